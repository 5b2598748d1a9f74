"""Compare methods: python benchmarks/compare/compare.py COMPARISON.yaml ... [--output FOLDER].

Makes the missing runs of comparisons and writes for each a JSON file (metric and usage of every run) and a page with
figures. They go to comparison/NAME, or with --output to FOLDER/results, next to the overview FOLDER/results.md.
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

from benchmarks.compare.report import page, write_overview, write_page
from benchmarks.compare.results import Results
from benchmarks.compare.runs import ComparisonError, Runner, outcome
from benchmarks.compare.spec import DEFAULT_BASE, ROOT, ComparisonSpec, load_spec, make_run
from configs import make_samples
from training_logs.showing.run_data import RunFolderError, damage_reported
from utils.config.schema import ConfigError
from utils.distributed.launch import cores
from utils.files import path_argument, write_json_atomically


def read_results(path: Path) -> dict[str, Any]:
    """Read recorded results; empty if there are none.

    Raises:
        ConfigError: they are damaged.
    """
    if not path.exists():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        page(Results(raw))
        return raw
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise ConfigError(f"{path}: damaged results ({error}): restore the file, or remove it") from None


def recorded_outcomes(raw: Mapping[str, Any], spec: ComparisonSpec) -> dict[str, dict[str, Any]]:
    """Return recorded outcomes by the ids of their runs; none if hardware or networks differ."""
    if not raw:
        return {}
    before = ComparisonSpec.model_validate(raw["comparison"], extra="ignore")
    if (before.hardware, before.networks) != (spec.hardware, spec.networks):
        return {}
    found = {}
    for entry in raw["outcomes"]:
        run = make_run(before, before.method(entry["method"]), entry["seed"])
        files = before.base != DEFAULT_BASE or "plugins" in run.settings  # which may have changed
        found[entry["id"] if files else run.id] = entry
    return found


def carry_out(path: Path, runner: Runner | None, folder: Path) -> dict[str, Any]:
    """Make the missing runs of a comparison and return its results as JSON values.

    Args:
        runner: None: make no run.
        folder: holds the recorded results of this comparison.
    """
    spec = load_spec(path)
    raw = read_results(folder / f"{path.stem}.json")
    if runner is not None and spec.samples:
        make_samples.main(ROOT / ".cache" / "samples", spec.samples)
    known = recorded_outcomes(raw, spec)
    runs = spec.runs()
    missing = [run for run in runs if run.id not in known]
    if missing:
        if runner is None:
            names = ", ".join(dict.fromkeys(run.method for run in missing))
            raise ComparisonError(f"runs are missing: {names}; without --report-only no finished run is repeated")
        runner.make(missing, path.stem)
    outcomes = []
    common = {}
    if any(run.id in known and known[run.id]["completed"] for run in runs):
        common = {key: raw[key] for key in ("metric", "parameters", "versions") if key in raw}
    for run in runs:
        found = known.get(run.id)
        if found is None:
            data = runner.data(run)
            with damage_reported(data.folder):
                found = outcome(data, run, spec)
            if not common and found["completed"]:
                common = {"metric": vars(data.metric), "parameters": data.summary["parameters"]}
        outcomes.append(found | {"method": run.method, "seed": run.seed})
    if not common:
        raise ComparisonError("no run completed")
    check_same_data(outcomes)
    file = path.resolve()
    names = {"name": path.stem, "file": str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)}
    return names | {"comparison": spec.model_dump(mode="json"), **common, "outcomes": outcomes}


def same_data(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return True if two outcomes come from the same data; without a digest, by the metric of the untrained model."""
    if "data" in ours and "data" in theirs:
        return ours["data"] == theirs["data"]
    return math.isclose(ours["curves"]["metric"][0], theirs["curves"]["metric"][0], rel_tol=1e-4)


def check_same_data(outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Raise ComparisonError if runs with the same seed used different data."""
    first: dict[int, Mapping[str, Any]] = {}
    for entry in outcomes:
        if entry["completed"] and not same_data(entry, first.setdefault(entry["seed"], entry)):
            other = first[entry["seed"]]["method"]
            raise ComparisonError(
                f"seed {entry['seed']}: {other} and {entry['method']} used different data; "
                "remove the recorded results or the runs of the other data"
            )


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 runs failed, 2 a comparison is wrong, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comparisons", nargs="+", type=path_argument, help="comparison files")
    parser.add_argument("--jobs", type=int, default=cores(), help="runs at a time (default: one per core)")
    parser.add_argument("--runs", type=path_argument, default=ROOT / "logs" / "comparisons", help="folder of the runs")
    parser.add_argument(
        "--output", type=path_argument, help="folder of results.md (default: comparison/NAME, without overview)"
    )
    parser.add_argument("--report-only", action="store_true", help="make no run: write the pages of recorded results")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    problems: list[str] = []
    try:
        for path in options.comparisons:
            load_spec(path)  # a wrong comparison is refused before the first run
        runner = None if options.report_only else Runner(options.runs.resolve(), options.jobs)
        for path in options.comparisons:
            folder = options.output / "results" if options.output else Path("comparison") / path.stem
            folder.mkdir(parents=True, exist_ok=True)  # an unwritable folder is noticed before the runs
            try:
                raw = carry_out(path, runner, folder)
            except (ComparisonError, RunFolderError) as error:
                problems.append(f"{path}: {error}")
                continue
            write_json_atomically(folder / f"{path.stem}.json", raw)
            print(write_page(Results(raw), folder))
        if options.output and not problems:
            write_overview(options.output, read_results)
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in [*problems, *error.problems]), file=sys.stderr)
        return 2
    except OSError as error:
        problems.append(f"results cannot be written: {error}; finished runs are kept, the same command continues")
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, the same command continues", file=sys.stderr)
        return 130
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the runs
    sys.exit(main())
