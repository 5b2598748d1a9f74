"""Delayed Nesterov: workers reach a server one by one, and momentum waits for several (arXiv 2401.09135)."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.nodes.async_clock import LegRound, forget, leg_round
from algorithms.synchronisation.group import Deliveries, Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method


class DelayedNesterov(Method):
    """Algorithm 3 with c = 0. Worker m began with x_m, moved by g = x_m - theta_m, and arrives: x = x - lr g / K.
    With every K-th arrival, over the whole run, g's mean b over the last K: v = mu v + b;  x = x - lr mu v.
    Then x_m = x.

    Workers arrive once a round, those first who are done first by the speed of their nodes, ties in their order, and go
    on at once, so that x_m is older the earlier it arrived. Nobody begins a round before all have arrived. With
    dynamic_steps (DyLU) there is little to wait for, as worker m makes floor(H speed_m / max speed) inner steps.

    With `steps` workers arrive after so many of their own instead, over rounds, and nobody waits for others: a round is
    a span of time, in which slower workers make fewer inner steps (`algorithms.nodes.async_clock`); the fast ones
    arrive several
    times meanwhile, as in the paper. What a worker gives is with the server at once; until it has the answer, by the
    link's time there and back, it makes no step. After a merge everybody begins a leg with the merged parameters.
    """

    @dataclass(frozen=True)
    class Settings:
        """buffer: K; null: as many as there are workers. dynamic_steps: fewer inner steps for slower workers. steps: a
        worker arrives after so many of its own; null: those of a round."""

        buffer: int | None = None
        dynamic_steps: bool = False
        steps: int | None = None

        def __post_init__(self):
            for name in ("buffer", "steps"):
                if (value := getattr(self, name)) is not None and value < 1:
                    raise ValueError(f"{name}: must be a positive integer, got {value}")
            if self.steps is not None and self.dynamic_steps:
                raise ValueError(f"steps: must be null with dynamic_steps, got {self.steps}")

    capabilities = Capabilities(
        encodings=("float32", "bfloat16"),
        one_exchange=False,
        weighs=False,
        message_tensors=1,
        shards=True,
    )
    state = ("velocity", "buffer")
    keeps = "anchor"

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        if settings.steps is not None:
            self.keeps = "replica"
            self.worker_state = ("start",)

    @classmethod
    def configured(cls, settings: Settings) -> Capabilities:
        if settings.dynamic_steps:
            purpose = "let slower workers make fewer inner steps"
            return dataclasses.replace(cls.capabilities, fewer_steps=True, needs_speeds=purpose)
        return dataclasses.replace(cls.capabilities, fewer_steps=settings.steps is not None)

    # An arrival per round

    def incoming(self, group: Group) -> Deliveries:
        return group.tensors(1, through="server")

    def message(self, worker: LocalWorker, group: Group) -> tuple[torch.Tensor]:
        return (worker.difference(worker.start),)

    def apply(self, group: Group, arrived: Mapping[int, Sequence[torch.Tensor]]) -> None:
        order = sorted(arrived, key=lambda worker: (group.clock.seconds[worker], worker))
        self._arrive(group, arrived, order)

    # Arrivals after so many steps of each worker's own

    def stops(self, group: Group) -> Sequence[int]:
        if self.settings.steps is None:
            return super().stops(group)
        for worker in group.local:
            if f"begun_{worker.index}" not in group.values:
                worker.state["start"].copy_(group.shared["parameters"])
        return sorted({group.inner_steps, *(arrival.stop for arrival in self._round(group).arrivals)})

    def turns(self, own_steps, inner_steps, values, travel) -> Mapping[int, Sequence[int]]:
        if self.settings.steps is None:
            return super().turns(own_steps, inner_steps, values, travel)
        each = leg_round(own_steps, inner_steps, self.settings.steps, values, travel).legs
        return {worker: own.turns for worker, own in each.items()}

    def _round(self, group: Group) -> LegRound:
        own_steps = dict(enumerate(group.clock.own_steps))
        return leg_round(own_steps, group.inner_steps, self.settings.steps, group.values, group.travel())

    def exchange(self, group: Group) -> None:
        legs = self._round(group)
        order = [arrival.worker for arrival in legs.arrivals if arrival.stop == group.step]
        if order:
            incoming = group.tensors(1, through="server", senders=order)
            for worker in group.local:
                if worker.index in order:
                    incoming.add(worker, (worker.state["start"] - worker.parameters,))
            arrived = incoming.result()
            self._arrive(group, arrived, [worker for worker in order if worker in arrived])
        if group.step == group.inner_steps:
            forget(group.values)
            group.values.update(legs.values)

    def _arrive(self, group: Group, arrived: Mapping[int, Sequence[torch.Tensor]], order: Sequence[int]) -> None:
        """Make the server's steps for these arrivals, in order; those who arrived go on from the result."""
        local = {worker.index: worker for worker in group.local}
        parameters = group.shared["parameters"]
        velocity = group.shared["velocity"]
        buffer = group.shared["buffer"]
        rate = self.outer.learning_rate
        size = self.settings.buffer or len(group.weights)
        waiting = group.values.get("waiting", 0)
        for index in order:
            parameters.add_(arrived[index][0], alpha=-rate / size)
            buffer.add_(arrived[index][0])
            waiting += 1
            if waiting >= size:
                velocity.mul_(self.outer.momentum).add_(buffer, alpha=1 / size)
                parameters.add_(velocity, alpha=-rate * self.outer.momentum)
                buffer.zero_()
                waiting = 0
            if index in local:
                local[index].start.copy_(parameters)
                if self.worker_state:
                    local[index].state["start"].copy_(parameters)
        group.values["waiting"] = waiting

    def merged(self, values: dict[str, float]) -> None:
        forget(values)

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        forget(values, workers)
