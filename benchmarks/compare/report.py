"""The pages of comparisons: results.md, an overview, and a page for each comparison in results/.

Numbers are means over seeds with the sample's standard deviation.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.compare.figures import draw_curves, draw_frontier
from benchmarks.compare.results import LABELS, Results, short, used_until
from benchmarks.compare.spec import as_override
from utils.files import write_atomically, write_text_atomically
from utils.text import byte_size

EQUAL_AXES = {"tokens": "tokens", "communications": "communications", "bytes_communicated": "bytes"}
# Communications at which the frontiers of families are read.
BUDGETS = (15, 25, 50, 100, 200)

# Cells and tables


def _spread(values: Sequence[float], decimals: int = 2) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.fmean(values):,.{decimals}f}"
    return f"{mean} ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else mean


def _count(values: Sequence[float]) -> str:
    """Mean of integers, with a decimal if it is small and not an integer."""
    mean = statistics.fmean(values)
    return f"{mean:,.0f}" if mean >= 100 or mean == round(mean) else f"{mean:,.1f}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _bytes(values: Sequence[float]) -> str:
    return byte_size(round(statistics.fmean(values)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; short rows are filled with empty cells."""
    filled = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in filled)])


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def final_table(results: Results) -> str:
    """Return metric and usage of all methods at the end of their runs."""
    rows = []
    for name in results.methods:
        runs = results.runs[name]
        if not runs:
            rows.append((results.labelled(name),))
            continue
        first = statistics.fmean(run["first_batch"] for run in runs)
        last = statistics.fmean(run["last_batch"] for run in runs)
        rows.append(
            (
                results.labelled(name),
                _spread([run["final_metric"] for run in runs]),
                f"{first:.0f} → {last:.0f}",
                _count(results.ends(name, "inner_steps")),
                _count(results.ends(name, "communications")),
                _bytes(results.ends(name, "bytes_communicated")),
            )
        )
    columns = ("method", results.raw["metric"]["name"], "examples per step", "inner steps", "communications", "bytes")
    return _table(columns, rows)


def seconds_table(results: Results) -> str:
    """Return the simulated time of all methods at the end of their runs."""
    rows = [
        (name, *(_seconds(statistics.fmean(results.ends(name, axis))) for axis in results.simulated))
        for name in results.methods
        if results.runs[name]
    ]
    return _table(("method", *map(short, results.simulated)), rows)


def _used(axis: str, amount: float) -> str:
    if axis == "bytes_communicated":
        return f"{byte_size(round(amount))} sent"
    if axis in LABELS:
        return f"{_count([amount])} {LABELS[axis]}"
    return f"{_seconds(amount)}: {short(axis)}"


def equal_table(results: Results, axes: Sequence[str]) -> str:
    """Return all methods at the most that the reference used, with their differences from the reference."""
    rows = [(name, *(_equal_cell(results, name, axis) for axis in axes)) for name in results.methods]
    return _table(("method", *(_used(axis, results.limit(axis)) for axis in axes)), rows)


def _equal_cell(results: Results, name: str, axis: str) -> str:
    if not results.runs[name]:
        return results.stopped(name)
    limit = results.limit(axis)
    cell = _spread(list(results.at(name, axis, limit).values()))
    ends = results.ends(name, axis)
    if max(ends) < 0.98 * limit:
        cell += " (at its end)"
    elif min(ends) > 1.02 * limit and name != results.reference:
        cell += " (cut off)"
    stopped = results.stopped(name)
    if stopped:
        return f"{cell}; {stopped}"
    if name == results.reference:
        return cell
    difference = results.difference(name, axis)
    if difference is None:
        stopped = results.stopped(results.reference)
        return f"{cell}; {f'{results.reference}: {stopped}' if stopped else 'other data'}"
    return f"{cell}; {difference}, {difference.verdict}"


