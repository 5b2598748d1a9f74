"""What was searched, as Markdown: from the JSON values of compare.py alone."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any


def values_found(raw: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    """What a method's values were found to be, by its own search or that of the comparison it is tuned on."""
    if "search" in raw:
        return raw["search"][method]["best"]
    return raw.get("found", {}).get(method, {})


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(columns), "|" + " --- |" * len(columns), *map(_row, rows)])


def _at_edge(key: str, where: Mapping[str, Any]) -> str:
    """What is to say of a key whose best value lies at the edge of what was searched, or beyond it."""
    further, name = where["further"], f"`{key}` at its {where['edge']} edge"
    if not isinstance(further, list):
        return f"{name}, not searched further" + (f": {further}" if further else "")
    tried = ", ".join(map(str, further))
    if 0.0 <= where["position"] <= 1.0:
        return f"{name}; no better beyond it ({tried})"
    return f"`{key}` beyond its {where['edge']} edge ({tried} tried there)"


def _metric(raw: Mapping[str, Any], value: float | None) -> str:
    return "stopped" if value is None else f"{value:.{raw['metric']['decimals']}f}"


def _searched(raw: Mapping[str, Any]) -> list[str]:
    search, rows, details = raw["comparison"]["search"], [], []
    shares = [Fraction(1, search["reduction"] ** (search["rungs"] - 1 - rung)) for rung in range(search["rungs"])]
    for name, found in raw["search"].items():
        edges = [_at_edge(key, where) for key, where in found["edges"].items() if where["edge"] is not None]
        rows.append(
            (name, str(len(found["runs"])), _values(found["best"]), _metric(raw, found["metric"]), "; ".join(edges))
        )
        runs = [
            (str(shares[run["rung"]]), run["why"], _values(run["values"]), _metric(raw, run["metric"]))
            for run in found["runs"]
        ]
        table = _table(("tokens", "why", "values", raw["metric"]["name"]), runs)
        details.append(f"<details><summary>Tuning runs of {name}</summary>\n\n{table}\n\n</details>")
    rungs, seed = ", ".join(map(str, shares)), raw["comparison"]["seeds"][0]
    return [
        f"Every method had {search['budget']} tuning runs, with seed {seed} and on this corpus: settings drawn at "
        f"random, the best 1/{search['reduction']} kept, with {rungs} of the tokens. What was left of the budget went "
        "beyond the edges that the best lay at, or to the next best. A method with fewer runs has no more settings.",
        _table(("method", "runs", "best", raw["metric"]["name"], "at an edge"), rows),
        *details,
    ]


def _taken(raw: Mapping[str, Any]) -> list[str]:
    comparison = raw["comparison"]
    names = [method["name"] for method in comparison["methods"]]
    rows = [(name, _values(values_found(raw, name)) or "as it is: not tuned there") for name in names]
    return [
        f"Nothing here. All values were found by the comparison {comparison['tuned_on']} and are used unchanged.",
        _table(("method", "values"), rows),
    ]


def what_was_searched(raw: Mapping[str, Any]) -> list[str]:
    """The parts of the section about a search, or about values found elsewhere; none where there was neither."""
    parts = _searched(raw) if "search" in raw else _taken(raw) if "found" in raw else []
    return ["## What was searched", *parts] if parts else []
