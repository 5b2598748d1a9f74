"""What errors of devices and models mean for a run.

A node of which a driver says that it failed (NodeFailedError) is done without. A CUDA error is not survived: the
context of the process is broken, and every later call in it fails likewise. So the process ends and tells the others
why, who end too; the run goes on from its last checkpoint, with torchrun --max-restarts by itself.
"""

import contextlib
from collections.abc import Iterator

import torch

from algorithms.batch.per_example import UnsupportedModuleError
from fabrics.training.worker import TrainingError
from utils.config.schema import ConfigError
from utils.distributed.devices import is_out_of_memory
from utils.text import first_line


class DeviceLostError(TrainingError):
    """A device has broken down, and with it this process's work on all devices of that kind."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn the errors of a device, or of a model that is passed, into ones that say what to do.

    Raises:
        DeviceLostError: the device cannot be used any more. TrainingError: there is no memory left, or the model has no
            per-example statistics.
    """
    try:
        yield
    except UnsupportedModuleError as error:
        raise TrainingError(f"statistics_estimator: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise TrainingError(
                f"no memory left beside the passes of inner steps, which would have been made smaller: "
                f"{first_line(error)}; lower padding_percentage, max_batch_size or number_of_initial_trainers"
            ) from error
        if isinstance(error, torch.AcceleratorError):
            raise DeviceLostError(
                f"a device broke down and cannot be used by this process any more: {first_line(error)}; "
                f"--resume goes on from the last checkpoint"
            ) from error
        raise


@contextlib.contextmanager
def set_up() -> Iterator[None]:
    """Say what to do where there is no memory for what lives between rounds.

    Raises:
        ConfigError: there is none.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise ConfigError(
                f"no memory for models, moments and what else lives between rounds: {first_line(error)}; "
                f"python run.py --plan estimates what the run needs"
            ) from error
        raise
