"""SIGINT and SIGTERM: the first asks a run to stop after its round, with a checkpoint; a later one ends it at once.

A signal may reach one process of a run or all of them. Each process keeps its request, and after every round the
processes gather whether one of them has one. A launcher such as torchrun's agent or SLURM may pass on a signal that has
reached its processes already. So a second signal within seconds of the first means nothing.
"""

import contextlib
import os
import signal
import threading
import time
from types import FrameType

STATUS_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Within this time another signal counts as the first one.
_SAME_SECONDS = 5.0


def handled_signals() -> tuple[int, ...]:
    """Return the signals whose handlers a run replaces: none in another thread than the main one, which may not."""
    return _SIGNALS if threading.current_thread() is threading.main_thread() else ()


class StopRequest:
    """Context in which the first signal is kept instead of ending the program; in the main thread only."""

    def __init__(self, speaks: bool = True):
        self.requested = False
        self._speaks = speaks
        self._requested_at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in handled_signals():
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception) -> None:
        if self.requested:  # the same signal may come again while the results are written
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._requested_at = time.monotonic()
            if self._speaks:  # without logging, which the signal may have interrupted
                text = "stopping after this round, with a checkpoint; another signal"
                text = f"{signal.Signals(number).name}: {text} in more than {_SAME_SECONDS:.0f} s stops at once\n"
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, text.encode())
        elif time.monotonic() - self._requested_at > _SAME_SECONDS:
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            signal.raise_signal(number)
