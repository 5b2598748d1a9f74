"""SPARTA: workers average a random part of their parameters every few inner steps (openreview stFPf3gzq1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from algorithms.synchronisation.method import OUTER_KEYS, Group, Method
from algorithms.synchronisation.outer_step import nesterov_step
from algorithms.synchronisation.random_part import random_part


class SPARTA(Method):
    """x_m[S] = mean_j x_j[S] after every `every`-th inner step of the run, with S a random share of all places.

    All draw the same S, so that only values travel, as they are. Workers go on from where they are; with_diloco, each
    round ends with DiLoCo's step as well, from which all go on together. AdamW's moments stay where they are.
    """

    temporaries = staticmethod(lambda settings, workers: max(0.0, 10 * settings.share - 1) + settings.with_diloco)
    own_copy = "replica"
    plannable = False
    encodings = ("float32",)
    shards = True

    @dataclass(frozen=True)
    class Settings:
        """share: of the parameters. every: so many inner steps, over rounds."""

        share: float = 0.005
        every: int = 1
        with_diloco: bool = False

        def __post_init__(self):
            if not 0 < self.share <= 1:
                raise ValueError(f"share: must be larger than 0 and at most 1, got {self.share}")
            if self.every < 1:
                raise ValueError(f"every: must be a positive number of inner steps, got {self.every}")

    @classmethod
    def outer_keys(cls, settings) -> tuple[str, ...]:
        counts = ("outer_momentum_at_merge",) if settings.every > 1 else ()  # where in `every` begins anew as well
        return OUTER_KEYS if settings.with_diloco else counts

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        self.shares_copy = settings.with_diloco
        self.trainer_state = ("velocity",) if settings.with_diloco else ()

    def stops(self, inner_steps: int, values: Mapping[str, float]) -> Sequence[int]:
        every = self.settings.every
        return sorted({*range(every - values.get("since", 0), inner_steps + 1, every), inner_steps})

    def exchange(self, group: Group) -> None:
        since = (group.values.get("since", 0) + group.step) % self.settings.every
        if since == 0:
            self._average_part(group)
        if group.step == group.inner_steps:
            group.values["since"] = since
            if self.settings.with_diloco:
                self._outer_step(group)

    def _average_part(self, group: Group) -> None:
        count = max(1, round(self.settings.share * group.size))
        places = group.here(random_part(group.size, count, group.generator()))
        mean = group.mean(
            lambda member: member.parameters[member.here(places)],
            group.shared["parameters"].new_empty(len(places)),
            "parameters",
            numbers=count,
        )
        if mean is not None:
            for member in group.members():
                member.parameters[member.here(places)] = member.here(mean)

    def _outer_step(self, group: Group) -> None:
        parameters, delta = group.shared["parameters"], group.mean_difference()
        if delta is not None:
            nesterov_step(parameters, delta, group.shared["velocity"], self.outer.learning_rate, self.outer.momentum)
            for member in group.members():
                member.parameters.copy_(member.here(parameters))
