"""The interface of a model family, and the family of a plain nn.Module; `transformers_models` has Hugging Face's."""

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
_WEIGHTS = "model.safetensors"
_ARCHITECTURE = "config.json"


@dataclass(frozen=True)
class Demands:
    """What the data demand of a model.

    Attributes:
        tokenizer: the tokenizer of the texts; None: the data are no text.
        sequence_length: the longest sequence that the model must take.
        class_names: for classification, by class.
    """

    tokenizer: PreTrainedTokenizerBase | None
    sequence_length: int
    class_names: Sequence[str] = ()


class Family(Protocol):
    """One value of `model_type`.

    Attributes:
        task: the examples that its models train on, and how they are evaluated (a key of eval_tool.METRICS).
        output_layer: finds the layer that need_to_reinit_output_layers means; None: there is none.
    """

    task: str
    output_layer: Callable[[nn.Module], nn.Module] | None

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with a `model_config`, one line each, without loading anything."""

    def model(self, settings: Mapping[str, Any], demands: Demands) -> nn.Module:
        """Build a model in float32 on the CPU, initialised from PyTorch's generator.

        Raises:
            ConfigError: it cannot be built.
        """


@dataclass(frozen=True)
class ModelFamily:
    """A family of any nn.Module.

    The module takes the tensors of `Examples.batch`, except `labels`, as keyword arguments. It returns logits
    (algorithms.batch.losses), or an object with the attribute `logits`. Its random numbers come from PyTorch's
    generator.

    Attributes:
        task: see Family.
        build: builds a module from architecture values and demands.
        presets: architecture values by name; each names all values of the family. The default is `demo`.
        output_layer: see Family.
    """

    task: str
    build: Callable[[Mapping[str, Any], Demands], nn.Module]
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"demo": {}})
    output_layer: Callable[[nn.Module], nn.Module] | None = None

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        known = {key for values in self.presets.values() for key in values}
        return settings_problems(settings, self.presets, known, "this model")

    def model(self, settings: Mapping[str, Any], demands: Demands) -> nn.Module:
        if not is_pretrained(settings):
            values = dict(self.presets[settings.get("preset") or "demo"]) | architecture_values(settings)
            module = self.build(values, demands)
        else:
            folder = Path(settings["name"])
            try:
                saved = json.loads((folder / _ARCHITECTURE).read_text(encoding="utf-8"))["model_config"]
                values = saved | architecture_values(settings)
                module = self.build(values, demands)
                module.load_state_dict(load_file(folder / _WEIGHTS))
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
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


def is_pretrained(settings: Mapping[str, Any]) -> bool:
    """True if model_config asks for pretrained weights."""
    return settings.get("pretrained") is True


def architecture_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture values of a model_config."""
    return {key: value for key, value in settings.items() if key not in OWN_KEYS}


def settings_problems(
    settings: Mapping[str, Any], presets: Collection[str], known: Collection[str], owner: str
) -> list[str]:
    """Return what is wrong with a `model_config`, one line each.

    Args:
        presets: names of the family's presets.
        known: names of its architecture values.
        owner: the model that has these values, in words.
    """
    problems = []
    pretrained = settings.get("pretrained", False)
    preset = settings.get("preset")
    if not isinstance(pretrained, bool):
        problems.append(f"model_config.pretrained: must be true or false, got {pretrained!r}")
    elif pretrained and not settings.get("name"):
        problems.append("model_config.name: pretrained: true needs the name of a hub model or a local folder")
    if preset is not None and preset not in presets:
        problems.append(f"model_config.preset: must be one of {', '.join(presets)}, got {preset!r}")
    for key, value in architecture_values(settings).items():
        if key not in known:
            hint = did_you_mean(str(key), {*known, *OWN_KEYS})
            problems.append(f"model_config.{key}: not an architecture value of {owner}{hint}")
            continue
        is_count = key.startswith(("num_", "max_")) or key.endswith("_size")
        if is_count and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"model_config.{key}: must be a positive integer, got {value!r}")
    return problems
