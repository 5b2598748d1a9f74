"""Comparisons in tables, plots and words: from the JSON files of compare.py alone to results.md.

Every number is a mean over seeds with the sample's standard deviation. Between two evaluations of a run the logarithm
of its metric is taken to be linear.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from training_logs.plots import colour, make_figure
from utils.utils import byte_size, write_atomically, write_text_atomically

_SIMULATED = "simulated: "
_LABELS = {
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


def _short(axis: str) -> str:
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
    return _table((*columns, "wall-clock", *map(_short, results.simulated)), rows)


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
    columns = [f"{shown[axis]} {_LABELS[axis]}" for axis in axes[:2]]
    columns += [f"{shown[axis]} s: {_short(axis)}" for axis in axes[2:]]
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
    columns = ("method", "runs that reach it", *(_LABELS[axis] for axis in axes[:2]), *map(_short, axes[2:]))
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
            else f"equal simulated time ({_short(axis)})"
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


# Plots


def _style(index: int) -> dict[str, Any]:
    return {"color": colour(index), "ls": ("-", "--", ":")[index // 10 % 3], "lw": 1.6}


def _limit_metric(axes: Axes, results: Results, room: float) -> None:
    """From the best final metric to that of most methods, and some room; what is far off is left out."""
    finals = sorted(results.mean_final(name) for name in results.methods if results.runs[name])
    low, high = finals[0], finals[len(finals) * 3 // 4]
    margin = room * (high - low) + 0.02 * high
    axes.set_ylim(low - 0.3 * margin, high + margin)


def _logarithmic(axes: Axes, low: float, high: float) -> None:
    """A logarithmic x axis with numbers that can be read, few or many as there is room."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    subs = (1.0, 2.0, 5.0) if high > 12.0 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())


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


