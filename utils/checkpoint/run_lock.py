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


def lock_run(folder: Path, patience: float = 0.0) -> contextlib.AbstractContextManager:
    """Lock a run folder until the end of this context, or of this process.

    On file systems without locks this does nothing.

    Args:
        folder: the run folder.
        patience: seconds to wait for a process that is about to end.

    Raises:
        ConfigError: another process is training this run.
    """
    lock = FileLock(folder / ".lock", fallback_to_soft=False)
    try:
        with contextlib.suppress(Timeout):
            return lock.acquire(timeout=0.0)
        if patience:
            _logger.info("waiting %.0f s for the process that is training this run to end", patience)
        return lock.acquire(timeout=patience)
    except Timeout:
        raise ConfigError(f"{folder}: another process is training this run; wait for its end, or stop it") from None
    except OSError:
        return contextlib.nullcontext()


def lock_run_in_main(processes: Processes, folder: str | Path | None) -> contextlib.AbstractContextManager:
    """Lock a run folder, if there is one, in the main process; ConfigError in all processes where it cannot."""
    # torchrun may start processes again before a machine has noticed that it has lost the others.
    patience = 60.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    locks = folder is not None and processes.is_main
    return done_by_all(processes, lambda: lock_run(Path(folder), patience) if locks else contextlib.nullcontext())
