"""Figures of a comparison: curves, and the frontier of final metric and communications."""

import math
import statistics
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from benchmarks.compare.results import LABELS, Results, mean_curve, short
from training_logs.showing.styles import colour, make_figure


def _line(index: int) -> dict[str, Any]:
    return {"color": colour(index), "ls": ("-", "--", ":")[index // 10 % 3], "lw": 1.6}


def _limit_metric(axes: Axes, results: Results, room: float) -> None:
    """Limit the y axis to the best three quarters of the final metrics, with a margin."""
    finals = sorted(results.mean_final(name) for name in results.methods if results.runs[name])
    low = finals[0]
    high = finals[len(finals) * 3 // 4]
    margin = room * (high - low) + 0.02 * high
    axes.set_ylim(low - 0.3 * margin, high + margin)


def _logarithmic(axes: Axes, low: float, high: float) -> None:
    """Make the x axis logarithmic, with readable ticks."""
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
        axes.plot(xs, np.exp(np.log(values).mean(0)), label=results.labelled(name), **_line(index))
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


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)


def draw_curves(results: Results) -> Figure:
    """Draw the metric over each kind of usage: mean and range over seeds."""
    axes_names = ["tokens", "communications", "bytes_communicated", *results.simulated[-3:]]
    figure, places = make_figure(len(axes_names), 3, (17, 5.2 * math.ceil(len(axes_names) / 3)))
    for place, axis in zip(places, axes_names, strict=True):
        _draw_curves(place, results, axis)
    _legend(figure, places[0])
    return figure


def draw_frontier(results: Results) -> Figure:
    """Draw the final metric over communications, whole and enlarged; a line is the frontier of a family."""
    figure, places = make_figure(2, 2, (14, 6.5))
    metric = results.raw["metric"]["name"]
    made = {
        name: max(statistics.fmean(results.ends(name, "communications")), 1.0)
        for name in results.methods
        if results.runs[name]
    }
    for axes in places:
        for index, name in enumerate(results.methods):
            if name not in made:
                continue
            finals = [run["final_metric"] for run in results.runs[name]]
            mean = statistics.fmean(finals)
            spread = [[mean - min(finals)], [max(finals) - mean]]
            shape = ("o", "s", "^")[index // 10 % 3]
            style = {"fmt": shape, "color": colour(index), "capsize": 3, "label": results.labelled(name)}
            axes.errorbar(made[name], mean, spread, **style)
        for members in results.families.values():
            line: list[tuple[float, float]] = []
            for x, y in sorted((made[name], results.mean_final(name)) for name in members):
                if not line or results.sign * (y - line[-1][1]) < 0:
                    line.append((x, y))
            axes.plot(*zip(*line, strict=True), color="0.6", lw=0.8, zorder=0)
        _logarithmic(axes, min(made.values()) / 1.3, 1.3 * max(made.values()))
        axes.grid(True, which="both", alpha=0.25)
        axes.set_xlabel("communications of the whole run (none counts as one)")
        axes.set_ylabel(f"final {metric}")
    places[0].set_title(f"final {metric}, mean and range over seeds")
    places[1].set_title("enlarged")
    _limit_metric(places[1], results, 0.6)
    _legend(figure, places[0])
    return figure
