"""The process that reports a run to ClearML: nothing that a server does, or does not do, reaches the training."""

import subprocess
from pathlib import Path

from training_logs.recording import background
from training_logs.trackers.clearml_modes import LAST_SECONDS, SESSION, resolved_mode
from utils.config.schema import Config

# How long the run waits for the last reports to a server.
WAIT_SECONDS = 4.0
_COMMAND = "python -m training_logs.log_processor"


class ClearMLProcess:
    """Follows a run that goes on, where there is a server; an offline session is written when the run is over.

    Importing clearml and writing a session costs seconds of processor time: nobody waits for a session, and while the
    run goes on nobody looks at it.

    Args:
        folder: the run folder, with its configuration.
        mode: online or offline.
    """

    def __init__(self, folder: Path, mode: str):
        self._folder, self._mode = folder, mode
        (folder / SESSION).mkdir(exist_ok=True)
        self._log = folder / SESSION / "clearml.log"
        self._process = self._start("--follow") if mode == "online" else None

    def _start(self, *options: str) -> subprocess.Popen:
        arguments = (str(self._folder.resolve()), "--mode", self._mode, *options)
        with self._log.open("wb") as log:
            return background.start("training_logs.log_processor", *arguments, output=log, waits=bool(options))

    def close(self) -> tuple[str, bool]:
        """Let it send the rest, and wait a little for a server; what to tell the user, and whether it is a warning."""
        again = f"{_COMMAND} {self._folder}"
        if self._mode == "offline":
            try:
                self._process = self._start()
            except OSError as error:
                return f"ClearML: no offline session ({error}); {again} writes it", True
            return (
                f"ClearML: an offline session is being written to {self._folder / SESSION} in the background, which "
                f"takes some seconds; with credentials, to the dashboard: {again}"
            ), False
        try:
            self._process.stdin.close()
            code = self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            return (
                f"ClearML is still sending and goes on in the background for {LAST_SECONDS // 60} minutes at most "
                f"({self._log}); {again} sends what did not arrive"
            ), True
        except OSError as error:
            code = error
        if code != 0:
            return f"ClearML failed ({code}), see {self._log}; {again} sends what did not arrive", True
        return "ClearML: everything is in the dashboard", False


def start_clearml(config: Config, folder: Path) -> ClearMLProcess | None:
    """The reporting process that the config asks for; None: off."""
    mode = resolved_mode(config.clearml)
    return None if mode == "off" else ClearMLProcess(folder, mode)
