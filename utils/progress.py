"""Progress bars in terminals and notebooks, which never end a program."""

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

from utils.distributed.launch import is_main


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


def in_notebook() -> bool:
    """Return whether a notebook shows what this program prints."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return "IPKernelApp" in getattr(shell, "config", ())


def shows_progress() -> bool:
    """Return whether someone watches this process, the first of the run, in a terminal or a notebook."""
    return is_main() and (in_notebook() or (sys.stderr is not None and sys.stderr.isatty()))


def progress_bar(items: Iterable | None = None, *, always: bool = False, **how: Any) -> tqdm:
    """Return a tqdm progress bar over items, or one to update, if `shows_progress`; always: also in log files."""
    if in_notebook():
        from tqdm.auto import tqdm as notebook_tqdm  # as text where ipywidgets is not installed

        return notebook_tqdm(items, **how)
    return tqdm(
        items, file=_BestEffort(sys.stderr) if always else None, disable=not (always or shows_progress()), **how
    )
