"""Compare methods: python benchmarks/compare/compare.py [COMPARISON.yaml ...] [--jobs N] [--output FOLDER].

Makes the missing runs of the comparisons in benchmarks/comparisons/. Writes FOLDER/results/<comparison>.json (metric
and usage of every run), a page with figures for each comparison, and the overview FOLDER/results.md. Methods that are
tuned get their values from a search with the first seed, or from another comparison (`tuned_on`). Recorded outcomes and
finished runs are not made again, so a method can be added to a recorded comparison.
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

from benchmarks.compare.report import write_results
from benchmarks.compare.runs import ComparisonError, Runner, completed, outcome
from benchmarks.compare.search import edge, halve
from benchmarks.compare.spec import COMPARISONS, ROOT, ComparisonSpec, MethodSpec, Run, load_spec, make_run
from configs import make_samples
from utils.config.schema import ConfigError
from utils.distributed.launch import cores
from utils.files import write_json_atomically

Tuned = dict[str, dict[str, Any]]
Identity = tuple[str, int | None]


def identity(spec: ComparisonSpec, run: Run) -> Identity:
    """Return what an outcome is recorded by: the run's id and the synchronous workers that are counted."""
    return run.id, spec.method(run.method).synchronous_workers


def tuned_values(raw: Mapping[str, Any]) -> Tuned:
    """Return the tuned values of the methods of recorded results, by a search or from another comparison."""
    if "search" in raw:
        return {name: entry["best"] for name, entry in raw["search"].items()}
    return raw.get("found", {})


