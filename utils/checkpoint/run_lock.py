"""A lock on the run folder: one process at a time trains a run."""

import contextlib
import logging
import os
from pathlib import Path

from filelock import FileLock, Timeout

from utils.config.schema import ConfigError
from utils.distributed.collective_checks import done_by_all
from utils.distributed.processes import Processes

_logger = logging.getLogger("adloco")


def held(folder: Path, patience: float = 0.0) -> contextlib.AbstractContextManager:
    """Lock a run folder until the end of this context, or of this process.

    On file systems without locks this does nothing.

    Args:
        folder: the run folder.
        patience: seconds to wait for a process that is about to end.

    Raises:
        ConfigError: another process is training it.
    """
    lock = FileLock(folder / ".lock", fallback_to_soft=False)
    for seconds in (0.0, patience):
        try:
            return lock.acquire(timeout=seconds)
        except Timeout:
            if patience and not seconds:
                _logger.info("waiting %.0f s for the process that is training this run to end", patience)
        except OSError:
            return contextlib.nullcontext()
    raise ConfigError(f"{folder}: another process is training this run; let it end, or stop it, first")


def claimed_by_main(processes: Processes, folder: str | Path | None) -> contextlib.AbstractContextManager:
    """The main process claims a run folder, if there is one; ConfigError in all processes where it cannot."""
    # torchrun may start processes again before a machine has noticed that it has lost the others.
    patience = 60.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    claims = folder is not None and processes.is_main
    return done_by_all(processes, lambda: held(Path(folder), patience) if claims else contextlib.nullcontext())
