"""NoLoCo: no all-reduce, but small groups of workers that are drawn anew in every round (arXiv 2506.10911)."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from algorithms.synchronisation.method import OUTER_KEYS, Group, Member, Method


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

    worker_state = ("velocity",)
    own_copy = "anchor"
    shares_copy = False
    delivers = 2
    weighs = False
    allows_fewer_steps = False
    encodings = ("float32", "bfloat16")
    shards = True

    @classmethod
    def outer_keys(cls, settings: Settings) -> Collection[str]:
        return [key for key in OUTER_KEYS if key != "outer_momentum" or settings.momentum is None]

    @classmethod
    def problems(cls, settings, inner_steps: int, workers: int | None) -> list[str]:
        if workers is None or workers == 1 or workers % settings.group == 0:
            return []
        return [f"synchronisation.group: must divide the {workers} workers of a trainer, got {settings.group}"]

    def planned(self, workers: int, mean: float, message: float, dtype: torch.dtype) -> float:
        whole, rest = divmod(workers, self.settings.group)
        return 2 * message * (whole * self.settings.group * (self.settings.group - 1) + rest * max(0, rest - 1))

    @classmethod
    def heard(cls, settings: Settings, others: int) -> int:
        return min(settings.group - 1, others)

    def exchange(self, group: Group) -> None:
        groups = draw_groups(group.workers, self.settings.group, group.generator())
        peers = {worker: drawn for drawn in groups for worker in drawn}

        def given(member: Member) -> tuple[torch.Tensor, torch.Tensor]:
            return member.parameters.sub_(member.start), member.start

        arrived = group.deliver_tensors(given, 2, peers.__getitem__, "groups")
        momentum = self.outer.momentum if self.settings.momentum is None else self.settings.momentum
        consensus = self.outer.learning_rate if self.settings.consensus is None else self.settings.consensus
        for member in group.members():
            present = [worker for worker in peers[member.index] if worker in arrived]
            velocity = member.state["velocity"].mul_(momentum)
            for worker in present:
                moved, began = map(member.here, arrived[worker])
                velocity.add_(moved, alpha=self.outer.learning_rate / len(present))
                if worker != member.index:
                    velocity.add_(began - member.start, alpha=consensus / len(present))
            member.start.add_(velocity)


def draw_groups(workers: int, size: int, generator: torch.Generator) -> list[list[int]]:
    """All workers, in groups of that size; the last one is smaller where it does not divide them."""
    order = torch.randperm(workers, generator=generator).tolist()
    return [sorted(order[first : first + size]) for first in range(0, workers, size)]
