"""The runs of a comparison: each an ordinary run of run.py on one process with one thread, made once."""

import json
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from benchmarks.compare.spec import ROOT, Run
from training_logs.showing.run_data import RunData, read_run
from utils.distributed.launch import cores
from utils.files import write_json_atomically

_ALONE = ("processes=1", "cpu_threads=1", "clearml=off", "plot_at_end=false")
# At the beginning of a line: models that have read Python's documentation print the word as well.
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)


class ComparisonError(RuntimeError):
    """Runs failed; the message says which and why."""


class Runner:
    """Makes runs, several at a time, each in a folder named by its id.

    Args:
        folder: folder of all runs.
        jobs: runs at a time.
    """

    def __init__(self, folder: Path, jobs: int):
        self.folder = folder
        self._jobs = jobs
        self._commit = commit()
        self._stopping = threading.Event()
        self._running: set[subprocess.Popen] = set()

    def record(self, run: Run) -> dict | None:
        """Return the record of a run that has ended: completed, or stopped by an error of training; else None."""
        path = self.folder / run.id / "run.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def data(self, run: Run) -> RunData:
        """Read the run folder of a completed run."""
        return read_run(self.folder / run.id / self.record(run)["folder"])

    def make(self, runs: Iterable[Run], title: str) -> None:
        """Make the missing runs; an interrupted run starts again.

        Raises:
            ComparisonError: some failed; the others were made.
        """
        missing = {run.id: run for run in runs if self.record(run) is None}
        problems = []
        with ThreadPoolExecutor(self._jobs) as pool, tqdm(total=len(missing), desc=title, unit=" runs") as bar:
            futures = {pool.submit(self._make, run): run for run in missing.values()}
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    if error is not None:
                        problems.append(str(error))
                    bar.set_postfix_str(f"{futures[future].method}, seed {futures[future].seed}"[:40])
                    bar.update()
            except BaseException:
                self._stopping.set()
                for process in list(self._running):
                    process.terminate()
                raise
        if problems:
            raise ComparisonError("\n".join(problems))

    def _make(self, run: Run) -> None:
        if self._stopping.is_set():
            return
        folder = self.folder / run.id
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = ["--config", run.base, *run.overrides(), *_ALONE, f"log_dir={folder}"]
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "run.py", *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
            self._running.add(process)
            if self._stopping.is_set():  # set after the check above
                process.terminate()
            status = process.wait()
            self._running.discard(process)
        if self._stopping.is_set():
            return
        text = (folder / "output.txt").read_bytes().decode("utf-8", errors="replace")
        made = [path for path in folder.iterdir() if path.is_dir()]
        if status not in (0, 1) or len(made) != 1 or _TRACEBACK.search(text):
            raise ComparisonError(f"{run.method}, {run.value}, seed {run.seed}: exit status {status}\n{text[-2000:]}")
        shutil.rmtree(made[0] / "model_weights", ignore_errors=True)
        shutil.rmtree(made[0] / "checkpoints", ignore_errors=True)
        record = {
            "settings": dict(run.settings),
            "commit": self._commit,
            "machine": machine(),
            "folder": made[0].name,
            "completed": status == 0,
        }
        write_json_atomically(folder / "run.json", record)


def commit() -> str:
    """Return the commit of the code, with a + if files outside docs/ differ from it."""

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else ""

    changed = git("status", "--porcelain", "-uno", "--", ".", ":!docs")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def machine() -> str:
    """Describe this machine."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {cores()} cores, {platform.system()}, Python {platform.python_version()}"
