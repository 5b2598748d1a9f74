"""Comparisons in tables and sentences. Numbers are means over seeds with the sample's standard deviation."""

import statistics
from collections.abc import Sequence

from benchmarks.compare.results import LABELS, Results, short, used_until
from utils.utils import byte_size

PLACES = {"tokens": "tokens", "communications": "communications", "bytes_communicated": "bytes"}
EQUAL_AXES = tuple(PLACES)
VERDICTS = ("better", "not told apart", "worse", "one seed")
# Communications at which the frontiers of families are read.
BUDGETS = (15, 25, 50, 100, 200)


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


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


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
    text = f"Tuned with seed {seed}, the best value bold:\n\n" + plain_table(("method", "key", "final metric"), rows)
    if edges:
        text += "\n\nBest at the edge of its grid, so perhaps better beyond it: " + ", ".join(edges) + "."
    return text


def final_table(results: Results) -> str:
    """Every method at the end of its token budget."""
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
    """So much of an axis, in words."""
    if axis == "bytes_communicated":
        return f"{byte_size(round(amount))} sent"
    if axis in LABELS:
        return f"{_count([amount])} {LABELS[axis]}"
    return f"{_seconds(amount)}: {short(axis)}"


def equal_tables(results: Results) -> list[str]:
    """Every method where it has used up as much of something as the reference at most, held against the reference.

    One table for tokens, communications and bytes, one for simulated time and one for simulated time with overlap.
    """
    tables = []
    for axes in (EQUAL_AXES, results.simulated, results.overlapped):
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
    """The best metric of every family at no more than so many communications."""
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
    return plain_table(columns, rows), target


def _place(axis: str) -> str:
    return PLACES.get(axis) or f"simulated time ({short(axis)})"


def headline(results: Results) -> str:
    """The reference, and how the best of the others stands to it at equal tokens, communications and bytes."""
    reference, name_of_metric = results.reference, results.raw["metric"]["name"]
    if not results.runs[reference]:
        return f"{reference} came to its end in no run."
    own = (
        f"{reference}: {name_of_metric} {_spread([run['final_metric'] for run in results.runs[reference]])}, "
        f"{_count(results.ends(reference, 'communications'))} communications, "
        f"{byte_size(round(statistics.fmean(results.ends(reference, 'bytes_communicated'))))}. "
    )
    said = []
    for axis in EQUAL_AXES:
        other = results.closest(axis)
        if other is None or (difference := results.difference(other, axis)) is None:
            continue
        said.append(f"at equal {_place(axis)} {other}: {difference}, {difference.verdict}")
    others = (
        "Best baseline" if any(method["baseline"] for method in results.raw["comparison"]["methods"]) else "Best other"
    )
    return f"{own}{others} {'; '.join(said)}." if said else own


def verdicts(results: Results) -> list[str]:
    """What follows from the numbers alone, in sentences: how the others stand to the reference."""
    reference, name_of_metric = results.reference, results.raw["metric"]["name"]
    if not results.runs[reference]:
        return [f"{reference} came to its end in no run."]
    if len(results.raw["comparison"]["seeds"]) == 1:
        return ["One seed: there are no intervals, so that nothing is told apart here."]
    said = []
    for axis in (*EQUAL_AXES, *results.simulated, *results.overlapped):
        groups: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
        for name in results.methods:
            difference = results.difference(name, axis) if name != reference and results.runs[name] else None
            if difference is not None:
                groups[difference.verdict].append(name)
        told = [
            f"Better than {reference}: {'; '.join(groups['better']) or 'none'}.",
            f"Not told apart: {'; '.join(groups['not told apart']) or 'none'}.",
            f"Worse: {len(groups['worse'])} of {len(results.methods) - 1}.",
        ]
        if groups["one seed"]:
            told.append(f"One seed in common, so no interval: {'; '.join(groups['one seed'])}.")
        said.append(f"**At equal {_place(axis)}.** {' '.join(told)}")
    baseline = results.best_baseline()
    if baseline is not None and baseline != reference:
        made = [statistics.fmean(results.ends(name, "communications")) for name in (reference, baseline)]
        said.append(
            f"{baseline} is the baseline with the best final {name_of_metric}, {results.mean_final(baseline):.2f}; "
            f"{reference} has {results.mean_final(reference):.2f}"
            + (f" and makes {made[0] / made[1]:.2f} times its communications." if made[1] else ".")
        )
    return said
