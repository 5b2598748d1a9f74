"""A run's model on the meta device: its architecture without weights, for estimates.

It takes no model-sized memory and downloads no weights: of a pretrained model only the architecture is read.
"""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from fabrics.data.dataset_loader import DATASETS
from fabrics.data.tokenization import END_OF_TEXT, named_tokenizer, train_tokenizer
from fabrics.models.initialisation import architecture_settings
from fabrics.models.model_family import ModelFamily
from fabrics.models.registry import MODELS, build_model
from utils.config.schema import Config

META = torch.device("meta")
# Smaller than any vocabulary that a model from scratch may have.
_FEW_TOKENS = 258


def _stand_in(config: Config, settings: dict) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return a tokenizer, without reading data, and whether its size is assumed to be `vocab_size`.

    It is assumed if neither the model nor the name of a tokenizer tells it; it is added to the settings then.
    """
    family = MODELS[config.model_type]
    few = train_tokenizer([END_OF_TEXT], _FEW_TOKENS, family.task)
    name = settings.get("preset") or settings.get("name") or "demo"
    presets: Mapping[str, Mapping] = getattr(family, "presets", {})
    if "vocab_size" in settings or "vocab_size" in presets.get(name, {"vocab_size": None}):
        return few, False
    if (named := named_tokenizer(config)) is not None:
        return named, False
    if isinstance(family, ModelFamily):  # reads the size of the tokenizer
        few.add_tokens([f"<token {number}>" for number in range(config.vocab_size - len(few))])
    else:
        settings["vocab_size"] = config.vocab_size
    return few, True


def meta_model(config: Config) -> tuple[nn.Module, list[str]]:
    """Return the model of a run on the meta device, and the assumptions about its data, one line each.

    Raises:
        ConfigError: it cannot be built.
    """
    settings = architecture_settings(config)
    assumed = []
    tokenizer, assumes_vocabulary = _stand_in(config, settings)
    if assumes_vocabulary:
        assumed.append(f"the vocabulary: assumed to have vocab_size {config.vocab_size} tokens")
    class_names = ()
    if isinstance(MODELS[config.model_type], ModelFamily) and DATASETS[config.dataset].task == "classification":
        class_names = ("0", "1")
        assumed.append("the classes of the data: assumed to be 2")
    with META:
        arguments = tokenizer, config.sequence_length, config.training_seed, class_names
        model = build_model(config.model_type, settings, *arguments)
    return model, assumed


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the FLOPs of training on one token.

    6 for every weight of a linear layer, the head included (2 forward, 4 backward), and 6 * layers * width *
    sequence_length for attention: 12 for all pairs of tokens, half of which are masked. A model whose config names no
    attention heads counts as having none.
    """
    linear = 6.0 * sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return linear
    width = heads * getattr(config, "head_dim", config.hidden_size // heads)
    return linear + 6.0 * config.num_hidden_layers * width * sequence_length
