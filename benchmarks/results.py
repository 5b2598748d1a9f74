"""Comparisons in tables and sentences, from the JSON values of compare.py alone.

Every number is a mean over seeds with the sample's standard deviation. Between two evaluations of a run the logarithm
of its metric is taken to be linear.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from utils.utils import byte_size

_SIMULATED = "simulated: "
LABELS = {
    "tokens": "training tokens",
    "inner_steps": "inner steps of a node",
    "communications": "communications",
    "bytes_communicated": "bytes communicated",
    "wall_seconds": "seconds of training on one core of this machine",
}


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

    @property
    def simulated(self) -> list[str]:
        """The names of the curves of simulated seconds."""
        return [name for name in self._finished[0]["curves"] if name.startswith(_SIMULATED)]

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
        return max(self.ends(self.raw["comparison"]["reference"], axis))


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


def _spread(values: Sequence[float], decimals: int = 2) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.fmean(values):,.{decimals}f}"
    return f"{mean} ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else mean


def _count(values: Sequence[float]) -> str:
    """A mean of whole numbers, with a digit after the point where it says something."""
    mean = statistics.fmean(values)
    return f"{mean:,.0f}" if mean >= 100 or mean == round(mean) else f"{mean:,.1f}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def short(axis: str) -> str:
    return axis.removeprefix(_SIMULATED)


# Tables


def grid_table(results: Results) -> str:
    """The final metric of every method with every value it was tuned over; empty where nothing was tuned."""
    grids = {name: (key, values) for name, (key, values) in results.raw["grids"].items() if key}
    if not grids:
        return ""
    seed, rows, edges = results.raw["comparison"]["seeds"][0], [], []
    for name, (key, values) in grids.items():
        best, cells = results.raw["best"][name], []
        for value in values:
            run = next(
                run
                for run in results.raw["outcomes"]
                if (run["method"], run["value"], run["seed"]) == (name, value, seed)
            )
            shown = f"{run['final_metric']:.2f}" if run["completed"] else "stopped"
            cells.append(f"{value:g}: " + (f"**{shown}**" if value == best else shown))
        if len(values) > 1 and best in (min(values), max(values)):
            edges.append(name)
        rows.append((name, f"`{key}`", ", ".join(cells)))
    text = f"Tuned with seed {seed}, the best value bold:\n\n" + _table(("method", "key", "final metric"), rows)
    if edges:
        text += "\n\nBest at the edge of its grid, so perhaps better beyond it: " + ", ".join(edges) + "."
    return text


def final_table(results: Results) -> str:
    """Every method at the end of its token budget."""
    rows = []
    for name in results.methods:
        runs = results.runs[name]
        if not runs:
            rows.append((name, "stopped by an error in every run", *[""] * (6 + len(results.simulated))))
            continue
        lost = len(results.raw["comparison"]["seeds"]) - len(runs)
        rows.append(
            (
                name + (f" ({lost} runs stopped)" if lost else ""),
                _spread([run["final_metric"] for run in runs]),
                f"{statistics.fmean(run['first_batch'] for run in runs):.0f} → "
                f"{statistics.fmean(run['last_batch'] for run in runs):.0f}",
                _count(results.ends(name, "inner_steps")),
                _count(results.ends(name, "communications")),
                byte_size(round(statistics.fmean(results.ends(name, "bytes_communicated")))),
                _seconds(statistics.fmean(results.ends(name, "wall_seconds"))),
                *(_seconds(statistics.fmean(results.ends(name, axis))) for axis in results.simulated),
            )
        )
    columns = ("method", results.raw["metric"]["name"], "examples per step", "inner steps", "communications", "bytes")
    return _table((*columns, "wall-clock", *map(short, results.simulated)), rows)


def equal_table(results: Results) -> str:
    """Every method where it has used up as many communications, or as much simulated time, as the reference at most."""
    reference = results.raw["comparison"]["reference"]
    if not results.runs[reference]:
        return ""
    axes = ["tokens", "communications", *results.simulated]
    limits = {axis: results.limit(axis) for axis in axes}
    rows = []
    for name in results.methods:
        cells = []
        for axis, limit in limits.items():
            if not results.runs[name]:
                cells.append("")
                continue
            values = [metric_where(run, axis, limit) for run in results.runs[name]]
            ended = all(end < 0.98 * limit for end in results.ends(name, axis))
            cells.append(_spread(values) + (" (at its end)" if ended else ""))
        rows.append((name, *cells))
    shown = {axis: f"{limit:,.0f}" if limit >= 100 else f"{limit:.3g}" for axis, limit in limits.items()}
    columns = [f"{shown[axis]} {LABELS[axis]}" for axis in axes[:2]]
    columns += [f"{shown[axis]} s: {short(axis)}" for axis in axes[2:]]
    return _table(("method", *columns), rows)


def target_table(results: Results) -> tuple[str, float | None]:
    """What every method has used up when it reaches the final metric of the best baseline; and that metric."""
    baseline = results.best_baseline()
    if baseline is None:
        return "", None
    target, rows = results.mean_final(baseline), []
    axes = ["tokens", "communications", *results.simulated]
    for name in results.methods:
        runs, cells = results.runs[name], []
        reached = [run for run in runs if used_until(run, "tokens", target, results.sign) is not None]
        for axis in axes:
            used = [used_until(run, axis, target, results.sign) for run in reached]
            if not used:
                cells.append("-")
            elif axis in ("tokens", "communications"):
                cells.append(_count([round(value, 1) for value in used]))
            else:
                cells.append(_seconds(statistics.fmean(used)))
        rows.append((name, f"{len(reached)} of {len(runs)}", *cells))
    columns = ("method", "runs that reach it", *(LABELS[axis] for axis in axes[:2]), *map(short, axes[2:]))
    return _table(columns, rows), target


def verdicts(results: Results) -> list[str]:
    """What follows from the numbers alone, in sentences."""
    there = [name for name in results.methods if results.runs[name]]
    reference, name_of_metric = results.raw["comparison"]["reference"], results.raw["metric"]["name"]
    said = []

    def winner(value: Callable[[str], float], among: Sequence[str], where: str) -> None:
        ranked = sorted(among, key=lambda name: results.sign * value(name))
        second = f", before {ranked[1]} ({value(ranked[1]):.2f})" if len(ranked) > 1 else ""
        place = ranked.index(reference) + 1
        own = f"; {reference} is number {place} of {len(ranked)} ({value(reference):.2f})" if place > 1 else ""
        said.append(f"At {where} {ranked[0]} has the best {name_of_metric} ({value(ranked[0]):.2f}){second}{own}.")

    if reference not in there:
        return [f"{reference} came to its end in no run."]
    winner(results.mean_final, there, "equal tokens")
    for axis in ("communications", *results.simulated):
        limit = results.limit(axis)
        words = (
            "as many communications as the reference"
            if axis == "communications"
            else f"equal simulated time ({short(axis)})"
        )

        def there_then(name: str, axis: str = axis, limit: float = limit) -> float:
            return statistics.fmean(metric_where(run, axis, limit) for run in results.runs[name])

        winner(there_then, there, words)
    baseline = results.best_baseline()
    if baseline is not None:
        share = statistics.fmean(results.ends(reference, "communications")) / statistics.fmean(
            results.ends(baseline, "communications")
        )
        own, other = results.mean_final(reference), results.mean_final(baseline)
        worse = results.sign * (own - other)
        said.append(
            f"Against the best baseline, {baseline}, {reference} ends with a {name_of_metric} "
            f"{'higher' if own > other else 'lower'} by {abs(own / other - 1):.1%} "
            f"({own:.2f} against {other:.2f}, {'worse' if worse > 0 else 'better'}) and makes {share:.2f} times its "
            f"communications."
        )
    return said
