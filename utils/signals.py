"""SIGINT and SIGTERM: the first asks a run to stop after its round, the second ends it at once."""

import signal
import time
from collections.abc import Callable
from types import FrameType

# A round that takes longer than this after the signal is given up.
PATIENCE_SECONDS = 30.0
STATUS_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context in which the first signal does not end the program but is kept.

    say: tells the user, once.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._since: float | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            # Not ours any more: it works whatever the program is waiting for.
            signal.signal(each, signal.SIG_DFL)
        self._since = time.monotonic()
        self._say(
            f"{signal.Signals(number).name}: stopping after this round, or within {PATIENCE_SECONDS:.0f} s; "
            "once more stops at once"
        )

    @property
    def requested(self) -> bool:
        """Whether to stop after the round."""
        return self._since is not None

    def check(self) -> None:
        """Raise KeyboardInterrupt when the round has taken too long since the signal."""
        if self._since is not None and time.monotonic() - self._since > PATIENCE_SECONDS:
            raise KeyboardInterrupt
