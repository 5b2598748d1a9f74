"""When models and checkpoints are written, and a run ends; all processes decide together, once per round."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fabrics.training.worker import TrainingError
from utils.checkpoint.checkpoint import Checkpoints
from utils.config.reading import dump_config
from utils.distributed.processes import Processes
from utils.distributed.signals import STOPPED_IN_ROUND, StoppedInRoundError, StopRequest
from utils.files import CHECKPOINTS_FOLDER, MODELS_FOLDER

if TYPE_CHECKING:
    from cluster import Cluster
    from training_logs.recording.records import Observer


@dataclass(frozen=True)
class Vote:
    """A process's vote after a round: stop, because a signal came; save, because the last checkpoint is too old."""

    stop: bool = False
    save: bool = False


class CheckpointPolicy:
    """Writes models and checkpoints into a run folder when they are due; folder: None: nothing is written.

    All processes have one and call it at the same places. A failure to write is a warning, and training continues.
    """

    def __init__(self, run: Cluster, observer: Observer, folder: Path | None = None, stop: StopRequest | None = None):
        self.decision = Vote()
        self._run = run
        self._observer = observer
        self._folder = folder
        self._stop = stop
        self._checkpoints = None
        if folder is not None:
            _check_shared(folder, run.processes)
            minutes = run.config.checkpoint_every_minutes
            self._checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, minutes, run.processes, observer.warn)

    def vote(self) -> Vote:
        return Vote(
            stop=self._stop is not None and self._stop.requested,
            save=self._checkpoints is not None and self._checkpoints.due,
        )

    def after_step(self) -> None:
        """Leave a round that still trains long after a signal, with a StoppedInRoundError; every process by itself."""
        if self._stop is not None and self._stop.overdue:
            raise StoppedInRoundError(STOPPED_IN_ROUND)

    def decide(self, votes: Sequence[Vote]) -> None:
        """Adopt what any process has voted for."""
        self.decision = Vote(any(vote.stop for vote in votes), any(vote.save for vote in votes))

    def after_round(self) -> None:
        """Write what is due after a round."""
        if self._checkpoints is None:
            return
        run = self._run
        every = run.config.save_weights_every
        step = run.counters.outer_steps
        due = every is not None and step % every == 0
        # Models come first: a run that is killed in between repeats the round and writes them again.
        if due:
            run.save_models(self._folder / MODELS_FOLDER / f"round_{step:05d}", self._observer)
        if due or run.finished or self.decision.save or self.decision.stop:
            state = {"cluster": run.state_dict(), "observer": self._observer.state_dict()}
            texts = {"config.yaml": dump_config(run.given_config)}
            self._checkpoints.save(step, run.tensors(), state, texts)


def _check_shared(folder: Path, processes: Processes) -> None:
    """Raise a TrainingError in all processes if machines have different folders of this name."""
    if processes.count == 1:
        return
    mark = None
    if processes.first_here:
        mark = folder / f".{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # a disk that is full or read-only is no error
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
    marks = processes.gather(mark is not None and mark.exists() and mark.name)
    # The main process looks: on NFS the others may not see a new folder for a while.
    missing = processes.gather([rank for rank, name in enumerate(marks) if name and not (folder / name).exists()])[0]
    if mark is not None:
        mark.unlink(missing_ok=True)
    if missing:
        raise TrainingError(
            f"log_dir: the machine of rank {missing[0]} has another folder of this name; checkpoints need one that all "
            f"machines share, got {folder.parent}"
        )
