"""Compare methods: python benchmarks/compare/compare.py [COMPARISON.yaml ...] [--jobs N] [--output FOLDER].

Makes the missing runs of the comparisons in benchmarks/comparisons/ and writes FOLDER/results/<comparison>.json (usage
and metric of every run), a page with plots beside it, and the overview FOLDER/results.md. Every method is tuned first,
with the first seed: over a grid, by a search, or by another comparison (`tuned_on`). Its best values are run with all
seeds. Outcomes in an earlier JSON file and finished runs are not made again, so a method can be added to a published
comparison.
"""

import argparse
import json
import math
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.compare.accounting import metric_at, simulated_seconds, usage
from benchmarks.compare.report import write_results
from benchmarks.compare.results import simulated_axis
from benchmarks.compare.runs import ComparisonError, Runner
from benchmarks.compare.search import edge, halve
from benchmarks.compare.spec import (
    COMPARISONS,
    ROOT,
    ComparisonSpec,
    MethodSpec,
    Run,
    load_spec,
    make_run,
    method_space,
    seed_runs,
    tuning_runs,
    with_settings,
)
from configs import make_samples
from utils.config.schema import ConfigError
from utils.distributed.launch import cores
from utils.files import write_json_atomically

# Entries of a comparison and of its methods that describe it and that no run depends on.
_WORDS = ("title", "question", "answer", "summary", "caveat", "claims", "order")
_WORDS_OF_METHODS = ("family", "baseline")
# What all runs of a comparison have in common.
_COMMON = ("metric", "parameters", "versions")


def outcome(run: Run, spec: ComparisonSpec, runner: Runner) -> dict[str, Any]:
    """Return usage and metric of a run after each evaluated round, as JSON values."""
    record = runner.record(run)
    found = {"method": run.method, "value": run.value, "seed": run.seed, "id": run.id}
    found |= {"commit": record["commit"], "machine": record["machine"], "completed": False}
    data = runner.data(run) if record["completed"] else None
    if data is None or data.summary["final_metric"] is None:  # stopped by an error, or diverged
        return found
    workers = spec.method(run.method).synchronous_workers
    metrics = metric_at(data) | {int(data.summary["outer_steps"]): data.summary["final_metric"]}
    evaluated = sorted(metrics)
    used = {entry.outer_step: entry for entry in usage(data, workers)}
    curves = {"metric": [data.summary["initial_metric"], *(metrics[step] for step in evaluated)]}
    for name in ("tokens", "inner_steps", "communications", "bytes_communicated", "wall_seconds"):
        curves[name] = [0, *(getattr(used[step], name) for step in evaluated)]
    for device in spec.hardware:
        for network in spec.networks:
            for overlap in (False, True):
                elapsed = simulated_seconds(data, device, network, workers, overlap)
                by_step = dict(zip(used, elapsed, strict=True))
                name = simulated_axis(device.name, network.name, overlap)
                curves[name] = [0.0, *(by_step[step] for step in evaluated)]
    batches = [sum(row["effective_batch"] for row in rows) for rows in data.by_round.values()]
    return found | {
        "completed": True,
        "final_metric": data.summary["final_metric"],
        "rounds": len(used),
        "first_batch": batches[0],
        "last_batch": batches[-1],
        "curves": {name: [float(f"{value:.6g}") for value in values] for name, values in curves.items()},
    }


class Stored:
    """An earlier results/<comparison>.json.

    Outcomes are looked up by the settings that the stored comparison gives them (`Run.id`), computed anew with today's
    keys, and not by an identifier of the time when they were made.

    Args:
        spec: the comparison as its file is now.
    """

    def __init__(self, path: Path, spec: ComparisonSpec):
        self.raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._now = spec
        self.spec = ComparisonSpec.model_validate(self.raw["comparison"]) if self.raw else None

    def outcomes(self) -> dict[tuple[str, int | None], dict[str, Any]]:
        """Return the outcomes by run id and synchronous workers; none if hardware or networks were others."""
        if self.spec is None or (self.spec.hardware, self.spec.networks) != (self._now.hardware, self._now.networks):
            return {}
        tuned = self.spec.with_found(self.found())
        found = {}
        for entry in self.raw["outcomes"]:
            method = tuned.method(entry["method"])
            found[make_run(tuned, method, entry["value"], entry["seed"]).id, method.synchronous_workers] = entry
        return found

    def found(self) -> dict[str, dict[str, Any]]:
        """Return the tuned values of the methods, by a search or by another comparison."""
        if "search" in self.raw:
            return {name: entry["best"] for name, entry in self.raw["search"].items()}
        return self.raw.get("found", {})

    def search(self, name: str) -> dict[str, Any] | None:
        """Return the search of a method if it was the one that the comparison asks for now."""
        entry = self.raw.get("search", {}).get(name)
        return entry if entry and _search_of(self.spec, name) == _search_of(self._now, name) else None

    def changed(self) -> list[str]:
        """Return the entries of the comparison, and the methods, for which other runs are stored."""
        now = self._now
        before = self.spec
        found = [
            key
            for key in ("seeds", "networks", "samples", "reference", "tuned_on")
            if getattr(now, key) != getattr(before, key)
        ]
        stored = {method.name for method in before.methods}
        for method in now.methods:
            if method.name not in stored or _asked(now, method.name) != _asked(before, method.name):
                found.append(method.name)
        names = {method.name for method in now.methods}
        return found + [f"not {method.name}" for method in before.methods if method.name not in names]


