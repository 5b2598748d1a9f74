"""The models that a configuration can name: building, drawing anew and saving them. A family is one entry in MODELS."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from algorithms.registry import Registry
from fabrics.models.model_family import Demands, Family, save_plain
from fabrics.models.transformers_models import BERT, MICROLLAMA
from utils.config.schema import ConfigError

MODELS: Registry[Family] = Registry({"microllama": MICROLLAMA, "bert": BERT})


def build_model(
    model_type: str,
    settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    sequence_length: int,
    seed: int,
    class_names: Sequence[str] = (),
) -> nn.Module:
    """A model in float32, in train mode, on the CPU.

    Args:
        model_type: a key of MODELS.
        settings: `model_config`: preset, name, pretrained, and architecture values.
        tokenizer, sequence_length, class_names: see Demands.
        seed: of the initialisation; the global generator is left as it was.

    Raises:
        ConfigError: unknown preset, name or value, or one that the tokenizer or the sequences do not fit.
    """
    family = MODELS[model_type]
    if problems := family.problems(settings):
        raise ConfigError(problems)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # that of the CPU, where models are made; no GPU's begins anew
        return family.model(settings, Demands(tokenizer, sequence_length, class_names)).train()


def reinitialise_output_layer(model_type: str, model: nn.Module, seed: int) -> None:
    """Draw the weight of the output layer anew (Xavier uniform, bias zero), in place.

    Raises:
        ConfigError: there is none, or it shares its weight with the embedding, which would be drawn anew with it.
    """
    family = MODELS[model_type]
    if family.output_layer is None:
        raise ConfigError(f"need_to_reinit_output_layers: {model_type} does not say which layer that is")
    layer, config = family.output_layer(model), getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False) and family.task == "causal_lm":
        raise ConfigError("need_to_reinit_output_layers: the output layer of this model is tied to its embedding")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            layer.bias.zero_()


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | os.PathLike,
    given: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model to a folder, which `pretrained: true` loads with the folder as its name.

    A module that has `save_pretrained`, as those of transformers, writes it itself (safetensors, config); of any other
    its state is written as safetensors. given: the state, on the CPU, tied tensors as one and others apart; None: the
    module's.
    """
    state = _copied(model.state_dict()) if given is None else dict(given)
    if hasattr(model, "save_pretrained"):
        _save_pretrained(model, state, folder)
    else:
        save_plain(model, state, Path(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor by itself, on the CPU, and what is tied still tied.

    The working module's parameters are views of one buffer, which the file format would take for shared tensors. A
    tensor without elements is nowhere, and never the same.
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
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    if use_cache is not None:
        config.use_cache = True
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        if use_cache is not None:
            config.use_cache = use_cache
