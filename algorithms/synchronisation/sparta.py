"""SPARTA: workers average a random part of their parameters every few inner steps (openreview stFPf3gzq1)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import OUTER_KEYS, Capabilities, Method
from algorithms.synchronisation.outer_step import nesterov_step
from algorithms.synchronisation.random_part import random_part


class SPARTA(Method):
    """x_m[S] = mean_j x_j[S] after every `every`-th inner step of the run, with S a random share of all places.

    All draw the same S, so that only values travel, as they are. Workers go on from where they are; with_diloco, each
    round ends with DiLoCo's step as well, from which all go on together. AdamW's moments stay where they are.
    """

    capabilities = Capabilities(encodings=("float32",), one_exchange=False, shards=True)
    keeps = "replica"

    @dataclass(frozen=True)
    class Settings:
        """share: of the parameters. every: inner steps between averages, counted over rounds."""

        share: float = 0.005
        every: int = 1
        with_diloco: bool = False

        def __post_init__(self):
            if not 0 < self.share <= 1:
                raise ValueError(f"share: must be larger than 0 and at most 1, got {self.share}")
            if self.every < 1:
                raise ValueError(f"every: must be a positive number of inner steps, got {self.every}")

    @classmethod
    def configured(cls, settings: Settings) -> Capabilities:
        return dataclasses.replace(
            cls.capabilities,
            averages_copies=not settings.with_diloco,
            outer_keys=OUTER_KEYS if settings.with_diloco else (),
            temporaries=max(0.0, 10 * settings.share - 1) + settings.with_diloco,
        )

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        self.state = ("velocity",) if settings.with_diloco else ()

    def stops(self, group: Group) -> Sequence[int]:
        every = self.settings.every
        first = every - group.values.get("since", 0)
        return sorted({*range(first, group.inner_steps + 1, every), group.inner_steps})

    def exchange(self, group: Group) -> None:
        since = (group.values.get("since", 0) + group.step) % self.settings.every
        if since == 0:
            self._average_part(group)
        if group.step == group.inner_steps:
            group.values["since"] = since
            if self.settings.with_diloco:
                self._outer_step(group)

    def _average_part(self, group: Group) -> None:
        size = group.model.whole_size
        count = max(1, round(self.settings.share * size))
        places = group.model.local_places(random_part(size, count, group.generator()))
        incoming = group.mean(group.shared["parameters"].new_empty(len(places)), "parameters", elements=count)
        for worker in group.local:
            incoming.add(worker, worker.parameters[worker.here(places)])
        mean = incoming.result()
        if mean is not None:
            for worker in group.local:
                worker.parameters[worker.here(places)] = worker.here(mean)

    def _outer_step(self, group: Group) -> None:
        parameters = group.shared["parameters"]
        delta = group.mean_difference()
        if delta is not None:
            nesterov_step(parameters, delta, group.shared["velocity"], self.outer.learning_rate, self.outer.momentum)
            for worker in group.local:
                worker.parameters.copy_(worker.here(parameters))