def frontier_table(results: Results) -> str:
    """Return the best metric of every family for several limits of communications."""
    columns = {budget: results.frontier(budget) for budget in BUDGETS}
    rows = []
    for family, members in results.families.items():
        cells = []
        for budget, frontier in columns.items():
            name, metrics = frontier[family]
            made = round(min(statistics.fmean(results.ends(name, "communications")), budget))
            which = f"{results.labelled(name)}, " if len(members) > 1 or results.stopped(name) else ""
            cells.append(f"{_spread(list(metrics.values()))} ({which}{made:,})")
        rows.append((family, *cells))
    return _table(("family", *(f"at most {budget}" for budget in BUDGETS)), rows)


def target_table(results: Results, target: float) -> str:
    """Return what every method has used when it reaches a metric."""
    axes = ["tokens", "communications", *results.simulated]
    rows = []
    for name in results.methods:
        reached = [run for run in results.runs[name] if used_until(run, "tokens", target, results.sign) is not None]
        cells = []
        for axis in axes:
            used = [used_until(run, axis, target, results.sign) for run in reached]
            if not used:
                cells.append("-")
            elif axis in LABELS:
                cells.append(_count([round(value, 1) for value in used]))
            else:
                cells.append(_seconds(statistics.fmean(used)))
        rows.append((name, f"{len(reached)} of {len(results.seeds)}", *cells))
    columns = ("method", "runs that reach it", *(LABELS.get(axis) or short(axis) for axis in axes))
    return _table(columns, rows)


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _tuning(results: Results) -> list[str]:
    """The section about a search, or about values found elsewhere; nothing without tuning."""
    raw = results.raw
    comparison = raw["comparison"]
    if "found" in raw:
        rows = [(name, _values(results.tuned(name)) or "not tuned there") for name in results.methods]
        text = f"All values were found by the comparison {comparison['tuned_on']} and are used unchanged."
        return ["## Tuning", text, _table(("method", "values"), rows)]
    if "search" not in raw:
        return []

    def metric(value: float | None) -> str:
        return "stopped" if value is None else f"{value:.{raw['metric']['decimals']}f}"

    search = comparison["search"]
    fractions = [Fraction(1, search["reduction"] ** (search["rungs"] - 1 - rung)) for rung in range(search["rungs"])]
    rows = []
    details = []
    for name, found in raw["search"].items():
        edges = [f"`{key}` ({where['edge']})" for key, where in found["edges"].items() if where["edge"]]
        count = str(len(found["runs"]))
        rows.append((name, count, _values(found["best"]), metric(found["metric"]), ", ".join(edges)))
        runs = [(str(fractions[run["rung"]]), _values(run["values"]), metric(run["metric"])) for run in found["runs"]]
        details.append(_details(f"Tuning runs of {name}", _table(("tokens", "values", raw["metric"]["name"]), runs)))
    return [
        "## Tuning",
        f"Every method had {search['budget']} tuning runs with seed {comparison['seeds'][0]} on this corpus: random "
        f"settings with {', '.join(map(str, fractions))} of the tokens, of which the best 1/{search['reduction']} "
        "entered the next rung.",
        _table(("method", "runs", "best", raw["metric"]["name"], "at an edge"), rows),
        *details,
    ]


# The page of a comparison


def headline(results: Results) -> str:
    """Return the reference's result, and the best of the others at equal tokens, communications and bytes."""
    reference = results.reference
    if not results.runs[reference]:
        return f"{reference} completed no run."
    own = (
        f"{results.labelled(reference)}: {results.raw['metric']['name']} "
        f"{_spread([run['final_metric'] for run in results.runs[reference]])}, "
        f"{_count(results.ends(reference, 'communications'))} communications, "
        f"{_bytes(results.ends(reference, 'bytes_communicated'))}."
    )
    found = []
    for axis, name in EQUAL_AXES.items():
        other = results.closest(axis)
        difference = None if other is None else results.difference(other, axis)
        if difference is not None:
            found.append(f"at equal {name} {other}: {difference}, {difference.verdict}")
    if not found:
        return own
    return f"{own} Best {'baseline' if results.baselines else 'other'} {'; '.join(found)}."


