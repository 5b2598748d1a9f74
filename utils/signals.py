"""SIGINT and SIGTERM: the first asks a run to stop after its round, the second ends it at once.

A signal may reach one process of a run or all of them, while they compute or wait for each other. Who gets it puts it
up for all on the notice board, in a thread, because a process that waits in a collective does nothing else; and whether
a round that takes too long is given up is the main process's to say.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from utils.notices import Notices

# A round that takes longer than this after the signal is given up.
PATIENCE_SECONDS = 30.0
STATUS_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# So many times as long as the one before a round may take, without warning.
_GROWTH = 4
# Between two looks at the board.
_INTERVAL_SECONDS = 0.5
_STOP, _GIVE_UP = "stop", "give up"


class Restorable(Protocol):
    """The state as it was after the last round: see utils.checkpoint.Checkpoints."""

    held: str

    def write_held(self, name: str) -> None:
        """Begin to write it."""


class StopRequest:
    """Context in which the first signal does not end the program but is kept.

    Args:
        say: tells the user, once.
        notices: of all processes of the run.
        decides: whether this is the process that decides when to give up.
    """

    def __init__(self, say: Callable[[str], None], notices: Notices, decides: bool):
        self._say, self._notices, self._decides = say, notices, decides
        self._since: float | None = None
        self._before: dict[int, object] = {}
        self._state: Restorable | None = None
        self._closing = threading.Event()
        self._got_one, self.given_up = False, False

    def __enter__(self) -> "StopRequest":
        self._signalled, wakeup = socket.socketpair()
        for end in (self._signalled, wakeup):
            end.setblocking(False)
        self._wakeup = wakeup
        # The interpreter writes a signal's number there at once, whatever the main thread waits for.
        self._wakeup_before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._closing.set()
        self._wakeup.send(b"\0")
        self._thread.join()
        self._signalled.close()
        self._wakeup.close()

    def restore(self, state: Restorable) -> None:
        """What is to be written when a round is given up."""
        self._state = state

    def may_give_up(self, seconds: float) -> bool:
        """Whether the round after one that took so long may well take longer than a signal would wait."""
        return _GROWTH * seconds > PATIENCE_SECONDS

    @property
    def requested(self) -> bool:
        """Whether to stop after the round."""
        return self._since is not None

    def check(self) -> None:
        """Raise KeyboardInterrupt when the round is given up."""
        if self.given_up:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            # Not ours any more: it works whatever the program is waiting for.
            signal.signal(each, signal.SIG_DFL)

    def _request(self, why: str) -> None:
        self._since = time.monotonic()
        self._say(f"{why}: stopping after this round, or within {PATIENCE_SECONDS:.0f} s; once more stops at once")

    def _watch(self) -> None:
        with contextlib.suppress(ConnectionError):  # the main process is gone, which is the heartbeat's to say
            while not self._closing.is_set():
                if select.select([self._signalled], [], [], _INTERVAL_SECONDS)[0]:
                    for number in self._signalled.recv(64):
                        if number in _SIGNALS:
                            self._signal(signal.Signals(number).name)
                self._look()

    def _signal(self, name: str) -> None:
        if self._got_one:
            os._exit(STATUS_INTERRUPTED)  # the main thread has not even come to the first
        self._got_one = True
        self._notices.post(_STOP, name)
        if self._since is None:
            self._request(name)

    def _look(self) -> None:
        """What the others say, and when it has taken too long."""
        if self._since is None and (name := self._notices.read(_STOP)) is not None:
            self._request(f"{name} to another process")
        if self._since is None or self.given_up:
            return
        if self._decides and time.monotonic() - self._since > PATIENCE_SECONDS:
            self._notices.post(_GIVE_UP, self._state.held if self._state is not None else "")
        held = self._notices.read(_GIVE_UP)
        if held is not None:
            if self._state is not None:
                self._state.write_held(held)
            self.given_up = True
