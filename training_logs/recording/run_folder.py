"""The run folder and the log: where everything is written, and that nothing written before is lost."""

import datetime
import logging
import logging.handlers
import os
import sys
from pathlib import Path

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from training_logs.trackers.clearml_modes import resolved_mode
from utils.config.schema import Config, ConfigError
from utils.utils import nearest_existing_folder

logger = logging.getLogger("adloco")


class _ConsoleHandler(logging.Handler):
    """Prints above the progress bars instead of through them."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))


class FileHandler(logging.FileHandler):
    """Says once, on the console, that the log file cannot be written."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            tqdm.write(f"warning: cannot write to {self.baseFilename}: {sys.exc_info()[1]}; training goes on")


def start_logging(is_main: bool = True) -> logging.handlers.MemoryHandler:
    """Log to the console, and keep the records until there is a run folder to put them in.

    is_main: whether this process is the one that speaks; others log nothing but errors.
    """
    disable_progress_bar()  # that of transformers: saving a model in one file has nothing to show
    root = logging.getLogger("adloco")
    root.setLevel(logging.INFO)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    console = _ConsoleHandler(logging.NOTSET if is_main else logging.ERROR)
    console.setFormatter(logging.Formatter("%(message)s"))
    kept = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    root.addHandler(console)
    root.addHandler(kept)
    return kept


def check_logs(config: Config) -> None:
    """Raise ConfigError if run folder or dashboard could not be had later; nothing is written."""
    resolved_mode(config.clearml)
    folder = nearest_existing_folder(Path(config.log_dir))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"log_dir: cannot write to {config.log_dir}: {folder} is not a writable folder")


def make_run_folder(config: Config, dataset: str) -> Path:
    """`log_dir/<Model>_<Dataset>_<Date>`, new; a second run within the same second gets a number.

    dataset: what is really trained on.
    """
    date = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    base = Path(config.log_dir) / f"{config.model_type}_{dataset}_{date}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"log_dir: cannot make {folder}: {error.strerror}") from None
        return folder
    raise ConfigError(f"log_dir: too many runs named {base}")


def continue_log(path: Path, length: int) -> None:
    """Cut the log file where a checkpoint was written; what comes after it goes to a file beside it."""
    if path.exists() and path.stat().st_size > length:
        with path.open("rb") as file, path.with_name(f"{path.stem}_lost{path.suffix}").open("ab") as lost:
            file.seek(length)
            lost.write(file.read())
        os.truncate(path, length)
