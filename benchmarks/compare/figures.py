"""Figures of a comparison: curves of the metric, and what every method ends with."""

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, SymmetricalLogLocator

from benchmarks.compare.results import Results, mean_curve
from training_logs.showing.styles import make_figure

# The figure of curves shows ends up to this multiple of the lowest end.
_HIGHEST_END = 3.0
# It shows at least this range, so that curves have a length.
_SMALLEST_RANGE = 1.8
# With more methods, the ranges of seeds would hide curves.
_METHODS_WITH_RANGES = 12
_LINES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 2, 2)))


def _styles(results: Results) -> dict[str, dict[str, Any]]:
    """Return a style for each method: variants of one method share a colour, the reference is wide and grey."""
    palette = matplotlib.colormaps["tab20"].colors
    colours = [*palette[::2], *palette[1::2]]
    groups: dict[str, list[str]] = {}
    for name in results.methods:
        if name != results.reference:
            groups.setdefault(re.split("[,:]", name)[0], []).append(name)
    # A curve with the same values stays visible on top of the wide one.
    styles = {results.reference: {"color": "0.6", "ls": "-", "marker": "o", "lw": 5.0, "zorder": 1.5}}
    for colour, names in zip(colours, groups.values(), strict=False):
        for number, name in enumerate(names):
            styles[name] = {"color": colour, "ls": _LINES[number % 8], "lw": 1.5}
            styles[name]["marker"] = "os^DvP<>X*p"[number % 11]
    return styles


def _scale_usage(axis: Axis, label: str, low: float, high: float, wide: bool) -> None:
    """Label an axis of usage from `low` to `high`; it is logarithmic except for tokens."""
    ticks = (1.0, 2.0, 5.0) if wide or high < 20.0 * max(low, 1.0) else (1.0,)
    scale = axis.axes.set_xscale
    if label == "training tokens":
        axis.axes.set_xlim(low, high + 0.03 * (high - low))
    elif low == 0.0:
        scale("symlog", linthresh=5.0)
        axis.axes.set_xlim(-0.5, 1.3 * high + 1.0)
        axis.set_major_locator(SymmetricalLogLocator(base=10.0, linthresh=1.0, subs=ticks))
    else:
        scale("log")
        axis.axes.set_xlim(0.95 * low, 1.2 * high)
        axis.set_major_locator(LogLocator(subs=ticks, numticks=20))
        axis.set_minor_formatter(NullFormatter())
    thousands = EngFormatter(sep="")
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if abs(x) < 1.0 else thousands(x)))
    axis.set_label_text(label)


def _scale_metric(axis: Axis, label: str) -> None:
    axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter("{0:.3g}".format))
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(label)


def _axes_of(results: Results) -> dict[str, str]:
    """Return the label of each usage that is drawn: communications, and the time of the fastest and slowest network."""
    networks = list(results.seconds.items())
    chosen = dict(networks[:1] + networks[1:][-1:])
    return {"communications": "communications"} | {axis: f"simulated seconds, {name}" for axis, name in chosen.items()}


def _completed(results: Results) -> list[str]:
    return [name for name in results.methods if results.runs[name]]


def _highest_shown(results: Results) -> float:
    ends = [value for name in results.methods for value in results.finals(name).values()]
    if results.sign < 0:
        return max(ends)
    lowest = min(ends)
    return max(_SMALLEST_RANGE * lowest, min(1.1 * max(ends), _HIGHEST_END * lowest))


def _entry(xs: Sequence[float], metric: np.ndarray, highest: float) -> float:
    """Return the usage at which a curve enters a panel."""
    inside = np.flatnonzero(metric <= highest)
    return float(xs[max(0, inside[0] - 1)]) if len(inside) else math.inf


def draw_curves(results: Results) -> Figure:
    """Draw the metric over tokens, communications and simulated time: mean of seeds, and range if methods are few."""
    labels = {"tokens": "training tokens"} | _axes_of(results)
    styles = _styles(results)
    highest = _highest_shown(results)
    lowest = min(value for name in results.methods for value in results.finals(name).values())
    names = _completed(results)
    lines = math.ceil(len(names) / 4)
    figure, panels = make_figure(len(labels), 2, (15, 5.2 * math.ceil(len(labels) / 2) + 0.25 * lines))
    for axes, (axis, label) in zip(panels, labels.items(), strict=True):
        entries = []
        for name in names:
            xs, values = mean_curve(results.runs[name], axis)
            mean = np.exp(np.log(values).mean(0))
            entries.append(_entry(xs, mean, highest))
            if len(names) <= _METHODS_WITH_RANGES:
                axes.fill_between(xs, values.min(0), values.max(0), color=styles[name]["color"], alpha=0.1, lw=0)
            axes.plot(xs, mean, label=results.labelled(name), markevery=[len(xs) - 1], ms=6, **styles[name])
        if results.sign > 0:
            axes.set_yscale("log")
            axes.set_ylim(0.97 * lowest, highest)
        _scale_metric(axes.yaxis, results.raw["metric"]["name"])
        highest_usage = max(max(results.ends(name, axis)) for name in names)
        _scale_usage(axes.xaxis, label, min(entries), highest_usage, wide=True)
        axes.grid(True, which="both", alpha=0.25)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=min(4, len(names)), fontsize=9)
    return figure


def draw_ends(results: Results) -> Figure:
    """Draw a row for each method: its final metric, mean and range of seeds, and what it has used."""
    labels = _axes_of(results)
    names = _completed(results)
    rows = range(len(names))
    figure, panels = make_figure(1 + len(labels), 4, (15, 1.2 + 0.3 * len(names)))
    metric = [list(results.finals(name).values()) for name in names]
    means = [statistics.fmean(values) for values in metric]
    ranges = [[mean - min(values) for mean, values in zip(means, metric, strict=True)]]
    ranges.append([max(values) - mean for mean, values in zip(means, metric, strict=True)])
    colours = ["black" if name == results.reference else "#1f77b4" for name in names]
    panels[0].errorbar(means, rows, xerr=ranges, ls="", capsize=3, ecolor="0.4", zorder=1)
    panels[0].scatter(means, rows, c=colours, s=36, zorder=2)
    if results.sign > 0:
        panels[0].set_xscale("log")
    _scale_metric(panels[0].xaxis, f"final {results.raw['metric']['name']}")
    for axes, (axis, label) in zip(panels[1:], labels.items(), strict=True):
        used = [statistics.fmean(results.ends(name, axis)) for name in names]
        axes.scatter(used, rows, c=colours, s=36)
        _scale_usage(axes.xaxis, label.replace(", ", ",\n"), min(used), max(used), wide=False)
    for number, axes in enumerate(panels):
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(rows, [results.labelled(name) for name in names] if number == 0 else [])
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x", which="both", alpha=0.25)
        for row in rows:
            axes.axhline(row, color="0.9", lw=0.8, zorder=0)
    return figure
