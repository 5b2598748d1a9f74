"""The runs of a comparison, each an ordinary run of run.py with one process and one thread, and their outcomes."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from benchmarks.compare.accounting import simulated_seconds, usage
from benchmarks.compare.results import simulated_axis
from benchmarks.compare.spec import ROOT, ComparisonSpec, Run
from training_logs.showing.run_data import RunData, RunFolderError, damage_reported, read_run
from utils.distributed.launch import STARTED_BY
from utils.files import write_json_atomically
from utils.progress import progress_bar

_ALONE = ("processes=1", "cpu_threads=1", "clearml=off", "plot_at_end=false")
# At the start of a line: models that have read Python's documentation print the word as well.
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)


class ComparisonError(RuntimeError):
    """A comparison cannot be made; the message says which runs failed or do not fit together, and why."""


class Runner:
    """Makes runs, several at a time (`jobs`), each in a folder named by its id."""

    def __init__(self, folder: Path, jobs: int):
        self.folder = folder
        self._jobs = jobs
        self._stopping = threading.Event()
        self._running: set[subprocess.Popen] = set()

    def data(self, run: Run) -> RunData | None:
        """Read the folder of a run that completed or was stopped by an error of training; None: not made yet."""
        path = self.folder / run.id / "run.json"
        if not path.exists():
            return None
        with damage_reported(path.parent):
            data = read_run(path.parent / json.loads(path.read_text(encoding="utf-8"))["folder"])
            if not complete(data):
                raise RunFolderError(f"{data.folder}: its records are incomplete: remove {path} to make the run again")
            return data

    def make(self, runs: Iterable[Run], title: str) -> None:
        """Make the missing runs; an interrupted run starts again.

        Raises:
            ComparisonError: some failed.
            OSError: some cannot be written.
        """
        missing = {run.id: run for run in runs if self.data(run) is None}
        problems: list[BaseException] = []
        with (
            ThreadPoolExecutor(self._jobs) as pool,
            progress_bar(always=True, total=len(missing), desc=title, unit=" runs") as bar,
        ):
            try:
                futures = {pool.submit(self._make, run): run for run in missing.values()}
                for future in as_completed(futures):
                    error = future.exception()
                    if error is not None:
                        problems.append(error)
                    bar.set_postfix_str(f"{futures[future].method}, seed {futures[future].seed}"[:40])
                    bar.update()
            except BaseException:
                self._stopping.set()
                for process in list(self._running):
                    process.kill()
                raise
        for error in problems:
            if isinstance(error, OSError):
                raise error
        if problems:
            raise ComparisonError("\n".join(map(str, problems)))

    def _make(self, run: Run) -> None:
        """Make a run, unless another program makes it first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / f".{run.id}.lock")
        # Timeout: the comparison was stopped while it waited for another program.
        with contextlib.suppress(Timeout), lock.acquire(cancel_check=self._stopping.is_set):
            if self.data(run) is None:
                self._train(run)

    def _train(self, run: Run) -> None:
        if self._stopping.is_set():
            return
        folder = self.folder / run.id
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = ["--config", run.base, *run.overrides(), *_ALONE, f"log_dir={folder}"]
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "run.py", *arguments],
                cwd=ROOT,
                env=os.environ | {STARTED_BY: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._running.add(process)
            if self._stopping.is_set():  # set after the check above
                process.kill()
            status = process.wait()
            self._running.discard(process)
        if self._stopping.is_set():
            return
        text = (folder / "output.txt").read_bytes().decode("utf-8", errors="replace")
        made = [path for path in folder.iterdir() if path.is_dir()]
        if status not in (0, 1) or len(made) != 1 or _TRACEBACK.search(text):
            raise ComparisonError(f"{run.method}, seed {run.seed}: exit status {status}\n{text[-2000:]}")
        data = read_run(made[0])
        if data.summary["status"] == "running" or not complete(data):
            raise ComparisonError(f"{run.method}, seed {run.seed}: its records are incomplete\n{text[-2000:]}")
        shutil.rmtree(made[0] / "model_weights", ignore_errors=True)
        shutil.rmtree(made[0] / "checkpoints", ignore_errors=True)
        write_json_atomically(folder / "run.json", {"settings": dict(run.settings), "folder": made[0].name})


def complete(data: RunData) -> bool:
    """Return whether the records have all rounds, exchanges, nodes and merges of the run."""
    merged = 0.0
    for step, rows in data.by_round.items():
        for row in rows:
            place = (step, int(row["trainer_id"]))
            if len(data.exchanges.get(place, ())) != row["round_events"] or place not in data.nodes:
                return False
        if rows["bytes_merged"][0] > merged and step not in data.merges:
            return False
        merged = rows["bytes_merged"][0]
    return len(data.by_round) >= data.summary["outer_steps"]


def outcome(data: RunData, run: Run, spec: ComparisonSpec) -> dict[str, Any]:
    """Return a run's metric and usage after each evaluated round, as JSON values."""
    origin = data.summary["invocations"][0]
    machine = origin["hardware"][0]
    found = {
        "method": run.method,
        "seed": run.seed,
        "id": run.id,
        "commit": origin["commit"][:10] + ("+" if origin["changed"] else ""),
        "machine": f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['system']}",
        "completed": data.summary["status"] == "completed" and data.summary["final_metric"] is not None,
    }
    if not found["completed"]:
        return found
    metrics = {int(step): value for step, value in zip(*data.best_metrics("outer_step"), strict=True)}
    metrics[int(data.summary["outer_steps"])] = data.summary["final_metric"]
    used = usage(data)
    evaluated = np.isin(used.pop("outer_step"), list(metrics))
    curves = {"metric": [data.summary["initial_metric"], *(metrics[step] for step in sorted(metrics))]}
    for name, totals in used.items():
        curves[name] = [0, *totals[evaluated]]
    for device in spec.hardware:
        for network in spec.networks:
            elapsed = np.array(simulated_seconds(data, device, network))
            curves[simulated_axis(device.name, network.name)] = [0, *elapsed[evaluated]]
    batches = [sum(row["effective_batch"] for row in rows) for rows in data.by_round.values()]
    return found | {
        "parameters": data.summary["parameters"],
        "data": data.summary["data_digest"],
        "versions": data.summary["versions"],
        "final_metric": data.summary["final_metric"],
        "rounds": len(evaluated),
        "first_batch": float(batches[0]),
        "last_batch": float(batches[-1]),
        "curves": {name: [float(f"{value:.6g}") for value in values] for name, values in curves.items()},
    }
