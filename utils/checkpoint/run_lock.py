"""One at a time: whoever trains the run in a folder keeps all others from it."""

import contextlib
import logging
from pathlib import Path

from filelock import FileLock, Timeout

from utils.config.schema import ConfigError

_logger = logging.getLogger("adloco")


def held(folder: Path, patience: float = 0.0) -> contextlib.AbstractContextManager:
    """Nobody else may train the run in this folder until the end of this context, or of this process.

    On file systems without locks everybody may.

    Args:
        folder: the run's.
        patience: seconds that somebody who is about to end may take.

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