def read_results(path: Path) -> dict[str, Any]:
    """Read recorded results; empty if there are none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def recorded_outcomes(raw: Mapping[str, Any], spec: ComparisonSpec) -> dict[Identity, dict[str, Any]]:
    """Return recorded outcomes by the settings that their comparison gave them; none if hardware or networks differ."""
    if not raw:
        return {}
    before = ComparisonSpec.model_validate(raw["comparison"])
    if (before.hardware, before.networks) != (spec.hardware, spec.networks):
        return {}
    tuned = before.with_settings(tuned_values(raw))
    return {
        identity(tuned, make_run(tuned, tuned.method(entry["method"]), entry["seed"])): entry
        for entry in raw["outcomes"]
    }


def recorded_search(raw: Mapping[str, Any], spec: ComparisonSpec, method: MethodSpec) -> dict[str, Any] | None:
    """Return the recorded search of a method if it is the one that the comparison asks for now."""
    entry = raw.get("search", {}).get(method.name)
    if entry is None:
        return None
    before = ComparisonSpec.model_validate(raw["comparison"])
    earlier = before.method(method.name)
    same_runs = make_run(before, earlier, before.seeds[0]).id == make_run(spec, method, spec.seeds[0]).id
    return entry if same_runs and (before.search, earlier.search) == (spec.search, method.search) else None


def carry_out(path: Path, runner: Runner | None, results: Path) -> dict[str, Any]:
    """Make the missing runs of a comparison and return its results as JSON values.

    Args:
        runner: None: make no run.
        results: the folder of all results.

    Raises:
        ConfigError: the comparison is wrong.
        ComparisonError: runs failed, are missing, or cannot be compared.
    """
    spec = load_spec(path)
    raw = read_results(results / f"{path.stem}.json")
    if runner is not None and spec.samples:
        make_samples.main(ROOT / ".cache" / "samples", spec.samples)
    tuning: dict[str, Any] = {}
    if spec.tuned_on is not None:
        tuning["found"] = found_values(path, spec, results)
    elif spec.search is not None:
        tuning["search"] = {
            method.name: recorded_search(raw, spec, method) or _searched(spec, method, runner)
            for method in spec.methods
        }
    tuned = spec.with_settings(tuned_values(tuning))
    runs = [make_run(tuned, method, seed) for method in tuned.methods for seed in spec.reported_seeds]
    known = recorded_outcomes(raw, spec)
    missing = [run for run in runs if identity(tuned, run) not in known]
    kept = [known[identity(tuned, run)] for run in runs if identity(tuned, run) in known]
    if missing and runner is None:
        raise ComparisonError(f"runs are missing: {', '.join(dict.fromkeys(run.method for run in missing))}")
    if missing and any(entry["completed"] and "data" not in entry for entry in kept):
        raise ComparisonError(
            f"{results / path.stem}.json: its outcomes have no digest of their data, so new runs cannot be compared "
            "with them; remove the file to make all runs again"
        )
    if missing:
        runner.make(missing, path.stem)
    outcomes = []
    common = {key: raw[key] for key in ("metric", "parameters", "versions") if key in raw}
    for run in runs:
        found = known.get(identity(tuned, run)) or outcome(run, tuned, runner)
        outcomes.append(found | {"method": run.method, "seed": run.seed})
        if not common and found["completed"]:
            data = runner.data(run)
            common = {"metric": vars(data.metric), "parameters": data.summary["parameters"]}
    if not common:
        raise ComparisonError("no run completed")
    check_same_data(outcomes)
    comparison = spec.model_dump(mode="json")
    return {"name": path.stem, "comparison": comparison, **common, **tuning, "outcomes": outcomes}


def check_same_data(outcomes: Iterable[dict[str, Any]]) -> None:
    """Check that runs with the same seed used the same data.

    Raises:
        ComparisonError: they did not.
    """
    by_seed: dict[int, dict[str | None, list[str]]] = {}
    for entry in outcomes:
        if entry["completed"]:
            by_seed.setdefault(entry["seed"], {}).setdefault(entry.get("data"), []).append(entry["method"])
    problems = []
    for seed, by_data in by_seed.items():
        if len(by_data) > 1:
            groups = "; ".join(f"{', '.join(methods)}: {data}" for data, methods in by_data.items())
            problems.append(f"seed {seed}: runs of different data cannot be compared ({groups})")
    if problems:
        raise ComparisonError("\n".join([*problems, "remove the recorded results or the runs of the other data"]))


def _searched(spec: ComparisonSpec, method: MethodSpec, runner: Runner | None) -> dict[str, Any]:
    """Tune one method by the comparison's search; JSON values."""
    if runner is None:
        raise ComparisonError(f"runs are missing: the search for {method.name}")
    search = spec.search
    space = spec.space(method)
    metrics: list[float | None] = []

    def losses_of(rung: int, candidates: list[dict[str, Any]]) -> list[float]:
        runs = [
            make_run(spec, method.with_settings(settings), spec.seeds[0], search.token_fraction(rung))
            for settings in candidates
        ]
        runner.make(runs, f"{method.name}, rung {rung + 1}")
        losses = []
        for run in runs:
            data = runner.data(run)
            metric = data.summary["final_metric"] if completed(data) else None
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


def found_values(path: Path, spec: ComparisonSpec, results: Path) -> Tuned:
    """Return the values that the comparison `tuned_on` found for the methods, by name.

    Raises:
        ConfigError: its results are missing, or hold no values for these methods.
    """
    source = results / f"{spec.tuned_on}.json"
    if not source.exists():
        raise ConfigError(f"{path}: tuned_on: {source} does not exist: make the runs of {spec.tuned_on} first")
    found = tuned_values(read_results(source))
    unknown = sorted({method.tuned_as for method in spec.methods if method.tuned_as} - found.keys())
    if unknown:
        raise ConfigError(f"{path}: tuned_as: {source} has no values for {', '.join(unknown)}")
    names = {method.name: method.tuned_as or method.name for method in spec.methods}
    own = {name: found[tuned] for name, tuned in names.items() if tuned in found}
    if not own:
        raise ConfigError(f"{path}: tuned_on: {source} has no values for any of these methods")
    return own


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Sort comparisons that use the values of others after those.

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
    parser.add_argument("--report-only", action="store_true", help="make no run: write the pages of recorded results")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    folder = options.output / "results"
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    try:
        runner = None if options.report_only else Runner(options.runs.resolve(), options.jobs)
        for path in in_order(options.comparisons or sorted(COMPARISONS.glob("*.yaml"))):
            try:
                write_json_atomically(folder / f"{path.stem}.json", carry_out(path, runner, folder))
            except ComparisonError as error:
                problems.append(f"{path}: {error}")
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
