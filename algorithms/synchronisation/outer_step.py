"""The outer step: from a pseudo-gradient to new parameters, in place on flat tensors.

The pseudo-gradient is the mean over workers of (x - x_m): its negative is a descent direction, so it takes the place of
a gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from algorithms.flat import Part, read_part, write_part


@torch.no_grad()
def nesterov_step(
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


def fragment_step(
    shared: Mapping[str, torch.Tensor], part: Part | None, pseudo_gradient: torch.Tensor, lr: float, momentum: float
) -> torch.Tensor:
    """Make DiLoCo's step on a part of the shared "parameters" and "velocity"; return the new part."""
    parameters = read_part(shared["parameters"], part)
    velocity = read_part(shared["velocity"], part)
    nesterov_step(parameters, pseudo_gradient, velocity, lr, momentum)
    write_part(shared["parameters"], part, parameters)
    write_part(shared["velocity"], part, velocity)
    return parameters


@dataclass(frozen=True)
class AdaptiveParameters:
    """Parameters of `adaptive_step`.

    Attributes:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: added to its square root; the larger, the less adaptive the step.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self):
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 0 and less than 1, got {getattr(self, name)}")
        if not 0 < self.tau < float("inf"):
            raise ValueError(f"tau: must be a positive number, got {self.tau}")


@torch.no_grad()
def adaptive_step(
    kind: str,
    parameters: torch.Tensor,
    pseudo_gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    lr: float,
    adaptive: AdaptiveParameters,
) -> None:
    """A server's Adagrad, Adam or Yogi (arXiv 2003.00295, Algorithm 2; D is the pseudo-gradient, the paper's -Delta):

        m = beta1 m + (1 - beta1) D;  x = x - lr m / (v^(1/2) + tau), with
        adagrad  v = v + D^2
        yogi     v = v - (1 - beta2) D^2 sign(v - D^2)
        adam     v = beta2 v + (1 - beta2) D^2

    There is no bias correction: v starts at tau^2, the least that the paper allows. `second` is v - tau^2, so that it
    starts at zero, as m, which is `first`. All tensors are flat, of one size, and change; the pseudo-gradient is used
    up.
    """
    beta1 = adaptive.beta1
    beta2 = adaptive.beta2
    offset = adaptive.tau**2
    first.mul_(beta1).add_(pseudo_gradient, alpha=1 - beta1)
    squares = pseudo_gradient.square_()
    if kind == "adagrad":
        second.add_(squares)
    elif kind == "adam":
        second.mul_(beta2).add_(squares.sub_(offset), alpha=1 - beta2)
    else:
        second.sub_(squares.mul_((second + offset).sub_(squares).sign_()), alpha=1 - beta2)
    # Rounding may have made v slightly negative.
    root = second.add(offset).clamp_min_(0.0).sqrt_()
    parameters.addcdiv_(first, root.add_(adaptive.tau), value=-lr)
