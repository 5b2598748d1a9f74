"""Tables of a comparison. Numbers are means over seeds with the sample's standard deviation."""

import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from benchmarks.compare.results import LABELS, Results, short, used_until
from utils.text import byte_size

EQUAL_AXES = {"tokens": "tokens", "communications": "communications", "bytes_communicated": "bytes"}
# Communications at which the frontiers of families are read.
BUDGETS = (15, 25, 50, 100, 200)


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


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def grid_table(results: Results) -> str:
    """Return the final metric of every value of every grid; empty if nothing was tuned by a grid."""
    grids = {name: (key, values) for name, (key, values) in results.raw["grids"].items() if key}
    if not grids:
        return ""
    seed = results.raw["comparison"]["seeds"][0]
    rows = []
    edges = []
    for name, (key, values) in grids.items():
        best = results.raw["best"][name]
        cells = []
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
    text = f"Tuned with seed {seed}, the best value bold:\n\n" + plain_table(("method", "key", "final metric"), rows)
    if edges:
        text += "\n\nBest at the edge of its grid, so perhaps better beyond it: " + ", ".join(edges) + "."
    return text


def final_table(results: Results) -> str:
    """Return all methods at the end of their runs."""
    rows = []
    for name in results.methods:
        runs = results.runs[name]
        if not runs:
            rows.append((name, "diverged in every run", *[""] * (6 + len(results.simulated))))
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
    return plain_table((*columns, "wall-clock", *map(short, results.simulated)), rows)


def _used(axis: str, amount: float) -> str:
    if axis == "bytes_communicated":
        return f"{byte_size(round(amount))} sent"
    if axis in LABELS:
        return f"{_count([amount])} {LABELS[axis]}"
    return f"{_seconds(amount)}: {short(axis)}"


def equal_tables(results: Results) -> list[str]:
    """Return all methods at the most that the reference used: tokens, communications and bytes; simulated time; the
    same with overlap."""
    tables = []
    for axes in (tuple(EQUAL_AXES), results.simulated, results.overlapped):
        if not axes:
            continue
        rows = []
        for name in results.methods:
            if not results.runs[name]:
                rows.append((name, *[""] * len(axes)))
                continue
            cells = []
            for axis in axes:
                limit = results.limit(axis)
                ended = all(end < 0.98 * limit for end in results.ends(name, axis))
                cell = _spread([*results.at(name, axis, limit).values()]) + (" (at its end)" if ended else "")
                difference = results.difference(name, axis) if name != results.reference else None
                cells.append(cell + (f"; {difference}: {difference.verdict}" if difference else ""))
            rows.append((name, *cells))
        tables.append(plain_table(("method", *(_used(axis, results.limit(axis)) for axis in axes)), rows))
    return tables


def frontier_table(results: Results) -> str:
    """Return the best metric of every family for several limits of communications."""
    columns = {budget: results.frontier(budget) for budget in BUDGETS}
    rows = []
    for family in results.families:
        cells = []
        for budget, frontier in columns.items():
            name, metrics = frontier[family]
            made = round(min(statistics.fmean(results.ends(name, "communications")), budget))
            which = f"{name}, " if len(results.families[family]) > 1 else ""
            cells.append(f"{_spread([*metrics.values()])} ({which}{made:,})")
        rows.append((family, *cells))
    return plain_table(("family", *(f"at most {budget}" for budget in BUDGETS)), rows)


def target_table(results: Results) -> tuple[str, float | None]:
    """Return what every method has used when it reaches the final metric of the best baseline; and that metric."""
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
    return plain_table(columns, rows), target


def headline(results: Results) -> str:
    """Return one sentence: the reference, and the best of the others at equal tokens, communications and bytes."""
    reference, name_of_metric = results.reference, results.raw["metric"]["name"]
    if not results.runs[reference]:
        return f"{reference} completed no run."
    own = (
        f"{reference}: {name_of_metric} {_spread([run['final_metric'] for run in results.runs[reference]])}, "
        f"{_count(results.ends(reference, 'communications'))} communications, "
        f"{byte_size(round(statistics.fmean(results.ends(reference, 'bytes_communicated'))))}. "
    )
    said = []
    for axis, name in EQUAL_AXES.items():
        other = results.closest(axis)
        if other is None or (difference := results.difference(other, axis)) is None:
            continue
        said.append(f"at equal {name} {other}: {difference}, {difference.verdict}")
    others = (
        "Best baseline" if any(method["baseline"] for method in results.raw["comparison"]["methods"]) else "Best other"
    )
    return f"{own}{others} {'; '.join(said)}." if said else own


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def search_tables(results: Results) -> list[str]:
    """Return the parts of the section about a search, or about values found elsewhere; none if there was neither."""
    raw = results.raw
    comparison = raw["comparison"]
    if "found" in raw:
        rows = [(name, _values(results.tuned(name)) or "not tuned there") for name in results.methods]
        return [
            f"All values were found by the comparison {comparison['tuned_on']} and are used unchanged.",
            plain_table(("method", "values"), rows),
        ]
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
        table = plain_table(("tokens", "values", raw["metric"]["name"]), runs)
        details.append(f"<details><summary>Tuning runs of {name}</summary>\n\n{table}\n\n</details>")
    of_tokens = ", ".join(map(str, fractions))
    return [
        f"Every method had {search['budget']} tuning runs with seed {comparison['seeds'][0]} on this corpus: random "
        f"settings with {of_tokens} of the tokens, of which the best 1/{search['reduction']} went on.",
        plain_table(("method", "runs", "best", raw["metric"]["name"], "at an edge"), rows),
        *details,
    ]
