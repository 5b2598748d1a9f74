"""Decoupled DiLoCo: fragments go to a server from those workers that are ready (arXiv 2604.21428)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from algorithms.nodes.async_clock import forget, in_steps
from algorithms.synchronisation.fragment_server import Answered, Taken, Waiting, fragment_round
from algorithms.synchronisation.fragments import fragment_parts, fragment_step
from algorithms.synchronisation.method import Group, Method, put, take


class Decoupled(Method):
    """Worker m is ready with fragment p after `steps` of its own since it last gave it, at first after (p + 1) / P of
    them. When `quorum` workers are ready, and `grace_window` seconds later, the server takes p from all that are:
    D_p = sum_m w_m (x_p - theta_m,p) / sum_m w_m,  w_m = tokens_m^2 / steps_m;  v_p = mu v_p + D_p;
    x_p = x_p - lr (D_p + mu v_p). Tokens and steps are those since m last gave p; tokens are counted in examples.

    Nobody waits. When x_p has come back, by the link's time for the fragment there and back, those that gave it have
    theta_m,p = mixing theta_m,p + (1 - mixing) x_p, or x_p where they have made no step meanwhile. A round is a span of
    time in which slower workers make fewer inner steps, spread evenly (`algorithms.nodes.async_clock`).

    Decided here, as the paper was not to be had whole: what is given is what the worker has when it is taken; that it
    is ready travels in no time; the grace window is a constant, where the paper's adapts, and ends when all are ready;
    the server has one round of p under way at a time; who has not given gets no x_p; with fewer workers than the quorum
    all are one; and unless given it is more than half of the workers, as with one every arrival makes an outer step of
    full size, which diverged where speeds differ (docs/results/pool.md). After a merge nothing is under way.
    """

    @dataclass(frozen=True)
    class Settings:
        """quorum: null: more than half. steps: null: those of a round. grace_window: in seconds of node_speeds."""

        fragments: int = 2
        quorum: int | None = None
        grace_window: float = 0.0
        steps: int | None = None
        mixing: float = 0.5

        def __post_init__(self):
            for name in ("fragments", "quorum", "steps"):
                if (value := getattr(self, name)) is not None and value < 1:
                    raise ValueError(f"{name}: must be a positive integer, got {value}")
            if not 0 <= self.grace_window < math.inf:
                raise ValueError(f"grace_window: must be a number of seconds, not negative, got {self.grace_window}")
            if not 0 <= self.mixing < 1:
                raise ValueError(f"mixing: must be at least 0 and less than 1, got {self.mixing}")

    temporaries = staticmethod(lambda settings, workers: 1.0)
    trainer_state = ("velocity",)
    own_copy = "replica"
    plannable = False
    shards = True

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        self._parts = fragment_parts(blocks, settings.fragments, "strided")

    @classmethod
    def problems(cls, settings, inner_steps: int, workers: int | None) -> list[str]:
        steps, name = (settings.steps, "steps") if settings.steps else (inner_steps, "the inner steps of a round")
        if settings.fragments > steps:
            return [f"synchronisation.fragments: must be at most {name}, {steps}, got {settings.fragments}"]
        return []

    @classmethod
    def fewer_steps(cls, settings) -> bool:
        return True

    @classmethod
    def needs_speeds(cls, settings) -> str:
        return "count the seconds of grace_window" if settings.grace_window else ""

    def _round(self, group: Group) -> tuple[list[tuple[int, Taken | Answered]], dict[str, float]]:
        """What happens in the whole round, with the fragment that it happens to, and the values after it."""
        settings, unit, happens, values = self.settings, group.step_seconds, [], {}
        quorum = settings.quorum or group.workers // 2 + 1
        period, grace = settings.steps or group.inner_steps, in_steps(settings.grace_window, unit)
        for number, part in enumerate(self._parts):
            first, travel = -(-(number + 1) * period // len(self._parts)), in_steps(group.server_seconds(part), unit)
            waiting = Waiting(first, period, quorum, grace, travel)
            round_of = (waiting, group.own_steps, group.batches, group.inner_steps)
            found, left = fragment_round(number, group.values, *round_of)
            happens += [(number, each) for each in found]
            values |= left
        return happens, values

    def begin(self, group: Group) -> Sequence[int]:
        happens, _ = self._round(group)
        return sorted({group.inner_steps, *(each.stop for _, each in happens)})

    def exchange(self, group: Group) -> None:
        happens, values = self._round(group)
        for number, each in happens:
            if each.stop == group.step:
                act = self._take if isinstance(each, Taken) else self._answer
                act(group, self._parts[number], each)
        if group.step == group.inner_steps:
            forget(group.values)
            group.values.update(values)

    def _take(self, group: Group, part, taken: Taken) -> None:
        if (delta := group.mean_difference(part, taken.back - taken.stop, taken.weights)) is not None:
            fragment_step(group, part, delta, self.outer)

    def _answer(self, group: Group, part, answered: Answered) -> None:
        shared = take(group.shared["parameters"], part)
        for member in group.members():
            if (gone_on := answered.workers.get(member.index)) is not None:
                new = member.here(shared)
                own = torch.lerp(new, take(member.parameters, part), self.settings.mixing) if gone_on else new
                put(member.parameters, part, own)

    def merged(self, values: dict[str, float]) -> None:
        forget(values)

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        forget(values, workers)
