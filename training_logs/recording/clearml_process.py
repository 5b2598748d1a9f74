"""The process that reports a run to ClearML while it goes on: nothing that a server does reaches the training."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from training_logs.clearml_modes import LAST_SECONDS, SESSION, resolved_mode
from utils.config import Config

# How long the run waits for the last reports.
WAIT_SECONDS = 4.0


class ClearMLProcess:
    """The reporting process of a run that goes on; nothing here waits for it but `close`, and that not for long.

    Args:
        folder: the run folder, with its configuration.
        mode: online or offline.
    """

    def __init__(self, folder: Path, mode: str):
        self._folder, self._mode = folder, mode
        (folder / SESSION).mkdir(exist_ok=True)
        self._log = folder / SESSION / "clearml.log"
        # Ctrl-C is for the run, which then ends this in order. A session of its own would keep it away as well, but a
        # low priority counts only among the processes of one session.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "training_logs.log_processor",
                    str(folder.resolve()),
                    "--mode",
                    mode,
                    "--follow",
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        signal.signal(signal.SIGINT, handler)
        # Training's threads wait for each other: whatever takes the core of one stops all of them.
        psutil.Process(self._process.pid).nice(19)

    def close(self) -> tuple[str, bool]:
        """Let it send the rest, and wait a little; what to tell the user, and whether that is a warning."""
        again = f"python -m training_logs.log_processor {self._folder}"
        try:
            self._process.stdin.close()
            code = self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            return (
                f"ClearML is still sending and goes on in the background for {LAST_SECONDS // 60} minutes at most "
                f"({self._log}); {again} sends the run again"
            ), True
        except OSError as error:
            code = error
        if code != 0:
            return f"ClearML failed ({code}), see {self._log}; {again} sends the run", True
        if self._mode == "offline":
            return f"ClearML: offline session in {self._folder / SESSION}; with credentials: {again}", False
        return "ClearML: everything is in the dashboard", False


def start_clearml(config: Config, folder: Path) -> ClearMLProcess | None:
    """The reporting process that the config asks for; None: off."""
    mode = resolved_mode(config.clearml)
    return None if mode == "off" else ClearMLProcess(folder, mode)
