"""Low-rank adapters (LoRA, arXiv 2106.09685): W x + (alpha / rank) B A x, of which only A and B are trained.

They are a dozen lines over linear layers, among them GPT-2's Conv1D, whose per-example statistics are known. The
library peft would wrap the model in classes of its own, and needs accelerate; a test compares with it. Folders of
models hold the sum W + (alpha / rank) B A, which any program loads as an ordinary model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fabrics.models.model_family import MODELS, is_pretrained
from utils.config.reading import with_parameters
from utils.config.schema import Config, ConfigError, Name, PositiveFloat, PositiveInt
from utils.text import did_you_mean


@dataclass(frozen=True)
class LoRA:
    """Values of the key `lora`.

    Attributes:
        rank: rows of A and columns of B.
        alpha: B A counts alpha / rank times.
        targets: linear layers by the end of their names, such as q_proj or layers.0.self_attn.q_proj.
    """

    targets: Annotated[list[Name], Field(min_length=1)]
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0


def lora_of(config: Config) -> LoRA | None:
    """Return the adapters that a configuration asks for; None: the whole model is trained."""
    return with_parameters(LoRA, config.lora, "lora", "LoRA") if config.lora else None


def lora_problems(config: Config) -> list[str]:
    """Return what is wrong with the key `lora`, one line each, as far as it is known without the model."""
    try:
        if lora_of(config) is None:
            return []
    except ConfigError as error:
        return error.problems
    found = []
    if not is_pretrained(config.model_config):
        found.append("lora: needs model_config.pretrained: true, as a frozen model that knows nothing learns nothing")
    if MODELS[config.model_type].task != "causal_lm":
        found.append(
            f"lora: needs a language model, got model_type {config.model_type}, whose classifier would be frozen"
        )
    if config.need_to_reinit_output_layers:
        found.append("need_to_reinit_output_layers: must be false with lora, which would freeze the new layer")
    if config.devices_per_node > 1:
        found.append(f"devices_per_node: must be 1 with lora, got {config.devices_per_node}")
    return found


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter, at first without effect, as B is zero."""

    def __init__(self, base: nn.Linear | Conv1D, lora: LoRA):
        super().__init__()
        inputs, outputs = base.weight.shape if isinstance(base, Conv1D) else base.weight.shape[::-1]
        options = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(inputs, lora.rank, **options)  # A, with PyTorch's initialisation
        self.up = nn.Linear(lora.rank, outputs, **options)  # B
        nn.init.zeros_(self.up.weight)
        self.scale = lora.alpha / lora.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def add_adapters(model: nn.Module, lora: LoRA, seed: int) -> None:
    """Freeze a model and give its target layers adapters, in place."""
    chosen = _target_layers(model, lora.targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for path, layer in chosen.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, AdaptedLinear(layer, lora))
        if isinstance(model, PreTrainedModel) and model.device.type != "meta":
            _check_forward(model)


@torch.no_grad()
def _check_forward(model: nn.Module) -> None:
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device))
    except AttributeError as error:  # Mamba's layers read the weights of others
        raise ConfigError(f"lora.targets: the model needs a layer among these as it is: {error}") from None


def _target_layers(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear | Conv1D]:
    layers = dict(model.named_modules())
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    chosen = {}
    for target in targets:
        found = {path: layer for path, layer in layers.items() if f".{path}".endswith(f".{target}")}
        if not found:
            linear = {path.rpartition(".")[2] for path, layer in layers.items() if _is_linear(layer)}
            known = ", ".join(sorted(linear))
            raise ConfigError(f"lora.targets: no layer {target}{did_you_mean(target, linear)}; linear layers: {known}")
        for path, layer in found.items():
            if not _is_linear(layer):
                raise ConfigError(f"lora.targets: {path} is a {type(layer).__name__}, not a linear layer")
            if len(users[layer.weight]) > 1 or layer is output:
                raise ConfigError(f"lora.targets: {path} is the output layer, or shares its weight, and stays as it is")
        chosen |= found
    return chosen


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, Conv1D)


def merged_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state of a model with its adapters added to their layers; without adapters, the state itself."""
    merged = dict(state)
    for path, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear):
            down = merged.pop(f"{path}.down.weight")
            up = merged.pop(f"{path}.up.weight")
            product = (up @ down).t() if isinstance(layer.base, Conv1D) else up @ down
            merged[f"{path}.weight"] = merged.pop(f"{path}.base.weight") + layer.scale * product
            if layer.base.bias is not None:
                merged[f"{path}.bias"] = merged.pop(f"{path}.base.bias")
    return merged
