"""NoLoCo: no all-reduce, but small groups of workers that are drawn anew in every round (arXiv 2506.10911)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.flat import Block
from algorithms.synchronisation.group import Group, LocalWorker, WorkerMessages
from algorithms.synchronisation.method import Capabilities, Method, require


@dataclass(frozen=True)
class NoLoCo(Method):
    """Worker i of a group g starts a round from its own x_i and ends it at theta_i:

        d_i = mu d_i + lr mean_g(theta_j - x_j) + consensus (mean_g(x_j) - x_i);  x_i = x_i + d_i

    The means over a group are unweighted. The paper's eq. 2 has a minus before the first; the authors' code
    (src/noloco/sparse_optimizer_c.py) has the plus, as here, and with the minus it diverges. The weighted mean of all
    x_i is evaluated, saved and merged. A worker uses its own x_i exactly; moves are rounded for all, its own too.

    Attributes:
        group: workers in a group.
        consensus: None: learning_rate_for_outer_opt, as in the authors' code.
    """

    group: int = 2
    consensus: float | None = None

    keeps = "anchor"
    worker_state = ("velocity",)

    def __post_init__(self):
        require(self, "at least 2", lambda value: value >= 2, "group")
        require(self, "a number that is not negative", lambda value: 0 <= value < math.inf, "consensus")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            averages_copies=True,
            encodings=("float32", "bfloat16"),
            weighted=False,
            message_tensors=2,
            recipients=self.group - 1,
            shards=True,
            bytes_per_round=self._bytes_per_round,
        )

    def _bytes_per_round(
        self, workers: int, mean: float, message: float, blocks: Sequence[Block], dtype: torch.dtype
    ) -> float:
        full_groups, rest = divmod(workers, self.group)
        return 2 * message * (full_groups * self.group * (self.group - 1) + rest * (rest - 1))

    def _peers(self, group: Group) -> dict[int, list[int]]:
        groups = draw_groups(len(group.weights), self.group, group.clock.generator())
        return {worker: drawn for drawn in groups for worker in drawn}

    def incoming(self, group: Group) -> WorkerMessages:
        return group.messages(tensors=2, to=self._peers(group).__getitem__, through=f"groups of {self.group}")

    def message(self, worker: LocalWorker, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        return worker.parameters.sub_(worker.start), worker.start

    def apply(self, group: Group, arrived: Mapping[int, Sequence[torch.Tensor]]) -> None:
        peers = self._peers(group)
        lr = group.outer.learning_rate
        consensus = lr if self.consensus is None else self.consensus
        for worker in group.local_workers:
            present = [peer for peer in peers[worker.index] if peer in arrived]
            velocity = worker.state["velocity"].mul_(group.outer.momentum)
            for peer in present:
                moved = worker.to_device(arrived[peer][0])
                start = worker.to_device(arrived[peer][1])
                velocity.add_(moved, alpha=lr / len(present))
                if peer != worker.index:
                    velocity.add_(start - worker.start, alpha=consensus / len(present))
            worker.start.add_(velocity)


def draw_groups(workers: int, size: int, generator: torch.Generator) -> list[list[int]]:
    """Draw groups of this size from all workers; the last one is smaller if the size does not divide them."""
    order = torch.randperm(workers, generator=generator).tolist()
    return [sorted(order[first : first + size]) for first in range(0, workers, size)]
