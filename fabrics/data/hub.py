"""The hub, and a network that is not there or fails.

The hub's libraries try every request six times, for 23 seconds and with a line for each, so that a run without a
network would say the same thing again and again. So the hub is asked for an answer once, before anything is loaded from
it. Without one the libraries are told that they are offline: they use what is in their cache and fail at once.
"""

import functools
import logging
import queue
import sys
import threading
import time
import zlib
from pathlib import Path
from types import ModuleType

from huggingface_hub import constants, get_session

from utils.utils import first_line

logger = logging.getLogger("adloco.dataset")

# For an answer, with two more attempts after a refusal.
SECONDS = 5.0
_WAITS_FOR_AN_ANSWER = (0.0, 1.0, 2.0)
# Between attempts to go on with what had begun: four minutes in all, besides what the libraries try.
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

_NETWORK_LIBRARIES = {"aiohttp", "fsspec", "h11", "httpcore2", "httpx2", "requests", "urllib3"}


def _ask() -> str | None:
    """Why the hub does not answer; None: it does."""
    problem, deadline = None, time.monotonic() + SECONDS
    for wait in _WAITS_FOR_AN_ANSWER:
        time.sleep(wait)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            status = get_session().head(constants.ENDPOINT, timeout=left).status_code
        except Exception as error:  # of the network, in half a dozen forms
            problem = first_line(error)
        else:
            if status < 500:
                return None
            problem = f"it answers with status {status}"
    return problem


@functools.cache
def unreachable() -> str | None:
    """Why nothing can be loaded from the hub; None: it can, or the libraries have been told to be offline by the user.

    Asked once, for a few seconds at most. Where the hub cannot be reached the libraries are offline from then on.
    """
    if constants.is_offline_mode():
        return None
    answer: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # In a thread, because nothing limits the time that looking up a name takes.
    threading.Thread(target=lambda: answer.put(_ask()), daemon=True).start()
    try:
        problem = answer.get(timeout=SECONDS)
    except queue.Empty:
        problem = f"no answer within {SECONDS:g} s"
    if problem is None:
        return None
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return f"{constants.ENDPOINT} cannot be reached ({problem})"


def prepare(name: str) -> None:
    """To be called before something is loaded by its name, from the hub or a folder."""
    if not Path(name).is_dir():
        unreachable()


def problem_with(name: str, error: Exception) -> str:
    """Why something could not be loaded, in one line."""
    offline = None if Path(name).is_dir() else unreachable()
    if offline and isinstance(error, OSError):
        return f"{offline}, and it is not in the hub's cache"
    return first_line(error)


def is_of_the_network(error: BaseException) -> bool:
    """Whether an error, or one that led to it, may be gone when one tries again."""
    seen: BaseException | None = error
    while seen is not None:
        missing = isinstance(seen, (FileNotFoundError, PermissionError))
        library = type(seen).__module__.partition(".")[0]
        if not missing and (isinstance(seen, (OSError, EOFError, zlib.error)) or library in _NETWORK_LIBRARIES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def leave_patience_to_us(datasets: ModuleType) -> None:
    """Let streams fail when a request has: their library would try again for ten minutes, with 200 lines."""
    datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 1, 0
    datasets.config.STREAMING_OPEN_MAX_RETRIES, datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 1, 0
    for name in ("huggingface_hub.utils._http", "huggingface_hub.file_download", "datasets.utils.file_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Patience:
    """How long to try to go on with something that had begun; the waits grow, and begin anew after progress.

    Args:
        what: that is read, for the log.
    """

    def __init__(self, what: str):
        self._what, self._failures = what, 0

    def progressed(self) -> None:
        """Something was read."""
        self._failures = 0

    def ends(self, error: Exception, place: str) -> bool:
        """False after a wait, to try again; True: it is no use, the error is here to stay.

        place: how far one had come, for the log.
        """
        if self._failures == len(WAITS) or not is_of_the_network(error):
            return True
        if not self._failures:
            logger.warning(
                "%s: interrupted at %s (%s: %s); trying to go on for %d minutes",
                self._what,
                place,
                type(error).__name__,
                first_line(error),
                round(sum(WAITS) / 60),
            )
        time.sleep(WAITS[self._failures])
        self._failures += 1
        return False
