"""Model families: `microllama` (causal language model) and `bert` (sequence classification).

From scratch they are built from a preset or from any architecture values; `pretrained: true` loads weights from
a hub name or a local folder (safetensors only, no remote code). A family is one entry in MODELS.
"""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PreTrainedTokenizerBase,
)

from fabrics import hub
from fabrics.tokenization import padding, vocabulary_size
from utils.config import ConfigError

# Keys of model_config that are not architecture values.
_OWN_KEYS = {"preset", "name", "pretrained"}

_LLAMA_PRESETS = {
    # 0.22M parameters with a vocabulary of 2048: trains on a laptop's CPU in minutes.
    "demo": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    # 304.6M parameters, the architecture of the hub's model of this name.
    "keeeeenw/MicroLlama": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 5632,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    },
}

_BERT_PRESETS = {
    "demo": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    # 109.5M parameters.
    "google-bert/bert-base-uncased": {
        "vocab_size": 30522,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
    },
}


@dataclass(frozen=True)
class ModelFamily:
    """One value of `model_type`.

    task: which examples it can train on and how it is judged (a key of eval_tool.METRICS).
    presets: architecture values by name. output_layer: finds the layer that need_to_reinit_output_layers means.
    """

    task: str
    config_class: type
    auto_class: type
    presets: Mapping[str, Mapping[str, Any]]
    output_layer: Callable[[nn.Module], nn.Module]


# What the libraries raise for architecture values that they did not check beforehand.
_IMPOSSIBLE_ARCHITECTURE = (
    StrictDataclassError, ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError,
)  # fmt: skip

MODELS = {
    "microllama": ModelFamily(
        "causal_lm", LlamaConfig, AutoModelForCausalLM, _LLAMA_PRESETS, lambda model: model.lm_head
    ),
    "bert": ModelFamily(
        "classification",
        BertConfig,
        AutoModelForSequenceClassification,
        _BERT_PRESETS,
        lambda model: model.classifier,
    ),
}


