"""SIGINT and SIGTERM: the first asks a run to stop after its round, another one a little later ends it at once.

A signal may reach one process of a run or all of them, while they compute or wait for each other. Who gets it puts it
up for all on the notice board, in a thread, because a process that waits in a collective does nothing else; and whether
a round that takes too long is given up is the main process's to say.

What starts programs may pass a signal on that has reached them already: torchrun's agent, and a SLURM step, whose
processes all get it. So a second one within seconds of the first means nothing.
"""

import contextlib
import ctypes
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from utils.distributed.kv_store import Notices

STATUS_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long after the first signal another one is taken for the same.
_SAME_SECONDS = 5.0
# So many times as long as the one before a round may take, without warning.
_GROWTH = 4
# Between two looks at the board.
_INTERVAL_SECONDS = 0.5
_STOP, _GIVE_UP = "stop", "give up"


class Restorable(Protocol):
    """The state as it was after the last round: see utils.checkpoint.checkpoint.Checkpoints."""

    held: str

    def write_held(self, name: str) -> None:
        """Begin to write it."""


def _let_end_the_process() -> None:
    """From now on these signals do, whatever the program waits for; from any thread, as signal.signal does not."""
    for number in _SIGNALS:
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number), ctypes.c_void_p(signal.SIG_DFL))


class StopRequest:
    """Context in which the first signal does not end the program but is kept.

    Args:
        say: tells the user, once.
        notices: of all processes of the run.
        decides: whether this is the process that decides when to give up.
        patience_seconds: after the signal a round is given up that has not ended.
    """

    def __init__(self, say: Callable[[str], None], notices: Notices, decides: bool, patience_seconds: float):
        self._say, self._notices, self._decides, self._patience = say, notices, decides, patience_seconds
        self._before: dict[int, object] = {}
        self._state: Restorable | None = None
        self._closing, self._woken = threading.Event(), threading.Event()
        # The first one that came to this process, and when; and since when the run is to stop.
        self._got: signal.Signals | None = None
        self._got_at, self._since, self._told = 0.0, None, False
        self.given_up = False

    def __enter__(self) -> "StopRequest":
        self._signalled, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        # The interpreter writes a signal's number there at once, whatever the main thread waits for.
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        # One hears signals and waits for nothing else, as the board may be far away, or gone.
        self._threads = [
            threading.Thread(target=each, name="signals", daemon=True) for each in (self._hear, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        self._closing.set()
        self._woken.set()
        with contextlib.suppress(BlockingIOError):  # it is full of what wakes the thread as well
            self._wakeup.send(b"\0")
        for thread in self._threads:
            thread.join()
        if not self._may_be_the_same():
            self._hand_back()
        self._signalled.close()
        self._wakeup.close()

    def restore(self, state: Restorable) -> None:
        """What is to be written when a round is given up."""
        self._state = state

    def may_give_up(self, seconds: float) -> bool:
        """Whether the round after one that took so long may well take longer than a signal would wait."""
        return _GROWTH * seconds > self._patience

    @property
    def requested(self) -> bool:
        """Whether to stop after the round."""
        return self._since is not None

    def check(self) -> None:
        """Raise KeyboardInterrupt when the round is given up."""
        if self.given_up:
            raise KeyboardInterrupt

    def _may_be_the_same(self) -> bool:
        return self._got is not None and time.monotonic() - self._got_at < _SAME_SECONDS

    def _hand_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the context the threads do what there is to do; after it this is what is left, for a while."""
        if self._closing.is_set() and not self._may_be_the_same():
            self._hand_back()
            signal.raise_signal(number)

    def _hear(self) -> None:
        while self._got is None:
            heard = [number for number in self._signalled.recv(64) if number in _SIGNALS]
            if heard:
                self._got_at, self._got = time.monotonic(), signal.Signals(heard[0])
            elif self._closing.is_set():
                return
        self._woken.set()
        if not self._closing.wait(_SAME_SECONDS):
            _let_end_the_process()

    def _request(self, why: str) -> None:
        self._since = time.monotonic()
        self._say(
            f"{why}: stopping after this round, or within {self._patience:.0f} s; "
            f"once more, after {_SAME_SECONDS:.0f} s, stops at once"
        )

    def _watch(self) -> None:
        with contextlib.suppress(ConnectionError):  # the main process is gone, which is the heartbeat's to say
            while not self._closing.is_set():
                self._woken.wait(_INTERVAL_SECONDS)
                self._woken.clear()
                self._look()

    def _look(self) -> None:
        """What came to this process, what the others say, and when it has taken too long."""
        if self._got is not None and not self._told:
            self._told = True
            self._notices.post(_STOP, self._got.name)
            if self._since is None:
                self._request(self._got.name)
        if self._since is None and (name := self._notices.read(_STOP)) is not None:
            self._request(f"{name} to another process")
        if self._since is None or self.given_up:
            return
        if not self._decides:
            held = self._notices.read(_GIVE_UP)
        elif time.monotonic() - self._since > self._patience:
            held = self._state.held if self._state is not None else ""
        else:
            held = None
        if held is None:
            return
        if self._state is not None:
            self._state.write_held(held)
        if self._decides:
            # When it is no more in question: if the round ends in between, nobody else has begun.
            self._notices.post(_GIVE_UP, held)
        self.given_up = True
