"""The optimisers of the inner steps, over a working model's flat buffers.

The learning rate is not theirs to know: it is given at every inner step. Their state is there from the beginning, in
named flat tensors, as PyTorch's optimisers would make it at their first step, so that every worker has the same tensors
at any time; a checkpoint and a hand-over copy them and know no optimiser.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.registry import Registry
from algorithms.schedule.learning_rate import LearningRateSchedule
from algorithms.synchronisation import METHODS
from fabrics.training.flat_model import FlatModel, laid_out
from utils.config.schema import Config, ConfigError

# Nesterov momentum of Muon, the value of its published code.
MUON_MOMENTUM = 0.95
UPDATE_SIZE = "match_rms_adamw"  # as large as those of AdamW (arXiv 2502.16982)


class InnerOptimizer:
    """What makes a worker's inner steps.

    Args:
        optimizers: PyTorch's, each over some of the model's parameters, in one group.
        state: all of their state, in tensors that theirs are, or are views of.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, torch.Tensor]):
        self._optimizers, self._state = optimizers, state

    def step(self, learning_rate: float) -> None:
        """One step with the gradient that is in the working model."""
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state by name, by reference."""
        return dict(self._state)


@dataclass(frozen=True)
class InnerOptimizerKind:
    """One value of `inner_optimizer`.

    state: what it keeps, by name, as at the start, on a device. over: the optimiser of a working model's parameters
    with such a state. state_shapes: tensors on no device, of the sizes of its state without the gaps of flat tensors.
    keys: of the configuration, that make a difference with it and not with every other one; None: not known.
    shards: whether it works on parts of tensors (`devices_per_node`).
    """

    state: Callable[[FlatModel, torch.device | str], dict[str, torch.Tensor]]
    over: Callable[[FlatModel, Config, Mapping[str, torch.Tensor]], InnerOptimizer]
    state_shapes: Callable[[FlatModel], dict[str, torch.Tensor]]
    keys: tuple[str, ...] | None = None
    shards: bool = True

    def build(
        self, working: FlatModel, config: Config, state: Mapping[str, torch.Tensor] | None = None
    ) -> InnerOptimizer:
        """An optimiser that goes on with a state, by reference; None: from the start."""
        return self.over(working, config, self.state(working, working.device) if state is None else state)


def _shape(working: FlatModel, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=working.parameters.dtype, device="meta")


def _moments(
    like: torch.Tensor, device: torch.device | str = "meta", steps: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """AdamW's state of a flat tensor of parameters; steps: the shape of its step counts."""
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


def _adamw_state(working: FlatModel, device: torch.device | str) -> dict[str, torch.Tensor]:
    return _moments(working.parameters.data, device)


