"""Plots and report of a run: on the way by a process of its own, at the end by this one.

Reading the logs of a long run takes seconds in which Python runs nothing else in its process: the main process would be
silent for so long, and others would take it for dead.
"""

import os
import signal
import subprocess
import tempfile
from pathlib import Path

from training_logs.recording import background

# What drawing may cost, in seconds of a processor over seconds of the run.
SHARE = 0.02
# What it costs before it is known.
_FIRST_SECONDS = 2.0


def affordable(spent: float, next_time: float, elapsed: float) -> bool:
    """Whether drawing once more keeps to its share of a run that has taken so many seconds."""
    return spent + next_time <= SHARE * elapsed


class Drawing:
    """Draws a run folder as often as its share of the run allows.

    Args:
        folder: the run folder.
        state: from state_dict, to go on there.
    """

    def __init__(self, folder: Path, state: dict | None = None):
        self._folder = folder
        self._spent, self._last = (state["spent"], state["last"]) if state else (0.0, _FIRST_SECONDS)
        self._process: subprocess.Popen | None = None
        self._output = None

    def state_dict(self) -> dict:
        """What was spent, and on the last drawing, in seconds of a processor."""
        return {"spent": self._spent, "last": self._last}

    def draw_if_cheap(self, elapsed: float) -> str | None:
        """Have it drawn beside the run, unless that is being done or costs too much; why the last drawing failed.

        Args:
            elapsed: seconds of the run so far.

        Raises:
            OSError: the process cannot be started.
        """
        problem = self._collect()
        if self._process is None and affordable(self._spent, self._last, elapsed):
            self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed when the process has ended
            arguments = (str(self._folder.resolve()),)
            self._process = background.start("training_logs.training_monitoring", *arguments, output=self._output)
        return problem

    def _collect(self, wait: bool = False) -> str | None:
        if self._process is None:
            return None
        number, status, used = os.wait4(self._process.pid, 0 if wait else os.WNOHANG)
        if not number:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._last = used.ru_utime + used.ru_stime
        self._spent += self._last
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        self._output.close()
        failed, self._process = self._process.returncode != 0, None
        return lines[-1] if failed and lines else "no reason given" if failed else None

    def draw(self) -> str | None:
        """Draw it now, with everything that there is; why it could not be drawn.

        Raises:
            OSError: it cannot be written.
        """
        if self._process is not None:  # it would put older plots in the place of these
            os.kill(self._process.pid, signal.SIGTERM)
            self._collect(wait=True)
        # Imported here: a run should not wait for a plotting library before it trains.
        from training_logs.training_monitoring import RunFolderError, draw

        try:
            draw(self._folder)
        except RunFolderError as error:
            return str(error)
        return None
