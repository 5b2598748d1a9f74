"""Decoupled DiLoCo: fragments go to a server from those workers that are ready (arXiv 2604.21428)."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from algorithms.nodes.async_clock import collections, forget, in_steps, made_at
from algorithms.synchronisation.fragments import fragment_parts, fragment_step
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Capabilities, Method, Part, put, take


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

    capabilities = Capabilities(one_exchange=False, fewer_steps=True, temporaries=1.0, shards=True)
    state = ("velocity",)
    keeps = "replica"

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
    def configured(cls, settings: Settings) -> Capabilities:
        purpose = "count the seconds of grace_window" if settings.grace_window else ""
        return dataclasses.replace(cls.capabilities, needs_speeds=purpose)

    def _round(self, group: Group) -> tuple[list[tuple[int, "Taken | Answered"]], dict[str, float]]:
        """What happens in the whole round, with the fragment that it happens to, and the values after it."""
        happens = []
        values = {}
        quorum = self.settings.quorum or len(group.weights) // 2 + 1
        period = self.settings.steps or group.inner_steps
        grace = in_steps(self.settings.grace_window, group.clock.step_seconds)
        for number, part in enumerate(self._parts):
            first = -(-(number + 1) * period // len(self._parts))
            waiting = Waiting(first, period, quorum, grace, group.travel(part))
            clock = group.clock
            found, left = fragment_round(
                number, group.values, waiting, clock.own_steps, clock.batches, group.inner_steps
            )
            happens += [(number, each) for each in found]
            values |= left
        return happens, values

    def stops(self, group: Group) -> Sequence[int]:
        happens, _ = self._round(group)
        return sorted({group.inner_steps, *(each.stop for _, each in happens)})

    def exchange(self, group: Group) -> None:
        happens, values = self._round(group)
        for number, each in happens:
            if each.stop == group.step and isinstance(each, Taken):
                self._take(group, self._parts[number], each)
            elif each.stop == group.step:
                self._answer(group, self._parts[number], each)
        if group.step == group.inner_steps:
            forget(group.values)
            group.values.update(values)

    def _take(self, group: Group, part: Part | None, taken: "Taken") -> None:
        delta = group.mean_difference(part, taken.back - taken.stop, taken.weights)
        if delta is not None:
            fragment_step(group, part, delta, self.outer)

    def _answer(self, group: Group, part: Part | None, answered: "Answered") -> None:
        shared = take(group.shared["parameters"], part)
        for worker in group.local:
            gone_on = answered.workers.get(worker.index)
            if gone_on is not None:
                new = worker.here(shared)
                if gone_on:
                    new = torch.lerp(new, take(worker.parameters, part), self.settings.mixing)
                put(worker.parameters, part, new)

    def merged(self, values: dict[str, float]) -> None:
        forget(values)

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        forget(values, workers)


# A worker's values of a fragment, before the numbers of both: its own inner steps of the round until it is ready; steps
# and examples since it gave; and the inner step of the round after which its answer is there, if it has none yet.
_READY, _STEPS, _EXAMPLES, _BACK = "ready", "steps", "examples", "back"


@dataclass(frozen=True)
class Taken:
    """stop: when. weights: of those that give, tokens^2 / steps. back: when they have the answer."""

    stop: int
    weights: dict[int, float]
    back: int


@dataclass(frozen=True)
class Answered:
    """stop: when. workers: whether each has gone on since it gave."""

    stop: int
    workers: dict[int, bool]


@dataclass(frozen=True)
class Waiting:
    """When a server takes a fragment. first: after how many of its own inner steps a new worker is ready; `period`: any
    later time. The others: see `algorithms.nodes.async_clock.collections`."""

    first: int
    period: int
    quorum: int
    grace: Fraction
    travel: Fraction


def fragment_round(
    fragment: int,
    values: Mapping[str, float],
    waiting: Waiting,
    own_steps: Sequence[int],
    batches: Sequence[int],
    inner_steps: int,
) -> tuple[list[Taken | Answered], dict[str, float]]:
    """What happens to a fragment in a round, in order, and its values after it.

    Args:
        values: of all fragments, after the round before.
        own_steps: of every worker in the round. batches: examples of each in one.
    """
    workers, happens = range(len(own_steps)), []

    def known(name: str, default: int) -> list[int]:
        return [int(values.get(f"{name}_{fragment}_{worker}", default)) for worker in workers]

    ready, steps, examples, backs = (
        known(name, default) for name, default in ((_READY, waiting.first), (_STEPS, 0), (_EXAMPLES, 0), (_BACK, 0))
    )
    collected = collections(
        own_steps, inner_steps, waiting.period, ready, waiting.quorum, waiting.grace, waiting.travel, max(backs)
    )

    def made(worker: int, stop: int) -> int:
        return made_at(stop, own_steps[worker], inner_steps)

    def answered(stop: int) -> None:
        """Whoever awaits the fragment has it, if that is in the round."""
        due = [worker for worker in workers if backs[worker] == stop > 0]
        if due and stop <= inner_steps:
            happens.append(Answered(stop, {worker: steps[worker] + made(worker, stop) > 0 for worker in due}))
            for worker in due:
                backs[worker] = 0

    answered(max(backs))
    for each in collected:
        weights = {}
        for worker in each.workers:
            here = made(worker, each.stop)
            since, seen = steps[worker] + here, examples[worker] + here * batches[worker]
            weights[worker] = seen**2 / since
            steps[worker], examples[worker] = -here, -here * batches[worker]
            ready[worker], backs[worker] = here + waiting.period, each.back
        happens.append(Taken(each.stop, weights, each.back))
        answered(each.back)
    left = {}
    for worker, own in enumerate(own_steps):
        left[f"{_READY}_{fragment}_{worker}"] = ready[worker] - own
        left[f"{_STEPS}_{fragment}_{worker}"] = steps[worker] + own
        left[f"{_EXAMPLES}_{fragment}_{worker}"] = examples[worker] + own * batches[worker]
        if backs[worker]:
            left[f"{_BACK}_{fragment}_{worker}"] = backs[worker] - inner_steps
    return happens, left
