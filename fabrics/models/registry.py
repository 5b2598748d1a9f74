"""The models that a configuration can name. A family is one entry in MODELS."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from algorithms.registry import Registry
from fabrics.models.model_family import Demands, Family
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
    """Build a model in float32, in train mode, on the CPU.

    Args:
        model_type: a key of MODELS.
        settings: `model_config`: preset, name, pretrained, and architecture values.
        tokenizer: see Demands.
        sequence_length: see Demands.
        seed: seed of the initialisation; the global generator is left as it was.
        class_names: see Demands.

    Raises:
        ConfigError: a preset, name or value is unknown, or does not fit the tokenizer or the sequences.
    """
    family = MODELS[model_type]
    if problems := family.problems(settings):
        raise ConfigError(problems)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's, where models are made; GPUs keep their states
        return family.model(settings, Demands(tokenizer, sequence_length, class_names)).train()


def reinitialise_output_layer(model_type: str, model: nn.Module, seed: int) -> None:
    """Draw the weight of the output layer again (Xavier uniform, bias zero), in place.

    Raises:
        ConfigError: there is no output layer, or it shares its weight with the embedding.
    """
    family = MODELS[model_type]
    if family.output_layer is None:
        raise ConfigError(f"need_to_reinit_output_layers: {model_type} does not say which layer that is")
    if family.task == "causal_lm" and getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        raise ConfigError("need_to_reinit_output_layers: the output layer of this model is tied to its embedding")
    layer = family.output_layer(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            layer.bias.zero_()
