"""torchrun starts all processes again, with the same arguments, after one has died and when machines come or go.

Only after a death does it count that as a restart. What all attempts at a run have in common are torchrun's agents,
one on every machine: some of them were there at the attempt before, and none has another job. The main process leaves
their names in the run folder that it has made, and looks for them when it is started again: nobody else can have put
them there, and they are found from any machine that has the log folder.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from utils.distributed.collective_checks import decided
from utils.distributed.processes import Processes
from utils.utils import has_checkpoint, write_text_atomically

_RECORD = ".torchrun"
_JOB = "TORCHELASTIC_RUN_ID"  # torchrun gives it to the processes that it starts


def _is_agent(process: psutil.Process) -> bool:
    """Whether it is not itself a program that torchrun started, such as a script around this one."""
    try:
        return _JOB not in process.environ()
    except psutil.Error:
        return True


def _agent() -> str | None:
    """A name for the agent of torchrun that started this process; None: torchrun did not."""
    if _JOB not in os.environ:
        return None
    agent = next(filter(_is_agent, psutil.Process().parents()), psutil.Process(os.getppid()))
    booted = psutil.boot_time()  # a clock that is set moves this and the creation time alike
    return f"{socket.gethostname()} {agent.pid} {agent.create_time() - booted:.2f}"


def agents_of(processes: Processes) -> frozenset[str]:
    """The names of the agents that started the processes; all call this together. None outside of torchrun."""
    return frozenset(agent for agent in processes.gather(_agent()) if agent is not None)


def _records(log_dir: Path, agents: Iterable[str]) -> list[Path]:
    """What attempts with one of these agents have left in run folders, the newest folder last."""
    known, found = set(agents), []
    for record in log_dir.glob(f"*/{_RECORD}") if known else ():
        with contextlib.suppress(OSError):
            owned = record.parent.stat().st_uid == record.stat().st_uid == os.getuid()
            if owned and known.intersection(record.read_text(encoding="utf-8").splitlines()):
                found.append(record)
    return sorted(found, key=lambda record: record.stat().st_mtime)


def remember_attempt(folder: Path, agents: Iterable[str]) -> None:
    """Let the next attempt, with one of these agents, find this run folder."""
    if lines := sorted(agents):
        write_text_atomically(folder / _RECORD, "\n".join(lines))


def forget_attempt(folder: Path) -> None:
    """The run in this folder is over."""
    (folder / _RECORD).unlink(missing_ok=True)


def _attempted_before(log_dir: Path, agents: frozenset[str]) -> str | None:
    """The run folder of the attempt before, if a checkpoint was written there."""
    folders = [record.parent for record in _records(log_dir, agents)]
    if not folders or not has_checkpoint(folders[-1]):
        return None
    # At once: this attempt may die before it is set up, and the next one have only those agents that are new in it.
    remember_attempt(folders[-1], agents)
    return str(folders[-1])


def folder_to_resume(processes: Processes, given: str | None, log_dir: Callable[[], Path]) -> str | None:
    """The run folder in which all processes go on, as the main process says; None: a new run.

    Where torchrun has started the run before it is that of the attempt before, if there is a checkpoint. One agent
    that was there is enough: that of a machine that came later is new, and may be the main process's.

    Args:
        given: the command line's.
        log_dir: says where runs are, in the main process.

    Raises:
        ConfigError: log_dir does.
    """
    agents = agents_of(processes)
    return decided(processes, lambda: (_attempted_before(log_dir(), agents) if agents else None) or given)
