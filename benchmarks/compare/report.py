"""The page of a comparison, and the overview results.md of the published ones.

Numbers are means over seeds with the sample's standard deviation.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare.figures import draw_curves, draw_ends
from benchmarks.compare.results import TOLERANCE, Results, used_until
from benchmarks.compare.spec import COMPARISONS
from utils.files import write_atomically, write_text_atomically
from utils.text import byte_size

USAGE = {"tokens": "tokens", "communications": "communications", "bytes_communicated": "bytes"}
VERDICTS = ("better", "not significant", "worse")
NOT_COMPARABLE = ("ended earlier", "used more", "stopped or other data")
# What the overview shows of a comparison.
_SHOWN = re.compile(r"\{(run|page|section): (\w+)(?:: ([^}]+))?\}")


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
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _details(summary: str, *parts: str) -> str:
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])


def token_range(results: Results) -> tuple[float, float] | None:
    """Return the fewest and most tokens of a run; None if all runs have about as many."""
    totals = [run["curves"]["tokens"][-1] for runs in results.runs.values() for run in runs]
    return (min(totals), max(totals)) if max(totals) > (1.0 + TOLERANCE) * min(totals) else None


def heading(results: Results) -> str:
    comparison = results.raw["comparison"]
    first = next(run for runs in results.runs.values() for run in runs)
    tokens = token_range(results) or (first["curves"]["tokens"][-1],)
    setting = [
        comparison["corpus"] or comparison["common"].get("dataset") or f"dataset of {comparison['base']}",
        f"{_millions(results.raw['parameters'])} parameters",
        f"{' to '.join(map(_millions, tokens))} tokens",
        f"{len(results.seeds)} seeds" if len(results.seeds) > 1 else "one seed",
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


def verdict_table(results: Results, axes: Mapping[str, str]) -> str:
    """Return which methods are better or worse than the reference at equal usage, by axis and its label."""
    rows = []
    for axis, label in axes.items():
        found: dict[str, list[str]] = {name: [] for name in (*VERDICTS, *NOT_COMPARABLE)}
        for method in results.methods:
            if method != results.reference:
                found[results.verdict(method, axis)].append(method)
        rows.append((f"{label}: {_amount(results.ends(results.reference, axis), axis)}", found))
    seeds = "" if len(results.seeds) > 1 else ", one seed"
    headers = {name: name + seeds for name in VERDICTS} | {name: f"not comparable: {name}" for name in NOT_COMPARABLE}
    shown = [name for name in headers if name in VERDICTS or any(found[name] for _, found in rows)]
    columns = ("at equal", *(headers[name] for name in shown))
    labels: dict[tuple[str, ...], list[str]] = {}
    for label, found in rows:
        labels.setdefault(tuple("<br>".join(found[name]) for name in shown), []).append(label)
    return _table(columns, [("<br>".join(same), *cells) for cells, same in labels.items()])


def final_table(results: Results) -> str:
    rows = []
    length = "tokens" if token_range(results) else "inner_steps"
    for name in results.methods:
        runs = results.runs[name]
        if not runs:
            rows.append([results.labelled(name), *[""] * 6])
            continue
        difference = "" if name == results.reference else str(results.difference(name) or "not comparable")
        first = statistics.fmean(run["first_batch"] for run in runs)
        last = statistics.fmean(run["last_batch"] for run in runs)
        usage = [_amount(results.ends(name, axis), axis) for axis in (length, "communications", "bytes_communicated")]
        metric = _spread(results.finals(name).values())
        rows.append((results.labelled(name), metric, difference, f"{first:.0f} to {last:.0f}", *usage))
    columns = ("method", results.raw["metric"]["name"], f"difference from {results.reference}", "examples per step")
    return _table((*columns, length.replace("_", " "), "communications", "bytes"), rows)


def seconds_table(results: Results, axes: Mapping[str, str]) -> str:
    completed = [name for name in results.methods if results.runs[name]]
    rows = [(name, *(_amount(results.ends(name, axis), axis) for axis in axes)) for name in completed]
    return _table(("method", *axes.values()), rows)


def target(results: Results) -> float:
    """Return the metric that every run of the reference reaches."""
    finals = [run["curves"]["metric"][-1] for run in results.runs[results.reference]]
    return max(finals, key=lambda metric: results.sign * metric)


def target_table(results: Results) -> str:
    """Return what every method has used when it reaches the metric that every run of the reference reaches."""
    networks = list(results.seconds.items())
    times = dict(networks[:1] + networks[1:][-1:])
    axes = {"tokens": "tokens", "inner_steps": "inner steps", "communications": "communications"} | times
    goal = target(results)
    rows = []
    for name in results.methods:
        used = {axis: [used_until(run, axis, goal, results.sign) for run in results.runs[name]] for axis in axes}
        reached = {axis: [amount for amount in found if amount is not None] for axis, found in used.items()}
        cells = [_amount(found, axis) if found else "-" for axis, found in reached.items()]
        rows.append((name, f"{len(reached['tokens'])} of {len(results.seeds)}", *cells))
    return _table(("method", "runs that reach it", *axes.values()), rows)


def _settings(results: Results) -> str:
    comparison = results.raw["comparison"]
    values = {key: comparison[key] for key in ("base", "seeds", "common", "hardware", "networks")}
    values["methods"] = {method["name"]: method["overrides"] for method in comparison["methods"]}
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
    text.append(f" on {machines}; {', '.join(sorted(versions))}. Seeds {', '.join(map(str, results.seeds))}.")
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
        "With at most twelve methods, bands show the range of seeds."
    )
    if results.runs[reference]:
        published = results.raw["file"].startswith("benchmarks/comparisons/")
        meaning = "[meaning](../comparing.md#what-the-numbers-mean)" if published else "meaning: docs/comparing.md"
        parts += [
            f"## Verdicts against {reference}",
            f"Runs are compared at their ends ({meaning}). The first column gives the usage of {reference}.",
            verdict_table(results, USAGE | {axis: f"time, {label}" for axis, label in networks.items()}),
        ]
    parts += [f"![Ends]({name}_ends.png)", "## End of the runs", final_table(results)]
    if networks:
        parts += ["## Simulated time", seconds_table(results, networks)]
    if results.runs[reference]:
        parts += [f"## Usage until the {metric} is {target(results):.2f}, which every run of {reference} reaches"]
        parts.append(target_table(results))
    if results.raw["comparison"]["details"]:
        parts += ["## Details and limitations", worded(results, "details")]
    parts += ["## Origin", _origin(results)]
    return "\n\n".join([*parts, _details("Settings", _settings(results))]) + "\n"


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
            return f"{link} | {comparison['corpus']} | {len(results.seeds)} | {_millions(results.raw['parameters'])}"
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
