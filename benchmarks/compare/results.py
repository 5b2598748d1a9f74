"""What a comparison found, from the JSON values of compare.py alone: curves, differences between methods, frontiers.

Between two evaluations of a run the logarithm of its metric is taken to be linear. Two methods are compared seed by
seed, in one way everywhere: `Results.difference`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

_SIMULATED, _OVERLAPPED = "simulated: ", ", overlapped"
CONFIDENCE = 0.95
LABELS = {
    "tokens": "training tokens",
    "inner_steps": "inner steps of a node",
    "communications": "communications",
    "bytes_communicated": "bytes communicated",
    "wall_seconds": "seconds of training on one core of this machine",
}


def simulated_axis(hardware: str, network: str, overlap: bool) -> str:
    """The name of the curve of simulated seconds."""
    return f"{_SIMULATED}{hardware}, {network}{_OVERLAPPED if overlap else ''}"


@dataclass(frozen=True)
class Difference:
    """Of one method from another, paired by seed: the mean over seeds and its 95% t interval, None for one seed.

    Where a smaller metric is better it is the difference of logarithms as a percentage, else the plain one in points.
    """

    mean: float
    interval: tuple[float, float] | None
    lower_is_better: bool

    @property
    def verdict(self) -> str:
        """better or worse only where the interval excludes 0."""
        if self.interval is None:
            return "one seed"
        low, high = self.interval
        if low <= 0 <= high:
            return "not told apart"
        return "better" if (high < 0) == self.lower_is_better else "worse"

    def __str__(self) -> str:
        text = f"{self.mean:+.1f}" + ("%" if self.lower_is_better else " points")
        if self.interval is None:
            return text
        digits = 1 if min(map(abs, self.interval)) >= 0.05 else 2  # no bound reads 0.0
        return text + " ({:+.{}f} to {:+.{}f})".format(self.interval[0], digits, self.interval[1], digits)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], lower_is_better: bool) -> Difference:
    """Of ours from theirs, metrics by seed, over the seeds that both have: at least one."""
    scale = math.log if lower_is_better else lambda value: 100.0 * value
    found = [scale(ours[seed]) - scale(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    mean, shown = statistics.fmean(found), (lambda x: 100.0 * math.expm1(x)) if lower_is_better else float
    if len(found) == 1:
        return Difference(shown(mean), None, lower_is_better)
    t = stats.t.ppf((1.0 + CONFIDENCE) / 2.0, len(found) - 1)
    half = float(t) * statistics.stdev(found) / math.sqrt(len(found))
    return Difference(shown(mean), (shown(mean - half), shown(mean + half)), lower_is_better)


@dataclass(frozen=True)
class Results:
    """One comparison, as compare.py wrote it."""

    raw: Mapping[str, Any]

    @cached_property
    def methods(self) -> list[str]:
        """Names, in the order of the file."""
        return [method["name"] for method in self.raw["comparison"]["methods"]]

    @cached_property
    def runs(self) -> dict[str, list[Mapping[str, Any]]]:
        """The runs of every method with its best value, a seed each; only those that came to their end."""
        chosen = set(self.raw["chosen"])
        return {
            name: [run for run in self._finished if run["method"] == name and run["id"] in chosen]
            for name in self.methods
        }

    @property
    def _finished(self) -> list[Mapping[str, Any]]:
        return [run for run in self.raw["outcomes"] if run["completed"]]

    @property
    def sign(self) -> int:
        """1 where a smaller metric is better, else -1."""
        return -1 if self.raw["metric"]["higher_is_better"] else 1

    @cached_property
    def families(self) -> dict[str, list[str]]:
        """The methods of every family, which are points of one frontier; a method without one is its own."""
        found: dict[str, list[str]] = {}
        for method in self.raw["comparison"]["methods"]:
            if self.runs[method["name"]]:
                found.setdefault(method.get("family") or method["name"], []).append(method["name"])
        return found

    @property
    def reference(self) -> str:
        """The method that the others are held against."""
        return self.raw["comparison"]["reference"]

    @cached_property
    def _simulated(self) -> list[str]:
        """Curves of simulated seconds that all runs have."""
        names = self._finished[0]["curves"]
        return [n for n in names if n.startswith(_SIMULATED) and all(n in run["curves"] for run in self._finished)]

    @property
    def simulated(self) -> list[str]:
        """The names of the curves of simulated seconds, nothing overlapping."""
        return [name for name in self._simulated if not name.endswith(_OVERLAPPED)]

    @property
    def overlapped(self) -> list[str]:
        """The same where synchronisations hide behind the next round; of runs from before that was counted none."""
        return [name for name in self._simulated if name.endswith(_OVERLAPPED)]

    def best_baseline(self) -> str | None:
        """The baseline with the best mean final metric."""
        names = [m["name"] for m in self.raw["comparison"]["methods"] if m["baseline"] and self.runs[m["name"]]]
        return min(names, key=lambda name: self.sign * self.mean_final(name)) if names else None

    def mean_final(self, method: str) -> float:
        """Mean final metric of a method."""
        return statistics.fmean(run["final_metric"] for run in self.runs[method])

    def ends(self, method: str, axis: str) -> list[float]:
        """What every run of a method had used up at its end."""
        return [run["curves"][axis][-1] for run in self.runs[method]]

    def limit(self, axis: str) -> float:
        """What all methods are compared at: as much as any run of the reference had used up at its end."""
        return max(self.ends(self.reference, axis))

    def at(self, method: str, axis: str, limit: float) -> dict[int, float]:
        """The metric of every seed of a method once it has used up so much."""
        return {run["seed"]: metric_where(run, axis, limit) for run in self.runs[method]}

    def difference(self, method: str, axis: str) -> Difference | None:
        """Of a method from the reference where both have used up the limit; None where no seed has runs of both."""
        limit = self.limit(axis)
        ours, theirs = self.at(method, axis, limit), self.at(self.reference, axis, limit)
        return paired_difference(ours, theirs, self.sign > 0) if ours.keys() & theirs.keys() else None

    def closest(self, axis: str) -> str | None:
        """The best at the limit of the baselines, or, where there is none, of all methods but the reference."""
        others = [m for m in self.raw["comparison"]["methods"] if m["name"] != self.reference and self.runs[m["name"]]]
        names = [m["name"] for m in others if m["baseline"]] or [m["name"] for m in others]
        limit = self.limit(axis)
        return min(names, key=lambda n: self.sign * statistics.fmean(self.at(n, axis, limit).values()), default=None)

    def frontier(self, budget: float) -> dict[str, tuple[str, dict[int, float]]]:
        """For every family the method with the best mean metric at no more communications, and its metric by seed.

        Only the runs of all seeds count, not those that a method was tuned with.
        """
        found = {}
        for family, methods in self.families.items():
            metrics = {name: self.at(name, "communications", budget) for name in methods}
            best = min(methods, key=lambda name: self.sign * statistics.fmean(metrics[name].values()))
            found[family] = (best, metrics[best])
        return found


def metric_where(run: Mapping[str, Any], axis: str, x: float) -> float:
    """The metric of a run once it has used up x; its last one where it ended before."""
    return float(np.exp(np.interp(x, run["curves"][axis], np.log(run["curves"]["metric"]))))


def used_until(run: Mapping[str, Any], axis: str, target: float, sign: int = 1) -> float | None:
    """What a run has used up when its metric first reaches the target; None where it never does."""
    xs, logs = run["curves"][axis], np.log(run["curves"]["metric"])
    goal = math.log(target)
    for index, value in enumerate(logs):
        if sign * (value - goal) <= 0:
            if index == 0:
                return xs[0]
            share = (logs[index - 1] - goal) / (logs[index - 1] - value)
            return xs[index - 1] + share * (xs[index] - xs[index - 1])
    return None


def mean_curve(runs: Sequence[Mapping[str, Any]], axis: str, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """What runs have used up on average, and the metric of each, at equal shares of their tokens.

    Returns:
        [points] of the axis, and [runs, points] of the metric; the last ones are those of the ends of the runs.
    """
    shares = np.linspace(0.0, 1.0, points)
    used, metrics = [], []
    for run in runs:
        tokens = np.asarray(run["curves"]["tokens"])
        used.append(np.interp(shares * tokens[-1], tokens, run["curves"][axis]))
        metrics.append(np.exp(np.interp(shares * tokens[-1], tokens, np.log(run["curves"]["metric"]))))
    return np.mean(used, axis=0), np.array(metrics)


def short(axis: str) -> str:
    """An axis of simulated time, without the word that they all begin with."""
    return axis.removeprefix(_SIMULATED)
