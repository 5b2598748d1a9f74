"""Streaming DiLoCo, with default values from memory: fragments one after the other (arXiv 2501.18512)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from algorithms.flat import Block, Part, fragment_problems, layer_fragments, read_part, write_part
from algorithms.synchronisation.diloco import diloco_step
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Capabilities, Method, require


@dataclass(frozen=True)
class StreamingDiLoCo(Method):
    """After inner step (p + 1) H / P of a round, fragment p is sent, and DiLoCo makes a step on (x_p, v_p):

        D_p = mean_m (x_p - x_m,p);  v_p = mu v_p + D_p;  x_p = x_p - lr (D_p + mu v_p)

    `delay` inner steps later (the last fragment's in the next round) it reaches the workers, which have continued:

        x_m,p = mixing x_m,p + (1 - mixing) x_p

    `layer_fragments` says which layers are in which fragment. If P does not divide the H of a round, (p + 1) H / P is
    rounded up. A fragment that is on its way arrives at the latest when it is sent again.

    The paper has no merges. Before one, and before workers leave, all fragments but the last, which has just been sent,
    are sent once more.

    Attributes:
        fragments: P.
        delay: inner steps between sending and arrival.
        mixing: the weight of a worker's own parameters; None: 0.5, or 0 without a delay.
    """

    fragments: int = 2
    delay: int = 1
    mixing: float | None = None

    keeps = "replica"
    state = ("velocity",)

    def __post_init__(self):
        require(self, "a positive integer", lambda value: value >= 1, "fragments")
        require(self, "at least 0", lambda value: value >= 0, "delay")
        require(self, "at least 0 and less than 1", lambda value: 0 <= value < 1, "mixing")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(one_exchange=False, temporaries=1.0, shards=True, problems=self._problems)

    def _problems(self, inner_steps: int | None, blocks: Sequence[Block] | None) -> list[str]:
        if blocks is not None:
            return fragment_problems(blocks, self.fragments)
        if inner_steps is None:
            return []
        key = "number_of_inner_steps_between_outers"
        interval, rest = divmod(inner_steps, self.fragments)
        if rest:
            return [f"synchronisation.fragments: must divide {key}, {inner_steps}, got {self.fragments}"]
        if self.delay >= interval:
            return [f"synchronisation.delay: must be less than {key} / fragments, {interval}, got {self.delay}"]
        return []

    def _sent_after(self, inner_steps: int) -> list[int]:
        return [-(-number * inner_steps // self.fragments) for number in range(1, self.fragments + 1)]

    def stops(self, group: Group) -> Sequence[int]:
        inner_steps = group.clock.inner_steps
        sent = self._sent_after(inner_steps)
        arriving = [step + self.delay for step in sent] + [int(step) for step in group.values.values()]
        return sorted({*sent, *(step for step in arriving if step <= inner_steps)})

    def exchange(self, group: Group) -> None:
        step = group.clock.step
        inner_steps = group.clock.inner_steps
        arrives = group.values  # the inner step of the round after which a fragment on its way arrives
        parts = layer_fragments(group.model.blocks, self.fragments)
        for number, (part, sent) in enumerate(zip(parts, self._sent_after(inner_steps), strict=True)):
            name = f"fragment_{number}"
            if sent == step:
                self._send(group, name, part)
                arrives[name] = step + self.delay
            if arrives.get(name) == step:
                self._arrive(group, part)
                del arrives[name]
        if step == inner_steps:
            for name in arrives:
                arrives[name] -= inner_steps

    def _send(self, group: Group, name: str, part: Part | None) -> None:
        if name in group.values:  # the round was shorter than the delay
            self._arrive(group, part)
        diloco_step(group, group.mean_pseudo_gradient(part, behind=self.delay), part)

    def _arrive(self, group: Group, part: Part | None) -> None:
        shared = read_part(group.shared["parameters"], part)
        default = 0.5 if self.delay else 0.0
        mixing = default if self.mixing is None else self.mixing
        for worker in group.local_workers:
            own = read_part(worker.parameters, part)
            write_part(worker.parameters, part, torch.lerp(worker.to_device(shared), own, mixing))

    def settle(self, group: Group) -> None:
        *parts, _ = layer_fragments(group.model.blocks, self.fragments)
        for number, part in enumerate(parts):
            self._send(group, f"fragment_{number}", part)

    def restarted(self, values: dict[str, float], workers: Collection[int] | None) -> None:
        if workers is None:
            values.clear()
