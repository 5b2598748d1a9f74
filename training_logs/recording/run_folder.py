"""The run folder, its lock and the log: where everything is written; nothing that was written before is lost."""

import contextlib
import datetime
import io
import logging
import logging.handlers
import os
import shlex
import sys
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from training_logs.trackers.clearml import resolved_mode
from training_logs.trackers.tracker import check_packages
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes, done_by_all
from utils.files import REPORT_FOLDER, has_checkpoint, nearest_existing_folder
from utils.progress import shows_progress

logger = logging.getLogger("adloco")


def _discard(stream: TextIO) -> None:
    """Send everything that is written to a broken stream nowhere, so that not even the flush at exit fails."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _complain(message: str) -> None:
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


class _ConsoleHandler(logging.Handler):
    """Prints above the progress bars.

    A console that cannot be written (a full disk, a closed pipe) is given up; training continues.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record))
            sys.stdout.flush()
        except OSError as error:
            logger.removeHandler(self)
            _discard(sys.stdout)
            _complain(f"warning: standard output cannot be written ({error.strerror}); training continues")


class FileHandler(logging.FileHandler):
    """Says once, on standard error, that the log file cannot be written."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            _complain(f"warning: cannot write to {self.baseFilename}: {sys.exc_info()[1]}; training continues")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # lines that are still buffered have been on the console
            super().close()


def start_logging(is_main: bool = True) -> logging.handlers.MemoryHandler:
    """Log to the console, and keep the records until there is a run folder for them.

    is_main: whether this is the main process; others log only errors.
    """
    if not (is_main and shows_progress()):
        disable_progress_bar()  # of downloads, and of loading weights
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # it writes what is buffered; the console reports a full disk
            sys.stdout.reconfigure(errors="backslashreplace")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    console = _ConsoleHandler(logging.NOTSET if is_main else logging.ERROR)
    console.setFormatter(logging.Formatter("%(message)s"))
    kept = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    logger.addHandler(console)
    logger.addHandler(kept)
    return kept


def check_logs(config: Config, anew: bool) -> None:
    """Raise ConfigError if the run folder or the dashboard cannot be used; nothing is written.

    anew: whether a run folder of this name must not exist.
    """
    if "clearml" in config.trackers:
        resolved_mode(config.clearml)
    check_packages(config.trackers)
    folder = nearest_existing_folder(Path(config.log_dir))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"log_dir: cannot write to {config.log_dir}: {folder} is not a writable folder")
    if config.run_name is not None:
        if Path(config.run_name).name != config.run_name:
            raise ConfigError(f"run_name: must be a name without a path, got {config.run_name!r}")
        folder = Path(config.log_dir, config.run_name)
        # make_run_folder renames the folder of an attempt, which has nothing but a lock before its report folder.
        begun = folder.is_dir() and os.listdir(folder) not in ([], [".lock"])
        if anew and (begun or folder.is_file()):
            instead = "start with --resume auto"
            if has_checkpoint(folder):
                instead = f"continue it with --resume {shlex.quote(str(folder))}"
            raise ConfigError(f"run_name: {folder} exists; choose another name, remove it, or {instead}")
        if folder.is_file() or (begun and not (folder / REPORT_FOLDER).exists()):
            raise ConfigError(f"run_name: {folder} is not the folder of a run; choose another name")


def lock_run(folder: Path) -> contextlib.AbstractContextManager:
    """Lock a run folder until the end of this context, or of this process; under torchrun, wait a minute for the lock.

    On file systems without locks this does nothing.

    Raises:
        ConfigError: another process is training this run.
    """
    lock = FileLock(folder / ".lock", fallback_to_soft=False)
    # torchrun may start processes again before a machine has noticed that it has lost the others.
    patience = 60.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    try:
        with contextlib.suppress(Timeout):
            return lock.acquire(timeout=0.0)
        if patience:
            logger.info("waiting %.0f s for the process that is training this run to end", patience)
        return lock.acquire(timeout=patience)
    except Timeout:
        raise ConfigError(f"{folder}: another process is training this run; wait for its end, or stop it") from None
    except OSError:
        return contextlib.nullcontext()


def lock_run_in_main(processes: Processes, folder: str | Path | None) -> contextlib.AbstractContextManager:
    """Lock a run folder, if there is one, in the main process; ConfigError in all processes where it cannot."""
    locks = folder is not None and processes.is_main
    return done_by_all(processes, lambda: lock_run(Path(folder)) if locks else contextlib.nullcontext())


def make_run_folder(config: Config, dataset: str) -> Path:
    """Create the folder `log_dir/run_name`, or `log_dir/<Model>_<Dataset>_<Date>` where the run has no name.

    A name that is taken gets a number. A folder with the name of the run is from an attempt that died before its first
    checkpoint. It gets the number.

    dataset: the dataset that is trained on, also if it is not the one that was asked for.
    """
    date = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    base = Path(config.log_dir, config.run_name or f"{config.model_type}_{dataset}_{date}")
    names = [base, *(base.with_name(f"{base.name}_{number}") for number in range(2, 1000))]
    try:
        if config.run_name is not None and base.exists():
            with lock_run(base):  # a run that was started at the same time would go on in two folders
                if has_checkpoint(base):
                    raise ConfigError(f"run_name: {base} has a checkpoint since this run was started; start again")
                base.rename(next(folder for folder in names if not folder.exists()))
        for folder in names if config.run_name is None else [base]:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise ConfigError(f"log_dir: cannot make {base}: {error.strerror}") from None
    raise ConfigError(f"log_dir: cannot make {base}: another run has just made it")
