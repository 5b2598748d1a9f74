"""Inner optimizers over the flat buffers of a model, and the inner learning rate.

The state of an optimizer exists from the start, in named flat tensors, with the values that PyTorch's optimizers would
create at their first step. So every worker has the same tensors at any time, and a checkpoint or a hand-over copies
them without knowing the optimizer. The learning rate is an argument of every step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.registry import Registry
from algorithms.schedule.learning_rate import LearningRateSchedule
from algorithms.synchronisation import METHODS
from fabrics.training.flat_model import FlatModel, flat_offsets
from utils.config.schema import Config, ConfigError

# Nesterov momentum of Muon, the value of its published code.
MUON_MOMENTUM = 0.95
# Muon's updates have the size of AdamW's (arXiv 2502.16982).
UPDATE_SIZE = "match_rms_adamw"


class InnerOptimizer:
    """The optimizer of a worker's inner steps.

    Args:
        optimizers: PyTorch's, each over some of the model's parameters in one group.
        state: all of their state, in the tensors that they use or that theirs are views of.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, torch.Tensor]):
        self._optimizers = optimizers
        self._state = state

    def step(self, learning_rate: float) -> None:
        """Update the model's parameters with its gradient."""
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state by name, by reference."""
        return dict(self._state)


@dataclass(frozen=True)
class InnerOptimizerKind:
    """One value of `inner_optimizer`.

    Attributes:
        state: creates the initial state of a model's optimizer on a device, by name.
        create: makes the optimizer of a model's parameters, with a state that it uses by reference.
        state_bytes: bytes of the state without the gaps of flat tensors.
        keys: the configuration keys that it reads and not every other kind does; None: unknown.
        shards: True if it works on a device's part of the tensors (`devices_per_node`).
    """

    state: Callable[[FlatModel, torch.device | str], dict[str, torch.Tensor]]
    create: Callable[[FlatModel, Config, Mapping[str, torch.Tensor]], InnerOptimizer]
    state_bytes: Callable[[FlatModel], int]
    keys: tuple[str, ...] | None = None
    shards: bool = True

    def build(
        self, model: FlatModel, config: Config, state: Mapping[str, torch.Tensor] | None = None
    ) -> InnerOptimizer:
        """Return an optimizer with this state, used by reference, or with a new one."""
        return self.create(model, config, self.state(model, model.device) if state is None else state)


# AdamW


def _moments(like: torch.Tensor, device: torch.device | str, steps: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """AdamW's initial state of flat parameters; steps: shape of the step counts."""
    return {
        "step": torch.zeros(steps, dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(like, device=device),
        "exp_avg_sq": torch.zeros_like(like, device=device),
    }


def _torch_adamw(parameters: Sequence[nn.Parameter], config: Config) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        betas=tuple(config.adam_betas),
        weight_decay=config.weight_decay,
        fused=True,
    )


def _adamw_state(model: FlatModel, device: torch.device | str) -> dict[str, torch.Tensor]:
    return _moments(model.parameters.data, device)


