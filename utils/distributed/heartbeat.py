"""Who of the processes still lives, and ending the others when one does not.

Every rank counts upwards in a shared store, once a second, in a thread of its own; the first rank watches all of them
and all watch the first. Who falls silent, or dies as a child of the first, is named in the store, and every rank that
has not ended by itself a little later is ended: waiting in a collective for somebody dead would take for ever. A slow
rank counts on and is waited for.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

_INTERVAL_SECONDS = 1.0
# Silent for so long means dead; less where a collective has already failed.
SILENCE_SECONDS, SILENCE_AFTER_FAILURE = 20.0, 5.0
# Who has not begun by then, importing or waiting for its machine, never will.
STARTING_SECONDS = 600.0
# For writing down what there is, after somebody died.
_GRACE_SECONDS = 25.0
_DONE = "done"


class PeerLostError(RuntimeError):
    """Another process of the run has died; the message names it."""


def exit_reason(code: int) -> str:
    """What an exit status says, for people."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed ({name})" + ("; out of memory?" if code == -signal.SIGKILL else "")


class Heartbeat:
    """One rank's sign of life and watch over the others.

    Args:
        store: a torch.distributed store of its own, shared by all ranks.
        rank, count: which of how many this is.
        children: the processes that this one started, by rank.
    """

    def __init__(self, store, rank: int, count: int, children: Mapping[int, subprocess.Popen]):
        self._store, self._rank, self._children = store, rank, children
        self._watched = range(1, count) if rank == 0 else (0,)
        self._seen = {other: ("", time.monotonic()) for other in self._watched}
        self._names: dict[int, str] = {}
        self._lost: str | None = None
        self._place = ""
        self._silence = SILENCE_SECONDS
        self._found, self._closing = threading.Event(), threading.Event()
        self._introduce()
        self._store.set(f"alive/{rank}", "0")  # who dies before the first beat has begun all the same
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _introduce(self) -> None:
        process = f"process {os.getpid()} on {socket.gethostname()}{self._place}"
        self._store.set(f"name/{self._rank}", f"rank {self._rank} ({process})")

    def placed(self, place: str) -> None:
        """Let the others call this one by its place in the run as well, from the next beat on."""
        self._place = f", {place}"

    def _run(self) -> None:
        beats, told = 0, ""
        while not self._closing.wait(_INTERVAL_SECONDS):
            beats += 1
            try:
                if self._place != told:
                    self._introduce()
                    told = self._place
                self._store.set(f"alive/{self._rank}", str(beats))
                lost = self._look()
            except RuntimeError:
                lost = "the first rank, or its machine, is gone"
            if self._closing.is_set():
                return
            if lost is not None:
                self._lost = lost
                self._found.set()
                if not self._closing.wait(_GRACE_SECONDS):
                    print(
                        f"error: {lost}; rank {self._rank} ends, and --resume goes on from the last checkpoint",
                        file=sys.stderr,
                        flush=True,
                    )
                    for child in self._children.values():
                        child.kill()
                    os._exit(1)
                return

    def _name(self, rank: int) -> str:
        if rank not in self._names:
            key = f"name/{rank}"
            self._names[rank] = self._store.get(key).decode() if self._store.check([key]) else f"rank {rank}"
        return self._names[rank]

    def _look(self) -> str | None:
        """Who is lost, if anybody."""
        if self._store.check(["lost"]):
            return self._store.get("lost").decode()
        now = time.monotonic()
        for other in self._watched:
            before, since = self._seen[other]
            key = f"alive/{other}"
            beats = self._store.get(key).decode() if self._store.check([key]) else ""
            child = self._children.get(other)
            if beats == _DONE:
                continue
            if child is not None and child.poll() not in (None, 0):
                return self._announce(f"{self._name(other)} {exit_reason(child.returncode)}")
            if beats != before:
                self._seen[other] = (beats, now)
            elif now - since > (self._silence if before else STARTING_SECONDS):
                return self._announce(f"{self._name(other)} has not answered for {now - since:.0f} s")
        return None

    def _announce(self, lost: str) -> str:
        self._store.set("lost", lost)
        return lost

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn the failure of a collective into a PeerLostError that says who is gone."""
        try:
            yield
        except RuntimeError as error:
            self._silence = SILENCE_AFTER_FAILURE
            if self._found.wait(SILENCE_SECONDS + 10.0):
                raise PeerLostError(self._lost) from error
            raise

    def failed(self, reason: str) -> None:
        """This rank ends by itself; tell the others why."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):
            if not self._store.check(["lost"]):
                self._announce(f"{self._name(self._rank)} ended: {reason}")

    def close(self) -> None:
        """This rank ends in order: its silence means nothing from now on."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"alive/{self._rank}", _DONE)
