"""What a model family is, and the family of a plain nn.Module; `transformers_models` has those of Hugging Face."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from utils.config.schema import ConfigError
from utils.text import did_you_mean

# Keys of model_config that are not architecture values.
OWN_KEYS = frozenset(("preset", "name", "pretrained"))
_WEIGHTS, _ARCHITECTURE = "model.safetensors", "config.json"


@dataclass(frozen=True)
class Demands:
    """What data ask of a model.

    tokenizer: None: they are no text. sequence_length: the longest sequence it must take. class_names: of a
    classification, by class.
    """

    tokenizer: PreTrainedTokenizerBase | None
    sequence_length: int
    class_names: Sequence[str] = ()


class Family(Protocol):
    """One value of `model_type`.

    task: which examples it can train on and how it is judged (a key of eval_tool.METRICS). output_layer: finds the
    layer that need_to_reinit_output_layers means; None: there is none.
    """

    task: str
    output_layer: Callable[[nn.Module], nn.Module] | None

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        """What is wrong with a `model_config` that can be told without loading anything, one line each."""

    def model(self, settings: Mapping[str, Any], demands: Demands) -> nn.Module:
        """A model in float32 on the CPU, initialised from PyTorch's generator; ConfigError: it cannot be built."""


@dataclass(frozen=True)
class ModelFamily:
    """A family of any nn.Module.

    The module takes what `Examples.batch` gives, but for `labels`, as keyword arguments, and returns logits
    (algorithms.batch.losses), or something with an attribute `logits`. What its forward draws comes from PyTorch's
    generator.

    build: from architecture values and demands to a module. presets: architecture values by name, all of the family's;
    `demo` is the default.
    """

    task: str
    build: Callable[[Mapping[str, Any], Demands], nn.Module]
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"demo": {}})
    output_layer: Callable[[nn.Module], nn.Module] | None = None

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        known = {key for values in self.presets.values() for key in values}
        return settings_problems(settings, self.presets, known, "this model")

    def model(self, settings: Mapping[str, Any], demands: Demands) -> nn.Module:
        given = {key: value for key, value in settings.items() if key not in OWN_KEYS}
        if not is_pretrained(settings):
            values = dict(self.presets[settings.get("preset") or "demo"]) | given
            return _with_architecture(self.build(values, demands), values)
        folder = Path(settings["name"])
        try:
            values = json.loads((folder / _ARCHITECTURE).read_text(encoding="utf-8"))["model_config"] | given
            module = self.build(values, demands)
            module.load_state_dict(load_file(folder / _WEIGHTS))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"model_config.name: cannot load {settings['name']!r}: {reason}") from None
        return _with_architecture(module, values)


def _with_architecture(module: nn.Module, values: Mapping[str, Any]) -> nn.Module:
    module.architecture = dict(values)
    return module


def save_plain(module: nn.Module, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a module's state as safetensors, with the architecture values that its family built it with."""
    folder.mkdir(parents=True, exist_ok=True)
    # Tensors that are one in the module are written as several: the format knows no shared ones.
    first = {tensor: name for name, tensor in reversed(state.items())}
    own = {name: tensor if first[tensor] == name else tensor.clone() for name, tensor in state.items()}
    save_file({name: tensor.contiguous() for name, tensor in own.items()}, folder / _WEIGHTS)
    values = {"class": type(module).__name__, "model_config": getattr(module, "architecture", {})}
    (folder / _ARCHITECTURE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def is_pretrained(settings: Mapping[str, Any]) -> bool:
    """Whether model_config asks for pretrained weights."""
    return settings.get("pretrained") is True


def settings_problems(
    settings: Mapping[str, Any], presets: Collection[str], known: Collection[str], whose: str
) -> list[str]:
    """What is wrong with a `model_config`, one line each.

    Args:
        known: names of architecture values.
        whose: values these are, in words.
    """
    problems = []
    pretrained, preset = settings.get("pretrained", False), settings.get("preset")
    if not isinstance(pretrained, bool):
        problems.append(f"model_config.pretrained: must be true or false, got {pretrained!r}")
    elif pretrained and not settings.get("name"):
        problems.append("model_config.name: pretrained: true needs the name of a hub model or a local folder")
    if preset is not None and preset not in presets:
        problems.append(f"model_config.preset: must be one of {', '.join(presets)}, got {preset!r}")
    for key, value in settings.items():
        if key in OWN_KEYS:
            continue
        if key not in known:
            hint = did_you_mean(str(key), {*known, *OWN_KEYS})
            problems.append(f"model_config.{key}: not an architecture value of {whose}{hint}")
            continue
        is_count = key.startswith(("num_", "max_")) or key.endswith("_size")
        if is_count and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"model_config.{key}: must be a positive integer, got {value!r}")
    return problems
