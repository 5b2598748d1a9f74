"""The page of all comparisons: from the JSON files of compare.py to plots and results.md."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from benchmarks.results import (
    LABELS,
    Results,
    equal_table,
    final_table,
    grid_table,
    mean_curve,
    short,
    target_table,
    verdicts,
)
from benchmarks.search_page import values_found, what_was_searched
from training_logs.showing.plots import colour, make_figure
from utils.utils import write_atomically, write_text_atomically

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
    axes.set_title(f"{name} over {LABELS.get(axis, 'simulated time')}")
    axes.set_xlabel(LABELS.get(axis) or f"seconds: {short(axis)}")
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
        values |= values_found(results.raw, method["name"])
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
    parts += what_was_searched(results.raw)
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
overlaps (`benchmarks/accounting.py`). Runs of before merges and moving nodes were counted whole have of a merge its
parameters alone among their bytes, and nothing of what is sent to nodes that come to a trainer. "What we conclude" is
written by people, in the comparison's file, after the runs of the commit named there; all else is computed."""


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
