"""The results of a comparison: differences between methods paired by seed, and which of them can be compared.

All runs are compared at their ends, where the learning rate has decayed. The part of a run that is cut off at less
usage is never compared: a run planned for that usage would have ended better.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
# Usages that differ by at most this fraction count as equal.
TOLERANCE = 0.1
# Evaluations that are a larger share of a run's tokens apart do not tell where it has reached a metric.
COARSE = 0.2


def simulated_axis(hardware: str, network: str) -> str:
    return f"simulated: {hardware}, {network}"


@dataclass(frozen=True)
class Difference:
    """The mean difference of two methods, paired by seed, and its 95% t interval (None for one seed).

    It is the difference of logarithms, in percent, if a smaller metric is better; otherwise the difference in points.
    """

    mean: float
    interval: tuple[float, float] | None
    lower_is_better: bool

    @property
    def verdict(self) -> str:
        """Better or worse only if the interval excludes 0; with one seed only the sign."""
        low, high = self.interval or (self.mean, self.mean)
        if low <= 0 <= high:
            return "not significant"
        return "better" if (high < 0) == self.lower_is_better else "worse"

    def __str__(self) -> str:
        text = f"{self.mean:+.1f}" + ("%" if self.lower_is_better else " points")
        if self.interval is None:
            return text
        return text + " ({:+.1f} to {:+.1f})".format(*self.interval)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], lower_is_better: bool) -> Difference:
    """Return the difference between metrics by seed, over the common seeds (at least one)."""
    seeds = sorted(ours.keys() & theirs.keys())
    if lower_is_better:
        found = [math.log(ours[seed]) - math.log(theirs[seed]) for seed in seeds]
    else:
        found = [100.0 * ours[seed] - 100.0 * theirs[seed] for seed in seeds]

    def shown(value: float) -> float:
        return 100.0 * math.expm1(value) if lower_is_better else value

    mean = statistics.fmean(found)
    if len(found) == 1:
        return Difference(shown(mean), None, lower_is_better)
    t = float(stats.t.ppf((1.0 + CONFIDENCE) / 2.0, len(found) - 1))
    half = t * statistics.stdev(found) / math.sqrt(len(found))
    return Difference(shown(mean), (shown(mean - half), shown(mean + half)), lower_is_better)


@dataclass(frozen=True)
class Results:
    """One comparison, from the JSON values that compare.py writes."""

    raw: Mapping[str, Any]

    @cached_property
    def methods(self) -> list[str]:
        return [method["name"] for method in self.raw["comparison"]["methods"]]

    @cached_property
    def seeds(self) -> dict[str, list[int]]:
        """The seeds of every method."""
        comparison = self.raw["comparison"]
        return {method["name"]: method.get("seeds") or comparison["seeds"] for method in comparison["methods"]}

    @property
    def seed_counts(self) -> list[int]:
        """How many seeds methods have: one number if all have as many, else the fewest and the most."""
        counts = sorted({len(seeds) for seeds in self.seeds.values()})
        return counts if len(counts) == 1 else [counts[0], counts[-1]]

    @property
    def reference(self) -> str:
        return self.raw["comparison"]["reference"]

    @property
    def references(self) -> dict[str, str]:
        """The method with which each method is compared; a reference is compared with itself."""
        methods = self.raw["comparison"]["methods"]
        found = {method["name"]: method.get("reference") or self.reference for method in methods}
        return {name: name if name in found.values() else reference for name, reference in found.items()}

    @property
    def several_references(self) -> bool:
        return len(set(self.references.values())) > 1

    @property
    def compared(self) -> list[str]:
        """The methods that are compared with another one."""
        return [method for method, reference in self.references.items() if method != reference]

    @property
    def sign(self) -> int:
        """1 if a smaller metric is better, else -1."""
        return -1 if self.raw["metric"]["higher_is_better"] else 1

    @cached_property
    def runs(self) -> dict[str, list[Mapping[str, Any]]]:
        """The completed runs of every method, one per seed."""
        found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in self.methods}
        for run in self.raw["outcomes"]:
            if run["completed"] and run["seed"] in self.seeds.get(run["method"], ()):
                found[run["method"]].append(run)
        return found

    @property
    def seconds(self) -> dict[str, str]:
        """Labels of the curves of simulated seconds."""
        comparison = self.raw["comparison"]
        return {
            simulated_axis(device["name"], network["name"]): network["name"]
            if len(comparison["hardware"]) == 1
            else f"{device['name']}, {network['name']}"
            for device in comparison["hardware"]
            for network in comparison["networks"]
        }

    def stopped(self, method: str) -> str:
        """Return in words how many seeds of a method diverged or failed; empty if none did."""
        total = len(self.seeds[method])
        count = total - len(self.runs[method])
        return f"{count} of {total} seeds stopped" if count else ""

    def labelled(self, method: str) -> str:
        stopped = self.stopped(method)
        return f"{method} ({stopped})" if stopped else method

    def finals(self, method: str) -> dict[int, float]:
        return {run["seed"]: run["final_metric"] for run in self.runs[method]}

    def ends(self, method: str, axis: str) -> list[float]:
        return [run["curves"][axis][-1] for run in self.runs[method]]

    def difference(self, method: str) -> Difference | None:
        """Return the difference from the method's reference over the seeds of both.

        None if a seed of either stopped, or if they have no seed in common.
        """
        reference = self.references[method]
        if self.stopped(method) or self.stopped(reference):
            return None
        ours, theirs = self.finals(method), self.finals(reference)
        return paired_difference(ours, theirs, self.sign > 0) if ours.keys() & theirs.keys() else None

    def verdict(self, method: str, axis: str) -> str:
        """Return the verdict on a method at equal usage.

        Nothing is known about a method that is worse with less usage, or better with more.
        """
        difference = self.difference(method)
        if difference is None:
            return "not comparable: stopped or no common seed"
        verdict = difference.verdict
        reference = self.references[method]
        shared = {run["seed"] for run in self.runs[method]} & {run["seed"] for run in self.runs[reference]}
        used, limit = (
            statistics.fmean(run["curves"][axis][-1] for run in self.runs[name] if run["seed"] in shared)
            for name in (method, reference)
        )
        if used < (1.0 - TOLERANCE) * limit and verdict == "worse":
            return "not comparable: ended earlier"
        if used > (1.0 + TOLERANCE) * limit and verdict == "better":
            return "not comparable: used more"
        return verdict


def _scaled(metric: Sequence[float], sign: int) -> np.ndarray:
    """Return the metric on the scale on which it is interpolated: a perplexity's logarithm, an accuracy itself."""
    return np.log(metric) if sign > 0 else np.asarray(metric)


