"""DiLoCo: one Nesterov step on the mean pseudo-gradient at the end of a round (arXiv 2311.08105, Algorithm 1)."""

import torch

from algorithms.synchronisation.group import Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method
from algorithms.synchronisation.outer_step import diloco_step


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
