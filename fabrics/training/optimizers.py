"""Inner optimizers over the flat buffers of a model, and the inner learning rate.

The state of an optimizer exists from the start, in named flat tensors, with the values that PyTorch's optimizers would
create at their first step. So every worker has the same tensors at any time, and a checkpoint or a hand-over copies
them without knowing the optimizer. The learning rate is an argument of every step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import nn

from algorithms.registry import Registry
from algorithms.schedule.schedules import LearningRateSchedule
from algorithms.synchronisation import METHODS
from fabrics.training.flat_model import FlatModel, flat_offsets
from utils.config.reading import with_parameters
from utils.config.schema import Config, ConfigError

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
# An inner step with a learning rate.
Step = Callable[[float], None]

# Nesterov momentum of Muon, the value of its published code.
MUON_MOMENTUM = 0.95
# Muon's updates have the size of AdamW's (arXiv 2502.16982).
UPDATE_SIZE = "match_rms_adamw"


class InnerOptimizer:
    """An inner optimizer. A subclass is a frozen dataclass; its fields are the keys of `inner_optimizer_config`.

    A subclass that works element by element names its `tensors` and defines `update`. Other ones define `state`,
    `state_bytes` and `begin`.

    Attributes:
        tensors: names of the flat tensors of its state, which start at zero.
        keys: the other configuration keys that it reads and not every other optimizer does.
        shards: True if it works on a device's part of the tensors (`devices_per_node`).
    """

    tensors: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[tuple[str, ...]] = ()
    shards: ClassVar[bool] = True

    def update(
        self, parameters: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], learning_rate: float
    ) -> None:
        """Update flat parameters and the state in place."""
        raise NotImplementedError

    def state(self, model: FlatModel, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return the initial state of a model's optimizer on a device, by name."""
        return {name: torch.zeros_like(model.parameters.data, device=device) for name in self.tensors}

    def state_bytes(self, model: FlatModel) -> int:
        """Return the bytes of the state without the gaps of flat tensors."""
        return len(self.tensors) * model.parameter_count * model.parameters.dtype.itemsize

    def begin(self, model: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> Step:
        """Return the step of a model's optimizer with this state, which it uses by reference."""
        return lambda learning_rate: self.update(model.parameters.data, model.gradient, state, learning_rate)


class WorkerOptimizer:
    """The optimizer of a worker's inner steps, or of a trainer's shared parameters with the given state, by reference.

    With `offload_moments` a new state is in host memory, and on the device within `steps`.
    """

    def __init__(self, model: FlatModel, config: Config, state: Mapping[str, torch.Tensor] | None = None):
        optimizer = inner_optimizer_of(config)
        self._offloads = bool(config.offload_moments) and state is None
        new_on = "cpu" if self._offloads else model.device
        new = optimizer.state(model, new_on if state is None else "meta")
        if self._offloads and model.device.type == "cuda":
            new = {name: tensor.pin_memory() for name, tensor in new.items()}
        self._state = new if state is None else {name: state[name] for name in new}
        self._begin = partial(optimizer.begin, model, config)
        self._device = model.device
        self._step = None if self._offloads else self._begin(self._state)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Context of some steps of a worker."""
        if not self._offloads:
            yield
            return
        on_device = {name: tensor.to(self._device, copy=True) for name, tensor in self._state.items()}
        self._step = self._begin(on_device)
        try:
            yield
        finally:
            self._step = None
        for name, tensor in self._state.items():
            tensor.copy_(on_device[name])

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the model's parameters with its gradient."""
        self._step(learning_rate)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state by name, by reference."""
        return dict(self._state)


def _step_of(*optimizers: torch.optim.Optimizer) -> Step:

    def step(learning_rate: float) -> None:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()

    return step


def _moments(like: torch.Tensor, device: torch.device | str, steps: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """AdamW's initial state of flat parameters; steps: shape of the step counts."""
    return {
        "step": torch.zeros(steps, dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(like, device=device),
        "exp_avg_sq": torch.zeros_like(like, device=device),
    }


@dataclass(frozen=True)
class AdamW(InnerOptimizer):
    """PyTorch's AdamW over the flat parameters."""

    betas: tuple[Beta, Beta] = (0.9, 0.99)

    keys = ("weight_decay",)

    def state(self, model: FlatModel, device: torch.device | str) -> dict[str, torch.Tensor]:
        return _moments(model.parameters.data, device)

    def state_bytes(self, model: FlatModel) -> int:
        return 4 + 2 * model.parameter_count * model.parameters.dtype.itemsize

    def begin(self, model: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> Step:
        optimizer = self.torch_optimizer([model.parameters], config)
        optimizer.state[model.parameters] = dict(state)
        return _step_of(optimizer)

    def torch_optimizer(self, parameters: Sequence[nn.Parameter], config: Config) -> torch.optim.AdamW:
        """Return PyTorch's AdamW of these parameters, without state."""
        return torch.optim.AdamW(parameters, betas=self.betas, weight_decay=config.weight_decay, fused=True)


@dataclass(frozen=True)
class SGD(InnerOptimizer):
    """PyTorch's SGD, without momentum."""

    keys = ("lr_sgd",)

    def begin(self, model: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> Step:
        return _step_of(torch.optim.SGD([model.parameters], fused=True))


# Muon for matrices, AdamW for the rest


def matrices_and_rest(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable matrices inside a model, and its other trainable parameters.

    Embeddings and the output layer, by its name or the last linear layer, are among the others: Muon's updates do not
    suit tables of tokens or classes.
    """
    output = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if output is None:
        output = next((child for child in reversed(list(module.modules())) if isinstance(child, nn.Linear)), None)
    outside = set() if output is None else set(output.parameters())
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            outside |= set(child.parameters())
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and parameter not in outside]
    inside = set(matrices)
    return matrices, [parameter for parameter in trainable if parameter not in inside]


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


@dataclass(frozen=True)
class Muon(AdamW):
    """PyTorch's Muon for matrices inside the model, and AdamW for the rest."""

    shards = False

    def state(self, model: FlatModel, device: torch.device | str) -> dict[str, torch.Tensor]:
        matrices, rest = matrices_and_rest(model.module)
        momentum = torch.zeros_like(_flat_like(matrices, model), device=device)
        # PyTorch's AdamW counts the steps of each parameter.
        return {"momentum": momentum} | _moments(_flat_like(rest, model), device, (len(rest),))

    def state_bytes(self, model: FlatModel) -> int:
        matrices, rest = matrices_and_rest(model.module)
        elements = sum(parameter.numel() for parameter in matrices) + 2 * sum(parameter.numel() for parameter in rest)
        return 4 * len(rest) + elements * model.parameters.dtype.itemsize

    def begin(self, model: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> Step:
        matrices, rest = matrices_and_rest(model.module)
        muon = torch.optim.Muon(
            matrices, weight_decay=config.weight_decay, momentum=MUON_MOMENTUM, adjust_lr_fn=UPDATE_SIZE
        )
        for parameter, momentum in zip(matrices, _views(state["momentum"], matrices), strict=True):
            muon.state[parameter] = {"momentum_buffer": momentum}
        if not rest:
            return _step_of(muon)
        adamw = self.torch_optimizer(rest, config)
        averages = _views(state["exp_avg"], rest)
        squares = _views(state["exp_avg_sq"], rest)
        for parameter, step, average, square in zip(rest, state["step"].unbind(), averages, squares, strict=True):
            adamw.state[parameter] = {"step": step, "exp_avg": average, "exp_avg_sq": square}
        return _step_of(muon, adamw)


def _check_registered(name: str, optimizer: type[InnerOptimizer]) -> None:
    """Raise ValueError if what is being registered is no dataclass that inherits InnerOptimizer and has defaults."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, InnerOptimizer)):
        raise ValueError(f"{name}: must be a class that inherits from InnerOptimizer")
    if "__dataclass_fields__" not in vars(optimizer):
        raise ValueError(f"{name}: the class {optimizer.__name__} needs the decorator @dataclass(frozen=True)")
    try:
        optimizer()
    except TypeError as error:
        raise ValueError(f"{name}: every parameter needs a default: {error}") from None


INNER_OPTIMIZERS: Registry[type[InnerOptimizer]] = Registry(
    {"adamw": AdamW, "muon": Muon, "sgd": SGD}, _check_registered
)


def inner_optimizer_name(config: Config) -> str | None:
    """Return the configured inner optimizer, or the method's default; None: the method does without."""
    return config.inner_optimizer or METHODS[config.distributed_algo]().capabilities.inner_optimizer


def inner_optimizer_of(config: Config) -> InnerOptimizer | None:
    """Return the inner optimizer with the parameters of `inner_optimizer_config`; None: the method does without."""
    name = inner_optimizer_name(config)
    values = config.inner_optimizer_config
    if name is not None:
        return with_parameters(INNER_OPTIMIZERS[name], values, "inner_optimizer_config", name)
    if values:
        raise ConfigError(f"inner_optimizer_config: must be empty with {config.distributed_algo}, got {values}")
    return None


def check_inner_optimizer(config: Config, model: FlatModel) -> None:
    """Raise ConfigError if Muon is configured and the model has no matrix for it."""
    if inner_optimizer_name(config) == "muon" and not matrices_and_rest(model.module)[0]:
        raise ConfigError(
            "inner_optimizer: muon needs a trainable matrix inside the model, besides embeddings and output layer; "
            "use adamw"
        )


# The learning rate


def learning_rate_schedule(config: Config) -> LearningRateSchedule:
    """Return the schedule of the inner learning rate; the batch schedule seesaw leaves only the warm-up of it."""
    return LearningRateSchedule(
        "constant" if config.batch_schedule == "seesaw" else config.learning_rate_schedule,
        config.warmup_steps,
        config.warmup_tokens,
        config.minimum_learning_rate_ratio,
    )


def base_learning_rate(config: Config) -> float:
    """Return the inner learning rate that the schedule's factors multiply."""
    if inner_optimizer_name(config) == "sgd" and config.lr_sgd:
        return config.lr_sgd
    return config.learning_rate_for_inner_opt
