"""NoLoCo: no all-reduce, but small groups of workers that are drawn anew in every round (arXiv 2506.10911)."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.group import Deliveries, Group, LocalWorker
from algorithms.synchronisation.method import OUTER_KEYS, Capabilities, Method


class NoLoCo(Method):
    """Worker i of a group g begins a round with its own x_i and ends it at theta_i:
    d_i = momentum d_i + lr mean_g(theta_j - x_j) + consensus (mean_g(x_j) - x_i);  x_i = x_i + d_i.

    The means over a group are plain ones. The paper's eq. 2 has a minus before the first; the authors' code
    (src/noloco/sparse_optimizer_c.py) has the plus, as here, and with the minus it diverges. What is evaluated, saved
    and merged is the weighted mean of all x_i. Rounding of what is sent reaches the others alone: a worker has its own
    x_i as it is.
    """

    @dataclass(frozen=True)
    class Settings:
        """momentum: null: outer_momentum. consensus: null, as in the authors' code: learning_rate_for_outer_opt."""

        group: int = 2
        momentum: float | None = None
        consensus: float | None = None

        def __post_init__(self):
            if self.group < 2:
                raise ValueError(f"group: must be at least 2, got {self.group}")
            if self.momentum is not None and not 0 <= self.momentum < 1:
                raise ValueError(f"momentum: must be at least 0 and less than 1, got {self.momentum}")
            if self.consensus is not None and not 0 <= self.consensus < float("inf"):
                raise ValueError(f"consensus: must be a number that is not negative, got {self.consensus}")

    capabilities = Capabilities(
        averages_copies=True,
        encodings=("float32", "bfloat16"),
        weighs=False,
        message_tensors=2,
        shards=True,
    )
    worker_state = ("velocity",)
    keeps = "anchor"

    @classmethod
    def configured(cls, settings: Settings) -> Capabilities:
        keys = [key for key in OUTER_KEYS if key != "outer_momentum" or settings.momentum is None]
        return dataclasses.replace(cls.capabilities, outer_keys=tuple(keys), recipients=settings.group - 1)

    @classmethod
    def problems(cls, settings, inner_steps: int, workers: int | None) -> list[str]:
        if workers is None or workers == 1 or workers % settings.group == 0:
            return []
        return [f"synchronisation.group: must divide the {workers} workers of a trainer, got {settings.group}"]

    def bytes_per_round(self, workers: int, mean: float, message: float, dtype: torch.dtype) -> float:
        whole, rest = divmod(workers, self.settings.group)
        return 2 * message * (whole * self.settings.group * (self.settings.group - 1) + rest * max(0, rest - 1))

    def _peers(self, group: Group) -> dict[int, list[int]]:
        """The group of each worker in this round, by number."""
        groups = draw_groups(len(group.weights), self.settings.group, group.generator())
        return {worker: drawn for drawn in groups for worker in drawn}

    def incoming(self, group: Group) -> Deliveries:
        return group.tensors(2, to=self._peers(group).__getitem__, through="groups")

    def message(self, worker: LocalWorker, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        return worker.parameters.sub_(worker.start), worker.start

    def apply(self, group: Group, arrived: Mapping[int, Sequence[torch.Tensor]]) -> None:
        peers = self._peers(group)
        momentum = self.outer.momentum if self.settings.momentum is None else self.settings.momentum
        consensus = self.outer.learning_rate if self.settings.consensus is None else self.settings.consensus
        for worker in group.local:
            present = [peer for peer in peers[worker.index] if peer in arrived]
            velocity = worker.state["velocity"].mul_(momentum)
            for peer in present:
                moved, began = map(worker.here, arrived[peer])
                velocity.add_(moved, alpha=self.outer.learning_rate / len(present))
                if peer != worker.index:
                    velocity.add_(began - worker.start, alpha=consensus / len(present))
            worker.start.add_(velocity)


def draw_groups(workers: int, size: int, generator: torch.Generator) -> list[list[int]]:
    """All workers, in groups of that size; the last one is smaller where it does not divide them."""
    order = torch.randperm(workers, generator=generator).tolist()
    return [sorted(order[first : first + size]) for first in range(0, workers, size)]
