"""Streaming DiLoCo: fragments of the model one after the other, each applied when it has arrived (arXiv 2501.18512)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.synchronisation.fragments import fragment_parts, fragment_step
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Capabilities, Method, Part, put, take


class StreamingDiLoCo(Method):
    """After inner step (p + 1) H / P of a round fragment p is sent, and DiLoCo's step made on (x_p, v_p):
    D_p = mean_m (x_p - x_m,p);  v_p = mu v_p + D_p;  x_p = x_p - lr (D_p + mu v_p).

    `delay` inner steps later (the last one in the next round) it reaches the workers, which have gone on: x_m,p is then
    mixing x_m,p + (1 - mixing) x_p  ("mix"), or x_p + (x_m,p - x_m,p as it was sent)  ("progress", arXiv 2605.20866).

    Which layers are in which fragment says `fragments`. Where P does not divide the H of a round, (p + 1) H / P is
    rounded up; what is under way arrives at the latest when its fragment is sent again, and not at all after a merge.
    """

    @dataclass(frozen=True)
    class Settings:
        """mixing: the weight of a worker's own parameters, 0.5 where merge is mix."""

        fragments: int = 2
        delay: int = 1
        merge: Literal["mix", "progress"] = "mix"
        mixing: float | None = None
        order: Literal["strided", "sequential"] = "strided"

        def __post_init__(self):
            mixes, mixing = self.merge == "mix", self.mixing
            if self.fragments < 1:
                raise ValueError(f"fragments: must be a positive integer, got {self.fragments}")
            if self.delay < 0:
                raise ValueError(f"delay: must not be negative, got {self.delay}")
            if mixing is not None and not (mixes and 0 <= mixing < 1):
                known = "at least 0 and less than 1" if mixes else "null where merge is progress"
                raise ValueError(f"mixing: must be {known}, got {mixing}")

    capabilities = Capabilities(one_exchange=False, temporaries=1.0, shards=True)
    state = ("velocity",)
    keeps = "replica"

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        self._parts = fragment_parts(blocks, settings.fragments, settings.order)
        self.worker_state = ("offset",) if settings.merge == "progress" else ()  # x_p - x_m,p as it was sent

    @classmethod
    def problems(cls, settings, inner_steps: int, workers: int | None) -> list[str]:
        key, (interval, left) = "number_of_inner_steps_between_outers", divmod(inner_steps, settings.fragments)
        if left:
            return [f"synchronisation.fragments: must divide {key}, {inner_steps}, got {settings.fragments}"]
        if settings.delay >= interval:
            return [f"synchronisation.delay: must be less than {key} / fragments, {interval}, got {settings.delay}"]
        return []

    def _sent_after(self, inner_steps: int) -> list[int]:
        return [-(-number * inner_steps // len(self._parts)) for number in range(1, len(self._parts) + 1)]

    def stops(self, group: Group) -> Sequence[int]:
        sent = self._sent_after(group.inner_steps)
        arriving = [*(step + self.settings.delay for step in sent), *map(int, group.values.values())]
        return sorted({*sent, *(step for step in arriving if step <= group.inner_steps)})

    def exchange(self, group: Group) -> None:
        arrives = group.values  # after which inner step of the round what is under way does
        for number, (part, sent) in enumerate(zip(self._parts, self._sent_after(group.inner_steps), strict=True)):
            name = f"fragment_{number}"
            if sent == group.step:
                if name in arrives:  # the round was shorter than the delay
                    self._apply(group, part)
                self._send(group, part)
                arrives[name] = group.step + self.settings.delay
            if arrives.get(name) == group.step:
                self._apply(group, part)
                del arrives[name]
        if group.step == group.inner_steps:
            for name in arrives:
                arrives[name] -= group.inner_steps

    def _send(self, group: Group, part: Part | None) -> None:
        delta = group.mean_difference(part, behind=self.settings.delay)
        if delta is None:
            return
        parameters = fragment_step(group, part, delta, self.outer)
        if self.worker_state:
            for worker in group.local:
                put(worker.state["offset"], part, worker.here(parameters) - take(worker.parameters, part))

    def _apply(self, group: Group, part: Part | None) -> None:
        settings = self.settings
        shared = take(group.shared["parameters"], part)
        for worker in group.local:
            new = worker.here(shared)
            own = take(worker.parameters, part)
            if settings.merge == "mix":
                new = torch.lerp(new, own, 0.5 if settings.mixing is None else settings.mixing)
            elif settings.delay:
                new = own + take(worker.state["offset"], part)
            put(worker.parameters, part, new)

    def merged(self, values: dict[str, float]) -> None:
        values.clear()
