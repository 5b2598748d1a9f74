"""Runs that a benchmark needs: each an ordinary run of run.py on one process with one thread, made once."""

import json
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.compare.plan import ROOT, Run
from training_logs.showing.run_data import RunData, read_run
from utils.checkpoint.run_lock import held
from utils.config.schema import ConfigError
from utils.distributed.launch import cores
from utils.utils import write_json_atomically

_ALONE = ("processes=1", "cpu_threads=1", "clearml=off", "memory_sample_seconds=null", "plot_at_end=false")
_SHORT = ("clearml=off", "plot_at_end=false", "processes=1", "cpu_threads=1", "eval_every=1000")


def made_run(place: Path, config: str, overrides: Sequence[str]) -> Path:
    """The folder of the run in `place` that came to its end; it is made where there is none.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    if (run := _completed(place)) is None:
        keys = (*_SHORT, *overrides, f"log_dir={place.resolve()}")
        command = [sys.executable, "run.py", "--config", config, *keys]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run = _completed(place)
    return run


def _completed(place: Path) -> Path | None:
    """One that was interrupted does not count."""
    for summary in sorted(place.glob("*/model_training_report/summary.json")):
        if json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed":
            return summary.parent.parent
    return None


class ComparisonError(RuntimeError):
    """Runs could not be made; the message says which and why."""


@dataclass(frozen=True)
class Store:
    """The folder of all runs, each in a folder named by its id."""

    folder: Path

    def record(self, run: Run) -> dict | None:
        """What is known of a run that has ended by itself: done, or stopped by an error of training; else None."""
        path = self.folder / run.id / "run.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def data(self, run: Run) -> RunData:
        """The run folder of a run that is done."""
        return read_run(self.folder / run.id / self.record(run)["folder"])


# At the beginning of a line: models that have read Python's documentation say the word as well.
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)


class Runner:
    """Makes runs, as many at a time as there are jobs."""

    def __init__(self, store: Store, base: str, jobs: int):
        self.store, self._base, self._jobs = store, base, jobs
        self._commit = commit()
        self._stopping = threading.Event()
        self._running: set[subprocess.Popen] = set()

    def _make(self, run: Run) -> None:
        if self._stopping.is_set():
            return
        folder = self.store.folder / run.id
        begun = self._begun(folder)
        for made in folder.glob("*/"):
            self._look_whether_it_is_left(made)
        if begun is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            arguments = ["--config", self._base, *run.overrides, *_ALONE, f"log_dir={folder}"]
        else:
            arguments = ["--resume", str(begun)]
        with (folder / "output.txt").open("ab") as output:
            before = output.tell()
            process = subprocess.Popen(
                [sys.executable, "run.py", *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
            self._running.add(process)
            write_json_atomically(folder / "begun.json", {"commit": self._commit, "process": process.pid})
            if self._stopping.is_set():  # meanwhile
                process.terminate()
            status = process.wait()
            self._running.discard(process)
        if self._stopping.is_set():
            return
        text = (folder / "output.txt").read_bytes()[before:].decode("utf-8", errors="replace")
        made = [path for path in folder.iterdir() if path.is_dir()]
        if status not in (0, 1) or len(made) != 1 or _TRACEBACK.search(text):
            if 0 <= status < 128:  # of itself: next time from the beginning
                (folder / "begun.json").unlink()
            raise ComparisonError(f"{run.method}, {run.value}, seed {run.seed}: exit status {status}\n{text[-2000:]}")
        shutil.rmtree(made[0] / "model_weights", ignore_errors=True)
        shutil.rmtree(made[0] / "checkpoints", ignore_errors=True)
        record = {
            "overrides": run.overrides,
            "commit": self._commit,
            "machine": machine(),
            "folder": made[0].name,
            "completed": status == 0,
        }
        write_json_atomically(folder / "run.json", record)

    @staticmethod
    def _look_whether_it_is_left(folder: Path) -> None:
        """Raise ComparisonError if anybody, on any machine, trains the run in this folder."""
        try:
            with held(folder):
                pass
        except ConfigError as error:
            raise ComparisonError(str(error)) from None

    def _begun(self, folder: Path) -> Path | None:
        """The run folder of a run that was interrupted, where it has a checkpoint, of the same code, to go on from.

        Raises:
            ComparisonError: it is still being made, as when the comparison was killed and its runs were not.
        """
        if not (path := folder / "begun.json").exists():
            return None
        begun = json.loads(path.read_text(encoding="utf-8"))
        if str(folder) in _arguments(begun["process"]):
            raise ComparisonError(f"{folder}: process {begun['process']} still makes this run; end it, or wait for it")
        # Files that differ from the commit may differ by more by now.
        if begun["commit"] != self._commit or self._commit in ("", "unknown") or self._commit.endswith("+"):
            return None
        checkpoints = {path.parent.parent for path in folder.glob("*/checkpoints/round_*")}
        return checkpoints.pop() if len(checkpoints) == 1 else None

    def make(self, runs: Iterable[Run], title: str, known: Container[str], made: Callable[[Run], None]) -> None:
        """Make the runs that are missing.

        Args:
            known: ids of runs that are not needed.
            made: called for each of the others that is there, as soon as it is.

        Raises:
            ComparisonError: some could not be made; the others were.
        """
        wanted = {run.id: run for run in runs if run.id not in known}
        missing = {id: run for id, run in wanted.items() if self.store.record(run) is None}
        for id in wanted.keys() - missing.keys():
            made(wanted[id])
        problems = []
        with ThreadPoolExecutor(self._jobs) as pool, tqdm(total=len(missing), desc=title, unit=" runs") as bar:
            futures = {pool.submit(self._make, run): run for run in missing.values()}
            try:
                for future in as_completed(futures):
                    if (error := future.exception()) is not None:
                        problems.append(str(error))
                    else:
                        made(futures[future])
                    bar.set_postfix_str(f"{futures[future].method}, seed {futures[future].seed}"[:40])
                    bar.update()
            except BaseException:
                self._stopping.set()
                for process in list(self._running):
                    process.terminate()  # ends with a checkpoint
                raise
        if problems:
            raise ComparisonError("\n".join(problems))


def _arguments(process: int) -> str:
    """Of a process's command line; nothing where there is no such process."""
    try:
        return " ".join(psutil.Process(process).cmdline())
    except psutil.Error:
        return ""


def commit() -> str:
    """The commit of the code that runs, marked where files differ from it; results in docs/ do not count."""

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else ""

    changed = git("status", "--porcelain", "-uno", "--", ".", ":!docs")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def machine() -> str:
    """This machine, in words."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {cores()} cores, {platform.system()}, Python {platform.python_version()}"
