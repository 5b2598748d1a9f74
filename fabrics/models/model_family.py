"""Models by name: families of Hugging Face's transformers, and families of any nn.Module.

`pretrained: true` loads from a hub name or a local folder: safetensors only, no remote code.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PreTrainedTokenizerBase,
)

from algorithms.registry import Registry
from fabrics.data.tokenization import padding, vocabulary_size
from utils.config.schema import ConfigError
from utils.distributed.devices import is_out_of_memory
from utils.text import counted, did_you_mean, first_line

logger = logging.getLogger("adloco.models")

# Keys of model_config that are not architecture values.
OWN_KEYS = frozenset(("preset", "name", "pretrained"))
_WEIGHTS = "model.safetensors"
_ARCHITECTURE = "config.json"
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
# Errors of the libraries for folders, and for architecture values, that they do not check beforehand.
_UNUSABLE = (
    StrictDataclassError, SafetensorError, OSError, ValueError, TypeError, RuntimeError, ArithmeticError, LookupError,
    AttributeError, AssertionError, ImportError,
)  # fmt: skip


@dataclass(frozen=True)
class Demands:
    """The demands of the data on a model. tokenizer: the tokenizer of the texts; None: the data are no text."""

    tokenizer: PreTrainedTokenizerBase | None
    sequence_length: int
    class_names: Sequence[str] = ()


def is_pretrained(settings: Mapping[str, Any]) -> bool:
    return settings.get("pretrained") is True


def architecture_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the architecture; a text such as 1e-5, which YAML takes for no number, is one."""
    return {key: _number(value) for key, value in settings.items() if key not in OWN_KEYS}


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(entry) for key, entry in value.items()}
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


LLAMA_PRESETS = {
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

BERT_PRESETS = {
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


# Values that the data, the tokenizer and the framework set.
_GIVEN_BY_THE_RUN = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "model_type",
    "pad_token_id",
    "use_cache",
}


def _problems(settings: Mapping[str, Any], presets: Collection[str], known: Collection[str], owner: str) -> list[str]:
    """Return what is wrong with a `model_config`, one line each, without loading anything."""
    problems = []
    pretrained = settings.get("pretrained", False)
    preset = settings.get("preset")
    texts = {key: settings.get(key) for key in ("preset", "name") if settings.get(key) is not None}
    for key, value in texts.items():
        if not isinstance(value, str) or not value:
            problems.append(f"model_config.{key}: must be a text, got {value!r}")
    if problems:
        return problems
    if "name" in texts and preset in presets:
        problems.append(f"model_config: give preset or name, got {preset} and {texts['name']}")
    if not isinstance(pretrained, bool):
        problems.append(f"model_config.pretrained: must be true or false, got {pretrained!r}")
    elif pretrained and not settings.get("name"):
        problems.append("model_config.name: pretrained: true needs the name of a hub model or a local folder")
    if preset is not None and preset not in presets:
        choice = f"must be one of {', '.join(presets)}" if presets else "must be null: this model type has no presets"
        problems.append(f"model_config.preset: {choice}, got {preset!r}")
    for key, value in architecture_values(settings).items():
        if key not in known:
            hint = did_you_mean(str(key), {*known, *OWN_KEYS})
            problems.append(f"model_config.{key}: not an architecture value of {owner}{hint}")
            continue
        is_count = key.startswith(("num_", "max_")) or key.endswith("_size")
        if is_count and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"model_config.{key}: must be a positive integer, got {value!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and ("dropout" in key or key.endswith("_pdrop")) and not 0 <= value < 1:
            problems.append(f"model_config.{key}: must be at least 0 and below 1, got {value!r}")
        elif is_number and not abs(value) <= 1e38:  # not a number, or one that does not fit into a tensor
            problems.append(f"model_config.{key}: must be a number of at most 1e38, got {value!r:.20}")
    return problems


@dataclass(frozen=True)
class ModelFamily:
    """A family of any nn.Module.

    The module takes the tensors of `Examples.batch`, except `labels`, as keyword arguments. It returns logits
    (algorithms.batch.losses), or an object with the attribute `logits`. Its random numbers come from PyTorch's
    generator.

    Attributes:
        task: the examples that its models train on, and how they are evaluated (a key of eval_tool.METRICS).
        build: builds a module from architecture values and demands.
        presets: architecture values by name; each names all values of the family. The default is `demo`.
        output_layer: finds the layer that need_to_reinit_output_layers means; None: there is none.
    """

    task: str
    build: Callable[[Mapping[str, Any], Demands], nn.Module]
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"demo": {}})
    output_layer: Callable[[nn.Module], nn.Module] | None = None

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        known = {key for values in self.presets.values() for key in values}
        found = _problems(settings, self.presets, known, "this model")
        if settings.get("name") and not settings.get("pretrained"):
            found.append("model_config.name: names weights of this model, which pretrained: true loads")
        return found

    def model(self, settings: Mapping[str, Any], demands: Demands) -> nn.Module:
        """Build a model in float32 on the CPU; ConfigError: it cannot be built."""
        if not is_pretrained(settings):
            values = dict(self.presets[settings.get("preset") or "demo"]) | architecture_values(settings)
            module = self.build(values, demands)
        else:
            folder = Path(settings["name"])
            try:
                saved = json.loads((folder / _ARCHITECTURE).read_text(encoding="utf-8"))["model_config"]
                values = saved | architecture_values(settings)
                module = self.build(values, demands)
                if torch.get_default_device().type != "meta":  # there only the architecture is needed
                    module.load_state_dict(load_file(folder / _WEIGHTS))
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
                if is_out_of_memory(error):
                    raise
                reason = " ".join(str(error).split())
                raise ConfigError(f"model_config.name: cannot load {settings['name']!r}: {reason}") from None
        module.architecture = dict(values)
        return module


