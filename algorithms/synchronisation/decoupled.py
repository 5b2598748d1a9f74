"""Decoupled DiLoCo, from a summary: fragments go to a server from those workers that are ready (arXiv 2604.21428)."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from algorithms.flat import Block, Part, fragment_problems, layer_fragments, read_part, write_part
from algorithms.nodes.async_clock import forget, in_steps, made_at, time_of
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Capabilities, Method
from algorithms.synchronisation.outer_step import fragment_step


@dataclass(frozen=True)
class Decoupled(Method):
    """Worker m is ready with fragment p after `steps` of its own since it last sent p, at first after (p + 1) / P of
    them. When `quorum` workers are ready, and `grace_window` seconds later, the server takes p from all that are:

        D_p = sum_m w_m (x_p - theta_m,p) / sum_m w_m,  w_m = tokens_m^2 / steps_m
        v_p = mu v_p + D_p;  x_p = x_p - lr (D_p + mu v_p)

    Tokens and steps are those since m last sent p; tokens are counted in examples.

    None waits. When x_p has come back, by the link's time for the fragment there and back, the workers that sent it
    have theta_m,p = mixing theta_m,p + (1 - mixing) x_p, or x_p if they have made no step meanwhile. A round is a span
    of time in which slower workers make fewer inner steps, spread evenly (`algorithms.nodes.async_clock`).

    The full paper was not available, so these are decided here. A worker sends its fragment as it is when the server
    takes it. The news that it is ready takes no time. The grace window is constant, where the paper's adapts, and ends
    when all are ready. The server has one exchange of p under way at a time. A worker that has not sent p gets no x_p.
    With fewer workers than the quorum, all are needed. The default quorum is more than half of the workers: with a
    quorum of one every arrival makes an outer step of full size, which diverged with unequal speeds
    (docs/results/pool.md). Before a merge, and before workers leave, each sends every fragment once more, as far as it
    has made steps since it last sent it; afterwards nothing is under way.

    Attributes:
        fragments: P.
        quorum: workers that must be ready; None: more than half.
        grace_window: in seconds of node_speeds.
        steps: a worker's own steps between sending p; None: those of a round.
        mixing: the weight of a worker's own parameters.
    """

    fragments: int = 2
    quorum: int | None = None
    grace_window: float = 0.0
    steps: int | None = None
    mixing: float = 0.5

    keeps = "replica"
    state = ("velocity",)

    def __post_init__(self):
        for name in ("fragments", "quorum", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be a positive integer, got {value}")
        if not 0 <= self.grace_window < math.inf:
            raise ValueError(f"grace_window: must be a number of seconds, not negative, got {self.grace_window}")
        if not 0 <= self.mixing < 1:
            raise ValueError(f"mixing: must be at least 0 and less than 1, got {self.mixing}")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            one_exchange=False,
            fewer_steps=True,
            needs_speeds="count the seconds of grace_window" if self.grace_window else "",
            temporaries=1.0,
            shards=True,
            problems=self._problems,
        )

    def _problems(self, inner_steps: int | None, workers: int | None, blocks: Sequence[Block] | None) -> list[str]:
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
        found = []
        values = {}
        for number, part in enumerate(self._parts(group)):
            server = Server(
                first=-(-(number + 1) * period // self.fragments),
                period=period,
                quorum=self.quorum or len(group.weights) // 2 + 1,
                grace=in_steps(self.grace_window, clock.step_seconds),
                server_steps=clock.server_steps(_elements(group, part)),
            )
            events, after = fragment_round(
                number, group.values, server, clock.own_steps, clock.batches, clock.inner_steps
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
        delta = group.pseudo_gradient(part, sent.back - sent.stop, sent.weights)
        if delta is not None:
            fragment_step(group.shared, part, delta, group.outer.learning_rate, group.outer.momentum)

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


def _elements(group: Group, part: Part | None) -> int:
    """Elements of a part over all devices that share the model; they ask together."""
    if part is None:
        return group.model.parameter_count
    own = torch.tensor(float(sum(piece.stop - piece.start for piece in part)), dtype=torch.float64)
    return int(group.model.shard_group.sum(own).item())


@dataclass(frozen=True)
class Sent:
    """Workers send a fragment, and the server makes its step.

    Attributes:
        stop: the inner step of the round after which that is.
        weights: of the workers that send it, by number: tokens^2 / steps.
        back: the inner step of the round after which they have the answer; it may be in a later round.
    """

    stop: int
    weights: dict[int, float]
    back: int


@dataclass(frozen=True)
class Answered:
    """Workers receive a fragment back.

    Attributes:
        stop: the inner step of the round after which that is.
        workers: by number, True if the worker has made a step since it sent the fragment.
    """

    stop: int
    workers: dict[int, bool]


@dataclass(frozen=True)
class Server:
    """When a server takes a fragment.

    Attributes:
        first: the number of its own inner steps after which a new worker is ready.
        period: its own inner steps from sending until it is ready again.
        quorum: workers that must be ready.
        grace: inner steps of the round for which the server waits then, unless all are ready.
        server_steps: inner steps of the round until the answer is back.
    """

    first: int
    period: int
    quorum: int
    grace: Fraction = Fraction(0)
    server_steps: Fraction = Fraction(0)


@dataclass
class _Progress:
    """One worker and one fragment.

    Attributes:
        own_steps: the worker's own inner steps in the round.
        batch: examples of one of them.
        ready: own steps of the round after which it is ready; 0 or less: since an earlier round.
        steps: own steps before the round since it last sent; negative: steps of the round until it sent.
        examples: likewise.
        back: the inner step of the round after which its answer is there; 0: none is under way.
    """

    own_steps: int
    batch: int
    ready: int
    steps: int
    examples: int
    back: int

    @classmethod
    def of(cls, values: Mapping[str, float], suffix: str, first: int, own_steps: int, batch: int) -> "_Progress":
        """Return the progress after the previous round; a new worker is ready after its `first` steps."""
        known = {name: int(values.get(f"{name}_{suffix}", 0)) for name in ("steps", "examples", "back")}
        return cls(own_steps, batch, int(values.get(f"ready_{suffix}", first)), **known)

    def values(self, suffix: str, inner_steps: int) -> dict[str, float]:
        """Return the values after the round, by name."""
        found = {
            f"ready_{suffix}": self.ready - self.own_steps,
            f"steps_{suffix}": self.steps + self.own_steps,
            f"examples_{suffix}": self.examples + self.own_steps * self.batch,
        }
        if self.back:
            found[f"back_{suffix}"] = self.back - inner_steps
        return found


def fragment_round(
    fragment: int,
    values: Mapping[str, float],
    server: Server,
    own_steps: Sequence[int],
    batches: Sequence[int],
    inner_steps: int,
) -> tuple[list[Sent | Answered], dict[str, float]]:
    """Simulate the round of one fragment.

    Args:
        values: of all fragments, after the previous round.
        own_steps: of every worker in the round.
        batches: examples of one of them.

    Returns:
        The events in order, and the fragment's values after the round.
    """
    suffixes = [f"{fragment}_{worker}" for worker in range(len(own_steps))]
    workers = [
        _Progress.of(values, suffix, server.first, own, batch)
        for suffix, own, batch in zip(suffixes, own_steps, batches, strict=True)
    ]
    events = list(_events(workers, server, inner_steps))
    after = {}
    for suffix, worker in zip(suffixes, workers, strict=True):
        after |= worker.values(suffix, inner_steps)
    return events, after


def _events(workers: list[_Progress], server: Server, inner_steps: int) -> Iterator[Sent | Answered]:
    """Advance the workers through a round of one fragment."""
    back = max(worker.back for worker in workers)
    stop = 0
    while True:
        if 0 < back <= inner_steps and any(worker.back == back for worker in workers):
            yield _answered(workers, back, inner_steps)
        times = [time_of(worker.ready, worker.own_steps, inner_steps) for worker in workers]
        in_order = sorted(times)
        closes = in_order[min(server.quorum, len(times)) - 1] + server.grace
        closes = max(min(closes, in_order[-1]), back)
        stop = max(math.ceil(closes), stop + 1)
        if stop > inner_steps:
            return
        back = math.ceil(stop + server.server_steps)
        weights = {}
        for number, worker in enumerate(workers):
            if times[number] > closes:
                continue
            made = made_at(stop, worker.own_steps, inner_steps)
            weights[number] = (worker.examples + made * worker.batch) ** 2 / (worker.steps + made)
            worker.steps = -made
            worker.examples = -made * worker.batch
            worker.ready = made + server.period
            worker.back = back
        yield Sent(stop, weights, back)


def _answered(workers: list[_Progress], back: int, inner_steps: int) -> Answered:
    found = {}
    for number, worker in enumerate(workers):
        if worker.back == back:
            found[number] = worker.steps + made_at(back, worker.own_steps, inner_steps) > 0
            worker.back = 0
    return Answered(back, found)
