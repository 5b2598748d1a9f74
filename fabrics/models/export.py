"""Models on the disk: every trainer's in a folder of its own, written by the main process.

That never has a model whole in its own memory where shard groups share it: their tensors come one after the other,
and are
kept in files without a name, from which the folder is written as any other.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from fabrics.models.registry import save_model
from fabrics.training.flat_model import FlatModel, StateDictError
from utils.distributed.processes import Processes
from utils.files import write_folder_atomically

# Tensors of fewer bytes are kept in memory.
_LARGE_BYTES = 2**20


def round_folder(folder: Path, outer_step: int) -> Path:
    """Where the models after a round are, in the folder of a run's models."""
    return folder / f"round_{outer_step:05d}"


def on_disk(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """A copy of a tensor in a mapped file of its own in the folder, which is gone with it; of a small one in memory.

    Raises:
        OSError, RuntimeError: there is no room, or no mapping.
    """
    if tensor.nbytes < _LARGE_BYTES:
        return tensor.detach().to("cpu", copy=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # later a full disk would end the process
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        else:  # macOS, where nothing takes the room at once
            file.truncate(tensor.nbytes)
        # Unlike a numpy.memmap this keeps no descriptor, of which a process may have few.
        numbers = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
    return numbers.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _write(
    folder: Path, trainer: Path, working: FlatModel, tokenizer: PreTrainedTokenizerBase | None, is_main: bool
) -> None:
    """Write the model that the working model has; what was kept of it on the way is gone afterwards."""
    given = (
        None if working.shard_group.size == 1 else working.full_state_dict(functools.partial(on_disk, folder=folder))
    )
    if is_main:
        write_folder_atomically(trainer, functools.partial(save_model, working.module, tokenizer, given=given))


def save_models(
    folder: Path,
    trainers: Iterable[int],
    parameters_of: Callable[[int], torch.Tensor | None],
    working: FlatModel,
    tokenizer: PreTrainedTokenizerBase | None,
    processes: Processes,
) -> tuple[dict[int, Path], str | None]:
    """Write every trainer's model to `folder/trainer_<id>`; all processes together.

    When all are there, those of other trainers, which a run that went on from a checkpoint may have left, are gone.

    Args:
        parameters_of: from a trainer to its flat parameters in the main process and its shard group; asked for one
        after
            the other.
        working: what the parameters pass through.

    Returns:
        Where each was written, and nothing where something could not be, with what is wrong.
    """
    folders, problem = {}, None
    if processes.is_main:
        for left_by_a_kill in folder.glob(".trainer_*"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
    for trainer in trainers:
        parameters, folders[trainer] = parameters_of(trainer), folder / f"trainer_{trainer}"
        if parameters is None:
            continue
        working.load(parameters)
        try:
            _write(folder, folders[trainer], working, tokenizer, processes.is_main)
        except (OSError, SafetensorError, StateDictError) as error:
            problem = f"the models could not be written to {folder}: {error}"
    problem = processes.gather(problem)[0]
    if processes.is_main and not problem:
        for old in set(folder.glob("trainer_[0-9]*")) - set(folders.values()):
            shutil.rmtree(old, ignore_errors=True)
    return ({} if problem else folders), problem
