"""Figures of a comparison: curves of the metric, and the final metric against communications and time."""

import math
import re
import statistics
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, SymmetricalLogLocator

from benchmarks.compare.results import Results, mean_curve
from training_logs.showing.styles import make_figure


def _styles(results: Results) -> dict[str, dict[str, Any]]:
    """Return a style for each method: variants of one method share a colour, the reference is black."""
    palette = matplotlib.colormaps["tab20"].colors
    colours = [*palette[::2], *palette[1::2]]
    groups: dict[str, list[str]] = {}
    for name in results.methods:
        if name != results.reference:
            groups.setdefault(re.split("[,:]", name)[0], []).append(name)
    styles = {results.reference: {"color": "black", "ls": "-", "marker": "o", "lw": 2.2, "zorder": 5}}
    for colour, names in zip(colours, groups.values(), strict=False):
        for number, name in enumerate(names):
            styles[name] = {"color": colour, "ls": ("-", "--", "-.", ":")[number % 4], "lw": 1.5}
            styles[name]["marker"] = "os^DvP<>X*p"[number % 11]
    return styles


def _label(axes: Axes, results: Results, label: str, ends: list[float], shown: float) -> None:
    """Label the axes and limit them; shown: fraction of the final metrics that are inside."""
    finals = sorted(value for name in results.methods for value in results.finals(name).values())
    axes.set_yscale("log")
    if results.sign > 0:
        high = max(1.3 * finals[0], 1.1 * finals[int(shown * (len(finals) - 1))])
        axes.set_ylim(0.96 * finals[0], high)
    axes.yaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter("{0:.3g}".format))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if min(ends) == 0.0:
        axes.set_xscale("symlog", linthresh=5.0)
        axes.set_xlim(-0.5, 1.3 * max(ends) + 1.0)
        axes.xaxis.set_major_locator(SymmetricalLogLocator(base=10.0, linthresh=1.0, subs=(1.0, 2.0, 5.0)))
    elif label != "training tokens":
        axes.set_xscale("log")
        axes.set_xlim(min(ends) / 3.0, 1.3 * max(ends))
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
        axes.xaxis.set_minor_formatter(NullFormatter())
    thousands = EngFormatter(sep="")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if abs(x) < 1.0 else thousands(x)))
    axes.set_xlabel(label)
    axes.grid(True, which="both", alpha=0.25)


def _axes_of(results: Results) -> dict[str, str]:
    """Return the label of each curve that is drawn."""
    counted = {"tokens": "training tokens", "communications": "communications"}
    return counted | {axis: f"simulated seconds, {network}" for axis, network in results.seconds(False).items()}


def _completed(results: Results) -> list[str]:
    return [name for name in results.methods if results.runs[name]]


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)


def draw_curves(results: Results) -> Figure:
    """Draw the metric over tokens, communications and the simulated time of every network: mean and range of seeds."""
    labels = _axes_of(results)
    styles = _styles(results)
    figure, panels = make_figure(len(labels), 3, (17, 5.0 * math.ceil(len(labels) / 3) + 1.0))
    for axes, (axis, label) in zip(panels, labels.items(), strict=True):
        for name in _completed(results):
            xs, values = mean_curve(results.runs[name], axis)
            axes.fill_between(xs, values.min(0), values.max(0), color=styles[name]["color"], alpha=0.1, lw=0)
            marks = {"markevery": [len(xs) - 1], "ms": 6}
            axes.plot(xs, np.exp(np.log(values).mean(0)), label=results.labelled(name), **styles[name], **marks)
        _label(axes, results, label, [max(results.ends(name, axis)) for name in _completed(results)], 0.9)
    panels[0].set_ylabel(results.raw["metric"]["name"])
    _legend(figure, panels[0])
    return figure


def draw_ends(results: Results) -> Figure:
    """Draw the final metric, mean and range of seeds, over communications and over the time of the fastest network."""
    labels = {axis: label for axis, label in _axes_of(results).items() if axis != "tokens"}
    shown = list(labels.items())[:2]
    styles = _styles(results)
    figure, panels = make_figure(len(shown), 2, (14, 6.5))
    for axes, (axis, label) in zip(panels, shown, strict=True):
        for name in _completed(results):
            finals = list(results.finals(name).values())
            mean = statistics.fmean(finals)
            spread = [[mean - min(finals)], [max(finals) - mean]]
            style = {key: styles[name][key] for key in ("color", "marker")}
            used = statistics.fmean(results.ends(name, axis))
            axes.errorbar(used, mean, spread, ls="", ms=8, capsize=3, label=results.labelled(name), **style)
        _label(axes, results, label, [statistics.fmean(results.ends(name, axis)) for name in _completed(results)], 1.0)
    panels[0].set_ylabel(f"final {results.raw['metric']['name']}")
    _legend(figure, panels[0])
    return figure