def _adamw(working: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> InnerOptimizer:
    optimizer = _torch_adamw([working.parameters], config)
    own = optimizer.state[working.parameters] = {name: state[name] for name in _adamw_state(working, "meta")}
    return InnerOptimizer([optimizer], own)


def _adamw_shapes(working: FlatModel) -> dict[str, torch.Tensor]:
    return _moments(_shape(working, working.parameter_count))


def _sgd(working: FlatModel, config: Config, state: Mapping[str, torch.Tensor]) -> InnerOptimizer:
    return InnerOptimizer([torch.optim.SGD([working.parameters], fused=True)], {})


# Muon orthogonalises a matrix's update. What is no matrix, and what looks up or names tokens or classes, is AdamW's.


def _output_weights(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of the output layer: where the module does not name it, of its last linear layer."""
    layer = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if layer is None:
        layer = next((child for child in reversed(list(module.modules())) if isinstance(child, nn.Linear)), None)
    return set() if layer is None else set(layer.parameters())


def matrices_and_rest(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable matrices inside a model, without embeddings and output layer; and what else is trainable."""
    outside = _output_weights(module)
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            outside |= set(child.parameters())
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    inside = {parameter for parameter in trainable if parameter.ndim == 2} - outside
    return [p for p in trainable if p in inside], [p for p in trainable if p not in inside]


def _muon_state(
    matrices: torch.Tensor, rest: torch.Tensor, tensors: int, device: torch.device | str = "meta"
) -> dict[str, torch.Tensor]:
    """Of the flat matrices and the flat rest, which is of so many tensors: PyTorch counts each one's steps."""
    return {"momentum": torch.zeros_like(matrices, device=device)} | _moments(rest, device, (tensors,))


def _numbers(working: FlatModel) -> tuple[list[int], list[int]]:
    """Of the matrices, and of the rest, among the working model's blocks."""
    matrices = set(matrices_and_rest(working.module)[0])
    inside = [p in matrices for p in working.module.parameters() if p.requires_grad]
    return [n for n, is_inside in enumerate(inside) if is_inside], [n for n, is_in in enumerate(inside) if not is_in]


def _muon_start(working: FlatModel, device: torch.device | str) -> dict[str, torch.Tensor]:
    trained = working.trainable()
    sizes = ([trained[number].numel() for number in part] for part in _numbers(working))
    flat = [(_shape(working, laid_out(each)[1]), len(each)) for each in sizes]
    return _muon_state(flat[0][0], *flat[1], device)


def _muon(working: FlatModel, config: Config, given: Mapping[str, torch.Tensor]) -> InnerOptimizer:
    """Muon for the matrices inside the model, with updates of AdamW's size (arXiv 2502.16982); AdamW for the rest."""
    trained, numbers = working.trainable(), _numbers(working)
    matrices, rest = ([trained[number] for number in part] for part in numbers)
    state = {name: given[name] for name in _muon_start(working, "meta")}
    muon = torch.optim.Muon(
        matrices, weight_decay=config.weight_decay, momentum=MUON_MOMENTUM, adjust_lr_fn=UPDATE_SIZE
    )
    for parameter, momentum in zip(matrices, _views_of(state["momentum"], matrices), strict=True):
        muon.state[parameter] = {"momentum_buffer": momentum}
    if not rest:
        return InnerOptimizer([muon], state)
    adamw = _torch_adamw(rest, config)
    moments = (_views_of(state[name], rest) for name in ("exp_avg", "exp_avg_sq"))
    for parameter, step, average, square in zip(rest, state["step"].unbind(), *moments, strict=True):
        adamw.state[parameter] = {"step": step, "exp_avg": average, "exp_avg_sq": square}
    return InnerOptimizer([muon, adamw], state)


def _views_of(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a flat tensor that holds tensors of these shapes, one after the other."""
    offsets, _ = laid_out([tensor.numel() for tensor in tensors])
    return [flat[at : at + each.numel()].view_as(each) for at, each in zip(offsets, tensors, strict=True)]


def _muon_shapes(working: FlatModel) -> dict[str, torch.Tensor]:
    parts = matrices_and_rest(working.module)
    shapes = (_shape(working, sum(p.numel() for p in part)) for part in parts)
    return _muon_state(*shapes, len(parts[1]))


_ADAMW_KEYS = ("adam_betas", "weight_decay")

INNER_OPTIMIZERS = Registry(
    {
        "adamw": InnerOptimizerKind(_adamw_state, _adamw, _adamw_shapes, _ADAMW_KEYS),
        "muon": InnerOptimizerKind(
            _muon_start,
            _muon,
            _muon_shapes,
            _ADAMW_KEYS,
            shards=False,
        ),
        "sgd": InnerOptimizerKind(lambda working, device: {}, _sgd, lambda working: {}, ("lr_sgd",)),
    }
)


def inner_optimizer_name(config: Config) -> str | None:
    """The inner optimiser that the configuration asks for, or else that of its method, which may do without."""
    return config.inner_optimizer or METHODS[config.distributed_algo]().capabilities.inner_optimizer


def check_inner_optimizer(config: Config, working: FlatModel) -> None:
    """Raise ConfigError where the model has nothing that Muon is for."""
    if inner_optimizer_name(config) == "muon" and not matrices_and_rest(working.module)[0]:
        raise ConfigError(
            "inner_optimizer: muon needs a trainable matrix inside the model, besides embeddings and output layer; "
            "use adamw"
        )


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
