"""torchrun --max-restarts starts all processes again with the same arguments; this tells them where they were.

The main process leaves the name of torchrun's job in the run folder that it has made, and looks there when it is
started again: nobody else can have put it there, and it is found from any machine that has the log folder.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from utils.agreement import decided
from utils.distributed import Processes
from utils.utils import has_checkpoint, write_text_atomically

_RECORD = ".torchrun"


def restarted() -> bool:
    """Whether the agent of torchrun that started this process had started one before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _job() -> str | None:
    """A name for the job of torchrun, the same after a restart; None: torchrun did not start this process."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run != "none":
        return run
    # Without a rendezvous every job has that name; but then the same agent lives as long as the job.
    agent = psutil.Process(os.getppid())
    return f"none {socket.gethostname()} {agent.pid} {agent.create_time()}"


def _records(log_dir: Path) -> list[Path]:
    """What this job has left in run folders, the newest folder last."""
    job, found = _job(), []
    for record in log_dir.glob(f"*/{_RECORD}") if job is not None else ():
        with contextlib.suppress(OSError):
            owned = record.parent.stat().st_uid == record.stat().st_uid == os.getuid()
            if owned and record.read_text(encoding="utf-8") == job:
                found.append(record)
    return sorted(found, key=lambda record: record.stat().st_mtime)


def remember_attempt(folder: Path) -> None:
    """Let the next attempt find this run folder."""
    job = _job()
    if job is not None:
        write_text_atomically(folder / _RECORD, job)


def forget_attempt(folder: Path) -> None:
    """The run in this folder is over."""
    (folder / _RECORD).unlink(missing_ok=True)


def _forget_attempts(log_dir: Path) -> None:
    """This is the job's first attempt: what earlier jobs of the same name have left is nothing to go on with."""
    for record in _records(log_dir):
        record.unlink(missing_ok=True)


def _attempted_before(log_dir: Path) -> str | None:
    """The run folder of the attempt before, if a checkpoint was written there."""
    folders = [record.parent for record in _records(log_dir)]
    return str(folders[-1]) if folders and has_checkpoint(folders[-1]) else None


def folder_to_resume(processes: Processes, given: str | None, log_dir: Callable[[], Path]) -> str | None:
    """The run folder in which all processes go on, as the main process says; None: a new run.

    After a restart by torchrun it is that of the attempt before, if there is a checkpoint. One restarted process is
    enough: the agent of a machine that came later counts from the beginning.

    Args:
        given: the command line's.
        log_dir: says where runs are, in the main process.

    Raises:
        ConfigError: log_dir does.
    """
    again = any(processes.gather(restarted()))

    def decide() -> str | None:
        if again:
            return _attempted_before(log_dir()) or given
        if _job() is not None:
            _forget_attempts(log_dir())
        return given

    return decided(processes, decide)
