"""How tests start programs: the fixture `programs`, and nothing else.

Whoever asks for it is a test that starts processes; `make check` leaves those out, and no other may start a Python. Its
programs are forks of an interpreter that has imported the libraries (see forkserver.py), or of their own with `fresh`.
No test waits for a time to pass: it waits for what it needs, and a limit that no machine comes near is there for what
never happens.
"""

import contextlib
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

import psutil
import pytest

from tests.support import forkserver

ROOT = Path(__file__).resolve().parents[2]
# What has not happened by then never will.
LIMIT_SECONDS = 1200.0
# The program, and not its module: an agent asks again and again which functions called it, and one of no file, as what
# runs modules is, is looked for in all modules there are, which makes a change of the rendezvous cost 0.1 s and more.
TORCHRUN = Path(sysconfig.get_path("scripts"), "torchrun")

T = TypeVar("T")


def wait_until(happened: Callable[[], T], what: str, *needed: Popen) -> T:
    """What `happened` returns as soon as it is true.

    Args:
        happened: asked again and again.
        what: words for it, for the error.
        needed: programs that must not end before.
    """
    end, pause = time.monotonic() + LIMIT_SECONDS, 0.001
    while True:
        ended = [process for process in needed if process.poll() is not None]
        if value := happened():
            return value
        for process in ended:
            said = [stream.read() for stream in (process.stdout, process.stderr) if stream is not None]
            raise AssertionError(f"{what}: the program ended before, with status {process.returncode}\n{said}")
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {LIMIT_SECONDS:.0f} s")
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)


def command(*words: str | Path, **keywords) -> subprocess.CompletedProcess:
    """What a command that is no Python program says; for every test."""
    assert words[0] != sys.executable
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=LIMIT_SECONDS, **keywords)


class Programs:
    """Starts Python programs, in the root of the project."""

    def __init__(self):
        self._refused = False
        self._server = forkserver.ForkServer().install()
        self._server.refuse, self._server.fresh = self.refuse, True
        self._running: list[Popen] = []
        sys.addaudithook(lambda event, _: event in ("os.fork", "os.forkpty", "os.system") and self.refuse())

    @contextlib.contextmanager
    def in_test(self, wanted: bool) -> Iterator[None]:
        """A test runs meanwhile; what it has started is killed at its end.

        Args:
            wanted: whether it has asked for programs.
        """
        self._refused, self._server.fresh = not wanted, False
        try:
            yield
        finally:
            self._refused, self._server.fresh = False, True
            self._end()

    def share_imports(self, few: bool) -> None:
        """Outside of tests programs are forks too, of a server that starts now; few: there are no others."""
        self._server.fresh = False
        self._server.start(few)

    def refuse(self) -> None:
        if self._refused:
            pytest.fail("this test starts a process and has not asked for the fixture programs")

    def start(self, *arguments: object, fresh: bool = False, apart: bool = False, **keywords) -> Popen:
        """Start Python with arguments.

        Args:
            fresh: in an interpreter of its own.
            apart: output and errors are two streams, and not one.
            keywords: of `subprocess.Popen`.
        """
        errors = subprocess.PIPE if apart else subprocess.STDOUT
        streams = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with self.fresh() if fresh else contextlib.nullcontext():
            process = Popen([sys.executable, *map(str, arguments)], **({"cwd": ROOT} | streams | keywords))
        self._running.append(process)
        return process

    def run(self, *arguments: object, status: int = 0, **keywords) -> subprocess.CompletedProcess:
        """What Python with arguments writes, output and errors apart; it must end with this status."""
        process = self.start(*arguments, apart=True, **keywords)
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == status, f"status {process.returncode}\n{output}\n{errors}"
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def torchrun(
        self, count: int, *arguments: object, options: Sequence[str] = (), **keywords
    ) -> subprocess.CompletedProcess:
        """`run` in several processes; options: of torchrun."""
        return self.run(TORCHRUN, "--standalone", f"--nproc_per_node={count}", *options, *arguments, **keywords)

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Whatever is started meanwhile has an interpreter of its own."""
        before, self._server.fresh = self._server.fresh, True
        try:
            yield
        finally:
            self._server.fresh = before

    def children_of(self, process: Popen) -> list[int]:
        """Process ids of what a program has started, in that order."""
        children = psutil.Process(process.pid).children()
        return [child.pid for child in children if child.name() != forkserver.NAME]

    def _end(self) -> None:
        """Kill what is left, and what that has started."""
        for process in self._running:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            child.kill()
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._running.clear()
