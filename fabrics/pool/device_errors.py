"""Errors of devices and models, turned into errors that say what to do.

A CUDA error breaks the context of the whole process, in which every later call fails. So the process ends and tells
the others, which end too. The run resumes from its last checkpoint, by itself under torchrun --max-restarts.
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
    """A device broke down; this process can no longer use any device of its kind."""


def device_is_lost() -> bool:
    """True if CUDA reports an error of this process's GPU; does not wait for it, as a collective may never end.

    After an error that breaks the context every call reports it, whichever library has raised it first.
    """
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.current_stream().query()
    except RuntimeError:
        return True
    return False


@contextlib.contextmanager
def explain_training_errors() -> Iterator[None]:
    """Raise a TrainingError that says what to do, in place of errors of devices and models during training."""
    try:
        yield
    except UnsupportedModuleError as error:
        raise TrainingError(f"statistics_estimator: {error}") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise TrainingError(
                f"out of memory outside of inner steps, which would use smaller micro-batches: {first_line(error)}; "
                f"lower padding_percentage, max_batch_size or number_of_initial_trainers"
            ) from error
        if isinstance(error, torch.AcceleratorError) or device_is_lost():
            raise DeviceLostError(
                f"a device broke down and cannot be used by this process any more: {first_line(error)}; "
                f"--resume continues from the last checkpoint"
            ) from error
        raise


@contextlib.contextmanager
def explain_setup_errors() -> Iterator[None]:
    """Raise a ConfigError if the state between rounds does not fit into memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise ConfigError(
                f"no memory for models, moments and other state between rounds: {first_line(error)}; "
                f"python run.py --plan estimates what the run needs"
            ) from error
        raise
