"""Delayed Nesterov: workers reach a server one by one, and momentum waits for several (arXiv 2401.09135)."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import torch

from algorithms.nodes.balance import PRECISION, forget, time_of
from algorithms.synchronisation.group import Group, LocalWorker, WorkerMessages
from algorithms.synchronisation.method import Capabilities, Method, evenly_spread, require


@dataclass(frozen=True)
class DelayedNesterov(Method):
    """Algorithm 3 with c = 0. Worker m started at x_m, moved by g = x_m - theta_m, and arrives: x = x - lr g / K.
    At every K-th arrival, over the whole run, with b the mean g of the last K: v = mu v + b;  x = x - lr mu v.
    Then x_m = x.

    Workers arrive once a round, in the order in which the speeds of their nodes let them finish, ties in worker order,
    and start again at once: the earlier a worker arrives, the older is its x_m. No worker begins a round before all
    have arrived. With dynamic_steps (DyLU) there is little to wait for, as worker m makes
    floor(H speed_m / max speed) inner steps.

    With `steps`, workers arrive after that many of their own steps instead (a leg), counted over rounds, and none waits
    for others: a round is a span of time, in which slower workers make fewer inner steps
    (`algorithms.nodes.balance`), and fast workers arrive several times, as in the paper. The server receives a
    worker's g at once; until the worker has the answer, by the link's time there and back, it makes no step. Before
    a merge, and before workers leave, those that have begun a leg send what they have: x takes it, and it counts as no
    arrival. Then every worker starts from the shared parameters.

    Before a merge, and before workers leave, b is dropped: x has all that has arrived, v lacks up to K - 1 arrivals.

    Attributes:
        buffer: K; None: the number of workers.
        dynamic_steps: fewer inner steps for slower workers.
        steps: a worker's own steps between two arrivals; None: those of a round.
    """

    buffer: int | None = None
    dynamic_steps: bool = False
    steps: int | None = None

    state = ("velocity", "buffer")

    def __post_init__(self):
        require(self, "a positive integer", lambda value: value >= 1, "buffer", "steps")
        if self.steps is not None and self.dynamic_steps:
            raise ValueError(f"steps: must be null with dynamic_steps, got {self.steps}")

    @property
    def keeps(self) -> Literal["anchor", "replica"]:
        return "anchor" if self.steps is None else "replica"

    @property
    def worker_state(self) -> tuple[str, ...]:
        return () if self.steps is None else ("start",)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            encodings=("float32", "bfloat16"),
            one_exchange=False,
            weighted=False,
            fewer_steps=self.dynamic_steps or self.steps is not None,
            needs_speeds="let slower workers make fewer inner steps" if self.dynamic_steps else "",
            message_tensors=1,
            shards=True,
            active_steps=evenly_spread if self.steps is None else self._active_steps,
        )

    def incoming(self, group: Group) -> WorkerMessages:
        return group.messages(tensors=1, through="server")

    def message(self, worker: LocalWorker, group: Group) -> tuple[torch.Tensor]:
        return (worker.pseudo_gradient(worker.start),)

    def apply(self, group: Group, arrived: Mapping[int, Sequence[torch.Tensor]]) -> None:
        order = sorted(arrived, key=lambda worker: (group.clock.seconds[worker], worker))
        self._serve(group, arrived, order)

    def stops(self, group: Group) -> Sequence[int]:
        if self.steps is None:
            return super().stops(group)
        for worker in group.local_workers:
            if f"begun_{worker.index}" not in group.values:
                worker.state["start"].copy_(group.shared["parameters"])
        return sorted({group.clock.inner_steps, *(math.ceil(time) for time, _ in self._round(group).arrivals)})

    def _active_steps(
        self, own_steps: Mapping[int, int], inner_steps: int, values: Mapping[str, float], server_steps: Fraction
    ) -> Mapping[int, Sequence[int]]:
        made = leg_round(own_steps, inner_steps, self.steps, values, server_steps).made
        return {worker: [math.ceil(time) - 1 for time in times] for worker, times in made.items()}

    def _round(self, group: Group) -> "LegRound":
        clock = group.clock
        server_steps = clock.server_steps(group.model.parameter_count)
        own_steps = dict(enumerate(clock.own_steps))
        return leg_round(own_steps, clock.inner_steps, self.steps, group.values, server_steps)

    def exchange(self, group: Group) -> None:
        step = group.clock.step
        legs = self._round(group)
        order = [worker for time, worker in legs.arrivals if math.ceil(time) == step]
        if order:
            arrived = self._arrived(group, order)
            self._serve(group, arrived, [worker for worker in order if worker in arrived])
        if step == group.clock.inner_steps:
            forget(group.values)
            group.values.update(legs.values)

    def _serve(self, group: Group, arrived: Mapping[int, Sequence[torch.Tensor]], order: Sequence[int]) -> None:
        """Make the server's steps for these arrivals, in order; the workers continue from the result."""
        local = {worker.index: worker for worker in group.local_workers}
        parameters = group.shared["parameters"]
        velocity = group.shared["velocity"]
        buffer = group.shared["buffer"]
        lr = group.outer.learning_rate
        momentum = group.outer.momentum
        size = self.buffer or len(group.weights)
        waiting = group.values.get("waiting", 0)
        for index in order:
            parameters.add_(arrived[index][0], alpha=-lr / size)
            buffer.add_(arrived[index][0])
            waiting += 1
            if waiting >= size:
                velocity.mul_(momentum).add_(buffer, alpha=1 / waiting)  # more than K if K has fallen
                parameters.add_(velocity, alpha=-lr * momentum)
                buffer.zero_()
                waiting = 0
            if index in local:
                local[index].start.copy_(parameters)
                if self.worker_state:
                    local[index].state["start"].copy_(parameters)
        group.values["waiting"] = waiting

    def settle(self, group: Group) -> None:
        present = [worker for worker, weight in enumerate(group.weights) if weight]
        begun = [worker for worker in present if group.values.get(f"begun_{worker}")]
        arrived = self._arrived(group, begun) if begun else {}
        size = self.buffer or len(group.weights)
        for (moved,) in arrived.values():
            group.shared["parameters"].add_(moved, alpha=-group.outer.learning_rate / size)
        group.shared["buffer"].zero_()  # of trainers that merge, each may have another number of arrivals in it
        group.values["waiting"] = 0

    def _arrived(self, group: Group, senders: Sequence[int]) -> Mapping[int, Sequence[torch.Tensor]]:
        incoming = group.messages(tensors=1, through="server", senders=senders)
        for worker in group.local_workers:
            if worker.index in senders:
                incoming.add(worker, (worker.state["start"] - worker.parameters,))
        return incoming.result()

    def restarted(self, values: dict[str, float], workers: Collection[int] | None) -> None:
        forget(values, workers)


