"""The outer step: from a pseudo-gradient to new parameters, in place on flat tensors.

The pseudo-gradient is the mean over workers of (x - x_m): minus it is a descent direction, so it takes the
place of a gradient.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_MOMENTS = ("first_moment", "second_moment")
# Of an outer step by its word the flat tensors that it keeps.
OUTER_STATE = {"mean": (), "nesterov": ("velocity",), "adam": _MOMENTS, "adagrad": _MOMENTS, "yogi": _MOMENTS}


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


@dataclass(frozen=True)
class AdaptiveValues:
    """Those of `adaptive_step`. tau: how adaptive it is; the larger, the less."""

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self):
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 0 and less than 1, got {getattr(self, name)}")
        if not 0 < self.tau < float("inf"):
            raise ValueError(f"tau: must be a positive number, got {self.tau}")

    def check_used(self, kind: str) -> None:
        """Raise ValueError where they say something of an outer step that has none of them."""
        unlike = [each.name for each in dataclasses.fields(AdaptiveValues) if getattr(self, each.name) != each.default]
        if unlike and OUTER_STATE[kind] is not _MOMENTS:
            raise ValueError(f"{unlike[0]}: must be left out with {kind}, which has none")


@torch.no_grad()
def adaptive_step(
    kind: str,
    parameters: torch.Tensor,
    pseudo_gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    lr: float,
    values: AdaptiveValues,
) -> None:
    """A server's Adagrad, Adam or Yogi (arXiv 2003.00295, Algorithm 2; D is the pseudo-gradient, the paper's -Delta):

        m = beta1 m + (1 - beta1) D;  x = x - lr m / (v^(1/2) + tau), with
        adagrad  v = v + D^2
        yogi     v = v - (1 - beta2) D^2 sign(v - D^2)
        adam     v = beta2 v + (1 - beta2) D^2

    There is no bias correction: v begins with tau^2, the least that the paper allows. `second` is v - tau^2, which
    begins with zero, as `first`, m, does. All tensors are flat and of one size, and change; that of the pseudo-gradient
    is used up.
    """
    beta1, beta2, offset = values.beta1, values.beta2, values.tau**2
    first.mul_(beta1).add_(pseudo_gradient, alpha=1 - beta1)
    squares = pseudo_gradient.square_()
    if kind == "adagrad":
        second.add_(squares)
    elif kind == "adam":
        second.mul_(beta2).add_(squares.sub_(offset), alpha=1 - beta2)
    else:
        second.sub_(squares.mul_((second + offset).sub_(squares).sign_()), alpha=1 - beta2)
    # Rounding may have taken a little more than all of v.
    root = second.add(offset).clamp_min_(0.0).sqrt_()
    parameters.addcdiv_(first, root.add_(values.tau), value=-lr)


def outer_step(
    kind: str,
    parameters: torch.Tensor,
    pseudo_gradient: torch.Tensor,
    kept: Mapping[str, torch.Tensor],
    lr: float,
    momentum: float,
    values: AdaptiveValues,
) -> None:
    """That of a word of `OUTER_STATE`, whose tensors are in `kept`; `mean` is x = x - pseudo_gradient."""
    state = [kept[name] for name in OUTER_STATE[kind]]
    if kind == "mean":
        parameters.sub_(pseudo_gradient)
    elif kind == "nesterov":
        nesterov_step(parameters, pseudo_gradient, *state, lr, momentum)
    else:
        adaptive_step(kind, parameters, pseudo_gradient, *state, lr, values)
