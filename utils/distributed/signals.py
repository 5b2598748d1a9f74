"""SIGINT and SIGTERM: the first one asks a run to stop after its round, with a checkpoint; another one ends it at once.

A signal may reach one process of a run or all of them. Each keeps what it got, and after every round the processes
gather whether one of them did. What starts programs may pass a signal on that has reached them already, as torchrun's
agent and SLURM do: a second one within seconds of the first means nothing.
"""

import contextlib
import os
import signal
import time
from types import FrameType

STATUS_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Another signal within this time is taken for the first one.
_SAME_SECONDS = 5.0


class StopRequest:
    """Context in which the first signal does not end the program but is kept.

    Args:
        speaks: whether this process tells the user.

    Attributes:
        requested: whether to stop after the round.
    """

    def __init__(self, speaks: bool = True):
        self.requested = False
        self._speaks = speaks
        self._got_at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception) -> None:
        if self.requested:  # the same signal may come once more while the run is written down
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._got_at = time.monotonic()
            if self._speaks:  # not by logging: the signal may have come while something is logged
                text = "stopping after this round, with a checkpoint; another signal"
                text = f"{signal.Signals(number).name}: {text} in more than {_SAME_SECONDS:.0f} s stops at once\n"
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, text.encode())
        elif time.monotonic() - self._got_at > _SAME_SECONDS:
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            signal.raise_signal(number)
