"""The results of a comparison: curves, paired differences between methods, and frontiers.

Between two evaluations the logarithm of the metric is interpolated linearly.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

_SIMULATED = "simulated: "
_OVERLAPPED = ", overlapped"
CONFIDENCE = 0.95
LABELS = {
    "tokens": "training tokens",
    "inner_steps": "inner steps of a node",
    "communications": "communications",
    "bytes_communicated": "bytes communicated",
}


def simulated_axis(hardware: str, network: str, overlap: bool) -> str:
    """Return the name of a curve of simulated seconds."""
    return f"{_SIMULATED}{hardware}, {network}{_OVERLAPPED if overlap else ''}"


def short(axis: str) -> str:
    """Return the name of an axis of simulated time without its prefix."""
    return axis.removeprefix(_SIMULATED)


@dataclass(frozen=True)
class Difference:
    """The difference of two methods, paired by seed.

    It is the difference of logarithms, in percent, if a smaller metric is better; otherwise the difference in points.

    Attributes:
        mean: mean over seeds.
        interval: 95% t interval of the mean; None for one seed.
    """

    mean: float
    interval: tuple[float, float] | None
    lower_is_better: bool

    @property
    def verdict(self) -> str:
        """Better or worse only if the interval excludes 0."""
        if self.interval is None:
            return "one seed"
        low, high = self.interval
        if low <= 0 <= high:
            return "not significant"
        return "better" if (high < 0) == self.lower_is_better else "worse"

    def __str__(self) -> str:
        text = f"{self.mean:+.1f}" + ("%" if self.lower_is_better else " points")
        if self.interval is None:
            return text
        digits = 1 if min(map(abs, self.interval)) >= 0.05 else 2  # no bound reads 0.0
        return text + " ({:+.{}f} to {:+.{}f})".format(self.interval[0], digits, self.interval[1], digits)


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
        """Names of the methods, in the order of the file."""
        return [method["name"] for method in self.raw["comparison"]["methods"]]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs that are reported: not the seed with which values were searched, if there are others."""
        seeds = self.raw["comparison"]["seeds"]
        return seeds[1:] if "search" in self.raw and len(seeds) > 1 else seeds

    @property
    def reference(self) -> str:
        """The method to which the others are compared."""
        return self.raw["comparison"]["reference"]

    @property
    def sign(self) -> int:
        """1 if a smaller metric is better, else -1."""
        return -1 if self.raw["metric"]["higher_is_better"] else 1

    @cached_property
    def runs(self) -> dict[str, list[Mapping[str, Any]]]:
        """The completed runs of every method, one per seed."""
        found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in self.methods}
        for run in self._completed:
            if run["seed"] in self.seeds and run["method"] in found:
                found[run["method"]].append(run)
        return found

    @property
    def _completed(self) -> list[Mapping[str, Any]]:
        return [run for run in self.raw["outcomes"] if run["completed"]]

    def tuned(self, method: str) -> Mapping[str, Any]:
        """Return the values that were found for a method, by a search or by another comparison."""
        if "search" in self.raw:
            return self.raw["search"][method]["best"]
        return self.raw.get("found", {}).get(method, {})

    @cached_property
    def families(self) -> dict[str, list[str]]:
        """The methods of every family; a method without a family is its own."""
        found: dict[str, list[str]] = {}
        for method in self.raw["comparison"]["methods"]:
            if self.runs[method["name"]]:
                found.setdefault(method.get("family") or method["name"], []).append(method["name"])
        return found

    @cached_property
    def _simulated(self) -> list[str]:
        names = self._completed[0]["curves"]
        return [n for n in names if n.startswith(_SIMULATED) and all(n in run["curves"] for run in self._completed)]

    @property
    def simulated(self) -> list[str]:
        """Names of the curves of simulated seconds without overlap."""
        return [name for name in self._simulated if not name.endswith(_OVERLAPPED)]

    @property
    def overlapped(self) -> list[str]:
        """Names of the curves of simulated seconds with synchronisations that overlap the next round."""
        return [name for name in self._simulated if name.endswith(_OVERLAPPED)]

    def stopped(self, method: str) -> str:
        """Return in words how many seeds of a method diverged or failed; empty if none did."""
        count = len(self.seeds) - len(self.runs[method])
        return f"{count} of {len(self.seeds)} seeds stopped" if count else ""

    def labelled(self, method: str) -> str:
        """Return the name of a method, with the number of its stopped seeds."""
        stopped = self.stopped(method)
        return f"{method} ({stopped})" if stopped else method

    def _data(self, method: str) -> dict[int, str | None]:
        """Digest of the data by seed; None where it was not recorded."""
        return {run["seed"]: run.get("data") for run in self.runs[method]}

    def mean_final(self, method: str) -> float:
        """Return the mean final metric of a method's completed runs."""
        return statistics.fmean(run["final_metric"] for run in self.runs[method])

    def ends(self, method: str, axis: str) -> list[float]:
        """Return what each run of a method used in total."""
        return [run["curves"][axis][-1] for run in self.runs[method]]

    def limit(self, axis: str) -> float:
        """Return the amount at which methods are compared: the most that a run of the reference used."""
        return max(self.ends(self.reference, axis))

    def at(self, method: str, axis: str, limit: float) -> dict[int, float]:
        """Return the metric of every seed of a method after it has used this much."""
        return {run["seed"]: metric_where(run, axis, limit) for run in self.runs[method]}

    def difference(self, method: str, axis: str) -> Difference | None:
        """Return the difference from the reference at the limit.

        None if a seed of one of the two stopped, or if they used different data with a seed.
        """
        if self.stopped(method) or self.stopped(self.reference) or self._data(method) != self._data(self.reference):
            return None
        limit = self.limit(axis)
        return paired_difference(self.at(method, axis, limit), self.at(self.reference, axis, limit), self.sign > 0)

    @property
    def baselines(self) -> list[str]:
        """Names of the baselines that completed all runs."""
        methods = self.raw["comparison"]["methods"]
        return [method["name"] for method in methods if method["baseline"] and not self.stopped(method["name"])]

    def best_baseline(self) -> str | None:
        """Return the baseline with the best mean final metric."""
        return min(self.baselines, key=lambda name: self.sign * self.mean_final(name), default=None)

    def closest(self, axis: str) -> str | None:
        """Return the best baseline at the limit; without baselines, the best method but the reference.

        Methods of which a seed stopped are not considered.
        """
        others = [name for name in self.methods if name != self.reference and not self.stopped(name)]
        names = [name for name in others if name in self.baselines] or others
        limit = self.limit(axis)
        return min(names, key=lambda name: self._loss(name, self.at(name, axis, limit)), default=None)

    def frontier(self, budget: float) -> dict[str, tuple[str, dict[int, float]]]:
        """Return the best method of every family with at most this many communications, and its metric by seed."""
        found = {}
        for family, methods in self.families.items():
            metrics = {name: self.at(name, "communications", budget) for name in methods}
            best = min(methods, key=lambda name: self._loss(name, metrics[name]))
            found[family] = (best, metrics[best])
        return found

    def _loss(self, method: str, metrics: Mapping[int, float]) -> float:
        """Rank a method by its mean metric; a stopped seed counts as the worst outcome."""
        return math.inf if self.stopped(method) else self.sign * statistics.fmean(metrics.values())


