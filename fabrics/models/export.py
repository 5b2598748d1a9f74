"""Models on disk: each trainer's model in a folder of its own, written by the main process."""

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from fabrics.data.tokenization import save_tokenizer
from fabrics.models.lora import merged_state
from fabrics.models.model_family import save_plain
from fabrics.training.flat_model import FlatModel
from utils.distributed.processes import Processes
from utils.files import write_folder_atomically


def save_models(
    folder: Path,
    trainers: Iterable[int],
    parameters_of: Callable[[int], torch.Tensor | None],
    working: FlatModel,
    tokenizer: PreTrainedTokenizerBase | None,
    processes: Processes,
) -> tuple[dict[int, Path], str | None]:
    """Write every trainer's model to `folder/trainer_<id>`; all processes call this together.

    Models of other trainers, left by a run that was resumed, are removed at the end.

    parameters_of: returns a trainer's flat parameters in the main process and its shard group, otherwise None.

    Returns:
        The folder of each trainer, and None; or no folder, and the problem.
    """
    folders = {}
    problem = None
    if processes.is_main:
        for left_by_a_kill in folder.glob(".trainer_*"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
    for trainer in trainers:
        folders[trainer] = folder / f"trainer_{trainer}"
        parameters = parameters_of(trainer)
        if parameters is None:
            continue
        working.load(parameters)
        try:
            _write(folders[trainer], working, tokenizer, processes.is_main)
        except (OSError, SafetensorError) as error:
            problem = f"the models could not be written to {folder}: {error}"
    problem = processes.gather(problem)[0]
    if processes.is_main and not problem:
        for old in set(folder.glob("trainer_[0-9]*")) - set(folders.values()):
            shutil.rmtree(old, ignore_errors=True)
    return ({} if problem else folders), problem


def _write(folder: Path, working: FlatModel, tokenizer: PreTrainedTokenizerBase | None, is_main: bool) -> None:
    """Write the current model. A model that was gathered from a shard group is freed when this returns."""
    state = working.full_state_dict() if working.shard_group.size > 1 else None
    if is_main:
        write_folder_atomically(folder, functools.partial(save_model, working.module, tokenizer, state=state))


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | os.PathLike,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model, adapters merged, to a folder, which `pretrained: true` loads with the folder as its name.

    A module of transformers writes itself. Of any other module the state is written as safetensors.

    state: the state on the CPU, in which tied parameters are one tensor; None: the module's own.
    """
    state = merged_state(model, _copied(model.state_dict()) if state is None else state)
    if hasattr(model, "save_pretrained"):
        _save_pretrained(model, state, folder)
    else:
        save_plain(model, state, Path(folder))
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def _copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU; tied tensors stay tied.

    The flat model's parameters are views of one buffer, which the file format would take for tied tensors. A tensor
    without elements has no address, and is never tied.
    """
    copies: dict[object, torch.Tensor] = {}
    found = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        found[name] = copies[place]
    return found


def _save_pretrained(model: nn.Module, state: Mapping[str, torch.Tensor], folder: str | os.PathLike) -> None:
    """Save with `use_cache` on, which is off in training, and without a progress bar."""
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    if use_cache is not None:
        config.use_cache = True
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        model.generation_config = GenerationConfig()
    bars = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=state)
        if generation is not None:
            # The library refuses to save some values that it has loaded, such as a temperature without sampling.
            generation.to_json_file(Path(folder) / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    finally:
        if generation is not None:
            model.generation_config = generation
        if bars:
            enable_progress_bar()
        if use_cache is not None:
            config.use_cache = use_cache
