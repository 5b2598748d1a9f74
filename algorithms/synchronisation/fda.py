"""FDA: workers synchronise when an estimate of their spread says so (arXiv 2405.20988; FDA-Opt: 2505.04535)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.synchronisation.method import OUTER_KEYS, Group, Member, Method
from algorithms.synchronisation.outer_step import OUTER_STATE, AdaptiveValues, outer_step
from algorithms.synchronisation.worker_variance import (
    LINEAR,
    SKETCHED,
    linear_numbers,
    sketched_numbers,
    spread,
    squared_norm,
)


class FDA(Method):
    """With p what was synchronised last, and u_m = x_m - p, the workers' variance is mean |u_m|^2 - |mean u_m|^2. Every
    `check_every` inner steps since then it is estimated, and they synchronise where that is above the threshold:

        linear   mean |u_m|^2 - (mean <xi, u_m>)^2, with xi the direction in which p moved last
        sketch   mean |u_m|^2 - |mean sketch(u_m)|^2 / (1 + error)

    Then p = p + mean u_m, or the outer step of DiLoCo or FedOpt with D = -mean u_m (`outer`), and all go on from p.
    Until p has moved, xi is 0, where the paper draws a unit vector at random: one of n dimensions tells nothing.
    Without a threshold the first rounds synchronise at their end, and it becomes the mean of the variances there, that
    of round i with weight i^(1/3). Drifts follow the learning rate, it does not: see max_inner_steps.
    """

    temporaries = staticmethod(lambda settings, workers: 1.0)
    own_copy, trainer_copies, shards = "replica", ("synchronised",), True
    shares_copy = plannable = False

    @dataclass(frozen=True)
    class Settings(AdaptiveValues):
        """calibrate: rounds that set the threshold if there is none; null: 3. max_inner_steps: from one to the next."""

        threshold: float | None = None
        calibrate: int | None = None
        monitor: Literal["linear", "sketch"] = "linear"
        check_every: int = 1
        max_inner_steps: int | None = None
        outer: Literal["mean", "nesterov", "adam", "adagrad", "yogi"] = "mean"

        def __post_init__(self):
            super().__post_init__()
            self.check_used(self.outer)
            if self.threshold is not None and not 0 <= self.threshold < float("inf"):
                raise ValueError(f"threshold: must be a number that is not negative, got {self.threshold}")
            if self.threshold is not None and self.calibrate is not None:
                raise ValueError(f"calibrate: must be null with a threshold, got {self.calibrate}")
            for name in ("calibrate", "check_every", "max_inner_steps"):
                if (value := getattr(self, name)) is not None and value < 1:
                    raise ValueError(f"{name}: must be a positive number, got {value}")
            if self.check_every > (most := self.max_inner_steps or self.check_every):
                raise ValueError(f"check_every: must be at most max_inner_steps, {most}, got {self.check_every}")

    @classmethod
    def outer_keys(cls, settings) -> tuple[str, ...]:
        return {"mean": OUTER_KEYS[2:], "nesterov": OUTER_KEYS}.get(settings.outer, OUTER_KEYS[::2])

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        direction = ("direction",) if settings.monitor == "linear" else ()
        self.trainer_state = ("synchronised", *direction, *OUTER_STATE[settings.outer])

    def _calibrates(self, values: Mapping[str, float]) -> bool:
        return self.settings.threshold is None and "threshold" not in values

    def stops(self, inner_steps: int, values: Mapping[str, float]) -> Sequence[int]:
        if self._calibrates(values):
            return (inner_steps,)
        # Checks are counted from the last synchronisation, which max_inner_steps may have made between two of them.
        grid = math.gcd(self.settings.check_every, self.settings.max_inner_steps or 0)
        return sorted({*range(grid - values.get("since", 0) % grid, inner_steps + 1, grid), inner_steps})

    def exchange(self, group: Group) -> None:
        values, every, most = group.values, self.settings.check_every, self.settings.max_inner_steps
        # Inner steps since the last synchronisation, as of the beginning of the round and as of now.
        since = values.setdefault("since", 0) + group.step
        if self._calibrates(values) or since >= (most or math.inf) or (since % every == 0 and self._too_far(group)):
            self._synchronise(group)
            values["since"] = -group.step
        if group.step == group.inner_steps:
            values["since"] += group.inner_steps

    def _too_far(self, group: Group) -> bool:
        point, direction = group.shared["synchronised"], group.shared.get("direction")

        def numbers(member: Member) -> torch.Tensor:
            seen = (sketched_numbers, group.sketch) if direction is None else (linear_numbers, member.here(direction))
            return seen[0](member.parameters - member.here(point), seen[1], group.total)

        mean = group.mean(numbers, point.new_empty(SKETCHED if direction is None else LINEAR), "monitor")
        threshold = group.values["threshold"] if self.settings.threshold is None else self.settings.threshold
        return mean is not None and spread(mean) > threshold

    def _synchronise(self, group: Group) -> None:
        shared, parameters, point = group.shared, group.shared["parameters"], group.shared["synchronised"]
        parameters.copy_(point)
        if (delta := group.mean_difference()) is None:
            return
        if self._calibrates(group.values):
            self._calibrate(group, torch.sub(point, delta, out=parameters))
            parameters.copy_(point)
        lr, momentum = self.outer.learning_rate, self.outer.momentum
        outer_step(self.settings.outer, parameters, delta, shared, lr, momentum, self.settings)
        if "direction" in shared and (norm := group.distance(parameters, point).item()):
            torch.sub(parameters, point, out=shared["direction"]).div_(norm)
        point.copy_(parameters)
        for member in group.members():
            member.parameters.copy_(member.here(point))

    def _calibrate(self, group: Group, centre: torch.Tensor) -> None:
        """Add the variance of this round; after the last one, set the threshold."""
        values, like = group.values, centre.new_empty(1)
        variance = group.mean(lambda m: squared_norm(m.parameters - m.here(centre), group.total), like, "monitor")
        number = values["calibrated"] = values.get("calibrated", 0) + 1
        values["weighted"] = values.get("weighted", 0.0) + number ** (1 / 3) * variance.item()
        if number >= (self.settings.calibrate or 3):
            values["threshold"] = values["weighted"] / sum(i ** (1 / 3) for i in range(1, number + 1))