def _simulation(results: Results) -> str:
    lines = []
    for device in results.raw["comparison"]["hardware"]:
        parameters = device["parameters"] or results.raw["parameters"]
        lines.append(
            f"- {device['name']}: t_min {1e3 * device['t_min']:.3g} ms, t_example {1e3 * device['t_example']:.3g} ms, "
            f"{parameters:,.0f} parameters sent as float32"
        )
    for network in results.raw["comparison"]["networks"]:
        lines.append(
            f"- {network['name']}: {network['bits_per_second']:,.0f} bit/s, latency {1e3 * network['latency']:g} ms"
        )
    return "\n".join(lines)


def _settings(results: Results) -> str:
    comparison = results.raw["comparison"]
    lines = [f"base: {comparison['base']}", f"seeds: {comparison['seeds']}"]
    lines.append("common: " + " ".join(as_override(*item) for item in comparison["common"].items()))
    for method in comparison["methods"]:
        values = method["overrides"] | dict(results.tuned(method["name"]))
        lines.append(f"{method['name']}: {' '.join(as_override(*item) for item in values.items()) or '(no overrides)'}")
    return f"```\n{chr(10).join(lines)}\n```"


def _origin(results: Results) -> str:
    outcomes = results.raw["outcomes"]
    machines = " and ".join(sorted({run["machine"] for run in outcomes}))
    versions: dict[str, set[str]] = {}
    for run in outcomes:
        for library, version in run.get("versions", results.raw.get("versions", {})).items():
            versions.setdefault(library, set()).add(version)
    libraries = ", ".join(f"{library} {' and '.join(sorted(found))}" for library, found in versions.items())
    text = (
        f"Made by `python benchmarks/compare/compare.py benchmarks/comparisons/{results.raw['name']}.yaml` with commit "
        f"{', '.join(sorted({run['commit'] for run in outcomes}))} on {machines}; {libraries}. "
        f"Seeds {', '.join(map(str, results.seeds))}."
    )
    if "search" in results.raw and len(results.raw["comparison"]["seeds"]) == 1:
        text += (
            "\n\nIts only seed is the seed of the tuning runs: each result is the best of its method's tuning runs "
            "and therefore optimistic."
        )
    if any(run["completed"] and "data" not in run for run in outcomes):
        text += "\n\nThese outcomes were recorded without a digest of their data, and are shown as recorded."
    return text


def page(results: Results) -> str:
    """Return the page of a comparison as Markdown."""
    comparison = results.raw["comparison"]
    name = results.raw["name"]
    parts = [
        f"# {comparison['title']}",
        comparison["question"].strip(),
        _origin(results),
        "[All comparisons](../results.md); [what the numbers mean](../comparing.md#what-the-numbers-mean)",
        "## Summary",
        headline(results),
    ]
    if comparison["answer"].strip():
        parts += ["## Conclusions", comparison["answer"].strip()]
    parts += [
        f"![Curves]({name}.png)",
        f"![Frontier]({name}_frontier.png)",
        "## At the end of the token budget",
        final_table(results),
        "Simulated time:",
        seconds_table(results),
    ]
    if results.runs[results.reference]:
        parts += [
            f"## At the most that {results.reference} used",
            equal_table(results, list(EQUAL_AXES)),
            equal_table(results, results.simulated),
        ]
        if results.overlapped:
            overlapped = equal_table(results, results.overlapped)
            parts.append(_details("Simulated time, synchronisations overlapped with the next round", overlapped))
    parts += ["## At a limited number of communications", frontier_table(results)]
    baseline = results.best_baseline()
    if baseline is not None:
        target = results.mean_final(baseline)
        parts += [
            f"## Until the {results.raw['metric']['name']} is {target:.2f}, that of {baseline}",
            target_table(results, target),
        ]
    parts += _tuning(results)
    parts += ["## Simulated hardware and networks", _simulation(results), _details("Settings", _settings(results))]
    return "\n\n".join(parts) + "\n"


