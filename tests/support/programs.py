"""Programs that tests start, by the fixture `programs`.

Importing PyTorch and transformers takes seconds. So `run` and `torchrun` start programs from a fork server
(multiprocessing's), which has imported them once; the other processes of a run are forks of its first one. With
`fresh=True`, and with `start`, a program has an interpreter of its own: tests of the start itself and of streams need
that, and so does every test on a machine with GPUs, because CUDA cannot be used in a fork.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess, Popen
from types import SimpleNamespace
from typing import TypeVar

import psutil
from torch import distributed as dist

from utils.distributed import launch

ROOT = Path(__file__).resolve().parents[2]
# A limit that no machine comes near, however busy it is: what has not happened by then never will.
LIMIT_SECONDS = 1200.0
# When one process of a job has failed, the others end by themselves, or are killed after this time.
ENDING_SECONDS = 60.0
TORCHRUN = Path(sysconfig.get_path("scripts"), "torchrun")

T = TypeVar("T")
_FORK = multiprocessing.get_context("fork")
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.support.preloaded"])


def wait_until(happened: Callable[[], T], what: str, *needed: Popen) -> T:
    """Return what `happened` returns as soon as it is true.

    Args:
        happened: called again and again.
        what: a description, for the error.
        needed: programs that must not end before.
    """
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        ended = [process for process in needed if process.poll() is not None]
        if value := happened():
            return value
        for process in ended:
            said = [stream.read() for stream in (process.stdout, process.stderr) if stream is not None]
            raise AssertionError(f"{what}: the program ended before, with status {process.returncode}\n{said}")
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {LIMIT_SECONDS:.0f} s")


def command(*words: str | Path, **keywords) -> CompletedProcess:
    """Run a command that is no Python program."""
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=LIMIT_SECONDS, **keywords)


class _ForkedPopen:
    """The part of Popen that utils.distributed.launch uses, for `python *words` without a new interpreter."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stdin: int):
        self._process = _FORK.Process(target=_forked, args=([*map(str, command[1:])], env))
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = LIMIT_SECONDS) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("fork", timeout)
        return self.returncode


def _forked(words: list[str], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    _run_python(words)


def _program(words: list[str], environment: dict[str, str], folder: Path, outputs: tuple[Path, Path]) -> None:
    """Do what `python *words` does; runs in a child of the fork server."""
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.chdir(folder)
    launch.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _ForkedPopen})
    _forked(words, environment)


def _run_python(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = words[:1]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


class Programs:
    """Starts Python programs, by default in the root of the project."""

    def __init__(self):
        self._running: list[Popen] = []

    def start(self, *arguments: object, apart: bool = False, **keywords) -> Popen:
        """Start a new interpreter, which is killed at the end of the test.

        Args:
            apart: capture output and errors in two streams instead of one.
            keywords: of `subprocess.Popen`.
        """
        errors = subprocess.PIPE if apart else subprocess.STDOUT
        defaults = {"stdout": subprocess.PIPE, "stderr": errors, "text": True, "cwd": ROOT}
        process = Popen([sys.executable, *map(str, arguments)], **(defaults | keywords))
        self._running.append(process)
        return process

    def run(
        self, *arguments: object, status: int = 0, env: Mapping[str, str] = os.environ, cwd: Path = ROOT, fresh=False
    ) -> CompletedProcess:
        """Run `python *arguments` to its end; its status must be `status`."""
        words = [*map(str, arguments)]
        if not fresh:
            return self._fork(words, [env], cwd, status)
        process = self.start(*words, env=env, cwd=cwd, apart=True)
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
        return _ended(words, process.returncode, status, output, errors)

    def torchrun(self, count: int, *arguments: object, status: int = 0) -> CompletedProcess:
        """Run a program in `count` processes with the environment that torchrun sets.

        The status is 1 if a process fails. The output is that of all processes.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "tests",
        }
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        return self._fork([*map(str, arguments)], [os.environ | shared | own for own in ranks], ROOT, status)

    def _fork(
        self, words: list[str], environments: Sequence[Mapping[str, str]], folder: Path, status: int
    ) -> CompletedProcess:
        """Run a program in one process for each environment; several have status 1 if one fails."""
        with tempfile.TemporaryDirectory() as written:
            outputs = Path(written, "output"), Path(written, "errors")
            processes = [
                _SERVER.Process(target=_program, args=(words, dict(environment), folder, outputs))
                for environment in environments
            ]
            for process in processes:
                process.start()
            end = time.monotonic() + LIMIT_SECONDS
            while running := [process for process in processes if process.exitcode is None]:
                if any(process.exitcode for process in processes):
                    end = min(end, time.monotonic() + ENDING_SECONDS)
                if time.monotonic() > end:
                    for process in running:
                        process.kill()
                multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)
            found = processes[0].exitcode if len(processes) == 1 else int(any(each.exitcode for each in processes))
            return _ended(words, found, status, *(path.read_text() for path in outputs))

    def end(self) -> None:
        """Kill the interpreters that still run, and what they have started."""
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


def _ended(words: list[str], found: int, wanted: int, output: str, errors: str) -> CompletedProcess:
    assert found == wanted, f"{words}: status {found}\n{output}\n{errors}"
    return CompletedProcess([sys.executable, *words], found, output, errors)