def used_until(run: Mapping[str, Any], axis: str, target: float, sign: int = 1) -> tuple[float, float] | None:
    """Return the least and the most that a run has used when its metric first reaches the target; None: never.

    Between two evaluations the metric is interpolated linearly, or its logarithm if a smaller metric is better. So both
    are equal, unless the evaluations are more than COARSE of the run's tokens apart.
    """
    xs = run["curves"][axis]
    tokens = run["curves"]["tokens"]
    reached = np.flatnonzero(sign * (np.asarray(run["curves"]["metric"]) - target) <= 0)
    if not len(reached):
        return None
    index = int(reached[0])
    first = max(index - 1, 0)
    if tokens[index] - tokens[first] > COARSE * tokens[-1]:
        return xs[first], xs[index]
    if index == 0:
        return xs[0], xs[0]
    before, after, goal = _scaled([*run["curves"]["metric"][first : index + 1], target], sign)
    used = xs[first] + (before - goal) / (before - after) * (xs[index] - xs[first])
    return used, used


def mean_curve(
    runs: Sequence[Mapping[str, Any]], axis: str, sign: int = 1, points: int = 200
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean usage [points], mean metric [points] and metric [runs, points], at equal fractions of the tokens.

    The metric is interpolated as in `used_until`, and its mean is that of the interpolated values.
    """
    fractions = np.linspace(0.0, 1.0, points)
    used = []
    values = []
    for run in runs:
        tokens = np.asarray(run["curves"]["tokens"])
        used.append(np.interp(fractions * tokens[-1], tokens, run["curves"][axis]))
        values.append(np.interp(fractions * tokens[-1], tokens, _scaled(run["curves"]["metric"], sign)))
    unscaled = np.exp if sign > 0 else np.asarray
    return np.mean(used, axis=0), unscaled(np.mean(values, axis=0)), unscaled(values)
