"""SPARTA: workers average a random part of their parameters in every inner step (openreview stFPf3gzq1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.flat import random_elements
from algorithms.synchronisation.diloco import diloco_step
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import OUTER_KEYS, Capabilities, Method, require


@dataclass(frozen=True)
class SPARTA(Method):
    """x_m[S] = mean_j x_j[S] after every inner step, where S is a random share of all positions.

    All workers draw the same S, so that only values are sent, exactly. Workers continue from where they are; with
    `with_diloco`, each round also ends with DiLoCo's step, from whose result all continue. AdamW's moments stay local.

    Attributes:
        share: of the parameters that are averaged.
        with_diloco: DiLoCo's step at the end of a round.
    """

    share: float = 0.005
    with_diloco: bool = False

    keeps = "replica"

    def __post_init__(self):
        require(self, "larger than 0 and at most 1", lambda value: 0 < value <= 1, "share")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            encodings=("float32",),
            one_exchange=False,
            averages_copies=not self.with_diloco,
            outer_keys=OUTER_KEYS if self.with_diloco else (),
            temporaries=max(0.0, 10 * self.share - 1) + self.with_diloco,
        )

    @property
    def state(self) -> tuple[str, ...]:
        return ("velocity",) if self.with_diloco else ()

    def stops(self, group: Group) -> Sequence[int]:
        return range(1, group.clock.inner_steps + 1)

    def exchange(self, group: Group) -> None:
        size = group.model.parameter_count
        count = max(1, round(self.share * size))
        positions = random_elements(group.model.blocks, size, count, group.clock.generator())
        incoming = group.mean(group.shared["parameters"].new_empty(count), "parameters")
        for worker in group.local_workers:
            incoming.add(worker, worker.parameters[worker.to_device(positions)])
        mean = incoming.result()
        if mean is not None:
            for worker in group.local_workers:
                worker.parameters[worker.to_device(positions)] = worker.to_device(mean)
        if self.with_diloco and group.clock.step == group.clock.inner_steps:
            diloco_step(group, group.mean_pseudo_gradient())
            for worker in group.local_workers:
                worker.parameters.copy_(worker.to_device(group.shared["parameters"]))