def settings_problems(model_type: str, settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with a `model_config` that can be told without loading anything, one line each."""
    family, problems = MODELS[model_type], []
    pretrained, preset = settings.get("pretrained", False), settings.get("preset")
    if not isinstance(pretrained, bool):
        problems.append(f"model_config.pretrained: must be true or false, got {pretrained!r}")
    elif pretrained and not settings.get("name"):
        problems.append("model_config.name: pretrained: true needs the name of a hub model or a local folder")
    if preset is not None and preset not in family.presets:
        problems.append(f"model_config.preset: must be one of {', '.join(family.presets)}, got {preset!r}")
    known = set(family.config_class().to_dict()) | {"num_labels"}
    for key, value in settings.items():
        if key in _OWN_KEYS:
            continue
        if key not in known:
            close = difflib.get_close_matches(str(key), known | _OWN_KEYS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            name = family.config_class.__name__
            problems.append(f"model_config.{key}: not an architecture value of {name}{hint}")
            continue
        is_count = key.startswith(("num_", "max_")) or key.endswith("_size")
        if is_count and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"model_config.{key}: must be a positive integer, got {value!r}")
    return problems


def is_pretrained(settings: Mapping[str, Any]) -> bool:
    """Whether model_config asks for pretrained weights."""
    return settings.get("pretrained") is True


def _load_failed(name: str, error: Exception) -> ConfigError:
    problem = hub.problem_with(name, error)
    return ConfigError(
        f"model_config.name: cannot load {name!r}, neither as a local folder nor from the hub: {problem}"
    )


def _architecture(family: ModelFamily, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture of a model from scratch: preset or name, then the values given on top."""
    name = settings.get("preset") or settings.get("name") or "demo"
    if name in family.presets:
        base = dict(family.presets[name])
    else:
        hub.prepare(name)
        try:
            base = AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
        except (OSError, ValueError) as error:
            raise _load_failed(name, error) from None
        if base.get("model_type") != family.config_class.model_type:
            raise ConfigError(
                f"model_config.name: {name!r} is a {base.get('model_type')} model, not {family.config_class.model_type}"
            )
    return base | _values(settings)


def _values(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _OWN_KEYS}


def build_model(
    model_type: str,
    settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    seed: int,
    class_names: Sequence[str] = (),
) -> nn.Module:
    """A model in float32, in train mode, on the CPU.

    Args:
        model_type: a key of MODELS.
        settings: `model_config`: preset, name, pretrained, and architecture values. The vocabulary is the
            tokenizer's unless they say otherwise.
        sequence_length: the longest sequence it must take.
        seed: of the initialisation; the global generator is left as it was.
        class_names: of the data, for a classifier.

    Raises:
        ConfigError: unknown preset, name or value, or one that the tokenizer or the sequences do not fit.
    """
    problems = settings_problems(model_type, settings)
    if problems:
        raise ConfigError(problems)
    family = MODELS[model_type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if is_pretrained(settings):
            values = _values(settings)
            hub.prepare(settings["name"])
            try:
                model = family.auto_class.from_pretrained(
                    settings["name"], dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **values
                )
            except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
                raise _load_failed(settings["name"], error) from None
            if model.config.model_type != family.config_class.model_type:
                raise ConfigError(
                    f"model_config.name: {settings['name']!r} is a {model.config.model_type} model, "
                    f"not {family.config_class.model_type}"
                )
        else:
            values = {"vocab_size": vocabulary_size(tokenizer)} | _architecture(family, settings)
            values |= {"pad_token_id": padding(tokenizer) if family.task == "classification" else None}
            values |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            try:
                model = family.auto_class.from_config(family.config_class(**values), dtype=torch.float32)
                # Some impossible values show themselves only in use.
                with torch.no_grad():
                    model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long))
            except _IMPOSSIBLE_ARCHITECTURE as error:
                raise ConfigError(
                    f"model_config: cannot build this architecture: {' '.join(str(error).split())}"
                ) from error
    if model.config.vocab_size < vocabulary_size(tokenizer):
        raise ConfigError(
            f"model_config.vocab_size: the model has {model.config.vocab_size} tokens, the tokenizer "
            f"{vocabulary_size(tokenizer)}"
        )
    if model.config.max_position_embeddings < sequence_length:
        raise ConfigError(
            f"sequence_length: the model takes at most {model.config.max_position_embeddings} tokens, "
            f"got {sequence_length}"
        )
    if class_names:
        if model.config.num_labels != len(class_names):
            raise ConfigError(
                f"model_config.num_labels: the data has {len(class_names)} classes, got {model.config.num_labels}"
            )
        model.config.id2label = dict(enumerate(class_names))
        model.config.label2id = {name: label for label, name in enumerate(class_names)}
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # a cache of keys and values is only for generation
    return model.train()


def reinitialise_output_layer(model_type: str, model: nn.Module, seed: int) -> None:
    """Draw the weight of the output layer anew (Xavier uniform, bias zero), in place.

    Raises:
        ConfigError: the layer shares its weight with the embedding, which would be drawn anew with it.
    """
    layer = MODELS[model_type].output_layer(model)
    if getattr(model.config, "tie_word_embeddings", False) and MODELS[model_type].task == "causal_lm":
        raise ConfigError("need_to_reinit_output_layers: the output layer of this model is tied to its embedding")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            layer.bias.zero_()


def save_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | os.PathLike) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) that the Auto classes load."""
    # The working module's parameters are views of one buffer, which the file format would take for shared tensors.
    # One copy per tensor, so that what is tied stays tied; a tensor without elements is nowhere, and never the same.
    copies: dict[object, torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[place]
    use_cache = getattr(model.config, "use_cache", None)
    if use_cache is not None:
        model.config.use_cache = True
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        if use_cache is not None:
            model.config.use_cache = use_cache
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
