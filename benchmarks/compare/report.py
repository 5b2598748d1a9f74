"""The pages of comparisons: results.md, an overview, and a page for each in results/."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.compare.figures import draw_curves, draw_frontier
from benchmarks.compare.results import Results
from benchmarks.compare.tables import (
    equal_tables,
    final_table,
    frontier_table,
    grid_table,
    headline,
    plain_table,
    search_tables,
    target_table,
)
from utils.files import write_atomically, write_text_atomically

# A page of a comparison


def _hardware(results: Results) -> str:
    lines = []
    for device in results.raw["comparison"]["hardware"]:
        parameters = device["parameters"] or results.raw["parameters"]
        lines.append(
            f"- {device['name']}: t_min {1e3 * device['t_min']:.3g} ms, t_example {1e3 * device['t_example']:.3g} ms, "
            f"{parameters:,.0f} parameters sent as float32"
        )
    return "\n".join(lines + [_network(network) for network in results.raw["comparison"]["networks"]])


def _network(network: dict) -> str:
    def of_nodes(value: float | list[float], write: Callable[[float], str]) -> str:
        return ", ".join(map(write, value)) if isinstance(value, list) else write(value)

    speed = of_nodes(network["bits_per_second"], lambda bits: f"{bits:,.0f}")
    latency = of_nodes(network["latency"], lambda seconds: f"{1e3 * seconds:g}")
    server = network.get("server_bits_per_second")
    of_server = f", {server:,.0f} bit/s of a server" if server else ""
    return f"- {network['name']}: {speed} bit/s, latency {latency} ms{of_server}"


def _settings(results: Results) -> str:
    comparison = results.raw["comparison"]
    lines = [f"base: {comparison['base']}", f"seeds: {comparison['seeds']}"]
    lines += [f"{key}: {value}" for key, value in comparison["common"].items()]
    for method in comparison["methods"]:
        tuned = results.raw["grids"][method["name"]][0]
        values = dict(method["overrides"]) | ({tuned: results.raw["best"][method["name"]]} if tuned else {})
        values |= results.tuned(method["name"])
        shown = " ".join(f"{key}={value}" for key, value in values.items())
        lines.append(f"{method['name']}: {shown or '(nothing else)'}")
    return "\n".join(lines)


def _caveat(results: Results) -> list[str]:
    text = results.raw["comparison"].get("caveat", "")
    return [f"> **{' '.join(text.split())}**"] if text.strip() else []


def _origin(results: Results) -> str:
    comparison, outcomes = results.raw["comparison"], results.raw["outcomes"]
    machines = " and ".join(sorted({run["machine"] for run in outcomes}))
    versions = ", ".join(f"{key} {value}" for key, value in results.raw["versions"].items())
    text = (
        f"Made by `python benchmarks/compare/compare.py benchmarks/comparisons/{results.raw['name']}.yaml` with commit "
        f"{', '.join(sorted({run['commit'] for run in outcomes}))} on {machines}; {versions}. "
        f"Seeds {', '.join(map(str, comparison['seeds']))}."
    )
    if changed := results.raw.get("changed"):
        text += f"\n\nThe comparison file has changed since ({'; '.join(changed)}); these runs are of that commit."
    return text


def page(results: Results) -> str:
    """Return the page of a comparison as Markdown."""
    comparison, name = results.raw["comparison"], results.raw["name"]
    table, target = target_table(results)
    parts = [
        f"# {comparison['title']}",
        *_caveat(results),
        comparison["question"].strip(),
        _origin(results),
        "[All comparisons](../results.md); [what the words mean](../comparing.md#what-the-numbers-mean)",
        "## In short",
        headline(results),
    ]
    if comparison["answer"].strip():
        parts += ["## What we conclude", comparison["answer"].strip()]
    parts += [
        f"![Curves]({name}.png)",
        f"![Frontier]({name}_frontier.png)",
        "## At the end of the token budget",
        final_table(results),
    ]
    if results.runs[results.reference]:
        parts += [f"## At the most that {results.reference} used", *equal_tables(results)]
    parts += ["## At a limited number of communications", frontier_table(results)]
    if target is not None:
        best_baseline = results.best_baseline()
        parts += [f"## Until the {results.raw['metric']['name']} is {target:.2f}, that of {best_baseline}", table]
    if tuned := grid_table(results):
        parts += ["## The grid", tuned]
    searched = search_tables(results)
    if searched:
        parts += ["## What was searched", *searched]
    parts += [
        "## Simulated hardware and networks",
        _hardware(results),
        f"<details><summary>Settings</summary>\n\n```\n{_settings(results)}\n```\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


# The overview

_INTRODUCTION = """# Results

