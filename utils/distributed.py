"""Where a trainer's workers live: the one interface through which it reaches them all.

Algorithms, trainers and the cluster speak of workers; only this module knows whether they share a process.
`LocalWorkers` owns every worker. Sums run in worker order, so that a result does not depend on who owns what.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Workers(Protocol):
    """The workers of one trainer, numbered from 0."""

    local_workers: tuple[int, ...]

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """From each local worker's value to all workers' values, everywhere, in worker order."""

    def weighted_sum(
        self, tensors: Iterable[tuple[int, torch.Tensor]], weights: Mapping[int, float], like: torch.Tensor
    ) -> torch.Tensor:
        """Sum over all workers of weight times tensor, of the shape and device of `like`.

        `tensors` yields (worker, tensor) for the local workers in order, and only the latest tensor has to be
        valid: a worker may be run when its tensor is asked for, and all of them may share one buffer.
        """

    def barrier(self) -> None:
        """Wait until everybody who owns a worker has come here."""


class LocalWorkers:
    """All workers of a trainer in this process."""

    def __init__(self, count: int):
        self.local_workers = tuple(range(count))

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        return {worker: values[worker] for worker in self.local_workers}

    def weighted_sum(
        self, tensors: Iterable[tuple[int, torch.Tensor]], weights: Mapping[int, float], like: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(like)
        for worker, tensor in tensors:
            total.add_(tensor.to(like.device), alpha=weights[worker])
        return total

    def barrier(self) -> None:
        """Nobody to wait for."""
