"""Experiment trackers: the interface of a dashboard, and the process that reports a run to one.

The process that trains never talks to a tracker. `training_logs.log_processor` reads the run folder in a process of its
own, while the run trains or afterwards, and tells the tracker what it finds. So no tracker can slow, stop or end a run,
and whatever did not arrive can be sent again from the folder.
"""

import contextlib
import importlib
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.schema import ConfigError
from utils.files import REPORT_FOLDER, write_json_atomically

# The module that reports a folder, and where it is found. Installed, its name begins with adloco.
_REPORTER = f"{__package__.rpartition('.')[0]}.log_processor"
_ROOT = Path(__file__).resolve().parents[__name__.count(".")]
# Seconds that a whole folder may take.
_SEND_SECONDS = 120.0
# Seconds that the end of a run waits for the last reports.
WAIT_SECONDS = 30.0
# Bytes of the round log for which both waits become one second longer.
_BYTES_PER_SECOND = 200_000
# The file of a store that keeps the dashboard's id of the run.
_RUN = "run.json"


# Name of a tracker, which is also the name of its module here: the package that it imports.
PACKAGES = {
    "clearml": "clearml",
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
}


def check_packages(trackers: Sequence[str]) -> None:
    """Raise ConfigError if a tracker's package is missing."""
    missing = [name for name in trackers if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        raise ConfigError([f"trackers: {name} needs a package: pip install {PACKAGES[name]}" for name in missing])


def tracker_of(name: str, folder: Path, mode: str, new: bool) -> "Tracker":
    """Return a tracker by name; see Tracker."""
    return importlib.import_module(f"{__package__}.{name}").TRACKER(folder, mode, new)


class Tracker:
    """A dashboard. To add one, override these methods, in a module with TRACKER, and name its package in PACKAGES.

    A run that is resumed, or sent again, is reported again from its first round: a tracker replaces or skips what it
    already has.

    Args:
        folder: of the run, or of a gradient analysis. What a tracker keeps is in the folder's `store`.
        mode: online or offline; only ClearML is told.
        new: report to a new task, if the folder already has one.
    """

    def __init__(self, folder: Path, mode: str, new: bool = False):
        self._folder = folder.resolve()
        self._mode = mode
        self._new = new
        self._last_round = 0
        self.store = self._folder / type(self).__module__.rpartition(".")[2]

    def clear_store(self) -> Path:
        """Empty the store, except for the id of the run and the log of the reporting process, and return it."""
        self.store.mkdir(exist_ok=True)
        for path in self.store.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix != ".log" and path.name != _RUN:
                path.unlink()
        return self.store

    def known_run(self) -> str | None:
        """Return the id of the run that an earlier report made; None: there is none, or a new one is wanted."""
        remembered = self.store / _RUN
        if self._new or not remembered.exists():
            return None
        return json.loads(remembered.read_text(encoding="utf-8"))["run"]

    def remember_run(self, run: str) -> None:
        """Keep the dashboard's id of the run for later reports."""
        self.store.mkdir(exist_ok=True)
        write_json_atomically(self.store / _RUN, {"run": run})

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, or continue, with the configuration of the run."""

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        """Show values of a round, named `title/series`."""

    def text(self, text: str) -> None:
        """Show a message."""

    def figure(self, name: str, path: Path) -> None:
        """Show an image."""

    def artifact(self, name: str, path: Path) -> None:
        """Keep a file: the summary, a difference of the code, or the weights of the best model."""

    def finish(self, status: str) -> None:
        """Wait until everything has arrived; status: completed, interrupted or failed."""


class TrackerProcess:
    """Reports a folder to a tracker from another process.

    Args:
        follow: report a run while it trains, until `finish` or the end of this process.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, name: str, folder: Path, mode: str, follow: bool):
        self._name = name
        option = "" if name == "clearml" else f" --tracker {name}"
        self._again = f"python -m {_REPORTER} {shlex.quote(str(folder))}{option}"
        self._rounds = folder / REPORT_FOLDER / "training_log.csv"
        self._log = folder / name / f"{name}.log"
        self._log.parent.mkdir(exist_ok=True)
        self._ended: float | None = None
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                _command(name, folder, mode, follow),
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C and the end of the terminal are for the run
            )

    def end(self) -> None:
        """Let the process report the rest, without waiting for it."""
        self._process.stdin.close()
        if self._ended is None:
            self._ended = time.monotonic()

    def finish(self, seconds: float | None = None) -> str | None:
        """Wait for the last reports; return a warning if they did not arrive.

        seconds: the longest wait since `end`, so that several trackers are waited for together; default: WAIT_SECONDS.
            Longer for a long run.
        """
        self.end()
        longest = WAIT_SECONDS if seconds is None else seconds
        with contextlib.suppress(OSError):  # the run folder is lost, or has no rounds
            longest += self._rounds.stat().st_size / _BYTES_PER_SECOND
        left = max(0.0, longest - (time.monotonic() - self._ended))
        try:
            status = self._process.wait(left)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"{self._name} is too slow; {self._again} sends what did not arrive"
        if status == 0:
            return None
        lines: list[str] = []
        with contextlib.suppress(OSError):  # the run folder is lost
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), f"status {status}")
        return f"{self._name} failed ({reason}; see {self._log}); {self._again} sends what did not arrive"


def _command(name: str, folder: Path, mode: str, follow: bool) -> list[str]:
    command = [sys.executable, "-m", _REPORTER, str(folder.resolve()), "--tracker", name, "--mode", mode]
    return [*command, "--follow"] if follow else command


def send_folder(name: str, folder: Path, mode: str) -> str | None:
    """Report a whole folder in a process of its own; return a warning if that failed."""
    try:
        return TrackerProcess(name, folder, mode, follow=False).finish(_SEND_SECONDS)
    except OSError as error:
        return f"{name} could not be started: {error}"