def _draw_curves(axes: Axes, results: Results, axis: str) -> None:
    for index, name in enumerate(results.methods):
        runs = results.runs[name]
        if not runs:
            continue
        xs, values = mean_curve(runs, axis)
        axes.fill_between(xs, values.min(0), values.max(0), color=colour(index), alpha=0.13, lw=0)
        axes.plot(xs, np.exp(np.log(values).mean(0)), label=name, **_style(index))
    _limit_metric(axes, results, 3.0)
    name = results.raw["metric"]["name"]
    axes.set_title(f"{name} over {_LABELS.get(axis, 'simulated time')}")
    axes.set_xlabel(_LABELS.get(axis) or f"seconds: {_short(axis)}")
    axes.set_ylabel(name)
    axes.grid(True, which="both", alpha=0.25)
    ends = [max(results.ends(method, axis)) for method in results.methods if results.runs[method]]
    if axis != "tokens" and max(ends) > 0:
        smallest = min(end for end in ends if end > 0)
        _logarithmic(axes, smallest / 3, 1.2 * max(ends))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_curves(results: Results):
    """The metric over everything that is used up, at equal shares of the runs: mean over seeds, and their range."""
    axes_names = ["tokens", "inner_steps", "communications", *results.simulated[-3:]]
    figure, places = make_figure(len(axes_names), 3, (17, 5.2 * math.ceil(len(axes_names) / 3)))
    for place, axis in zip(places, axes_names, strict=True):
        _draw_curves(place, results, axis)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def draw_frontier(results: Results):
    """The final metric of every method beside the communications it made, and closer; the lower left is better."""
    figure, places = make_figure(2, 2, (14, 6.5))
    name_of_metric = results.raw["metric"]["name"]
    made = {
        name: max(statistics.fmean(results.ends(name, "communications")), 1.0)
        for name in results.methods
        if results.runs[name]
    }
    for axes in places:
        for index, name in enumerate(results.methods):
            if name not in made:
                continue
            ys = [run["final_metric"] for run in results.runs[name]]
            x, y = made[name], statistics.fmean(ys)
            shape = ("o", "s", "^")[index // 10 % 3]
            axes.errorbar(x, y, [[y - min(ys)], [max(ys) - y]], fmt=shape, color=colour(index), capsize=3, label=name)
        _logarithmic(axes, min(made.values()) / 1.3, 1.3 * max(made.values()))
        axes.grid(True, which="both", alpha=0.25)
        axes.set_xlabel("communications of the whole run (none counts as one)")
        axes.set_ylabel(f"final {name_of_metric}")
    places[0].set_title(f"final {name_of_metric}, mean and range over seeds")
    places[1].set_title("closer")
    _limit_metric(places[1], results, 0.6)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return figure


# The page


def _hardware(results: Results) -> str:
    lines = []
    for device in results.raw["comparison"]["hardware"]:
        parameters = device["parameters"] or results.raw["parameters"]
        lines.append(
            f"- {device['name']}: t_min {1e3 * device['t_min']:.3g} ms, t_example {1e3 * device['t_example']:.3g} ms, "
            f"{parameters:,.0f} parameters sent as float32"
        )
    lines += [
        f"- {network['name']}: {network['bits_per_second']:,.0f} bit/s, latency {1e3 * network['latency']:g} ms"
        for network in results.raw["comparison"]["networks"]
    ]
    return "\n".join(lines)


def _settings(results: Results) -> str:
    comparison = results.raw["comparison"]
    lines = [f"base: {comparison['base']}", f"seeds: {comparison['seeds']}"]
    lines += [f"{key}: {value}" for key, value in comparison["common"].items()]
    for method in comparison["methods"]:
        tuned = results.raw["grids"][method["name"]][0]
        values = dict(method["overrides"]) | ({tuned: results.raw["best"][method["name"]]} if tuned else {})
        shown = " ".join(f"{key}={value}" for key, value in values.items())
        lines.append(f"{method['name']}: {shown or '(nothing else)'}")
    return "\n".join(lines)


def section(results: Results) -> str:
    """One comparison as Markdown."""
    comparison, name = results.raw["comparison"], results.raw["name"]
    commits = sorted({run["commit"] for run in results.raw["outcomes"]})
    machines = " and ".join(sorted({run["machine"] for run in results.raw["outcomes"]}))
    versions = ", ".join(f"{key} {value}" for key, value in results.raw["versions"].items())
    table, target = target_table(results)
    best_baseline = results.best_baseline()
    parts = [
        f"## {comparison['title']}",
        comparison["question"].strip(),
        f"Made by `python benchmarks/compare.py benchmarks/comparisons/{name}.yaml` with commit {', '.join(commits)} "
        f"on {machines}; {versions}. Seeds {', '.join(map(str, comparison['seeds']))}.",
        "### What the numbers say",
        "\n".join(f"- {sentence}" for sentence in verdicts(results)),
    ]
    if comparison["answer"].strip():
        parts += ["### What we conclude", comparison["answer"].strip()]
    parts += [
        f"![Curves](results/{name}.png)",
        f"![Frontier](results/{name}_frontier.png)",
        "### At the end of the token budget",
        final_table(results),
        f"### At what {comparison['reference']} has used up at most",
        equal_table(results),
    ]
    if target is not None:
        parts += [f"### Until the {results.raw['metric']['name']} is {target:.2f}, that of {best_baseline}", table]
    if tuned := grid_table(results):
        parts += ["### The grid", tuned]
    parts += [
        "### Simulated hardware and networks",
        _hardware(results),
        f"<details><summary>Settings</summary>\n\n```\n{_settings(results)}\n```\n\n</details>",
    ]
    return "\n\n".join(parts)


_INTRODUCTION = """# Results

Written by `python benchmarks/compare.py` from the files in `results/`; not to be edited by hand. Numbers are means over
seeds with the sample's standard deviation, curves means with the range over seeds. A communication is one
synchronisation of a trainer or one merge. Wall-clock: training on one thread of the machine named below, evaluation
excluded, while its other cores made other runs. Simulated time: nodes work side by side, each on a device of its own; a
forward and backward pass takes max(t_min, b * t_example), a synchronisation latency + bytes / bandwidth, and nothing
overlaps (`benchmarks/accounting.py`). "What we conclude" is written by people, in the comparison's file, after the runs
of the commit named there; all else is computed."""


def write_results(output: Path) -> Path:
    """Draw all comparisons in output/results/*.json and write output/results.md; where it is."""
    sections, contents = [], []
    for path in sorted((output / "results").glob("*.json")):
        results = Results(json.loads(path.read_text(encoding="utf-8")))
        for suffix, draw in (("", draw_curves), ("_frontier", draw_frontier)):
            image = path.with_name(f"{path.stem}{suffix}.png")
            write_atomically(image, lambda place, draw=draw, results=results: draw(results).savefig(place, dpi=80))
        sections.append(section(results))
        title = results.raw["comparison"]["title"]
        contents.append(f"- [{title}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})")
    page = [_INTRODUCTION, "\n".join(contents), *sections]
    write_text_atomically(output / "results.md", "\n\n".join(page) + "\n")
    return output / "results.md"
