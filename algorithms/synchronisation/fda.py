"""FDA: workers synchronise when an estimate of their spread says so (arXiv 2405.20988; FDA-Opt: 2505.04535)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.batch.across_workers import inner_product, sketch
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import OUTER_KEYS, Capabilities, Method
from algorithms.synchronisation.outer_step import OUTER_STATE, AdaptiveValues, outer_step


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

    capabilities = Capabilities(
        averages_copies=True,
        copies=("synchronised",),
        one_exchange=False,
        temporaries=1.0,
        shards=True,
    )
    keeps = "replica"

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
    def configured(cls, settings: Settings) -> Capabilities:
        keys = {"mean": (), "nesterov": OUTER_KEYS}
        adaptive = ("learning_rate_for_outer_opt",)
        return dataclasses.replace(cls.capabilities, outer_keys=keys.get(settings.outer, adaptive))

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        direction = ("direction",) if settings.monitor == "linear" else ()
        self.state = ("synchronised", *direction, *OUTER_STATE[settings.outer])

    def _calibrates(self, values: dict[str, float]) -> bool:
        return self.settings.threshold is None and "threshold" not in values

    def stops(self, group: Group) -> Sequence[int]:
        if self._calibrates(group.values):
            return (group.inner_steps,)
        # Checks are counted from the last synchronisation, which max_inner_steps may have made between two of them.
        grid = math.gcd(self.settings.check_every, self.settings.max_inner_steps or 0)
        first = grid - group.values.get("since", 0) % grid
        return sorted({*range(first, group.inner_steps + 1, grid), group.inner_steps})

    def exchange(self, group: Group) -> None:
        # Inner steps since the last synchronisation, as of the beginning of the round and as of now.
        since = group.values.setdefault("since", 0) + group.step
        most = self.settings.max_inner_steps or math.inf
        checks = since % self.settings.check_every == 0
        if self._calibrates(group.values) or since >= most or (checks and self._too_far(group)):
            self._synchronise(group)
            since = 0
            group.values["since"] = -group.step
        if group.step == group.inner_steps:
            group.values["since"] = since

    def _too_far(self, group: Group) -> bool:
        """Compare the estimated variance of the workers with the threshold."""
        point = group.shared["synchronised"]
        linear = self.settings.monitor == "linear"
        incoming = group.mean(point.new_empty(LINEAR if linear else SKETCHED), "monitor")
        for worker in group.local:
            drift = worker.parameters - worker.here(point)
            if linear:
                numbers = linear_numbers(drift, worker.here(group.shared["direction"]), group.model.shard_group.sum)
            else:
                numbers = sketched_numbers(drift, group.model.sketch, group.model.shard_group.sum)
            incoming.add(worker, numbers)
        mean = incoming.result()
        threshold = group.values["threshold"] if self.settings.threshold is None else self.settings.threshold
        return mean is not None and variance_of_workers(mean) > threshold

    def _synchronise(self, group: Group) -> None:
        shared = group.shared
        parameters = shared["parameters"]
        point = shared["synchronised"]
        parameters.copy_(point)
        delta = group.mean_difference()
        if delta is None:
            return
        if self._calibrates(group.values):
            self._calibrate(group, torch.sub(point, delta, out=parameters))
            parameters.copy_(point)
        outer_step(
            self.settings.outer,
            parameters,
            delta,
            shared,
            self.outer.learning_rate,
            self.outer.momentum,
            self.settings,
        )
        if "direction" in shared:
            moved = group.model.distance(parameters, point).item()
            if moved:
                torch.sub(parameters, point, out=shared["direction"]).div_(moved)
        point.copy_(parameters)
        for worker in group.local:
            worker.parameters.copy_(worker.here(point))

    def _calibrate(self, group: Group, centre: torch.Tensor) -> None:
        """Add the variance of this round; after the last calibration round, set the threshold."""
        values = group.values
        incoming = group.mean(centre.new_empty(1), "monitor")
        for worker in group.local:
            incoming.add(worker, squared_norm(worker.parameters - worker.here(centre), group.model.shard_group.sum))
        variance = incoming.result().item()
        number = values.get("calibrated", 0) + 1
        values["calibrated"] = number
        values["weighted"] = values.get("weighted", 0.0) + number ** (1 / 3) * variance
        if number >= (self.settings.calibrate or 3):
            values["threshold"] = values["weighted"] / sum(i ** (1 / 3) for i in range(1, number + 1))


# An AMS sketch, as in the paper, with the error that the authors' code expects of it.
_ROWS, _WIDTH = 5, 250
_SKETCH_ERROR = _WIDTH**-0.5

SKETCHED = 1 + _ROWS * _WIDTH  # numbers that a worker sends
LINEAR = 2


Total = Callable[[torch.Tensor], torch.Tensor]


def _alone(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


def squared_norm(vector: torch.Tensor, total: Total = _alone) -> torch.Tensor:
    """[1]."""
    return total(inner_product(vector, vector).view(1)).to(vector.dtype)


def linear_numbers(drift: torch.Tensor, direction: torch.Tensor, total: Total = _alone) -> torch.Tensor:
    """|u|^2 and <direction, u>."""
    return total(torch.stack([inner_product(other, drift) for other in (drift, direction)])).to(drift.dtype)


def sketched_numbers(drift: torch.Tensor, sketched: Callable = sketch, total: Total = _alone) -> torch.Tensor:
    """|u|^2 and a sketch of u, with the signs that all have; sketched: as algorithms.batch.across_workers.sketch."""
    return torch.cat([squared_norm(drift, total), sketched(drift, 0, _WIDTH, _ROWS)])


def variance_of_workers(mean: torch.Tensor) -> float:
    """The variance of the workers, from the mean of their numbers; linear: never below it, with a direction of norm 1.

    sketched: the median of the rows is |mean u|^2 within its error mostly, and divided by 1 + error hardly ever above.
    """
    squared, seen = mean[0].item(), mean[1:].double()
    if len(mean) == LINEAR:
        return squared - seen.item() ** 2
    return squared - seen.view(_ROWS, _WIDTH).square().sum(1).median().item() / (1 + _SKETCH_ERROR)
