"""Synchronous (data-parallel) training: gradients are averaged at every inner step."""

import torch

from algorithms.synchronisation.group import Group, LocalWorker, WorkerMean
from algorithms.synchronisation.method import Capabilities, Method


class Synchronous(Method):
    """g = mean_m g_m, clipped; then one step of the inner optimizer, whose moments are the trainer's."""

    capabilities = Capabilities(
        exchanges_gradients=True, encodings=("float32", "bfloat16"), outer_keys=(), one_exchange=False, shards=True
    )

    def incoming(self, group: Group) -> WorkerMean:
        return group.mean(kind="gradient")

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        return worker.gradient

    def apply(self, group: Group, gradient: torch.Tensor) -> None:
        group.inner.update(gradient)
