"""The programs that tests start are what a Python of their own would be, and nothing else starts any."""

import ast
import json
import signal
from pathlib import Path

import pytest

from tests.support.programs import ROOT, command, wait_until

# Everything that a program can see of how it was started.
LOOK = """
import json, os, random, resource, signal, sys, threading
streams = [
    [s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode, type(s.buffer).__name__]
    for s in (sys.stdin, sys.stdout, sys.stderr)
]
seen = dict(
    argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, executable=sys.executable, flags=str(sys.flags),
    main={name: str(value).split(" object at ")[0] for name, value in vars(sys.modules["__main__"]).items()},
    folder=os.getcwd(), environment=dict(os.environ), mask=os.umask(0o22),
    leads_a_session=os.getsid(0) == os.getpid(), nice=os.nice(0), threads=threading.active_count(),
    signals={number: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
    blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), limits=resource.getrlimit(resource.RLIMIT_NOFILE),
    terminals=[os.isatty(number) for number in range(3)], streams=streams, said=sys.stdin.read(),
)
print(json.dumps(seen))
import numpy, torch
print(json.dumps([random.random(), numpy.random.rand(), torch.rand(()).item()]))
"""


@pytest.mark.parametrize("how", ["a script", "unbuffered", "a command", "a module"])
def test_a_program_sees_what_it_would_see_in_an_interpreter_of_its_own(programs, tmp_path, monkeypatch, how):
    (tmp_path / "look.py").write_text(LOOK)
    monkeypatch.setenv("ASKED", "for")
    arguments = {
        "a script": [tmp_path / "look.py", "-u", "x"],
        "unbuffered": ["-u", tmp_path / "look.py"],
        "a command": ["-c", LOOK, "x", "-m"],
        "a module": ["-m", "look", "x"],
    }[how]
    seen, drawn = [], []
    for fresh in (True, False):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1} if how == "a module" else ())
        started = programs.start(*arguments, fresh=fresh, cwd=tmp_path, stdin=-1, start_new_session=how == "a command")
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        output, _ = started.communicate("a line\r\nand another")
        first, second = output.splitlines()
        seen.append(json.loads(first))
        drawn.append(json.loads(second))
    for what, alone in seen[0].items():
        assert seen[1][what] == alone, what
    assert seen[0]["environment"]["ASKED"] == "for"
    # Nobody's random numbers are somebody else's.
    assert len({*drawn[0], *drawn[1]}) == 6


def test_two_programs_do_not_draw_the_same_random_numbers(programs):
    drawing = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    drawn = [number for _ in range(2) for number in programs.run("-c", drawing).stdout.split()]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('no')", 1),
        ("raise ValueError", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import atexit; atexit.register(print, 'last')", 0),
        ("file = open(1, 'w', closefd=False); file.write('not closed')", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('joined'))).start()", 0),
        ("import sys; sys.stdout.close(); sys.exit(True)", 1),
        ("import sys; sys.exit(257)", 1),
    ],
)
def test_a_program_ends_as_it_would(programs, source, status):
    ends = [programs.run("-c", source, status=status, fresh=fresh) for fresh in (True, False)]
    assert ends[0].stdout == ends[1].stdout
    assert ends[0].stderr.splitlines()[-1:] == ends[1].stderr.splitlines()[-1:]


def test_a_program_gets_signals_and_is_a_child(programs, tmp_path):
    source = f"import os, time; open({str(tmp_path / 'up')!r}, 'w').write(str(os.getppid())); time.sleep(10_000)"
    program = programs.start("-c", source)
    parent = wait_until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text(), "a start", program)
    assert parent == command("sh", "-c", "echo $PPID").stdout.strip()
    program.send_signal(signal.SIGINT)
    assert program.communicate()[0].endswith("KeyboardInterrupt\n")
    assert program.returncode == -signal.SIGINT


def test_what_a_program_starts_is_its_child_and_as_new_as_itself(programs):
    inner = "import os, sys; print(os.getppid(), 'torch' in sys.modules, 'tests.support.threads' in sys.modules)"
    source = (
        "import os, subprocess, sys, tests.support.threads; print(os.getpid(), flush=True); "
        f"subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    )
    number, parent, libraries, ours = programs.run("-c", source).stdout.split()
    assert (parent, libraries, ours) == (number, "True", "False")
    alone = programs.run("-c", source, fresh=True).stdout.split()
    assert alone[2:] == ["False", "False"]


def test_a_fork_that_installs_a_server_gets_the_one_that_it_has(programs):
    """Test processes do, which are forks themselves: what they start need not import everything once more."""
    source = (
        "from tests.support.forkserver import ForkServer as F; a = F().install(); "
        "print(a is F().install(), a._channel is None)"
    )
    assert programs.run("-c", source).stdout == "True False\n"
    assert programs.run("-c", source, fresh=True).stdout == "True True\n"


def test_libraries_are_imported_anew_where_the_environment_tells_them_something_else(programs, monkeypatch):
    source = "import os, sys; print('torch' in sys.modules)"
    assert programs.run("-c", source).stdout == "True\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert programs.run("-c", source).stdout == "False\n"


def test_a_pool_of_processes_works_and_does_not_import_everything_once_more(programs):
    """Also where `multiprocessing` hands on options of the interpreter, as it does -B."""
    source = (
        "import multiprocessing; pool = multiprocessing.get_context('spawn').Pool(2); "
        "print(pool.map(abs, [-1, 2]), pool.apply(eval, (\"'torch' in __import__('sys').modules\",)))"
    )
    assert programs.run("-c", source).stdout == "[1, 2] True\n"


# Nothing else


def test_a_test_that_has_not_asked_for_programs_starts_none():
    import os
    import subprocess  # what the product would call
    import sys

    with pytest.raises(pytest.fail.Exception, match="has not asked for the fixture programs"):
        subprocess.run([sys.executable, "-c", "pass"])
    with pytest.raises(pytest.fail.Exception, match="has not asked for the fixture programs"):
        os.fork()


MODULES = {"subprocess", "multiprocessing", "pty", "concurrent.futures.process", "torch.multiprocessing"}
NAMES = {
    *("executable", "fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "ProcessPoolExecutor"),
    *("create_subprocess_exec", "create_subprocess_shell", "execv", "execve", "spawnv", "spawnl", "spawnve"),
}
# Where programs are started from, and a program that stands in for one.
STARTERS = {"programs.py", "forkserver.py", "killed.py"}


def ways_to_start(source: str) -> set[str]:
    """What a source imports and names by which a process could be started."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            found |= {name for name in names if name in MODULES or name.split(".")[-1] in NAMES}
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            found.add(node.attr)
    return found


def test_tests_start_programs_through_the_fixture_alone():
    paths = [path for path in (ROOT / "tests").glob("**/*.py") if path.name not in {*STARTERS, Path(__file__).name}]
    assert len(paths) > 100
    found = {str(path): ways_to_start(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: ways for name, ways in found.items() if ways} == {}


def test_the_check_sees_every_way():
    assert ways_to_start("def f():\n    import subprocess") == {"subprocess"}
    assert ways_to_start("from os import fork") == {"os.fork"}
    assert ways_to_start("import sys\nx = [sys.executable]") == {"executable"}
    assert ways_to_start("from concurrent.futures import ProcessPoolExecutor") == {
        "concurrent.futures.ProcessPoolExecutor"
    }
    assert ways_to_start("from torch import multiprocessing as mp") == {"torch.multiprocessing"}