def _adamw(model: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> InnerOptimizer:
    optimizer = _torch_adamw([model.parameters], config)
    own = {name: state[name] for name in ("step", "exp_avg", "exp_avg_sq")}
    optimizer.state[model.parameters] = own
    return InnerOptimizer([optimizer], own)


def _adamw_bytes(model: FlatModel) -> int:
    return 4 + 2 * model.parameter_count * model.parameters.dtype.itemsize


# SGD


def _sgd(model: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> InnerOptimizer:
    return InnerOptimizer([torch.optim.SGD([model.parameters], fused=True)], {})


# Muon for matrices, AdamW for the rest


def matrices_and_rest(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable matrices inside a model, and its other trainable parameters.

    Embeddings and the output layer are among the others: Muon's updates do not suit tables of tokens or classes.
    """
    outside = set(_output_layer_parameters(module))
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            outside |= set(child.parameters())
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and parameter not in outside]
    inside = set(matrices)
    return matrices, [parameter for parameter in trainable if parameter not in inside]


def _output_layer_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of the layer that the module names as its output layer, or of its last linear layer."""
    layer = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if layer is None:
        linear = [child for child in module.modules() if isinstance(child, nn.Linear)]
        layer = linear[-1] if linear else None
    return [] if layer is None else list(layer.parameters())


def _flat_like(parameters: Sequence[nn.Parameter], model: FlatModel) -> torch.Tensor:
    """A flat tensor with room for some of the model's parameters, on the meta device."""
    _, size = flat_offsets([parameter.numel() for parameter in parameters])
    return torch.empty(size, dtype=model.parameters.dtype, device="meta")


def _views(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Views of a flat tensor in the shapes of these parameters, one after the other."""
    offsets, _ = flat_offsets([parameter.numel() for parameter in parameters])
    return [
        flat[start : start + parameter.numel()].view_as(parameter)
        for start, parameter in zip(offsets, parameters, strict=True)
    ]


def _muon_state(model: FlatModel, device: torch.device | str) -> dict[str, torch.Tensor]:
    matrices, rest = matrices_and_rest(model.module)
    momentum = torch.zeros_like(_flat_like(matrices, model), device=device)
    # PyTorch's AdamW counts the steps of each parameter.
    return {"momentum": momentum} | _moments(_flat_like(rest, model), device, (len(rest),))


def _muon(model: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> InnerOptimizer:
    matrices, rest = matrices_and_rest(model.module)
    own = {name: state[name] for name in ("momentum", "step", "exp_avg", "exp_avg_sq")}
    muon = torch.optim.Muon(
        matrices, weight_decay=config.weight_decay, momentum=MUON_MOMENTUM, adjust_lr_fn=UPDATE_SIZE
    )
    for parameter, momentum in zip(matrices, _views(own["momentum"], matrices), strict=True):
        muon.state[parameter] = {"momentum_buffer": momentum}
    if not rest:
        return InnerOptimizer([muon], own)
    adamw = _torch_adamw(rest, config)
    averages = _views(own["exp_avg"], rest)
    squares = _views(own["exp_avg_sq"], rest)
    for parameter, step, average, square in zip(rest, own["step"].unbind(), averages, squares, strict=True):
        adamw.state[parameter] = {"step": step, "exp_avg": average, "exp_avg_sq": square}
    return InnerOptimizer([muon, adamw], own)


def _muon_bytes(model: FlatModel) -> int:
    matrices, rest = matrices_and_rest(model.module)
    elements = sum(parameter.numel() for parameter in matrices) + 2 * sum(parameter.numel() for parameter in rest)
    return 4 * len(rest) + elements * model.parameters.dtype.itemsize


_ADAMW_KEYS = ("adam_betas", "weight_decay")

INNER_OPTIMIZERS = Registry(
    {
        "adamw": InnerOptimizerKind(_adamw_state, _adamw, _adamw_bytes, _ADAMW_KEYS),
        "muon": InnerOptimizerKind(_muon_state, _muon, _muon_bytes, _ADAMW_KEYS, shards=False),
        "sgd": InnerOptimizerKind(lambda model, device: {}, _sgd, lambda model: 0, ("lr_sgd",)),
    }
)


def inner_optimizer_name(config: Config) -> str | None:
    """Return the configured inner optimizer, or the method's default; None: the method does without."""
    return config.inner_optimizer or METHODS[config.distributed_algo]().capabilities.inner_optimizer


def check_inner_optimizer(config: Config, model: FlatModel) -> None:
    """Raise ConfigError if Muon is configured and the model has no matrix for it."""
    if inner_optimizer_name(config) == "muon" and not matrices_and_rest(model.module)[0]:
        raise ConfigError(
            "inner_optimizer: muon needs a trainable matrix inside the model, besides embeddings and output layer; "
            "use adamw"
        )


# The learning rate


def learning_rate_schedule(config: Config) -> LearningRateSchedule:
    """Return the schedule of the inner learning rate, as factors of `base_learning_rate`."""
    return LearningRateSchedule(
        config.learning_rate_schedule,
        config.warmup_steps,
        config.warmup_tokens,
        config.minimum_learning_rate_ratio,
    )


def base_learning_rate(config: Config) -> float:
    """Return the inner learning rate that the schedule's factors multiply."""
    if inner_optimizer_name(config) == "sgd" and config.lr_sgd:
        return config.lr_sgd
    return config.learning_rate_for_inner_opt
