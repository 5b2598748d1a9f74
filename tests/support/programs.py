"""Programs that tests start, by the fixture `programs`.

`run` and `torchrun` fork the test process, which has imported PyTorch and transformers already: a program starts in
milliseconds. With `fresh=True`, and with `start`, it has an interpreter of its own. Tests of the start itself, of
signals and of kills by a signal need that; so does everything on a machine with GPUs, where PyTorch cannot go on in a
fork. A fork has what the test has replaced, so fixtures that replace something ask for theirs first.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import IO, TypeVar

import psutil
import torch
from torch import distributed as dist

ROOT = Path(__file__).resolve().parents[2]
# A limit that no machine comes near, however busy it is: what has not happened by then never will.
LIMIT_SECONDS = 1200.0
# The other processes of a job end by themselves when one has failed, or are killed after this time.
ENDING_SECONDS = 60.0
TORCHRUN = Path(sysconfig.get_path("scripts"), "torchrun")

T = TypeVar("T")
_FORKS = multiprocessing.get_context("fork")


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


def _become(words: list[str], environment: Mapping[str, str], folder: Path, output: IO, errors: IO) -> None:
    """In a fork: run what `python *words` would run."""
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (open until the process ends)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for logger in (logging.root, logging.getLogger("adloco")):  # as in a new interpreter
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET if logger.parent else logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")  # pytest makes errors of some
    given = dict(environment)
    os.environ.clear()
    os.environ.update(given)
    os.chdir(folder)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


@contextlib.contextmanager
def _streams() -> Iterator[tuple[IO, IO]]:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        yield output, errors


def _ended(words: list[str], found: int, wanted: int, output: IO, errors: IO) -> CompletedProcess:
    said = []
    for stream in (output, errors):
        stream.seek(0)
        said.append(stream.read())
    assert found == wanted, f"{words}: status {found}\n{said[0]}\n{said[1]}"
    return CompletedProcess([sys.executable, *words], found, *said)


class Programs:
    """Starts Python programs, in the root of the project unless told otherwise."""

    def __init__(self):
        self._running: list[Popen] = []

    def start(self, *arguments: object, apart: bool = False, **keywords) -> Popen:
        """Start a new interpreter, which is killed at the end of the test.

        Args:
            apart: output and errors are two streams, and not one.
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
        with _streams() as (output, errors):
            if fresh or words[0] == "-c" or torch.cuda.is_available():
                process = self.start(*words, env=env, cwd=cwd, stdout=output, stderr=errors)
                process.wait(LIMIT_SECONDS)
                return _ended(words, process.returncode, status, output, errors)
            fork = _FORKS.Process(target=_become, args=(words, env, cwd, output, errors))
            fork.start()
            fork.join(LIMIT_SECONDS)
            fork.kill()
            fork.join()
            return _ended(words, fork.exitcode, status, output, errors)

    def torchrun(
        self, count: int, *arguments: object, status: int = 0, options: Sequence[str] = ()
    ) -> CompletedProcess:
        """Run a program in `count` processes with the environment that torchrun sets.

        The status is 1 if a process fails. The output is that of all processes.

        Args:
            options: of torchrun itself, which then runs in an interpreter of its own.
        """
        if options or torch.cuda.is_available():
            begin = (TORCHRUN, "--standalone", f"--nproc_per_node={count}", *options)
            return self.run(*begin, *arguments, status=status, fresh=True)
        words = [*map(str, arguments)]
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
        with _streams() as (output, errors):
            forks = []
            for rank in range(count):
                environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                forks.append(_FORKS.Process(target=_become, args=(words, environment, ROOT, output, errors)))
                forks[-1].start()
            end = time.monotonic() + LIMIT_SECONDS
            while running := [fork for fork in forks if fork.exitcode is None]:
                if any(fork.exitcode for fork in forks):
                    end = min(end, time.monotonic() + ENDING_SECONDS)
                if time.monotonic() > end:
                    for fork in running:
                        fork.kill()
                multiprocessing.connection.wait([fork.sentinel for fork in running], timeout=1.0)
            failed = any(fork.exitcode for fork in forks)
            return _ended(words, int(failed), status, output, errors)

    def end(self) -> None:
        """Kill the programs that still run, and what they have started."""
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
