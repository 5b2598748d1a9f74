"""Trackers: dashboards that follow a run. One interface, and what every tracker is told.

A tracker runs in a process of its own (`BackgroundTracker`), so that no server can slow, stop or end a run. What does
not arrive is sent later by `python -m training_logs.log_processor RUN_DIR`.
"""

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# How many calls may wait for a slow server; further ones are left out.
MOST_WAITING = 1000
# How long the end of a run waits for the last reports.
WAIT_SECONDS = 30.0
_COMMAND = "python -m training_logs.log_processor"

# Column of training_log.csv: title in the dashboard, with one series per trainer.
TITLES = {
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


class Tracker:
    """A dashboard. To add one, override these six methods."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, or continue after a resume, with the run's configuration."""

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        """Show values of a round, named `title/series`."""

    def text(self, text: str) -> None:
        """Show a message."""

    def figure(self, name: str, path: Path) -> None:
        """Show an image."""

    def file(self, name: str, path: Path) -> None:
        """Keep a file: the summary, a difference of the code, or the weights of the best model."""

    def close(self, status: str) -> None:
        """Wait until everything has arrived; status: completed, interrupted or failed."""


def round_scalars(rows: Iterable[Mapping[str, float | None]], metric: str, higher_is_better: bool) -> dict[str, float]:
    """Return what a dashboard shows of a round.

    Args:
        rows: the round's rows of training_log.csv, one per trainer.
        metric: name of the validation metric.
    """
    rows = list(rows)
    values = {}
    metrics = []
    for row in rows:
        trainer = f"trainer {int(row['trainer_id'])}"
        for column, title in TITLES.items():
            values[f"{title}/{trainer}"] = row[column]
        values[f"tokens per second/{trainer}"] = row["round_tokens"] / row["seconds"]
        if _is_number(row["validation_metric"]):
            metrics.append(row["validation_metric"])
    if metrics:
        values[f"run/best {metric}"] = max(metrics) if higher_is_better else min(metrics)
    values["run/living trainers"] = len(rows)
    values["run/total batch"] = sum(row["effective_batch"] for row in rows)
    values["run/communications"] = rows[0]["communications"]
    values["run/bytes communicated"] = rows[0]["bytes_communicated"]
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def merge_line(outer_step: int, representative: int, weights: Mapping[int, float]) -> str:
    """Describe a merge."""
    parts = ", ".join(f"trainer {trainer} ({weight:.2f})" for trainer, weight in weights.items())
    return f"merge after round {outer_step}: {parts} become trainer {representative}"


def report_end(tracker: Tracker, folder: Path, report_dir: Path, summary: Mapping[str, Any]) -> None:
    """Report plots, texts, summary, differences of the code and the best model of a run that has ended."""
    for path in sorted(report_dir.glob("*.png")):
        tracker.figure(path.stem, path)
    for text in summary.get("continuations", ()):
        tracker.text("\n".join(f"{name}: {text[name]}" for name in ("prompt", "continuation", "reference")))
    tracker.file("summary", report_dir / "summary.json")
    for invocation in summary.get("invocations", ()):
        if invocation["patch"]:
            tracker.file(invocation["patch"], folder / invocation["patch"])
    if summary.get("best_model"):
        tracker.file("best model", folder / summary["best_model"] / "model.safetensors")


class BackgroundTracker(Tracker):
    """Runs a tracker in a process of its own; no call waits for it.

    Args:
        tracker: can be pickled; it is started by `start` in the other process.
        name: for messages.
        folder: the run folder.
        log: receives what the process prints.
    """

    def __init__(self, tracker: Tracker, name: str, folder: Path, log: Path):
        self._name = name
        self._folder = folder
        self._log = log
        self._left_out = 0
        log.parent.mkdir(exist_ok=True)
        # A fork would copy PyTorch's state, and what it holds on a GPU.
        context = multiprocessing.get_context("spawn")
        self._calls = context.Queue(MOST_WAITING)
        self._process = context.Process(target=_serve, args=(tracker, self._calls, str(log)), daemon=True)
        self._process.start()

    def _call(self, method: str, *arguments) -> None:
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            self._left_out += 1

    def start(self, config: Mapping[str, Any]) -> None:
        self._call("start", config)

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        self._call("scalars", outer_step, values)

    def text(self, text: str) -> None:
        self._call("text", text)

    def figure(self, name: str, path: Path) -> None:
        self._call("figure", name, path)

    def file(self, name: str, path: Path) -> None:
        self._call("file", name, path)

    def close(self, status: str) -> str | None:
        """Wait for the last reports, but not long; return a warning if something did not arrive."""
        self._call("close", status)
        self._process.join(WAIT_SECONDS)
        code = self._process.exitcode
        self._calls.cancel_join_thread()
        if code is None:
            self._process.kill()
        if code == 0 and not self._left_out:
            return None
        problem = "is too slow" if code in (0, None) else f"failed ({code}), see {self._log}"
        return f"{self._name} {problem}; {_COMMAND} {self._folder} sends what did not arrive"


def _serve(tracker: Tracker, calls: multiprocessing.Queue, log: str) -> None:
    """Carry out calls until `close`, or until the run's process has died."""
    # Ctrl-C and the end of the terminal are for the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(19)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    method = ""
    while method != "close":
        try:
            method, arguments = calls.get(timeout=1.0)
        except queue.Empty:
            if multiprocessing.parent_process().is_alive():
                continue
            method = "close"
            arguments = ("interrupted",)
        getattr(tracker, method)(*arguments)
    # Threads of a tracker that wait for a dead server must not keep this process.
    os._exit(0)
