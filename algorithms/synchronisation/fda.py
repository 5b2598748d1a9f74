"""FDA: workers synchronise when an estimate of their variance says so (arXiv 2405.20988)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.flat import inner_product
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Capabilities, Method, require

# Rounds that set the threshold.
_CALIBRATION_ROUNDS = 3
# The AMS sketch of the paper, with the error that the authors' code expects of it.
_ROWS = 5
_WIDTH = 250
_SKETCH_ERROR = _WIDTH**-0.5


@dataclass(frozen=True)
class FDA(Method):
    """With p the last synchronised parameters and u_m = x_m - p, the workers' variance is mean |u_m|^2 - |mean u_m|^2.
    Every `check_every` inner steps it is estimated, and workers synchronise if it is above the threshold:

        linear   mean |u_m|^2 - (mean <xi, u_m>)^2, with xi the direction in which p moved last
        sketch   mean |u_m|^2 - |mean sketch(u_m)|^2 / (1 + error)

    Then p = p + mean u_m, and all continue from p. Until p has moved, xi is 0, where the paper draws a random unit
    vector: one of n dimensions tells nothing.

    Without a threshold the first three rounds synchronise at their end, and the threshold becomes the mean of the
    variances there, that of round i with weight i^(1/3) (FDA-Opt, arXiv 2505.04535). Rounds of one worker, whose
    variance is 0, and rounds in which the learning rate warms up do not count. Drifts follow the learning rate and the
    number of workers, the threshold does not: see max_inner_steps. A merge keeps the threshold.

    Attributes:
        threshold: of the variance; None: calibrated.
        monitor: the estimate.
        check_every: inner steps between two checks.
        max_inner_steps: the most inner steps between two synchronisations after the calibration; None: no limit.
    """

    threshold: float | None = None
    monitor: Literal["linear", "sketch"] = "linear"
    check_every: int = 1
    max_inner_steps: int | None = None

    capabilities = Capabilities(
        averages_copies=True,
        copies=("synchronised",),
        outer_keys=(),
        one_exchange=False,
        temporaries=1.0,
        reads_state_often=True,
        shards=True,
    )
    keeps = "replica"

    def __post_init__(self):
        require(self, "a number that is not negative", lambda value: 0 <= value < math.inf, "threshold")
        require(self, "a positive number", lambda value: value >= 1, "check_every", "max_inner_steps")
        most = self.max_inner_steps or math.inf
        require(self, f"at most max_inner_steps, {most}", lambda value: value <= most, "check_every")

    @property
    def state(self) -> tuple[str, ...]:
        return ("synchronised", "direction") if self.monitor == "linear" else ("synchronised",)

    def _calibrates(self, values: dict[str, float]) -> bool:
        return self.threshold is None and "threshold" not in values

    def stops(self, group: Group) -> Sequence[int]:
        inner_steps = group.clock.inner_steps
        group.values.setdefault("learning_rate", group.inner.learning_rate)
        if self._calibrates(group.values):
            return (inner_steps,)
        # Checks are counted from the last synchronisation, which max_inner_steps may have made between two of them.
        grid = math.gcd(self.check_every, self.max_inner_steps or 0)
        first = grid - group.values.get("since", 0) % grid
        return sorted({*range(first, inner_steps + 1, grid), inner_steps})

    def exchange(self, group: Group) -> None:
        step = group.clock.step
        # Inner steps since the last synchronisation: in the values as of the round's start, here as of now.
        since = group.values.setdefault("since", 0) + step
        most = self.max_inner_steps or math.inf
        checks = since % self.check_every == 0
        if self._calibrates(group.values) or since >= most or (checks and self._too_far_apart(group)):
            self._synchronise(group)
            since = 0
            group.values["since"] = -step
        if step == group.clock.inner_steps:
            group.values["since"] = since
            group.values["learning_rate"] = group.inner.learning_rate

    def _too_far_apart(self, group: Group) -> bool:
        point = group.shared["synchronised"]
        elements = 2 if self.monitor == "linear" else 1 + _ROWS * _WIDTH
        incoming = group.mean(point.new_empty(elements), "monitor")
        for worker in group.local_workers:
            drift = worker.parameters - worker.to_device(point)
            if self.monitor == "linear":
                product = inner_product(worker.to_device(group.shared["direction"]), drift).view(1)
                rest = group.model.shard_group.sum(product)
            else:
                rest = group.model.sketch(drift, 0, _WIDTH, _ROWS)
            incoming.add(worker, torch.cat([_squared_norm(drift, group), rest.to(drift.dtype)]))
        mean = incoming.result()
        threshold = group.values["threshold"] if self.threshold is None else self.threshold
        return mean is not None and variance_estimate(mean) > threshold

    def _synchronise(self, group: Group) -> None:
        shared = group.shared
        parameters = shared["parameters"]
        point = shared["synchronised"]
        parameters.copy_(point)
        delta = group.mean_pseudo_gradient()
        if delta is None:
            return
        warms_up = group.inner.learning_rate > group.values["learning_rate"]
        if self._calibrates(group.values) and not group.lone:
            if warms_up:  # a first round of one step shows no rise
                group.values.update(calibrated=0, weighted=0.0)
            else:
                self._calibrate(group, torch.sub(point, delta, out=parameters))
                parameters.copy_(point)
        parameters.sub_(delta)
        if "direction" in shared:
            distance = group.model.distance(parameters, point).item()
            if distance:
                torch.sub(parameters, point, out=shared["direction"]).div_(distance)
        point.copy_(parameters)
        for worker in group.local_workers:
            worker.parameters.copy_(worker.to_device(point))

    def _calibrate(self, group: Group, centre: torch.Tensor) -> None:
        """Add the variance of this round; after the last calibration round, set the threshold."""
        values = group.values
        incoming = group.mean(centre.new_empty(1), "monitor")
        for worker in group.local_workers:
            incoming.add(worker, _squared_norm(worker.parameters - worker.to_device(centre), group))
        number = values.get("calibrated", 0) + 1
        values["calibrated"] = number
        values["weighted"] = values.get("weighted", 0.0) + number ** (1 / 3) * incoming.result().item()
        if number == _CALIBRATION_ROUNDS:
            values["threshold"] = values["weighted"] / sum(i ** (1 / 3) for i in range(1, number + 1))

    def restarted(self, values: dict[str, float], workers: Collection[int] | None) -> None:
        if workers is None:
            values["since"] = 0


def _squared_norm(drift: torch.Tensor, group: Group) -> torch.Tensor:
    return group.model.shard_group.sum(inner_product(drift, drift).view(1)).to(drift.dtype)


def variance_estimate(mean_state: torch.Tensor) -> float:
    """Return the estimated variance of the workers, from the mean of |u|^2 with <xi, u>, or with a sketch of u.

    linear: never below the variance if xi has norm 1. sketch: the median over the rows is |mean u|^2 within its error
    with high probability, and after division by 1 + error hardly ever above it.
    """
    state = mean_state.cpu()  # one wait for a GPU
    squared = state[0].item()
    rest = state[1:].double()
    if len(rest) == 1:
        return squared - rest.item() ** 2
    return squared - rest.view(_ROWS, _WIDTH).square().sum(1).median().item() / (1 + _SKETCH_ERROR)
