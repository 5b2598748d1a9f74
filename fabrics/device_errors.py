"""What a device's errors mean for a run.

A node of which a driver says that it failed (NodeFailedError) is done without. A CUDA error is not survived: the
context of the process is broken, and every later call in it fails likewise. So the process ends and tells the others
why, who end too; the run goes on from its last checkpoint, with torchrun --max-restarts by itself.
"""

import contextlib
from collections.abc import Iterator

import torch

from fabrics.worker import TrainingError
from utils.devices import is_out_of_memory


class DeviceLostError(TrainingError):
    """A device has broken down, and with it this process's work on all devices of that kind."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn a device's errors into ones that say what to do.

    Raises:
        DeviceLostError: the device cannot be used any more. TrainingError: there is no memory left.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise TrainingError(
                f"no memory left beside the passes of inner steps, which would have been made smaller: "
                f"{_first_line(error)}; lower padding_percentage, max_batch_size or number_of_initial_trainers"
            ) from error
        if isinstance(error, torch.AcceleratorError):
            raise DeviceLostError(
                f"a device broke down and cannot be used by this process any more: {_first_line(error)}; "
                f"--resume goes on from the last checkpoint"
            ) from error
        raise


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
