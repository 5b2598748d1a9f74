"""Delayed Nesterov: workers reach a server one by one, and momentum waits for several (arXiv 2401.09135)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.nodes.async_clock import LegRound, forget, in_steps, leg_round
from algorithms.synchronisation.method import Group, Method


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

    trainer_state = ("velocity", "buffer")
    delivers = 1
    own_copy = "anchor"
    plannable = False
    weighs = False
    allows_fewer_steps = False
    encodings = ("float32", "bfloat16")
    shards = True

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        if settings.steps is not None:
            self.own_copy, self.worker_state = "replica", ("start",)

    @classmethod
    def fewer_steps(cls, settings: Settings) -> bool:
        return settings.dynamic_steps or settings.steps is not None

    @classmethod
    def needs_speeds(cls, settings: Settings) -> str:
        return "let slower workers make fewer inner steps" if settings.dynamic_steps else ""

    def begin(self, group: Group) -> Sequence[int]:
        if self.settings.steps is None:
            return super().begin(group)
        for member in group.members():
            if f"begun_{member.index}" not in group.values:
                member.state["start"].copy_(group.shared["parameters"])
        return sorted({group.inner_steps, *(arrival.stop for arrival in self._round(group).arrivals)})

    def turns(self, own_steps, inner_steps, values, travel) -> Mapping[int, Sequence[int]]:
        if self.settings.steps is None:
            return super().turns(own_steps, inner_steps, values, travel)
        each = leg_round(own_steps, inner_steps, self.settings.steps, values, travel).legs
        return {worker: own.turns for worker, own in each.items()}

    def _round(self, group: Group) -> LegRound:
        travel = in_steps(group.server_seconds(None), group.step_seconds)
        return leg_round(dict(enumerate(group.own_steps)), group.inner_steps, self.settings.steps, group.values, travel)

    def exchange(self, group: Group) -> None:
        if self.settings.steps is None:
            arrived = group.deliver_tensors(lambda m: (m.parameters.neg_().add_(m.start),), 1, through="server")
            self._arrive(group, arrived, sorted(arrived, key=lambda worker: (group.seconds[worker], worker)))
            return
        legs = self._round(group)
        if order := [arrival.worker for arrival in legs.arrivals if arrival.stop == group.step]:
            arrived = group.deliver_tensors(lambda m: (m.state["start"] - m.parameters,), 1, None, "server", order)
            self._arrive(group, arrived, [worker for worker in order if worker in arrived])
        if group.step == group.inner_steps:
            forget(group.values)
            group.values.update(legs.values)

    def _arrive(self, group: Group, arrived: Mapping[int, Sequence[torch.Tensor]], order: Sequence[int]) -> None:
        members = {member.index: member for member in group.members()}
        parameters, velocity, buffer = (group.shared[name] for name in ("parameters", "velocity", "buffer"))
        rate, momentum, size = self.outer.learning_rate, self.outer.momentum, self.settings.buffer or group.workers
        waiting = group.values.get("waiting", 0)
        for worker in order:
            parameters.add_(arrived[worker][0], alpha=-rate / size)
            buffer.add_(arrived[worker][0])
            waiting += 1
            if waiting >= size:
                velocity.mul_(momentum).add_(buffer, alpha=1 / size)
                parameters.add_(velocity, alpha=-rate * momentum)
                buffer.zero_()
                waiting = 0
            if worker in members:
                members[worker].start.copy_(parameters)
                if self.worker_state:
                    members[worker].state["start"].copy_(parameters)
        group.values["waiting"] = waiting

    def merged(self, values: dict[str, float]) -> None:
        forget(values)

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        forget(values, workers)
