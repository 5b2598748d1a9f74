"""Model families of Hugging Face, built from a preset or other architecture values, or loaded with weights.

`pretrained: true` loads from a hub name or a local folder: safetensors only, no remote code.
"""

import functools
from collections.abc import Callable, Mapping
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

from fabrics.data.tokenization import padding, vocabulary_size
from fabrics.models.model_family import Demands, architecture_values, is_pretrained, settings_problems
from utils.config.schema import ConfigError
from utils.distributed.devices import is_out_of_memory
from utils.text import first_line

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


# Errors of the libraries for architecture values that they do not check beforehand.
_IMPOSSIBLE_ARCHITECTURE = (
    StrictDataclassError, ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError,
)  # fmt: skip


@functools.cache
def _known(config_class: type) -> frozenset[str]:
    """Return the names of the architecture values."""
    return frozenset(config_class().to_dict()) | {"num_labels"}


@dataclass(frozen=True)
class TransformersFamily:
    """A family of the library transformers.

    Attributes:
        task: see model_family.Family.
        config_class: the library's configuration class.
        auto_class: the library's class that builds and loads models.
        presets: architecture values by name.
        output_layer: see model_family.Family.
    """

    task: str
    config_class: type
    auto_class: type
    presets: Mapping[str, Mapping[str, Any]]
    output_layer: Callable[[nn.Module], nn.Module]

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        return settings_problems(settings, self.presets, _known(self.config_class), self.config_class.__name__)

    def model(self, settings: Mapping[str, Any], demands: Demands) -> nn.Module:
        """See model_family.Family. Unless the settings say otherwise, the vocabulary is the tokenizer's."""
        tokenizer = demands.tokenizer
        if tokenizer is None:
            raise ConfigError("model_type: this model reads text, and the dataset has no tokenizer")
        model = self._pretrained(settings) if is_pretrained(settings) else self._from_scratch(settings, tokenizer)
        if model.config.vocab_size < vocabulary_size(tokenizer):
            raise ConfigError(
                f"model_config.vocab_size: the model has {model.config.vocab_size} tokens, the tokenizer "
                f"{vocabulary_size(tokenizer)}"
            )
        if model.config.max_position_embeddings < demands.sequence_length:
            raise ConfigError(
                f"sequence_length: the model takes at most {model.config.max_position_embeddings} tokens, "
                f"got {demands.sequence_length}"
            )
        if names := demands.class_names:
            if model.config.num_labels != len(names):
                raise ConfigError(
                    f"model_config.num_labels: the data has {len(names)} classes, got {model.config.num_labels}"
                )
            model.config.id2label = dict(enumerate(names))
            model.config.label2id = {name: label for label, name in enumerate(names)}
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # a cache of keys and values is only for generation
        return model

    def _pretrained(self, settings: Mapping[str, Any]) -> nn.Module:
        try:
            options = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
            model = self.auto_class.from_pretrained(settings["name"], **options, **architecture_values(settings))
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise _load_failed(settings["name"], error) from None
        if model.config.model_type != self.config_class.model_type:
            raise ConfigError(
                f"model_config.name: {settings['name']!r} is a {model.config.model_type} model, "
                f"not {self.config_class.model_type}"
            )
        return model

    def _from_scratch(self, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> nn.Module:
        values = {"vocab_size": vocabulary_size(tokenizer)} | self._architecture(settings)
        values |= {"pad_token_id": padding(tokenizer) if self.task == "classification" else None}
        values |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        try:
            model = self.auto_class.from_config(self.config_class(**values), dtype=torch.float32)
            # Some impossible values fail only in use. A model on the meta device has no values to use.
            if model.device.type != "meta":
                with torch.no_grad():
                    model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long))
        except _IMPOSSIBLE_ARCHITECTURE as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"model_config: cannot build this architecture: {' '.join(str(error).split())}"
            ) from error
        return model

    def _architecture(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the architecture of a model from scratch: that of its preset or name, updated by the values given."""
        name = settings.get("preset") or settings.get("name") or "demo"
        if name in self.presets:
            base = dict(self.presets[name])
        else:
            try:
                base = AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
            except (OSError, ValueError) as error:
                raise _load_failed(name, error) from None
            if base.get("model_type") != self.config_class.model_type:
                raise ConfigError(
                    f"model_config.name: {name!r} is a {base.get('model_type')} model, "
                    f"not {self.config_class.model_type}"
                )
        return base | architecture_values(settings)


def _load_failed(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model_config.name: cannot load {name!r}, neither as a local folder nor from the hub: {first_line(error)}"
    )


MICROLLAMA = TransformersFamily(
    "causal_lm", LlamaConfig, AutoModelForCausalLM, _LLAMA_PRESETS, lambda model: model.lm_head
)
BERT = TransformersFamily(
    "classification", BertConfig, AutoModelForSequenceClassification, _BERT_PRESETS, lambda model: model.classifier
)
