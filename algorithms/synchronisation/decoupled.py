"""Decoupled DiLoCo, from a summary: fragments go to a server from those workers that are ready (arXiv 2604.21428)."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from algorithms.flat import Block, Part, fragment_problems, layer_fragments, read_part, write_part
from algorithms.nodes.balance import forget, time_of
from algorithms.synchronisation.diloco import diloco_step
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Capabilities, Method, require


@dataclass(frozen=True)
class Decoupled(Method):
    """Worker m is ready with fragment p after `steps` of its own since it last sent p, at first after (p + 1) / P of
    them. When `quorum` workers are ready, the server takes p from all that are:

        D_p = sum_m w_m (x_p - theta_m,p) / sum_m w_m,  w_m = tokens_m^2 / steps_m
        v_p = mu v_p + D_p;  x_p = x_p - lr (D_p + mu v_p)

    Tokens and steps are those since m last sent p; tokens are counted in examples.

    None waits. When x_p has come back, by the link's time for the fragment there and back, the workers that sent it
    have theta_m,p = mixing theta_m,p + (1 - mixing) x_p, or x_p if they have made no step meanwhile. A round is a span
    of time in which slower workers make fewer inner steps, spread evenly (`algorithms.nodes.balance`).

    The full paper was not available, so these are decided here. A worker sends its fragment as it is when the server
    takes it. The news that it is ready takes no time. The paper's grace window, in which the server waits for more, is
    left out. The server has one exchange of p under way at a time. A worker that has not sent p gets no x_p. With fewer
    workers than the quorum, all are needed. The default quorum is more than half of the workers. With a quorum of one
    every arrival makes an outer step of full size, which diverged with unequal speeds (docs/results/pool.md). Before a
    merge, and before workers leave, each sends every fragment once more, as far as it has made steps since it last sent
    it; afterwards nothing is under way.

    Attributes:
        fragments: P.
        quorum: workers that must be ready; None: more than half.
        steps: a worker's own steps between sending p; None: those of a round.
        mixing: the weight of a worker's own parameters.
    """

    fragments: int = 2
    quorum: int | None = None
    steps: int | None = None
    mixing: float = 0.5

    keeps = "replica"
    state = ("velocity",)

    def __post_init__(self):
        require(self, "a positive integer", lambda value: value >= 1, "fragments", "quorum", "steps")
        require(self, "at least 0 and less than 1", lambda value: 0 <= value < 1, "mixing")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(one_exchange=False, fewer_steps=True, temporaries=1.0, shards=True, problems=self._problems)

    def _problems(self, inner_steps: int | None, blocks: Sequence[Block] | None) -> list[str]:
        if blocks is not None:
            return fragment_problems(blocks, self.fragments)
        steps = self.steps or inner_steps
        if steps is None or self.fragments <= steps:
            return []
        name = "steps" if self.steps else "the inner steps of a round"
        return [f"synchronisation.fragments: must be at most {name}, {steps}, got {self.fragments}"]

    def _parts(self, group: Group) -> list[Part | None]:
        return layer_fragments(group.model.blocks, self.fragments)

    def _round(self, group: Group) -> "tuple[list[tuple[int, Sent | Answered]], dict[str, float]]":
        """Return the events of the whole round, each with its fragment, and the values after the round."""
        clock = group.clock
        period = self.steps or clock.inner_steps
        before = group.values
        found = []
        values = {}
        if self.steps is None:  # workers are ready at the same share of a round of another length
            values["inner_steps"] = clock.inner_steps
            before = _rescaled(before, clock.inner_steps)
        for number, part in enumerate(self._parts(group)):
            events, after = fragment_round(
                number,
                before,
                clock.own_steps,
                clock.batches,
                clock.inner_steps,
                first=-(-(number + 1) * period // self.fragments),
                period=period,
                quorum=self.quorum or len(group.weights) // 2 + 1,
                server_steps=clock.server_steps(group.elements(part)),
            )
            found += [(number, event) for event in events]
            values |= after
        return found, values

    def stops(self, group: Group) -> Sequence[int]:
        events, _ = self._round(group)
        return sorted({group.clock.inner_steps, *(event.stop for _, event in events)})

    def exchange(self, group: Group) -> None:
        step = group.clock.step
        events, values = self._round(group)
        parts = self._parts(group)
        for number, event in events:
            if event.stop == step and isinstance(event, Sent):
                self._send(group, parts[number], event)
            elif event.stop == step:
                self._answer(group, parts[number], event)
        if step == group.clock.inner_steps:
            forget(group.values)
            group.values.update(values)

    def _send(self, group: Group, part: Part | None, sent: "Sent") -> None:
        diloco_step(group, group.mean_pseudo_gradient(part, sent.back - sent.stop, sent.weights), part)

    def _answer(self, group: Group, part: Part | None, answered: "Answered") -> None:
        shared = read_part(group.shared["parameters"], part)
        for worker in group.local_workers:
            progressed = answered.workers.get(worker.index)
            if progressed is None:
                continue
            new = worker.to_device(shared)
            if progressed:
                new = torch.lerp(new, read_part(worker.parameters, part), self.mixing)
            write_part(worker.parameters, part, new)

    def settle(self, group: Group) -> None:
        for number, part in enumerate(self._parts(group)):
            under_way = {}
            weights = {}
            for worker, weight in enumerate(group.weights):
                steps = group.values.get(f"steps_{number}_{worker}", 0)
                if weight and steps:
                    weights[worker] = group.values[f"examples_{number}_{worker}"] ** 2 / steps
                if f"back_{number}_{worker}" in group.values:
                    under_way[worker] = steps > 0
            self._answer(group, part, Answered(0, under_way))
            if weights:
                self._send(group, part, Sent(0, weights, 0))

    def restarted(self, values: dict[str, float], workers: Collection[int] | None) -> None:
        forget(values, workers)


def _rescaled(values: Mapping[str, float], inner_steps: int) -> dict[str, float]:
    """Return the values with which workers are ready at the same share of a round of this many inner steps."""
    factor = inner_steps / values.get("inner_steps", inner_steps)
    return {
        name: math.floor(value * factor + 0.5) if name.startswith("ready_") else value for name, value in values.items()
    }


class Sent(NamedTuple):
    """After inner step `stop` workers send a fragment, with these weights by number; the answer is there after `back`.

    Inner steps are those of the round; `back` may be in a later one.
    """

    stop: int
    weights: dict[int, float]
    back: int


class Answered(NamedTuple):
    """After inner step `stop` workers receive a fragment back; by number, True if it made a step since it sent it."""

    stop: int
    workers: dict[int, bool]


def fragment_round(
    fragment: int,
    values: Mapping[str, float],
    own_steps: Sequence[int],
    batches: Sequence[int],
    inner_steps: int,
    first: int,
    period: int,
    quorum: int,
    server_steps: Fraction = Fraction(0),
) -> tuple[list[Sent | Answered], dict[str, float]]:
    """Simulate the round of one fragment, and return the events in order and the fragment's values after the round.

    The values of worker m and fragment p are: ready_p_m, its own steps of the round after which it is ready, 0 or less
    if since an earlier round; steps_p_m and examples_p_m, those since it last sent p; back_p_m, the inner step of the
    round after which its answer is there, if one is under way.

    Args:
        values: of all fragments, after the previous round.
        own_steps: of every worker in the round.
        batches: examples of one of them.
        first: the number of its own inner steps after which a new worker is ready.
        period: its own inner steps from sending until it is ready again.
        quorum: workers that must be ready before the server takes the fragment.
        server_steps: inner steps of the round until the answer is back.
    """
    workers = range(len(own_steps))

    def known(name: str, otherwise: int = 0) -> list[int]:
        return [int(values.get(f"{name}_{fragment}_{worker}", otherwise)) for worker in workers]

    def made(worker: int, time: int) -> int:
        """Return the number of its own steps that a worker has made at this time."""
        return time * own_steps[worker] // inner_steps

    ready = known("ready", first)
    steps = known("steps")  # before the round; negative: those of the round before it sent
    examples = known("examples")
    back = known("back")
    events: list[Sent | Answered] = []
    under_way = max(back)
    stop = 0
    while True:
        waiting = [worker for worker in workers if back[worker] == under_way]
        if 0 < under_way <= inner_steps and waiting:
            progressed = {worker: steps[worker] + made(worker, under_way) > 0 for worker in waiting}
            events.append(Answered(under_way, progressed))
            for worker in waiting:
                back[worker] = 0
        times = [time_of(ready[worker], own_steps[worker], inner_steps) for worker in workers]
        closes = max(sorted(times)[min(quorum, len(times)) - 1], under_way)
        stop = max(math.ceil(closes), stop + 1)
        if stop > inner_steps:
            break
        under_way = math.ceil(stop + server_steps)
        weights = {}
        for worker in workers:
            if times[worker] > closes:
                continue
            done = made(worker, stop)
            weights[worker] = (examples[worker] + done * batches[worker]) ** 2 / (steps[worker] + done)
            steps[worker] = -done
            examples[worker] = -done * batches[worker]
            ready[worker] = done + period
            back[worker] = under_way
        events.append(Sent(stop, weights, under_way))
    after = {}
    for worker, own in enumerate(own_steps):
        after[f"ready_{fragment}_{worker}"] = ready[worker] - own
        after[f"steps_{fragment}_{worker}"] = steps[worker] + own
        after[f"examples_{fragment}_{worker}"] = examples[worker] + own * batches[worker]
        if back[worker]:
            after[f"back_{fragment}_{worker}"] = back[worker] - inner_steps
    return events, after