def metric_where(run: Mapping[str, Any], axis: str, x: float) -> float:
    """Return the metric of a run after it has used x; its last one if it ended before."""
    return float(np.exp(np.interp(x, run["curves"][axis], np.log(run["curves"]["metric"]))))


def used_until(run: Mapping[str, Any], axis: str, target: float, sign: int = 1) -> float | None:
    """Return what a run has used when its metric first reaches the target; None if it never does."""
    xs = run["curves"][axis]
    logs = np.log(run["curves"]["metric"])
    goal = math.log(target)
    for index, value in enumerate(logs):
        if sign * (value - goal) <= 0:
            if index == 0:
                return xs[0]
            share = (logs[index - 1] - goal) / (logs[index - 1] - value)
            return xs[index - 1] + share * (xs[index] - xs[index - 1])
    return None


def mean_curve(runs: Sequence[Mapping[str, Any]], axis: str, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean usage of runs and the metric of each, at equal fractions of their tokens.

    Returns:
        [points] of the axis, and [runs, points] of the metric.
    """
    fractions = np.linspace(0.0, 1.0, points)
    used = []
    metrics = []
    for run in runs:
        tokens = np.asarray(run["curves"]["tokens"])
        used.append(np.interp(fractions * tokens[-1], tokens, run["curves"][axis]))
        metrics.append(np.exp(np.interp(fractions * tokens[-1], tokens, np.log(run["curves"]["metric"]))))
    return np.mean(used, axis=0), np.array(metrics)