Headings and first lines say whether AdLoCo wins, where and by how much; the linked pages say why. Numbers are means
over seeds with the sample's standard deviation. Percentages are differences between two methods on the same seeds, with
the 95% t interval of that pair in brackets. A method is better or worse only if the interval excludes 0
([what the numbers mean](comparing.md#what-the-numbers-mean)). `python benchmarks/compare/compare.py` makes the missing
runs of all comparisons, or of those given, and writes these pages; `--report-only` makes no run."""


def _claims(comparisons: Sequence[Results]) -> list[str]:
    rows = [
        (claim["paper"].strip(), claim["found"].strip(), f"[{results.raw['name']}](results/{results.raw['name']}.md)")
        for results in comparisons
        for claim in results.raw["comparison"].get("claims", [])
    ]
    table = plain_table(("arXiv 2508.18182 says", "what we found", "where"), rows)
    return ["## What the paper claims, what we found", table] if rows else []


def _summary(results: Results) -> list[str]:
    comparison, name = results.raw["comparison"], results.raw["name"]
    return [
        f"## {comparison['title']}",
        *_said(results),
        f"{headline(results)} [Tables, curves and settings](results/{name}.md); again with "
        f"`python benchmarks/compare/compare.py benchmarks/comparisons/{name}.yaml`.\n"
        f"![Frontier](results/{name}_frontier.png)",
    ]


def _said(results: Results) -> list[str]:
    summary = results.raw["comparison"].get("summary", "").strip()
    return [summary] if summary else []


def _with_care(comparisons: Sequence[Results]) -> list[str]:
    """Comparisons with a caveat; a common caveat is printed once."""
    by_caveat: dict[str, list[Results]] = {}
    for results in comparisons:
        for caveat in _caveat(results):
            by_caveat.setdefault(caveat, []).append(results)
    parts = ["## To be read with care"] if by_caveat else []
    for caveat, alike in by_caveat.items():
        parts += [caveat, *map(_short, alike)]
    return parts


def _with_one_seed(comparisons: Sequence[Results]) -> list[str]:
    """Comparisons that search values for others."""
    parts = ["## Searches with one seed, judged by other comparisons"]
    return [*parts, *map(_short, comparisons)] if comparisons else []


def _short(results: Results) -> str:
    title, name = results.raw["comparison"]["title"], results.raw["name"]
    return "\n".join([f"**[{title}](results/{name}.md)**", *(_said(results) or [headline(results)])])


def overview(comparisons: Sequence[Results]) -> str:
    """Return the overview as Markdown."""
    parts, alone = [_INTRODUCTION, *_claims(comparisons)], []
    for results in comparisons:
        if len(results.raw["comparison"]["seeds"]) == 1:
            alone.append(results)
        elif not _caveat(results):
            parts += _summary(results)
    return "\n\n".join([*parts, *_with_one_seed(alone), *_with_care(comparisons)]) + "\n"


def pages(comparisons: Sequence[Results]) -> dict[str, str]:
    """Return the text of every page by its path below the folder of results.md."""
    ordered = sorted(comparisons, key=lambda found: (found.raw["comparison"].get("order", 0), found.raw["name"]))
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
