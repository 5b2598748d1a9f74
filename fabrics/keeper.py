"""What a run keeps on the disk while it goes on: models of rounds on the way, and checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fabrics.model_folders import prune, round_folder
from utils.checkpoint import Checkpoints
from utils.config import Config
from utils.config_reading import dump_config
from utils.distributed import Processes
from utils.utils import checkpoints_of


class _Observer(Protocol):
    def warn(self, message: str) -> None:
        """Something that the user should know."""

    def state_dict(self) -> dict:
        """What to hand to the next observer."""


class _Run(Protocol):
    totals: Any
    finished: bool
    stopped: bool

    def state_dict(self) -> dict:
        """Plain values, the same in every process."""

    def tensors(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Those of this process, in named groups."""

    def save_models(self, folder: Path, observer: _Observer) -> Mapping[int, Path]:
        """Write every living trainer's model; nothing where that fails."""


class Keeper:
    """Writes models and checkpoints into a run folder when they are due; all processes together.

    What cannot be written is a warning, and training goes on.

    Args:
        folder: the run folder; None: nothing is written.
        config: the run's configuration.
        processes: those of the run.
    """

    def __init__(self, folder: Path | None, config: Config, processes: Processes):
        self._folder, self._config, self._processes = folder, config, processes

    def after_round(self, run: _Run, observer: _Observer) -> None:
        """Write what is due after a round."""
        every, step = self._config.save_weights_every, run.totals.outer_steps
        due = every is not None and step % every == 0
        # The models first: a run that is killed in between makes the round again, and them.
        if due and self._folder is not None:
            models = self._folder / self._config.model_weights_dir
            if run.save_models(round_folder(models, step), observer) and self._processes.is_main:
                prune(models, self._config.keep_models)
        if due or run.finished or run.stopped:
            self.save_checkpoint(run, observer)

    def save_checkpoint(self, run: _Run, observer: _Observer) -> None:
        """Write a checkpoint."""
        if self._folder is None:
            return
        state = {"cluster": run.state_dict(), "observer": observer.state_dict()}
        checkpoints = Checkpoints(checkpoints_of(self._folder), self._config.keep_checkpoints)
        texts = {"config.yaml": dump_config(self._config)}
        try:
            checkpoints.save(self._processes, run.totals.outer_steps, run.tensors(), state, texts)
        except OSError as error:
            observer.warn(
                f"no checkpoint after round {run.totals.outer_steps}: {error}; training goes on, and what was written "
                f"before is as it was"
            )
