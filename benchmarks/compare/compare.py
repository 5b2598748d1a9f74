"""Methods side by side: python benchmarks/compare/compare.py [COMPARISON.yaml ...] [--jobs N] [--output FOLDER].

Makes the runs that the comparisons in benchmarks/comparisons/ ask for and that are not finished yet, several at a time,
and writes the results: FOLDER/results/<comparison>.json with what every run used up and reached, a page with plots
beside it, and FOLDER/results.md, an overview. What an earlier one of these JSON files holds counts as finished, too: a
method can be added to a published comparison without making the others again. Every run is an ordinary run of run.py
with overrides, on one process with one thread. Each method is tuned first, with the first seed: over a grid, or by a
search (benchmarks/compare/search.py), which another comparison may use as well. Its best values are then run with
all seeds.
Stop it at any time: what is finished stays, but for its models and checkpoints, which nobody asks for; what is known of
it is also in FOLDER/results/unfinished/<comparison>.json, so that another machine can go on from there.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from benchmarks.compare.accounting import Hardware, fit_step_cost, metric_at, simulated_seconds, usage
from benchmarks.compare.network import same_networks
from benchmarks.compare.plan import (
    ROOT,
    Comparison,
    Method,
    Run,
    grid,
    load_comparison,
    make_run,
    seed_runs,
    tuning_runs,
    with_found,
)
from benchmarks.compare.report import write_results
from benchmarks.compare.results import simulated_axis
from benchmarks.compare.runs import ComparisonError, Runner, Store
from benchmarks.compare.search import Measured, found_values, search_methods
from configs import make_samples
from training_logs.showing.run_data import RunData
from utils.config.schema import ConfigError
from utils.distributed.launch import cores
from utils.utils import write_json_atomically

# What people say about a comparison and its methods, and no run depends on.
_WORDS = ("title", "question", "answer", "summary", "caveat", "claims", "order")
_WORDS_OF_METHODS = ("family", "baseline")
_MEASURED = ("t_min", "t_example")
# What all runs of a comparison have in common.
_COMMON = ("metric", "parameters", "versions")


def calibrated(hardware: Hardware, run: RunData, store: Store) -> Hardware:
    """The hardware with what it leaves out measured here, for the model and data of a run; measured once."""
    if hardware.t_min is not None and hardware.t_example is not None:
        return hardware
    keys = ("model_type", "model_config", "sequence_length", "vocab_size")
    wanted = {key: run.config[key] for key in keys}
    path = store.folder / "calibration.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = next((entry for entry in known if entry["of"] == wanted), None)
    if found is None:
        code = (
            "import json, sys; from benchmarks.compare.compare import measure; print(json.dumps(measure(sys.argv[1])))"
        )
        output = subprocess.run(
            [sys.executable, "-c", code, str(run.folder / "config.yaml")],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        ).stdout  # fmt: skip
        batches, seconds = json.loads(output.splitlines()[-1])
        t_min, t_example = fit_step_cost(batches, seconds)
        found = {"of": wanted, "batches": batches, "seconds": seconds, "t_min": t_min, "t_example": t_example}
        write_json_atomically(path, [*known, found])
    t_min = found["t_min"] if hardware.t_min is None else hardware.t_min
    t_example = found["t_example"] if hardware.t_example is None else hardware.t_example
    return Hardware(hardware.name, t_min, t_example, hardware.parameters)


def measure(config_path: str, repeats: int = 15) -> tuple[list[int], list[float]]:
    """Median seconds of an inner step on one thread of this machine, for several batches."""
    import torch

    from benchmarks.performance.throughput import BareLoop, make_data
    from fabrics.config_checks import CHECKS, CHOICES
    from utils.config.reading import load_config

    torch.set_num_threads(1)
    config, _ = load_config(config_path, (), CHOICES, CHECKS)
    config = dataclasses.replace(config, model_config={"vocab_size": config.vocab_size} | config.model_config)
    loop = BareLoop(config, make_data(config, config.model_config["vocab_size"]), torch.device("cpu"))
    batches = [1, 2, 4, 8, 16, 32]
    times: dict[int, list[float]] = {batch: [] for batch in batches}
    for repeat in range(repeats + 1):
        for batch in batches:
            loop.batch, started = batch, time.perf_counter()
            loop.run(1)
            if repeat:
                times[batch].append(time.perf_counter() - started)
    return batches, [statistics.median(values) for values in times.values()]


def outcome(run: Run, method: Method, hardware: Iterable[Hardware], comparison: Comparison, store: Store) -> dict:
    """What a run used up and reached, as JSON values."""
    record = store.record(run)
    head = {"method": run.method, "value": run.value, "seed": run.seed, "id": run.id}
    head |= {"commit": record["commit"], "machine": record["machine"]}
    data = store.data(run) if record["completed"] else None
    if data is None or data.summary["final_metric"] is None:  # stopped by an error, or of parameters that say no number
        return head | {"completed": False}
    metrics = metric_at(data) | {int(data.summary["outer_steps"]): data.summary["final_metric"]}
    start, wanted = data.summary["initial_metric"], sorted(metrics)
    used = {entry.outer_step: entry for entry in usage(data, method.synchronous_workers)}
    curves: dict[str, list[float]] = {
        "metric": [start, *(metrics[step] for step in wanted)],
    }
    for name in ("tokens", "inner_steps", "communications", "bytes_communicated", "wall_seconds"):
        curves[name] = [0, *(getattr(used[step], name) for step in wanted)]
    for device in hardware:
        for network in comparison.networks:
            for overlap in (False, True):
                elapsed = simulated_seconds(data, device, network, method.synchronous_workers, overlap)
                by_step = dict(zip(used, elapsed, strict=True))
                curves[simulated_axis(device.name, network.name, overlap)] = [0.0, *(by_step[step] for step in wanted)]
    rounded = {name: [float(f"{value:.6g}") for value in values] for name, values in curves.items()}
    batches = [sum(row["effective_batch"] for row in rows) for rows in data.by_round.values()]
    return head | {
        "completed": True,
        "final_metric": data.summary["final_metric"],
        "rounds": len(used),
        "first_batch": batches[0],
        "last_batch": batches[-1],
        "curves": rounded,
    }


def best_value(outcomes: Iterable[Mapping], metric: Mapping) -> float | None:
    """Of the outcomes of one method over its grid, the value with the best final metric."""

    def badness(found: Mapping) -> float:
        if not found["completed"]:
            return float("inf")
        return found["final_metric"] * (-1 if metric["higher_is_better"] else 1)

    return min(outcomes, key=badness)["value"]


def published(path: Path, comparison: Comparison) -> dict:
    """What an earlier results/<comparison>.json knows: {} where there is none, or where it simulated other devices.

    Outcomes of methods that stand for another number of synchronous workers by now are left out.
    """
    if not path.exists():
        return {}
    found, now = json.loads(path.read_text(encoding="utf-8")), comparison.model_dump(mode="json")
    then = found["comparison"]
    same = len(now["hardware"]) == len(then["hardware"]) and all(
        value == old[key] or (value is None and key in _MEASURED)
        for new, old in zip(now["hardware"], then["hardware"], strict=True)
        for key, value in new.items()
    )
    if not same or not same_networks(now["networks"], then["networks"]):
        return {}
    before, after = ({m["name"]: m["synchronous_workers"] for m in entry["methods"]} for entry in (then, now))
    outcomes = [entry for entry in found["outcomes"] if before[entry["method"]] == after.get(entry["method"])]
    return found | {"outcomes": outcomes}


class Kept:
    """What is known of the runs of a comparison: from its results, and run by run from those that are unfinished.

    Args:
        results: where the outcome will be written.

    Attributes:
        metrics: what runs of its search ended with, by id; None: they did not come to their end.
        outcomes: what its other runs used up and reached, by id.
        about: what all runs have in common; None, where no run has come to its end.
    """

    def __init__(self, comparison: Comparison, store: Store, results: Path):
        self._comparison, self._store, self._path = comparison, store, unfinished(results)
        self._methods = {method.name: method for method in comparison.methods}
        done, part = published(results, comparison), published(self._path, comparison)
        tried = [entry for method in done.get("search", {}).values() for entry in method["runs"]]
        self.metrics = part.get("metrics", {}) | {entry["id"]: entry["metric"] for entry in tried}
        self.outcomes = {entry["id"]: entry for found in (part, done) for entry in found.get("outcomes", [])}
        before = done or part
        self.about = before | {"hardware": before["comparison"]["hardware"]} if "metric" in before else None

    def tried(self, run: Run) -> None:
        """Keep what a run of the search ended with."""
        self._look(run)
        completed = self._store.record(run)["completed"]
        self.metrics[run.id] = self._store.data(run).summary["final_metric"] if completed else None
        self._write()

    def ended(self, run: Run) -> None:
        """Keep what another run used up and reached."""
        self._look(run)
        hardware = [Hardware(**entry) for entry in self.about["hardware"]] if self.about else []
        self.outcomes[run.id] = outcome(run, self._methods[run.method], hardware, self._comparison, self._store)
        self._write()

    def _look(self, run: Run) -> None:
        """The first run that came to its end says what all have in common."""
        if self.about is None and self._store.record(run)["completed"]:
            data = self._store.data(run)
            self.about = {
                "metric": vars(data.metric),
                "parameters": data.summary["parameters"],
                "versions": data.summary["versions"],
                "hardware": [vars(calibrated(entry, data, self._store)) for entry in self._comparison.hardware],
            }

    def common(self) -> dict:
        """The comparison, and what all runs have in common, as JSON values."""
        comparison, about = self._comparison.model_dump(mode="json"), self.about or {}
        if self.about:
            comparison["hardware"] = about["hardware"]
        return {"comparison": comparison} | {key: about[key] for key in _COMMON if key in about}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"metrics": self.metrics, "outcomes": list(self.outcomes.values())}
        write_json_atomically(self._path, self.common() | kept)


def unfinished(results: Path) -> Path:
    """Where the outcomes of single runs are, as long as the results of a comparison are not complete."""
    return results.parent / "unfinished" / results.name


def carry_out(path: Path, store: Store, jobs: int, results: Path) -> dict:
    """Make the runs of a comparison that are missing; its outcome as JSON values.

    Args:
        results: where the outcome will be written; what is there by now, or unfinished beside it, is not made again.

    Raises:
        ConfigError: the comparison is wrong.
        ComparisonError: runs could not be made.
    """
    written = load_comparison(path)
    runner, kept = Runner(store, written.base, jobs), Kept(written, store, results)
    if written.samples:
        make_samples.main(ROOT / ".cache" / "samples", written.samples)
    comparison, how = _tuned(path, written, runner, kept, results.parent)
    tuned = tuning_runs(comparison)

    def outcomes(runs: Iterable[Run]) -> list[dict]:
        return [kept.outcomes[run.id] | {"method": run.method, "value": run.value, "seed": run.seed} for run in runs]

    runner.make(tuned, f"{path.stem}, tuning", kept.outcomes, kept.ended)
    tried = outcomes(tuned)
    metric = kept.about["metric"] if kept.about else {}
    best = {
        method.name: best_value([found for found in tried if found["method"] == method.name], metric)
        for method in comparison.methods
    }
    chosen = seed_runs(comparison, best)
    runner.make(chosen, f"{path.stem}, all seeds", kept.outcomes, kept.ended)
    if kept.about is None:
        raise ComparisonError("no run came to its end")
    there = {run.id for run in tuned}
    return {
        "name": path.stem,
        **kept.common(),
        **how,
        "grids": {method.name: grid(comparison, method) for method in comparison.methods},
        "best": best,
        "chosen": [run.id for run in chosen],
        "changed": [],
        "outcomes": tried + outcomes(run for run in chosen if run.id not in there),
    }


def _tuned(
    path: Path, comparison: Comparison, runner: Runner, kept: Kept, results: Path
) -> tuple[Comparison, dict[str, dict]]:
    """The comparison with the values that were found for its methods; what there is to say of them, as JSON values."""
    if comparison.tuned_on is not None:
        found = found_values(path, comparison, results)
        return with_found(comparison, found), {"found": found}
    if comparison.search is None:
        return comparison, {}

    def measure(asked: list[Run], words: str) -> Measured:
        runner.make(asked, f"{path.stem}, {words}", kept.metrics, kept.tried)
        higher = kept.about is not None and kept.about["metric"]["higher_is_better"]
        return Measured({run.id: kept.metrics[run.id] for run in asked}, higher)

    searched = search_methods(comparison, measure)
    return with_found(comparison, {name: entry["best"] for name, entry in searched.items()}), {"search": searched}


def with_new_words(path: Path, results: Path) -> dict:
    """The outcome of a comparison as it was written, with the words that the comparison has now.

    `changed` names what the comparison asks for by now that these runs are not.

    Raises:
        ConfigError: the comparison is wrong.
        ComparisonError: it has no results yet.
    """
    if not results.exists():
        raise ComparisonError(f"{results} is not there: the runs were not made yet")
    comparison, found = load_comparison(path), json.loads(results.read_text(encoding="utf-8"))
    now = comparison.model_dump(mode="json")
    then = Comparison.model_validate(found["comparison"]).model_dump(mode="json")  # keys that came later are there
    said = {method["name"]: {key: method[key] for key in _WORDS_OF_METHODS} for method in now["methods"]}
    methods = [method | said.get(method["name"], {}) for method in then["methods"]]
    settled = (*_WORDS, "base", "hardware", "methods")
    changed = [key for key in now if key not in settled and now[key] != then[key]]
    before = {method["name"]: method for method in methods}
    changed += [
        name
        for name in said
        if name not in before or (before[name] not in now["methods"] and not _was_run(comparison, before[name], found))
    ]
    changed += [f"not {method['name']}" for method in methods if method["name"] not in said]
    words = {key: now[key] for key in _WORDS} | {"methods": methods}
    return found | {"comparison": then | words, "changed": changed}


def _was_run(comparison: Comparison, before: Mapping, found: Mapping) -> bool:
    """Whether a method asks for the runs that were chosen, though in other words than before."""
    own, name = with_found(comparison, found.get("found", {})), before["name"]
    now, method = (next(m for m in methods if m.name == name) for methods in (comparison.methods, own.methods))
    ids = {make_run(own, method, found["best"][name], seed).id for seed in found["comparison"]["seeds"]}
    return now.model_dump(mode="json") | {"overrides": before["overrides"]} == before and ids <= set(found["chosen"])


def in_order(paths: Iterable[Path], results: Path) -> list[Path]:
    """Comparisons that are tuned on others, after those.

    Raises:
        ConfigError: one is wrong, or tuned on one that is neither among them nor in the folder of results.
    """
    comparisons = {path: load_comparison(path) for path in paths}
    first = [path for path, comparison in comparisons.items() if comparison.tuned_on is None]
    there = {path.stem for path in first}
    then = [path for path in comparisons if path not in first]
    for path in then:
        if comparisons[path].tuned_on not in there:
            found_values(path, comparisons[path], results)
    return first + then


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 done, 1 runs could not be made, 2 a comparison is wrong, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("comparisons", nargs="*", type=Path, help="default: all of benchmarks/comparisons/")
    parser.add_argument("--jobs", type=int, default=cores(), help="runs at a time (default: one per core)")
    parser.add_argument("--runs", type=Path, default=ROOT / "logs" / "comparisons", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of results.md (default: docs)")
    parser.add_argument("--report-only", action="store_true", help="make no run: results/ as it is, with new words")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    paths = options.comparisons or sorted((ROOT / "benchmarks" / "comparisons").glob("*.yaml"))
    folder = options.output / "results"
    store, problems = Store(options.runs.resolve()), []
    try:
        paths = in_order(paths, folder)
        for path in paths:
            results = folder / f"{path.stem}.json"
            try:
                found = (
                    with_new_words(path, results)
                    if options.report_only
                    else carry_out(path, store, options.jobs, results)
                )
            except ComparisonError as error:
                problems.append(f"{path}: {error}")
                continue
            if found["changed"]:
                changed = "; ".join(found["changed"])
                print(f"{path}: asks for other runs than {results} holds: {changed}", file=sys.stderr)
            write_json_atomically(results, found)
            if not options.report_only:
                unfinished(results).unlink(missing_ok=True)
        print(write_results(options.output))
    except ConfigError as error:
        problems += error.problems
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, the same command goes on", file=sys.stderr)
        return 130
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the runs as well
    sys.exit(main())
