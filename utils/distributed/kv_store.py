"""What one process leaves for the others to read, without anybody waiting: short texts in a store that all reach.

Collectives need everybody at the same place of the program; a signal, or a file written in the background, comes in
between.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Protocol

from utils.distributed.heartbeat import PeerLostError

_POLL_SECONDS = 0.05


class Store(Protocol):
    """What is needed of a torch.distributed store."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read what is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""


class Notices:
    """A notice board for the threads of all processes.

    Args:
        store: nobody else uses this connection to it.
        rank, count: which of how many processes this is.

    Attributes:
        rank, count: these.
    """

    def __init__(self, store: Store, rank: int = 0, count: int = 1):
        self._store, self._lock = store, threading.Lock()
        self.rank, self.count, self._topics = rank, count, 0

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[Store]:
        try:
            with self._lock:
                yield self._store
        except RuntimeError as error:
            raise ConnectionError(f"the first process is gone: {error}") from None

    def new_topic(self, what: str) -> str:
        """A name that was not used before, the same in all processes if all ask for theirs in the same order."""
        self._topics += 1
        return f"{what} {self._topics}"

    def post(self, name: str, text: str) -> None:
        """Put up a text, in place of what was there under that name.

        Raises:
            ConnectionError: the process that keeps the board is gone; likewise below.
        """
        with self._reaching() as store:
            store.set(name, text)

    def read(self, name: str) -> str | None:
        """The text that is up under a name, or None."""
        with self._reaching() as store:
            return store.get(name).decode() if store.check([name]) else None

    def post_own(self, name: str, text: str) -> None:
        """Put up a text beside those of the other processes under that name."""
        self.post(f"{name}/{self.rank}", text)

    def read_all(self, name: str) -> list[str | None]:
        """The processes' own texts under a name; None for those that have put up none."""
        return [self.read(f"{name}/{rank}") for rank in range(self.count)]


def common_attempt(store: Store, rank: int, count: int, seconds: float) -> str:
    """A name for this attempt at the run that its `count` processes have in common, and no other attempt has.

    The store of torchrun outlives an attempt and still holds what was left in it, and processes cannot count their
    attempts: the agent of a machine that came later begins at 0. So every process calls under a name of its own, and
    the first one answers whoever calls until all of this attempt have heard it.

    Raises:
        PeerLostError: the others do not come within `seconds`.
    """
    deadline, own = time.monotonic() + seconds, uuid.uuid4().hex
    others = range(1, count)
    if rank != 0:
        store.set(f"call/{rank}", own)
    while rank != 0 and not store.check([f"answer/{own}"]):
        _wait(deadline, "the first process")
    if rank != 0:
        attempt = store.get(f"answer/{own}").decode()
        store.set(f"heard/{attempt}/{rank}", "")
        return attempt
    while missing := [other for other in others if not store.check([f"heard/{own}/{other}"])]:
        for other in missing:
            if store.check([f"call/{other}"]):
                store.set(f"answer/{store.get(f'call/{other}').decode()}", own)
        _wait(deadline, f"rank {', '.join(map(str, missing))}")
    return own


def _wait(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise PeerLostError(f"{whom} did not come in time")
    time.sleep(_POLL_SECONDS)
