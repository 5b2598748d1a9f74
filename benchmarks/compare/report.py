"""The page and the figures of a comparison, and the overview results.md of the published ones.

Numbers are means over seeds with the sample's standard deviation.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, SymmetricalLogLocator

from benchmarks.compare.results import COARSE, TOLERANCE, Results, mean_curve, used_until
from benchmarks.compare.spec import COMPARISONS
from training_logs.showing.styles import literal, make_figure
from utils.files import write_atomically, write_text_atomically
from utils.text import byte_size

USAGE = {"tokens": "tokens", "communications": "communications", "bytes_communicated": "bytes"}
# Columns of the table of verdicts, beside the method.
_MOST_VERDICTS = 6
# What the overview shows of a comparison.
_SHOWN = re.compile(r"\{(run|page|section): (\w+)(?:: ([^}]+))?\}")
# The figure of curves shows ends up to this multiple of the lowest end.
_HIGHEST_END = 3.0
# It shows at least this range, so that curves have a length.
_SMALLEST_RANGE = 1.8
# The figure of ends names those above this multiple of the lowest at its edge.
_FARTHEST_END = 6.0
# Inches.
_WIDTH = 15
# With more methods, the ranges of seeds would hide curves.
_METHODS_WITH_RANGES = 12
_LINES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 2, 2)))


def _spread(values: Iterable[float]) -> str:
    values = list(values)
    mean = f"{statistics.fmean(values):,.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def _amount(values: Sequence[float], axis: str) -> str:
    mean = statistics.fmean(values)
    if axis == "bytes_communicated":
        return byte_size(round(mean))
    if axis in ("tokens", "communications", "inner_steps"):
        return f"{mean:,.0f}" if mean >= 100 or mean == round(mean) else f"{mean:,.1f}"
    return f"{mean:,.0f} s" if mean >= 100 else f"{mean:.3g} s"


def _millions(count: float) -> str:
    return f"{count / 1e6:.2g}M" if count < 10e6 else f"{count / 1e6:.0f}M"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in (columns, *rows))
    return "\n".join([f"| {head} |", "|" + " --- |" * len(columns), *(f"| {line} |" for line in lines)])


def token_range(results: Results) -> tuple[float, float] | None:
    """Return the fewest and most tokens of a run; None if all runs have about as many."""
    totals = [run["curves"]["tokens"][-1] for runs in results.runs.values() for run in runs]
    return (min(totals), max(totals)) if max(totals) > (1.0 + TOLERANCE) * min(totals) else None


def _sizes(results: Results) -> str:
    """Return the parameters of the smallest and the largest model."""
    common = results.raw["parameters"]
    sizes = [run.get("parameters", common) for runs in results.runs.values() for run in runs]
    return " to ".join(dict.fromkeys((_millions(min(sizes)), _millions(max(sizes)))))


def _seed_counts(results: Results) -> str:
    return " to ".join(map(str, results.seed_counts))


def heading(results: Results) -> str:
    comparison = results.raw["comparison"]
    first = next(run for runs in results.runs.values() for run in runs)
    tokens = token_range(results) or (first["curves"]["tokens"][-1],)
    setting = [
        comparison["corpus"] or comparison["common"].get("dataset") or f"dataset of {comparison['base']}",
        f"{_sizes(results)} parameters",
        f"{' to '.join(map(_millions, tokens))} tokens",
        "one seed" if results.seed_counts == [1] else f"{_seed_counts(results)} seeds",
    ]
    return f"{comparison['title']} ({', '.join(setting)})"


def worded(results: Results, key: str) -> str:
    """Return a text of the comparison file in which {METHOD} is replaced by the method's mean final metric."""

    def mean(match: re.Match) -> str:
        runs = results.runs.get(match[1])
        return f"{statistics.fmean(run['final_metric'] for run in runs):.2f}" if runs else match[0]

    return re.sub(r"\{([^{}]+)\}", mean, results.raw["comparison"][key].strip())


def caption(results: Results) -> str:
    comparison = results.raw["comparison"]
    answer = worded(results, "answer")
    return f"**Question:** {comparison['question'].strip()}" + (f"\n\n**Answer:** {answer}" if answer else "")


