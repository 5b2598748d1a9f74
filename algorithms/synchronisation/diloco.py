"""DiLoCo: one Nesterov step on the mean pseudo-gradient at the end of a round (arXiv 2311.08105, Algorithm 1)."""

import torch

from algorithms.flat import Part, read_part, write_part
from algorithms.synchronisation.group import Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method


class DiLoCo(Method):
    """D = mean_m (x - x_m);  v = mu v + D;  x = x - lr (D + mu v).

    Workers keep AdamW's moments, and every round starts from x.
    """

    capabilities = Capabilities(shards=True)
    state = ("velocity",)

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        return worker.pseudo_gradient(group.shared["parameters"])

    def apply(self, group: Group, delta: torch.Tensor) -> None:
        diloco_step(group, delta)


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


def diloco_step(group: Group, pseudo_gradient: torch.Tensor | None, part: Part | None = None) -> None:
    """Make DiLoCo's step on a part of the shared "parameters" and "velocity", or on all; none without workers."""
    if pseudo_gradient is None:
        return
    parameters = read_part(group.shared["parameters"], part)
    velocity = read_part(group.shared["velocity"], part)
    nesterov_step(parameters, pseudo_gradient, velocity, group.outer.learning_rate, group.outer.momentum)
    if part is not None:
        write_part(group.shared["parameters"], part, parameters)
        write_part(group.shared["velocity"], part, velocity)
