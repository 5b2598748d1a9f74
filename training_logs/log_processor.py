"""Send a run folder, or a gradient analysis, to an experiment tracker.

    python -m training_logs.log_processor RUN_DIR [--tracker NAME] [--mode auto|online|offline] [--new] [--follow]

A run that is sent again continues its task; `--new` makes a new one. With `--follow` a run is sent while it trains,
until the standard input ends: a pipe from the process that trains, which ends with that process.
"""

import argparse
import json
import math
import os
import select
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from training_logs.showing.run_data import RunData, RunFolderError, Table, damage_reported, read_run
from training_logs.trackers.clearml import resolved_mode
from training_logs.trackers.tracker import PACKAGES, Tracker, check_packages, tracker_of
from utils.config.schema import CLEARML_MODES, ConfigError
from utils.files import path_argument
from utils.progress import progress_bar
from utils.text import merge_line

# The summary of a gradient analysis, by which its folder is known.
ANALYSIS_SUMMARY = "gradient_analysis.json"
# Seconds between two looks at the folder of a run that trains, and at least ten times those of reading a long log.
_LOOK_SECONDS = 1.0
# Column of training_log.csv: title in the dashboard, with one series per trainer.
_TITLES = {
    "train_loss": "training loss",
    "validation_loss": "validation loss",
    "validation_metric": "validation metric",
    "requested_batch": "requested batch",
    "effective_batch": "effective batch",
    "micro_batch": "micro-batch",
    "accumulation_steps": "accumulation steps",
    "gradient_variance": "gradient variance",
    "gradient_squared_norm": "gradient squared norm",
    "nodes": "nodes",
}


def round_scalars(run: RunData, rows: Table) -> dict[str, float]:
    """Return what a dashboard shows of a round. rows: the round's rows of training_log.csv, one per trainer."""
    values = {}
    for row in rows:
        trainer = f"trainer {int(row['trainer_id'])}"
        for column, title in _TITLES.items():
            values[f"{title}/{trainer}"] = row[column]
        values[f"tokens per second/{trainer}"] = row["round_tokens"] / row["seconds"]
    metrics = [metric for metric in rows["validation_metric"] if math.isfinite(metric)]
    if metrics:
        values[f"run/best {run.metric.name}"] = run.metric.best(metrics)
    values["run/living trainers"] = len(rows)
    values["run/total batch"] = rows["effective_batch"].sum()
    values["run/communications"] = rows["communications"][0]
    values["run/bytes communicated"] = rows["bytes_communicated"][0]
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


def send_run(folder: Path, tracker: Tracker, follow: bool = False) -> None:
    """Report a run, of which everything is read from its folder. follow: report it while it trains."""
    run = read_run(folder)
    with damage_reported(folder):  # before anything is sent
        for rows in run.by_round.values():
            round_scalars(run, rows)
        artifacts_of(run)
    tracker.start(run.config)
    rounds = 0
    merged = 0
    ended = False
    pause = _LOOK_SECONDS
    while not ended:
        # The end comes first: what is read afterwards is everything that the run has written.
        ended = not follow or _run_has_ended(pause)
        started = time.monotonic()
        run = read_run(folder)
        pause = max(_LOOK_SECONDS, 10.0 * (time.monotonic() - started))
        for step, rows in progress_bar(run.by_round.items(), desc="sending", unit=" rounds", leave=False, delay=1):
            if step > rounds:
                tracker.scalars(step, round_scalars(run, rows))
                rounds = step
        for step, merge in run.merges.items():
            if step > merged:
                tracker.text(merge_line(step, merge.representative, merge.weights))
                merged = step
    if run.summary.get("final_metric") is not None:  # also counts a merge after the last round
        tracker.scalars(rounds, {f"run/final {run.metric.name}": run.summary["final_metric"]})
    for name, path in figures_of(run).items():
        tracker.figure(name, path)
    for name, path in artifacts_of(run).items():
        tracker.artifact(name, path)
    status = run.summary["status"]
    tracker.finish("interrupted" if status == "running" else status)  # running: it was killed


def figures_of(run: RunData) -> dict[str, Path]:
    """Return the plots of a run by name."""
    return _inside(run.folder, {path.stem: path for path in sorted(run.report_dir.glob("*.png"))})


def artifacts_of(run: RunData) -> dict[str, Path]:
    """Return the summary, the differences of the code, and the weights of the best model, by name."""
    paths = {"summary": run.report_dir / "summary.json"}
    for invocation in run.summary.get("invocations", ()):
        if invocation["patch"]:
            paths[invocation["patch"]] = run.folder / invocation["patch"]
    if run.summary.get("best_model"):
        paths["best model"] = run.folder / run.summary["best_model"] / "model.safetensors"
    return _inside(run.folder, paths)


def _inside(folder: Path, paths: Mapping[str, Path]) -> dict[str, Path]:
    """Leave out files outside the folder, which the summary or the links of a foreign folder may name."""
    return {name: path for name, path in paths.items() if path.resolve().is_relative_to(folder.resolve())}


def _run_has_ended(pause: float) -> bool:
    """Wait for the next look at the folder, or for the end of the run."""
    readable, _, _ = select.select([sys.stdin], [], [], pause)
    return bool(readable)


def send_analysis(folder: Path, tracker: Tracker) -> None:
    """Report figures and numbers of a gradient analysis."""
    summary = folder / ANALYSIS_SUMMARY
    with damage_reported(folder):
        config = json.loads(summary.read_text(encoding="utf-8"))["config"]
    tracker.start(config)
    for name, path in _inside(folder, {path.stem: path for path in sorted(folder.glob("*.png"))}).items():
        tracker.figure(name, path)
    for name, path in _inside(folder, {"gradient analysis": summary}).items():
        tracker.artifact(name, path)
    tracker.finish("completed")


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 2 if the folder cannot be sent."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.log_processor", description="Send a run folder to an experiment tracker."
    )
    parser.add_argument("run", type=path_argument, metavar="RUN_DIR")
    parser.add_argument("--tracker", choices=PACKAGES, default="clearml", help="default: %(default)s")
    parser.add_argument("--mode", choices=CLEARML_MODES[:3], default="auto", help="of ClearML (default: %(default)s)")
    parser.add_argument("--new", action="store_true", help="send to a new task, although the folder has one")
    parser.add_argument("--follow", action="store_true", help="follow a run that trains, until standard input ends")
    options = parser.parse_args(arguments)
    if options.follow:
        os.nice(19)
    try:
        check_packages([options.tracker])
        mode = resolved_mode(options.mode) if options.tracker == "clearml" else "offline"
        tracker = tracker_of(options.tracker, options.run, mode, options.new)
        if (options.run / "config.yaml").exists() or not (options.run / ANALYSIS_SUMMARY).exists():
            send_run(options.run, tracker, options.follow)  # the folder of a run may also receive an analysis
        else:
            send_analysis(options.run, tracker)
    except (ConfigError, RunFolderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if mode == "offline":
        print(f"reported to {options.tracker}; local files are in {tracker.store}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