def _search_of(spec: ComparisonSpec, name: str) -> tuple:
    method = spec.method(name)
    return make_run(spec, method, None, spec.seeds[0]).id, spec.search, method.search


def _asked(spec: ComparisonSpec, name: str) -> tuple:
    """Everything about a method that its runs depend on."""
    method = spec.method(name)
    runs = [make_run(spec, method, value, 0).id for value in spec.grid(method)[1]]
    return runs, method.synchronous_workers, spec.search, method.search, method.tuned_as


def best_value(outcomes: Iterable[Mapping], higher_is_better: bool) -> float | None:
    """Return the value with the best final metric."""

    def loss(entry: Mapping) -> float:
        if not entry["completed"]:
            return math.inf
        return -entry["final_metric"] if higher_is_better else entry["final_metric"]

    return min(outcomes, key=loss)["value"]


def carry_out(path: Path, runner: Runner, results: Path) -> dict[str, Any]:
    """Make the missing runs of a comparison and return its results as JSON values.

    Args:
        results: the folder of all results.

    Raises:
        ConfigError: the comparison is wrong.
        ComparisonError: runs failed.
    """
    spec = load_spec(path)
    stored = Stored(results / f"{path.stem}.json", spec)
    if spec.samples:
        make_samples.main(ROOT / ".cache" / "samples", spec.samples)
    how: dict[str, Any] = {}
    if spec.tuned_on is not None:
        how["found"] = found_values(path, spec, results)
    elif spec.search is not None:
        how["search"] = {method.name: _searched(spec, method, stored, runner) for method in spec.methods}
    found = how.get("found") or {name: entry["best"] for name, entry in how.get("search", {}).items()}
    tuned = spec.with_found(found)
    known = stored.outcomes()
    common = {key: stored.raw[key] for key in _COMMON if key in stored.raw}

    def outcomes(runs: list[Run], title: str) -> list[dict[str, Any]]:
        keys = {run: (run.id, tuned.method(run.method).synchronous_workers) for run in runs}
        runner.make([run for run in runs if keys[run] not in known], f"{path.stem}, {title}")
        for run in runs:
            if keys[run] not in known:
                known[keys[run]] = outcome(run, tuned, runner)
            if not common and runner.record(run) and runner.record(run)["completed"]:
                data = runner.data(run)
                common["metric"] = vars(data.metric)
                common["parameters"] = data.summary["parameters"]
                common["versions"] = data.summary["versions"]
        return [known[keys[run]] | {"method": run.method, "value": run.value, "seed": run.seed} for run in runs]

    grid = tuning_runs(tuned)
    tried = outcomes(grid, "tuning")
    if not common:
        raise ComparisonError("no run completed")
    higher = common["metric"]["higher_is_better"]
    best = {
        method.name: best_value([entry for entry in tried if entry["method"] == method.name], higher)
        for method in spec.methods
    }
    done = {(run.method, run.value, run.seed) for run in grid}
    chosen = [run for run in seed_runs(tuned, best) if (run.method, run.value, run.seed) not in done]
    return {
        "name": path.stem,
        "comparison": spec.model_dump(mode="json"),
        **common,
        **how,
        "grids": {method.name: spec.grid(method) for method in spec.methods},
        "best": best,
        "changed": [],
        "outcomes": tried + outcomes(chosen, "all seeds"),
    }


