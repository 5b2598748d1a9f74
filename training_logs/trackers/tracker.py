"""Experiment trackers: the interface of a dashboard, and the process that reports a run to one.

The process that trains never talks to a tracker. `training_logs.log_processor` reads the run folder in a process of its
own, while the run trains or afterwards, and tells the tracker what it finds. So no tracker can slow, stop or end a run,
and whatever did not arrive can be sent again from the folder.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The module that reports a folder, and where it is found. Installed, its name begins with adloco.
_REPORTER = f"{__package__.rpartition('.')[0]}.log_processor"
_ROOT = Path(__file__).resolve().parents[__name__.count(".")]
# Seconds that the end of a run waits for the last reports.
WAIT_SECONDS = 30.0


class Tracker:
    """A dashboard. To add one, override these six methods.

    A run that is resumed, or sent again, is reported again from its first round: a tracker replaces or skips what it
    already has.
    """

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
        name: of the tracker, for messages.
        folder: of a run, or of a gradient analysis.
        mode: online or offline.
        follow: report a run while it trains, until `finish` or the end of this process.
        log: receives the output of the process.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, name: str, folder: Path, mode: str, follow: bool, log: Path):
        self._name = name
        self._again = f"python -m {_REPORTER} {folder}"
        self._log = log
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                _command(folder, mode, follow),
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C and the end of the terminal are for the run
            )

    def finish(self, seconds: float | None = None) -> str | None:
        """Wait for the last reports; return a warning if they did not arrive.

        Args:
            seconds: the longest wait; default: WAIT_SECONDS.
        """
        self._process.stdin.close()
        try:
            status = self._process.wait(WAIT_SECONDS if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"{self._name} is too slow; {self._again} sends what did not arrive"
        if status == 0:
            return None
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), f"status {status}")
        return f"{self._name} failed ({reason}; see {self._log}); {self._again} sends what did not arrive"


def _command(folder: Path, mode: str, follow: bool) -> list[str]:
    command = [sys.executable, "-m", _REPORTER, str(folder.resolve()), "--mode", mode]
    return [*command, "--follow"] if follow else command
