"""Detection of lost processes, and the reason for an error.

A process that dies breaks the connections to the others. Their next collective fails with a message that names no
process, and a collective on GPUs may wait instead. Under torchrun the agents notice a dead process and end the others.
`python run.py` starts its processes without an agent, so its first process watches the ones that it has started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from utils.config.schema import ConfigError
from utils.distributed.signals import STOPPED_IN_ROUND, StoppedInRoundError

if TYPE_CHECKING:
    from torch.distributed import Store

_INTERVAL_SECONDS = 0.5
# Time for the operating system to report a death after a connection has broken.
_NAMING_SECONDS = 5.0
# Time to write the results after a process has died or ended.
GRACE_SECONDS = 25.0
# Time to write them while the main thread waits for ever; torchrun kills a process after 30 s.
_FINISHING_SECONDS = 15.0
# Begins the reason of a process that ends with a ConfigError, which the others then raise as well.
WRONG_CONFIG = "the configuration is wrong: "


class PeerLostError(RuntimeError):
    """Another process of the run has died or does not answer; the message names it if it is known."""


def exit_reason(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed ({name})" + ("; out of memory?" if code == -signal.SIGKILL else "")


class PeerWatch:
    """Watches the processes that this one has started, and explains failed collectives.

    Args:
        children: the started processes by rank; none under torchrun.
        store: where a process that ends by itself leaves the reason.

    Attributes:
        finish: called with the reason before this process ends while its main thread waits; None: print the reason.
    """

    def __init__(self, children: Mapping[int, subprocess.Popen] | None = None, store: "Store | None" = None):
        self._children = children or {}
        self.finish: Callable[[str], None] | None = None
        self._store = store
        self._lost: str | None = None
        self._killed = False
        self._found = threading.Event()
        self._closing = threading.Event()
        self._claim = threading.Lock()  # taken by the thread that ends this process
        self._ending = threading.Event()
        if self._children:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _watch(self) -> None:
        while not self._closing.wait(_INTERVAL_SECONDS):
            ended = {rank: child for rank, child in self._children.items() if child.poll() not in (None, 0)}
            if not ended:
                continue
            # A process that was killed comes before those that ended because they lost it.
            rank = min(ended, key=lambda rank: ended[rank].returncode)
            self._killed = ended[rank].returncode < 0
            self._lost = f"rank {rank} (process {ended[rank].pid}) {exit_reason(ended[rank].returncode)}"
            self._found.set()
            if not self._closing.wait(GRACE_SECONDS):
                self.end(self.left_reason() or self._lost)
            return

    def end(self, reason: str, status: int = 1, speaks: bool = True) -> None:
        """End this process, whose main thread waits for ever, and the ones that it has started.

        Args:
            speaks: print the reason, if there is no `finish`.
        """
        if not self._claim.acquire(blocking=False):  # the main thread has come back, and ends the process
            return
        self._ending.set()
        if self.finish is not None:
            finishing = threading.Thread(target=self.finish, args=(reason,), name="finishing", daemon=True)
            finishing.start()
            finishing.join(_FINISHING_SECONDS)
        elif speaks:
            advice = "" if WRONG_CONFIG in reason else "; --resume continues from the last checkpoint"
            print(f"error: {reason}{advice}", file=sys.stderr, flush=True)
        for child in self._children.values():
            child.kill()
        os._exit(status)

    def _wait_for_the_end(self) -> None:
        """Wait in the main thread, as another one writes the results and ends the process."""
        if self._ending.is_set():
            threading.Event().wait()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn the failure of a collective into a PeerLostError, or the error that has ended the other process.

        That is a StoppedInRoundError or ConfigError.
        """
        try:
            yield
        except RuntimeError as error:
            if not (type(error).__name__.startswith("Dist") or "gloo" in str(error).lower()):
                raise  # not because of another process
            self._wait_for_the_end()
            reason = self._reason(error)
            kind = PeerLostError
            if reason.endswith(STOPPED_IN_ROUND):
                kind = StoppedInRoundError
            elif WRONG_CONFIG in reason:
                kind = ConfigError
            raise kind(reason) from error

    def _reason(self, error: RuntimeError) -> str:
        text = " ".join(str(error).split())
        if self._children:
            self._found.wait(_NAMING_SECONDS)
        if self._lost is not None and self._killed:
            return self._lost
        of_nccl = "nccl error" in text.lower() and "remote process" not in text.lower()  # such as too little memory
        problem = "GPUs cannot exchange tensors" if of_nccl else "another process of the run is gone"
        if "timed out" in text.lower():
            problem = "another process did not answer"
        return self.left_reason() or self._lost or f"{problem}: {text}"

    def left_reason(self) -> str | None:
        """Return why another process has ended by itself; None: none has."""
        with contextlib.suppress(RuntimeError):  # the first process, which keeps the store, may be gone
            if self._store is not None and self._store.check(["ended"]):
                return self._store.get("ended").decode()
        return None

    def failed(self, rank: int, reason: str) -> None:
        """Tell the other processes why this one ends by itself, and write its results in this thread."""
        if not self._claim.acquire(blocking=False):
            self._wait_for_the_end()
        self.tell(rank, reason)

    def tell(self, rank: int, reason: str) -> None:
        """Tell the other processes why this one ends."""
        self.close()
        with contextlib.suppress(RuntimeError):
            if self._store is not None and not self._store.check(["ended"]):
                self._store.set("ended", f"rank {rank} ended: {reason}")

    def close(self) -> None:
        """Stop watching: from now on the processes end by themselves."""
        self._closing.set()
