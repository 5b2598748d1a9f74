"""What a run keeps while it goes on: models on the way, checkpoints, and a state to go back to after a signal.

A round that takes long may be given up when a signal comes (`utils.distributed.signals`). Moments of the inner
optimisers change
with every inner step, so that the state before the round is gone then, unless a copy of it was kept: in host memory, as
for a checkpoint, and only where rounds are so long that it can be needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fabrics.models.export import prune, round_folder
from utils.checkpoint.checkpoint import Checkpoints
from utils.config.reading import dump_config
from utils.config.schema import Config
from utils.distributed.heartbeat import PeerLostError
from utils.distributed.processes import Processes
from utils.distributed.signals import StopRequest
from utils.utils import checkpoints_of


class _Observer(Protocol):
    def on_step(self) -> None:
        """After every inner step."""

    def warn(self, message: str) -> None:
        """Something that the user should know."""

    def state_dict(self) -> dict:
        """What to hand to the next observer."""


class _Run(Protocol):
    totals: Any
    finished: bool

    def state_dict(self) -> dict:
        """Plain values, the same in every process."""

    def tensors(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Those of this process, in named groups."""

    def save_models(self, folder: Path, observer: _Observer) -> Mapping[int, Path]:
        """Write every living trainer's model; nothing where that fails."""


@dataclass(frozen=True)
class Wishes:
    """What a process would have after a round: the end of the run, a checkpoint, a copy of the state."""

    stop: bool = False
    save: bool = False
    hold: bool = False


class Keeper:
    """Writes models and checkpoints into a run folder when they are due; a context for the rounds of a run.

    All processes have one and call it at the same places. What cannot be written is a warning, and training goes on.

    Args:
        config: the run's configuration.
        processes: those of the run.
        observer: is warned, and its state goes into checkpoints.
        folder: the run folder; None: nothing is written.
        stop: asks the run to stop; None: nobody does.
    """

    def __init__(
        self,
        config: Config,
        processes: Processes,
        observer: _Observer,
        folder: Path | None = None,
        stop: StopRequest | None = None,
    ):
        self._config, self._processes, self._observer = config, processes, observer
        self._folder, self._stop, self._granted = folder, stop, Wishes()
        self._checkpoints = None
        if folder is not None:
            keep, minutes = config.keep_checkpoints, config.checkpoint_every_minutes
            self._checkpoints = Checkpoints(checkpoints_of(folder), keep, minutes, processes, observer.warn)
            if stop is not None:
                stop.restore(self._checkpoints)

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # Others may wait for what this process writes; what somebody lost has not written will not come any more.
        if error is not None and self._checkpoints is not None:
            self._checkpoints.settle(somebody_is_lost=isinstance(error, PeerLostError))

    def on_step(self) -> None:
        """Tell the observer of an inner step, and raise KeyboardInterrupt when the round is given up."""
        self._observer.on_step()
        if self._stop is not None:
            self._stop.check()

    def wishes(self, round_seconds: float) -> Wishes:
        """This process's, after a round that took so long."""
        stop, checkpoints = self._stop, self._checkpoints
        return Wishes(
            stop=stop is not None and stop.requested,
            save=checkpoints is not None and checkpoints.due,
            hold=stop is not None and stop.may_give_up(round_seconds),
        )

    def grant(self, wishes: Sequence[Wishes]) -> None:
        """What one process wishes, all do."""
        self._granted = Wishes(*(any(getattr(wish, what) for wish in wishes) for what in ("stop", "save", "hold")))

    @property
    def stopping(self) -> bool:
        """Whether the run stops after this round."""
        return self._granted.stop

    def after_round(self, run: _Run) -> None:
        """Write what is due after a round, or keep a copy of the state."""
        every, step = self._config.save_weights_every, run.totals.outer_steps
        due = every is not None and step % every == 0
        # The models first: a run that is killed in between makes the round again, and them.
        if due and self._folder is not None:
            models = self._folder / self._config.model_weights_dir
            if run.save_models(round_folder(models, step), self._observer) and self._processes.is_main:
                prune(models, self._config.keep_models)
        if self._checkpoints is None:
            return
        if due or run.finished or self._granted.save or self._granted.stop:
            self._checkpoints.save(*self._contents(run))
        elif self._granted.hold:
            self._checkpoints.hold(*self._contents(run))

    def save_checkpoint(self, run: _Run) -> None:
        """Write a checkpoint, and wait until it is there."""
        if self._checkpoints is not None:
            self._checkpoints.save(*self._contents(run))
            self._checkpoints.finish()

    def _contents(self, run: _Run) -> tuple:
        """Of a checkpoint, as Checkpoints.save has them."""
        state = {"cluster": run.state_dict(), "observer": self._observer.state_dict()}
        return run.totals.outer_steps, run.tensors(), state, {"config.yaml": dump_config(self._config)}

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._checkpoints is not None:
            self._checkpoints.finish()
