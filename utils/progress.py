"""Progress bars that never end a program: where standard error cannot be written, they show nothing."""

import contextlib
import sys
from typing import Any, TextIO

from tqdm import tqdm


class _BestEffort:
    """A stream that ignores what it cannot write, as on a full disk."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def progress_bar(**how: Any) -> tqdm:
    """Return a tqdm progress bar, which is shown on standard error also if that is no terminal."""
    return tqdm(file=_BestEffort(sys.stderr), **how)
