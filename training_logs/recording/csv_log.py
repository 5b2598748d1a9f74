"""A CSV file that only grows and is exact after a full disk, a kill, and a resume."""

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


class CsvLog:
    """Rows appended to a CSV file.

    Rows that cannot be written stay in memory and are written with the next rows.

    Args:
        path: the file. It is created with its header, or continued.
        columns: the header.
        state: from state_dict. The log continues there: later rows and half a last line are cut off.

    Raises:
        OSError: the file cannot be created, or is shorter than the state says.
    """

    def __init__(self, path: Path, columns: Sequence[str], state: dict | None = None):
        self.path = path
        self.columns = tuple(columns)
        if state is None:
            self._pending = ""
            path.write_text(_text([columns]), encoding="utf-8", newline="")
            self._length = path.stat().st_size
            return
        self._pending = state["pending"]
        self._length = state["bytes"]
        if path.stat().st_size < self._length:
            raise OSError(f"{path} is shorter than it was when the checkpoint was written")
        os.truncate(path, self._length)

    def append(self, rows: Iterable[Sequence]) -> None:
        """Write rows.

        Raises:
            OSError: they could not be written, and wait for the next call.
        """
        self._pending += _text(rows)
        data = self._pending.encode()
        try:
            # Mode r+b: a file that was removed meanwhile must not come back without its first rows.
            with self.path.open("r+b") as file:
                file.seek(self._length)
                file.write(data)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._length)
            raise
        self._length += len(data)
        self._pending = ""

    def state_dict(self) -> dict:
        """Return the length of the file, which is synchronised to disk, and the rows that wait."""
        with contextlib.suppress(OSError):
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        return {"bytes": self._length, "pending": self._pending}


def _text(rows: Iterable[Sequence]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