def _searched(spec: ComparisonSpec, method: MethodSpec, stored: Stored, runner: Runner) -> dict[str, Any]:
    """Tune one method by the comparison's search, unless the same search is stored; JSON values."""
    known = stored.search(method.name)
    if known is not None:
        return known
    search = spec.search
    space = method_space(spec, method)
    metrics: list[float | None] = []

    def losses_of(rung: int, candidates: list[dict[str, Any]]) -> list[float]:
        runs = [
            make_run(spec, with_settings(method, settings), None, spec.seeds[0], search.share(rung))
            for settings in candidates
        ]
        runner.make(runs, f"{method.name}, rung {rung + 1}")
        losses = []
        for run in runs:
            data = runner.data(run) if runner.record(run)["completed"] else None
            metric = None if data is None else data.summary["final_metric"]
            metrics.append(metric)
            if metric is None:
                losses.append(math.inf)
            else:
                losses.append(-metric if data.metric.higher_is_better else metric)
        return losses

    best, runs = halve(search, space, method.name, losses_of)
    entries = [
        {"values": settings, "rung": rung, "metric": metric}
        for (rung, settings), metric in zip(runs, metrics, strict=True)
    ]
    last = [entry for entry in entries if entry["rung"] == search.rungs - 1]
    return {
        "best": best,
        "metric": next(entry["metric"] for entry in last if entry["values"] == best),
        "edges": {key: {"edge": edge(values, best[key])} for key, values in space.items()},
        "runs": entries,
    }


def found_values(path: Path, spec: ComparisonSpec, results: Path) -> dict[str, dict[str, Any]]:
    """Return the values that the comparison `tuned_on` found for the methods, by name.

    Raises:
        ConfigError: its results are missing, or hold no values for these methods.
    """
    there = results / f"{spec.tuned_on}.json"
    if not there.exists():
        raise ConfigError(f"{path}: tuned_on: {there} is not there: make the runs of {spec.tuned_on} first")
    raw = json.loads(there.read_text(encoding="utf-8"))
    if "search" in raw:
        found = {name: entry["best"] for name, entry in raw["search"].items()}
    else:
        found = {name: {key: raw["best"][name]} for name, (key, _) in raw["grids"].items() if key}
    unknown = sorted({method.tuned_as for method in spec.methods if method.tuned_as} - found.keys())
    if unknown:
        raise ConfigError(f"{path}: tuned_as: {there} has no values for {', '.join(unknown)}")
    names = {method.name: method.tuned_as or method.name for method in spec.methods}
    own = {name: found[tuned] for name, tuned in names.items() if tuned in found}
    if not own:
        raise ConfigError(f"{path}: tuned_on: {there} has no values for any of these methods")
    return own


def with_new_words(path: Path, results: Path) -> dict[str, Any]:
    """Return stored results with the words that the comparison file has now.

    `changed` names what the comparison file asks for and other runs are stored for.

    Raises:
        ConfigError: the comparison is wrong.
        ComparisonError: it has no results yet.
    """
    there = results / f"{path.stem}.json"
    if not there.exists():
        raise ComparisonError(f"{there} is not there: the runs were not made yet")
    spec = load_spec(path)
    stored = Stored(there, spec)
    now = spec.model_dump(mode="json")
    words = {method["name"]: {key: method[key] for key in _WORDS_OF_METHODS} for method in now["methods"]}
    comparison = stored.spec.model_dump(mode="json")
    comparison |= {key: now[key] for key in _WORDS}
    comparison["methods"] = [method | words.get(method["name"], {}) for method in comparison["methods"]]
    return stored.raw | {"comparison": comparison, "changed": stored.changed()}


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Sort comparisons that are tuned on others after those.

    Raises:
        ConfigError: one is wrong.
    """
    return sorted(paths, key=lambda path: load_spec(path).tuned_on is not None)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 runs failed, 2 a comparison is wrong, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comparisons", nargs="*", type=Path, help="default: all of benchmarks/comparisons/")
    parser.add_argument("--jobs", type=int, default=cores(), help="runs at a time (default: one per core)")
    parser.add_argument("--runs", type=Path, default=ROOT / "logs" / "comparisons", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of results.md (default: docs)")
    parser.add_argument("--report-only", action="store_true", help="make no run: write the pages of stored results")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    folder = options.output / "results"
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    try:
        runner = Runner(options.runs.resolve(), options.jobs)
        for path in in_order(options.comparisons or sorted(COMPARISONS.glob("*.yaml"))):
            try:
                found = with_new_words(path, folder) if options.report_only else carry_out(path, runner, folder)
            except ComparisonError as error:
                problems.append(f"{path}: {error}")
                continue
            if found["changed"]:
                print(f"{path}: other runs are stored for: {'; '.join(found['changed'])}", file=sys.stderr)
            write_json_atomically(folder / f"{path.stem}.json", found)
        print(write_results(options.output))
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in [*problems, *error.problems]), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, the same command continues", file=sys.stderr)
        return 130
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the runs
    sys.exit(main())