# The overview

_INTRODUCTION = """# Results

Each section answers one question in its first lines and links to a page with tables, curves and settings. Numbers are
means over seeds with the sample's standard deviation. Percentages are differences between two methods on the same
seeds, with their 95% t interval in brackets. A method is better or worse only if the interval excludes 0
([what the numbers mean](comparing.md#what-the-numbers-mean)). `python benchmarks/compare/compare.py` makes the missing
runs of all comparisons, or of those given, and writes these pages; `--report-only` makes no run.

**AdLoCo** is the method of the paper, with all workers from the first round. **AdLoCo-J** adds joining workers, an
addition of this project: a worker joins when each has `smallest_worker_batch` examples."""


_FULL_SECTIONS = 6


def _claims(comparisons: Sequence[Results]) -> list[str]:
    rows = [
        (claim["paper"].strip(), claim["found"].strip(), f"[{results.raw['name']}](results/{results.raw['name']}.md)")
        for results in comparisons
        for claim in results.raw["comparison"]["claims"]
    ]
    table = _table(("arXiv 2508.18182 says", "what we found", "where"), rows)
    return ["## Claims of the paper", table] if rows else []


def _section(results: Results) -> list[str]:
    comparison = results.raw["comparison"]
    name = results.raw["name"]
    return [
        f"## {comparison['title']}",
        *_summary(results),
        f"{headline(results)} [Tables, curves and settings](results/{name}.md); repeat with "
        f"`python benchmarks/compare/compare.py benchmarks/comparisons/{name}.yaml`.\n"
        f"![Frontier](results/{name}_frontier.png)",
    ]


def _summary(results: Results) -> list[str]:
    summary = results.raw["comparison"]["summary"].strip()
    return [summary] if summary else []


def _short_section(results: Results) -> str:
    heading = f"**[{results.raw['comparison']['title']}](results/{results.raw['name']}.md)**"
    return "\n".join([heading, *(_summary(results) or [headline(results)])])


def overview(comparisons: Sequence[Results]) -> str:
    """Return the overview as Markdown; the first comparisons in full, others and those with one seed in short."""
    parts = [_INTRODUCTION, *_claims(comparisons)]
    several = [results for results in comparisons if len(results.seeds) > 1]
    for results in several[:_FULL_SECTIONS]:
        parts += _section(results)
    further = [_short_section(results) for results in several[_FULL_SECTIONS:]]
    if further:
        parts += ["## Further comparisons", *further]
    single = [_short_section(results) for results in comparisons if len(results.seeds) == 1]
    if single:
        parts += ["## One seed only", *single]
    return "\n\n".join(parts) + "\n"


def pages(comparisons: Sequence[Results]) -> dict[str, str]:
    """Return the text of every page by its path below the folder of results.md."""
    ordered = sorted(comparisons, key=lambda found: (found.raw["comparison"]["order"], found.raw["name"]))
    return {"results.md": overview(ordered)} | {f"results/{found.raw['name']}.md": page(found) for found in ordered}


def write_results(output: Path) -> Path:
    """Draw all comparisons in output/results/*.json, write their pages and output/results.md; return its path."""
    comparisons = [
        Results(json.loads(path.read_text(encoding="utf-8"))) for path in sorted((output / "results").glob("*.json"))
    ]
    for results in comparisons:
        for suffix, draw in (("", draw_curves), ("_frontier", draw_frontier)):
            image = output / "results" / f"{results.raw['name']}{suffix}.png"
            write_atomically(image, lambda place, draw=draw, results=results: draw(results).savefig(place, dpi=80))
    for name, text in pages(comparisons).items():
        write_text_atomically(output / name, text)
    return output / "results.md"