def verdict_table(results: Results) -> str:
    """Return whether each method is better or worse than its reference at equal usage."""
    times = {axis: f"time, {name}" for axis, name in results.seconds.items()}
    columns = _verdict_columns(results, times)
    if len(columns) > _MOST_VERDICTS - results.several_references:
        columns = _verdict_columns(results, {axis: times[axis] for axis in _extreme_networks(results)})
    others = results.compared
    heads = ["method", *map("<br>".join, columns.values())]
    rows = [list(row) for row in zip(others, *columns, strict=True)]
    if results.several_references:
        heads.insert(1, "reference")
        for row in rows:
            row.insert(1, results.references[row[0]])
    return _table(heads, rows)


def _verdict_columns(results: Results, times: Mapping[str, str]) -> dict[tuple[str, ...], list[str]]:
    """Return the labels of each column of verdicts; axes with the same verdicts share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for axis, label in (USAGE | times).items():
        verdicts = [results.verdict(method, axis) for method in results.compared]
        amount = "" if results.several_references else f": {_amount(results.ends(results.reference, axis), axis)}"
        columns.setdefault(tuple(verdicts), []).append(f"{label}{amount}")
    return columns


def final_table(results: Results) -> str:
    rows = []
    length = "tokens" if token_range(results) else "inner_steps"
    for name in results.methods:
        runs = results.runs[name]
        if not runs:
            rows.append([results.labelled(name), *[""] * 6])
            continue
        difference = str(results.difference(name) or "not comparable") if name in results.compared else ""
        batches = [f"{statistics.fmean(run[key] for run in runs):.0f}" for key in ("first_batch", "last_batch")]
        usage = [_amount(results.ends(name, axis), axis) for axis in (length, "communications", "bytes_communicated")]
        metric = _spread(results.finals(name).values())
        rows.append((results.labelled(name), metric, difference, " to ".join(dict.fromkeys(batches)), *usage))
    reference = "the reference" if results.several_references else results.reference
    columns = ("method", results.raw["metric"]["name"], f"difference from {reference}", "examples per step")
    return _table((*columns, length.replace("_", " "), "communications", "bytes"), rows)


def _extreme_networks(results: Results) -> dict[str, str]:
    """Return axis and label of the simulated time with the first and with the last network."""
    networks = list(results.seconds.items())
    return dict(networks[:1] + networks[-1:])


def _figure_axes(results: Results) -> dict[str, str]:
    times = {axis: f"simulated seconds, {name}" for axis, name in _extreme_networks(results).items()}
    return {"communications": "communications"} | times


def seconds_table(results: Results, axes: Mapping[str, str]) -> str:
    rows = [(name, *(_amount(results.ends(name, axis), axis) for axis in axes)) for name in _completed(results)]
    return _table(("method", *axes.values()), rows)


def _clocks(results: Results) -> str:
    """Return in words how long a pass takes on each device."""
    return " ".join(
        f"On {device['name']} a pass over b examples takes {1e3 * device['t_min']:.2f} ms, or b times "
        f"{1e3 * device['t_example']:.2f} ms if that is more."
        for device in results.raw["comparison"]["hardware"]
    )


def target(results: Results, reference: str) -> float:
    """Return the metric that every run of a reference reaches."""
    finals = [run["curves"]["metric"][-1] for run in results.runs[reference]]
    return max(finals, key=lambda metric: results.sign * metric)


def target_table(results: Results) -> str:
    """Return what every method has used when it reaches the metric that every run of its reference reaches."""
    axes = {"tokens": "tokens", "inner_steps": "inner steps", "communications": "communications"}
    axes |= _extreme_networks(results)
    rows = []
    for name in results.methods:
        if not results.runs[results.references[name]]:
            rows.append((name, "the reference stopped", *["-"] * len(axes)))
            continue
        goal = target(results, results.references[name])
        used = {axis: [used_until(run, axis, goal, results.sign) for run in results.runs[name]] for axis in axes}
        reached = {axis: [between for between in found if between is not None] for axis, found in used.items()}
        cells = [_between(found, axis) if found else "-" for axis, found in reached.items()]
        reach = f"{len(reached['tokens'])} of {len(results.seeds[name])}"
        rows.append((name, f"{reach}: {goal:.2f}" if results.several_references else reach, *cells))
    return _table(("method", "runs that reach it", *axes.values()), rows)


def _between(found: Sequence[tuple[float, float]], axis: str) -> str:
    least, most = (_amount(amounts, axis) for amounts in zip(*found, strict=True))
    if least != most and not any(low for low, _ in found):  # evaluated at the start and the end only
        return f"at most {most}"
    return least if least == most else f"{least} to {most}"


def _settings(results: Results) -> str:
    comparison = results.raw["comparison"]
    values = {key: comparison[key] for key in ("base", "seeds", "common", "hardware", "networks")}
    values["methods"] = {method["name"]: method["overrides"] for method in comparison["methods"]}
    own_seeds = {method["name"]: method["seeds"] for method in comparison["methods"] if method.get("seeds")}
    if own_seeds:
        values["seeds of methods"] = own_seeds
    return f"```yaml\n{yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=150)}```"


def _origin(results: Results) -> str:
    outcomes = results.raw["outcomes"]
    machines = " and ".join(sorted({run["machine"] for run in outcomes}))
    commits = ", ".join(sorted({run["commit"] for run in outcomes}))
    versions = {
        f"{library} {version}"
        for run in outcomes
        for library, version in run.get("versions", results.raw.get("versions", {})).items()
    }
    text = [f"Made by `python benchmarks/compare/compare.py {results.raw['file']}` with commit {commits}"]
    if "+" in commits:
        text.append(" (+ marks a working tree with changes that were not committed)")
    seeds = sorted({run["seed"] for run in outcomes})
    text.append(f" on {machines}; {', '.join(sorted(versions))}. {'Seeds' if len(seeds) > 1 else 'Seed'} ")
    text.append(f"{', '.join(map(str, seeds))}.")
    if any(run["completed"] and "data" not in run for run in outcomes):
        text.append(" Some outcomes were recorded without a digest of their data.")
    made: dict[str, dict[str, None]] = {}
    for run in outcomes:
        made.setdefault(run["commit"], {})[run["method"]] = None
    if len(made) > 1:
        text.append("\n\n" + _table(("commit", "rows"), [(commit, "<br>".join(rows)) for commit, rows in made.items()]))
    return "".join(text)


def page(results: Results) -> str:
    name = results.raw["name"]
    metric = results.raw["metric"]["name"]
    reference = results.reference
    networks = results.seconds
    parts = [f"# {heading(results)}", caption(results), f"![Curves]({name}.png)"]
    parts.append(
        f"A curve ends with a marker. The wide grey curve is {reference}. "
        f"With at most twelve methods, bands show the range of seeds.{_left_out(results)}"
    )
    several = results.several_references
    compares = several or bool(results.runs[reference])
    if compares:
        published = results.raw["file"].startswith("benchmarks/comparisons/")
        differences = [results.difference(method) for method in results.compared]
        signs = any(difference is not None and difference.interval is None for difference in differences)
        one_seed = " With one seed a verdict is only the sign of a difference." if signs else ""
        meaning = "[meaning](../comparing.md#what-the-numbers-mean)" if published else "meaning: docs/comparing.md"
        if several:
            parts += ["## Verdicts", f"Each method against its reference, at equal usage ({meaning}).{one_seed}"]
        else:
            parts.append(f"## Verdicts against {reference}")
            parts.append(f"At equal usage, that of {reference} in the head of each column ({meaning}).{one_seed}")
        parts.append(verdict_table(results))
    parts += [f"![Ends]({name}_ends.png)", "## End of the runs", final_table(results)]
    if networks:
        parts += ["## Simulated time", _clocks(results), seconds_table(results, networks)]
    if compares:
        goal = "of the reference"
        if not several:
            goal = f"is {target(results, reference):.2f}, which every run of {reference} reaches"
        parts.append(f"## Usage until the {metric} {goal}")
        parts.append(
            f"Interpolated between evaluations. A range: it is reached between two that are more than {COARSE:.0%} of "
            f"the run apart."
        )
        parts.append(target_table(results))
    if results.raw["comparison"]["details"]:
        parts += ["## Details and limitations", worded(results, "details")]
    parts += ["## Origin", _origin(results)]
    parts += ["<details><summary>Settings</summary>", _settings(results), "</details>"]
    return "\n\n".join(parts) + "\n"


def write_page(results: Results, folder: Path) -> Path:
    """Write the page of a comparison and its figures; return the path of the page."""
    for suffix, draw in (("", draw_curves), ("_ends", draw_ends)):
        image = folder / f"{results.raw['name']}{suffix}.png"
        write_atomically(image, lambda place, draw=draw: draw(results).savefig(place, dpi=80))
    path = folder / f"{results.raw['name']}.md"
    write_text_atomically(path, page(results))
    return path


def overview(template: str, comparisons: Mapping[str, Results]) -> str:
    """Return results.md: a template with numbers of comparisons.

    {run: NAME: METHOD} becomes cells with metric, communications and bytes; {page: NAME} cells with link, corpus,
    seeds and parameters; {section: NAME} the caption and the figure of a comparison.
    """

    def filled(match: re.Match) -> str:
        kind, name, method = match.groups()
        results = comparisons[name]
        if kind == "run":
            usage = [_amount(results.ends(method, axis), axis) for axis in ("communications", "bytes_communicated")]
            return " | ".join([_spread(results.finals(method).values()), *usage])
        if kind == "page":
            comparison = results.raw["comparison"]
            link = f"[{comparison['title']}](results/{name}.md)"
            return f"{link} | {comparison['corpus']} | {_seed_counts(results)} | {_sizes(results)}"
        more = f"[Verdicts, tables and settings](results/{name}.md)."
        return f"## {heading(results)}\n\n{caption(results)} {more}\n\n![Ends](results/{name}_ends.png)"

    return _SHOWN.sub(filled, template)


def write_overview(output: Path, read: Callable[[Path], Mapping[str, Any]]) -> None:
    """Write results.md if output/results has all comparisons that it shows.

    Args:
        output: receives results.md.
        read: reads recorded results; empty if there are none.
    """
    template = (COMPARISONS / "overview.md").read_text(encoding="utf-8")
    names = sorted({name for _, name, _ in _SHOWN.findall(template)})
    raws = {name: read(output / "results" / f"{name}.json") for name in names}
    if not all(raws.values()):
        return
    comparisons = {name: Results(raw) for name, raw in raws.items()}
    write_text_atomically(output / "results.md", overview(template, comparisons))


# Figures: curves of the metric, and what every method ends with


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
    for colour, names in zip(itertools.cycle(colours), groups.values(), strict=False):
        for number, name in enumerate(names):
            marker = "os^DvP<>X*p"[number % 11]
            styles[name] = {"color": colour, "ls": _LINES[number % 8], "lw": 1.5, "marker": marker}
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
        margin = max(1.05, (high / low) ** 0.04)  # so that the axis does not cut the marker of the lowest
        axis.axes.set_xlim(low / margin, 1.2 * high)
        axis.set_major_locator(LogLocator(subs=ticks, numticks=20))
        axis.set_minor_formatter(NullFormatter())
    thousands = EngFormatter(sep="")
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if abs(x) < 1.0 else thousands(x)))
    axis.set_label_text(literal(label))


def _scale_metric(axis: Axis, label: str) -> None:
    axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter("{0:.3g}".format))
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(literal(label))


def _completed(results: Results) -> list[str]:
    return [name for name in results.methods if results.runs[name]]


def _highest_shown(results: Results) -> float:
    ends = [value for name in results.methods for value in results.finals(name).values()]
    if results.sign < 0:
        return max(ends)
    lowest = min(ends)
    best_mean = min(statistics.fmean(results.finals(name).values()) for name in _completed(results))
    return max(1.1 * best_mean, _SMALLEST_RANGE * lowest, min(1.1 * max(ends), _HIGHEST_END * lowest))


def _left_out(results: Results) -> str:
    """Say what the figure of curves does not show."""
    if results.sign < 0:
        return ""
    highest = _highest_shown(results)
    ends = {name: statistics.fmean(results.finals(name).values()) for name in _completed(results)}
    outside = [f"{name} ({end:.2f})" for name, end in ends.items() if end > highest]
    text = f" The part of curves above {highest:.3g} is left out."
    return f"{text} Above it end: {', '.join(outside)}." if outside else text


def _entry(xs: Sequence[float], metric: np.ndarray, highest: float) -> float:
    """Return the usage at which a curve enters a panel."""
    inside = np.flatnonzero(metric <= highest)
    return float(xs[max(0, inside[0] - 1)]) if len(inside) else math.inf


def draw_curves(results: Results) -> Figure:
    """Draw the metric over tokens, communications and simulated time: mean of seeds, and range if methods are few."""
    labels = {"tokens": "training tokens"} | _figure_axes(results)
    styles = _styles(results)
    highest = _highest_shown(results)
    lowest = min(value for name in results.methods for value in results.finals(name).values())
    names = _completed(results)
    # A character takes 0.07 inches, the line and the marker before a name 0.6.
    columns = max(1, min(4, len(names), int(_WIDTH / (0.6 + 0.07 * max(map(len, names))))))
    lines = math.ceil(len(names) / columns)
    figure, panels = make_figure(len(labels), 2, (_WIDTH, 5.2 * math.ceil(len(labels) / 2) + 0.25 * lines))
    for axes, (axis, label) in zip(panels, labels.items(), strict=True):
        entries = []
        for name in names:
            xs, mean, values = mean_curve(results.runs[name], axis, results.sign)
            entries.append(_entry(xs, mean, highest))
            if len(names) <= _METHODS_WITH_RANGES:
                axes.fill_between(xs, values.min(0), values.max(0), color=styles[name]["color"], alpha=0.1, lw=0)
            axes.plot(xs, mean, label=literal(results.labelled(name)), markevery=[len(xs) - 1], ms=6, **styles[name])
        if results.sign > 0:
            axes.set_yscale("log")
            axes.set_ylim(0.97 * lowest, highest)
        _scale_metric(axes.yaxis, results.raw["metric"]["name"])
        highest_usage = max(max(results.ends(name, axis)) for name in names)
        _scale_usage(axes.xaxis, label, min(entries), highest_usage, wide=True)
        axes.grid(True, which="both", alpha=0.25)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, fontsize=9)
    return figure


def draw_ends(results: Results) -> Figure:
    """Draw a row for each method: its final metric, mean and range of seeds, and what it has used."""
    labels = _figure_axes(results)
    names = _completed(results)
    rows = range(len(names))
    figure, panels = make_figure(1 + len(labels), 4, (_WIDTH, 1.2 + 0.3 * len(names)))
    metric = [list(results.finals(name).values()) for name in names]
    means = np.array([statistics.fmean(values) for values in metric])
    ranges = np.array([means - [min(values) for values in metric], [max(values) for values in metric] - means])
    colours = ["black" if name == results.reference else "#1f77b4" for name in names]
    panels[0].errorbar(means, rows, xerr=ranges, ls="", capsize=3, ecolor="0.4", zorder=1)
    panels[0].scatter(means, rows, c=colours, s=36, zorder=2)
    if results.sign > 0:
        panels[0].set_xscale("log")
        farthest = _FARTHEST_END * means.min()
        for row in np.flatnonzero(means > farthest):
            panels[0].set_xlim(right=farthest)
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center"}
            panels[0].annotate(f"{means[row]:.0f} \N{RIGHTWARDS ARROW}", (0.99, row), **place)
    _scale_metric(panels[0].xaxis, f"final {results.raw['metric']['name']}")
    for axes, (axis, label) in zip(panels[1:], labels.items(), strict=True):
        used = [statistics.fmean(results.ends(name, axis)) for name in names]
        axes.scatter(used, rows, c=colours, s=36)
        _scale_usage(axes.xaxis, label.replace(", ", ",\n"), min(used), max(used), wide=False)
    for number, axes in enumerate(panels):
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(rows, [literal(results.labelled(name)) for name in names] if number == 0 else [])
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x", which="both", alpha=0.25)
        for row in rows:
            axes.axhline(row, color="0.9", lw=0.8, zorder=0)
    return figure