def save_plain(module: nn.Module, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a module's state as safetensors, and the architecture values that it was built with."""
    folder.mkdir(parents=True, exist_ok=True)
    # The format knows no shared tensors: tied tensors are written several times.
    first = {tensor: name for name, tensor in reversed(state.items())}
    own = {name: tensor if first[tensor] == name else tensor.clone() for name, tensor in state.items()}
    save_file({name: tensor.contiguous() for name, tensor in own.items()}, folder / _WEIGHTS)
    values = {"class": type(module).__name__, "model_config": getattr(module, "architecture", {})}
    (folder / _ARCHITECTURE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class TransformersFamily:
    """A family of transformers. config_class: None: that of the model that `name` names."""

    task: str
    config_class: type | None
    auto_class: type
    presets: Mapping[str, Mapping[str, Any]]
    output_layer: Callable[[nn.Module], nn.Module]

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        if self.config_class is not None:
            known = {*self.config_class().to_dict(), "num_labels"} - _GIVEN_BY_THE_RUN
            return _problems(settings, self.presets, known, self.config_class.__name__)
        if not settings.get("name"):
            return ["model_config.name: this model type needs the name of a hub model or a local folder"]
        return _problems(settings, self.presets, (), "this model type, which has those of the named model")

    def model(self, settings: Mapping[str, Any], demands: Demands) -> nn.Module:
        """Build or load a model. Unless the settings say otherwise, the vocabulary is the tokenizer's."""
        tokenizer = demands.tokenizer
        if tokenizer is None:
            raise ConfigError("model_type: this model reads text, and the dataset has no tokenizer")
        make = self._pretrained if is_pretrained(settings) else self._from_scratch
        model = make(settings, tokenizer)
        if model.config.vocab_size < vocabulary_size(tokenizer):
            raise ConfigError(
                f"model_config.vocab_size: the model has {model.config.vocab_size} tokens, the tokenizer "
                f"{vocabulary_size(tokenizer)}"
            )
        most_tokens = getattr(model.config, "max_position_embeddings", None)  # None: no limit
        if most_tokens is not None and most_tokens < demands.sequence_length:
            raise ConfigError(
                f"sequence_length: the model takes at most {most_tokens} tokens, got {demands.sequence_length}"
            )
        if names := demands.class_names:
            if model.config.num_labels != len(names):
                raise ConfigError(
                    f"model_config.num_labels: the data has {len(names)} classes, got {model.config.num_labels}"
                )
            model.config.id2label = dict(enumerate(names))
            model.config.label2id = {name: label for label, name in enumerate(names)}
        if self.config_class is None and model.device.type != "meta" and _sees_later_tokens(model):
            raise ConfigError(
                f"model_config.name: this {model.config.model_type} model sees the tokens that it is to predict; "
                f'"is_decoder": true in its config.json hides them'
            )
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # a cache of keys and values is only for generation
        return model

    def _pretrained(self, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> nn.Module:
        self._named_architecture(settings["name"], with_weights=True)
        options = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
        options |= architecture_values(settings)
        try:
            model, weights = self.auto_class.from_pretrained(settings["name"], **options, output_loading_info=True)
        except _UNUSABLE as error:
            if is_out_of_memory(error):
                raise
            raise _load_failed(settings["name"], error) from None
        self._check_weights(model, settings["name"], weights["missing_keys"], weights["unexpected_keys"])
        generation = getattr(model, "generation_config", None)
        if generation is not None and tokenizer.eos_token_id is not None:
            ends = generation.eos_token_id
            if tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):  # not the model's tokenizer
                generation.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
        return model

    def _check_weights(
        self, model: nn.Module, folder: str, missing: Collection[str], unexpected: Collection[str]
    ) -> None:
        """Refuse weights that lack a part of the model; only a classifier may lack the layers on its encoder."""
        if self.task == "classification":
            missing = [name for name in missing if ".encoder." in name or ".embeddings." in name]
        elif unexpected:
            logger.warning("model_config.name: not used of %r: %s", folder, _some(unexpected))
        if missing:
            raise ConfigError(f"model_config.name: the weights of {folder!r} lack {_some(missing)}")

    def _from_scratch(self, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> nn.Module:
        name = settings.get("preset") or settings.get("name") or "demo"
        base = self.presets[name] if name in self.presets else self._named_architecture(name)
        values = {"vocab_size": vocabulary_size(tokenizer), **base, **architecture_values(settings)}
        values |= {"pad_token_id": padding(tokenizer) if self.task == "classification" else None}
        values |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        try:
            config_class = self.config_class or CONFIG_MAPPING[values["model_type"]]
            model = self.auto_class.from_config(config_class(**values), dtype=torch.float32)
            # Some impossible values fail only in use. A model on the meta device has no values to use.
            if model.device.type != "meta":
                with torch.no_grad():
                    model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long))
        except _UNUSABLE as error:
            if is_out_of_memory(error):
                raise
            # transformers puts the name of its validator before the reason.
            reason = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", " ".join(str(error).split()))
            raise ConfigError(f"model_config: cannot build this architecture: {reason}") from error
        return model

    def _named_architecture(self, name: str, with_weights: bool = False) -> dict[str, Any]:
        try:
            values = AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
        except _UNUSABLE as error:
            raise _load_failed(name, error) from None
        if values.pop("quantization_config", None) and with_weights:
            raise ConfigError(f"model_config.name: {name!r} is quantised; train the model that it was made from")
        if self.config_class is not None and values["model_type"] != self.config_class.model_type:
            raise ConfigError(
                f"model_config.name: {name!r} is a {values['model_type']} model, not {self.config_class.model_type}; "
                f"model_type: causal_lm takes language models of any architecture"
            )
        return values


@torch.no_grad()
def _sees_later_tokens(model: nn.Module) -> bool:
    model.eval()
    later = (0, model.config.vocab_size - 1)
    first, second = (model(input_ids=torch.tensor([[0, token]])).logits[0, 0] for token in later)
    if not first.isfinite().all():
        raise ConfigError("model_config.name: the model's logits are NaN or infinite")
    return not torch.allclose(first, second, rtol=1e-3, atol=1e-4)


def _some(names: Collection[str]) -> str:
    first = sorted(names)[0]
    return first if len(names) == 1 else f"{first} and {counted(len(names) - 1, 'other tensor')}"


def _load_failed(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model_config.name: cannot load {name!r}, neither as a local folder nor from the hub: {first_line(error)}"
    )


MICROLLAMA = TransformersFamily(
    "causal_lm", LlamaConfig, AutoModelForCausalLM, LLAMA_PRESETS, lambda model: model.lm_head
)
BERT = TransformersFamily(
    "classification", BertConfig, AutoModelForSequenceClassification, BERT_PRESETS, lambda model: model.classifier
)
# Any architecture; a model on the hub or in a folder gives it.
CAUSAL_LM = TransformersFamily("causal_lm", None, AutoModelForCausalLM, {}, lambda model: model.get_output_embeddings())


def _check_registered(name: str, family: ModelFamily | TransformersFamily) -> None:
    if not isinstance(family, ModelFamily | TransformersFamily):
        raise ValueError(f"{name}: must be a ModelFamily or a TransformersFamily")


# Values of `model_type`.
MODELS: Registry[ModelFamily | TransformersFamily] = Registry(
    {"microllama": MICROLLAMA, "bert": BERT, "causal_lm": CAUSAL_LM}, _check_registered
)


def build_model(
    model_type: str,
    settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    sequence_length: int,
    seed: int,
    class_names: Sequence[str] = (),
) -> nn.Module:
    """Build a model in float32, in train mode, on the CPU; the global generator is left as it was."""
    family = MODELS[model_type]
    if problems := family.problems(settings):
        raise ConfigError(problems)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's, where models are made; GPUs keep their states
        return family.model(settings, Demands(tokenizer, sequence_length, class_names)).train()


def reinitialise_output_layer(model_type: str, model: nn.Module, seed: int) -> None:
    """Draw the weight of the output layer again (Xavier uniform, bias zero), in place."""
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
