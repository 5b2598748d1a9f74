"""Local SGD: workers make steps of SGD, and their parameters are averaged at the end of a round (arXiv 1805.09767)."""

import torch

from algorithms.synchronisation.group import Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method


class LocalSGD(Method):
    """x = x - mean_m (x - x_m)."""

    capabilities = Capabilities(inner_optimizer="sgd", outer_keys=(), shards=True)

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        return worker.pseudo_gradient(group.shared["parameters"])

    def apply(self, group: Group, delta: torch.Tensor) -> None:
        group.shared["parameters"].sub_(delta)
