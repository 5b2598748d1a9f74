"""The outer step: from a pseudo-gradient to new parameters, in place on flat tensors.

The pseudo-gradient is the mean over workers of (x - x_m): minus it is a descent direction, so it takes the
place of a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@torch.no_grad()
def diloco_step(
    parameters: torch.Tensor,
    pseudo_gradient: torch.Tensor,
    velocity: torch.Tensor,
    lr: float,
    momentum: float,
) -> None:
    """Nesterov momentum, equal to torch.optim.SGD(nesterov=True) (DiLoCo, arXiv 2311.08105, Algorithm 1).

    v = momentum * v + pseudo_gradient;  x = x - lr * (pseudo_gradient + momentum * v).
    All tensors are flat and of one size; `parameters` and `velocity` change, `pseudo_gradient` does not.
    """
    velocity.mul_(momentum).add_(pseudo_gradient)
    parameters.add_(pseudo_gradient, alpha=-lr).add_(velocity, alpha=-lr * momentum)


@torch.no_grad()
def local_sgd_step(parameters: torch.Tensor, pseudo_gradient: torch.Tensor) -> None:
    """Plain averaging of the workers' parameters, x = x - pseudo_gradient (arXiv 1805.09767)."""
    parameters.sub_(pseudo_gradient)


@dataclass(frozen=True)
class DistributedAlgorithm:
    """An outer step together with the inner optimiser that its paper uses.

    outer_step: called with (parameters, pseudo_gradient, velocity, lr, momentum); velocity is None unless
    `has_velocity`.
    """

    outer_step: Callable[..., None]
    inner_optimizer: str
    has_velocity: bool


DISTRIBUTED_ALGORITHMS = {
    "DiLoCo": DistributedAlgorithm(diloco_step, inner_optimizer="adamw", has_velocity=True),
    "LocalSGD": DistributedAlgorithm(
        lambda parameters, pseudo_gradient, velocity, lr, momentum: local_sgd_step(parameters, pseudo_gradient),
        inner_optimizer="sgd",
        has_velocity=False,
    ),
}
