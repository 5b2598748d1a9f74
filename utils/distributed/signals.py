"""SIGINT, SIGTERM and SIGHUP: the first asks a run to stop after its round, with a checkpoint; a later one ends it.

A launcher kills its processes 30 seconds after the signal. So a round that still trains after 20 seconds is left after
the next inner step, and the run resumes from the last checkpoint.

A signal may reach one process of a run or all of them. Each process keeps its request, and after every round the
processes gather whether one of them has one. A launcher such as torchrun's agent or SLURM may pass on a signal that has
reached its processes already. So a second signal within seconds of the first means nothing.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from types import FrameType

STATUS_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Within this time another signal counts as the first one.
_SAME_SECONDS = 5.0
# Time for the round to end after the first signal.
ROUND_SECONDS = 20.0
STOPPED_IN_ROUND = (
    f"stopped in a round that did not end within {ROUND_SECONDS:.0f} s; work after the last checkpoint is lost"
)


class StoppedInRoundError(Exception):
    """A signal has ended the run within a round, which is not in a checkpoint."""


def handled_signals() -> tuple[int, ...]:
    """Return the signals whose handlers a run replaces: none in another thread than the main one, which may not.

    SIGHUP stays ignored if it is, as by nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return _SIGNALS[:-1] if ignored else _SIGNALS


class StopRequest:
    """Context in which the first signal is kept instead of ending the program; in the main thread only."""

    def __init__(self, speaks: bool = True):
        self.requested = False
        self._speaks = speaks
        self._requested_at = 0.0
        self._before: dict[int, object] = {}
        self._arriving, self._arrived = socket.socketpair()
        self._wakeup_before = -1

    def __enter__(self) -> "StopRequest":
        self._arriving.setblocking(False)
        for number in handled_signals():
            self._before[number] = signal.signal(number, self._on_signal)
        if self._before:
            self._wakeup_before = signal.set_wakeup_fd(self._arriving.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
        self._arriving.close()
        self._arrived.close()
        if self.requested:  # the same signal may come again while the results are written
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arrived(self) -> bool:
        """Return True if a signal came, also while the main thread waits outside Python, where it handles none."""
        numbers = b""
        with contextlib.suppress(OSError):  # none has come, or the request has ended
            numbers = self._arrived.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return self.requested or any(number in self._before for number in numbers)

    @property
    def overdue(self) -> bool:
        """True if a signal came so long ago that the round is to be left."""
        return self.requested and time.monotonic() - self._requested_at >= ROUND_SECONDS

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._requested_at = time.monotonic()
            if self._speaks:  # without logging, which the signal may have interrupted
                text = (
                    f"stopping after this round, with a checkpoint; if it trains another {ROUND_SECONDS:.0f} s, it is "
                    f"abandoned for the checkpoint before it. Signal again after {_SAME_SECONDS:.0f} s to stop at once"
                )
                text = f"{signal.Signals(number).name}: {text}\n"
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, text.encode())
        elif time.monotonic() - self._requested_at > _SAME_SECONDS:
            for each in self._before:
                signal.signal(each, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(128 + number)  # Linux keeps the first process of a container from ending by an unhandled signal