class LegRound(NamedTuple):
    """A round of workers that arrive after every leg.

    Attributes:
        made: the times of each worker's steps, in inner steps of the round, by number.
        arrivals: (time, worker), in order, ties in worker order.
        values: after the round, by name. begun_m: steps of its current leg that worker m has made. late_m: inner steps
            from then until its answer is there; negative: the fraction of its next step that is done.
    """

    made: Mapping[int, Sequence[Fraction]]
    arrivals: list[tuple[Fraction, int]]
    values: dict[str, float]


def leg_round(
    own_steps: Mapping[int, int],
    inner_steps: int,
    leg: int,
    values: Mapping[str, float],
    server_steps: Fraction = Fraction(0),
) -> LegRound:
    """Simulate the round of workers that arrive after every `leg` steps of their own, and wait for each answer.

    A worker makes at least one step: if none is done in time, at the end of the round, for which it may have to hurry.

    Args:
        own_steps: steps for which each worker has time in a round without waiting, at least 1, by number.
        values: after the previous round; a worker without any begins a leg.
        server_steps: inner steps of the round until the server has answered.
    """
    made = {}
    arrivals = []
    after: dict[str, float] = {}
    for worker, own in own_steps.items():
        begun = int(values.get(f"begun_{worker}", 0))
        late = Fraction(values.get(f"late_{worker}", 0.0)).limit_denominator(PRECISION)
        length = time_of(1, own, inner_steps)
        time = late if late > 0 else late * length
        steps: list[Fraction] = []
        while time + length <= inner_steps or not steps:
            time = min(time + length, Fraction(inner_steps))
            steps.append(time)
            begun += 1
            if begun == leg:
                arrivals.append((time, worker))
                begun = 0
                time += server_steps
        late = time - inner_steps
        if late < 0:  # a step that is done in full would be one of the round that has ended
            late = max(late / length, Fraction(1 - PRECISION, PRECISION))
        made[worker] = steps
        after[f"begun_{worker}"] = begun
        if late:
            after[f"late_{worker}"] = float(late)
    return LegRound(made, sorted(arrivals), after)
