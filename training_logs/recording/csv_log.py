"""A CSV file that only grows, and is exact after a full disk, a kill and a resume."""

import contextlib
import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class CsvLog:
    """Rows appended to a CSV file. The keys of the first row are its header.

    Rows that cannot be written stay in memory and are written with the next rows.

    Args:
        state: from state_dict. The log continues there: later rows and half a last line are cut off.
        columns: the header, written by the first append even if it has no rows.

    Raises:
        OSError: the file cannot be created, or is shorter than the state says.
    """

    def __init__(self, path: Path, state: Mapping | None = None, columns: Sequence[str] = ()):
        self.path = path
        self._length = 0
        self._pending = ""
        if state is None:
            path.write_text("", encoding="utf-8")
            if columns:
                self._pending = ",".join(columns) + "\r\n"
            return
        self._length = state["bytes"]
        self._pending = state["pending"]
        if path.stat().st_size < self._length:
            raise OSError(f"{path} is shorter than it was when the checkpoint was written")
        os.truncate(path, self._length)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows with equal keys; None is an empty cell.

        Raises:
            OSError: they could not be written, and wait for the next call.
        """
        if rows:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(rows[0]))
            if not self._length and not self._pending:
                writer.writeheader()
            writer.writerows(rows)
            self._pending += text.getvalue()
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
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            os.fsync(file.fileno())
        return {"bytes": self._length, "pending": self._pending}
