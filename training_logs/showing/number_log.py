"""CSVs of numbers, read in pieces and held by column: a long log is never in memory as text or as Python objects."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

Row = dict[str, float]
# Bytes of text that are in memory at a time.
_PIECE = 4_000_000


class Rows(Sequence):
    """Rows of numbers, held by column: rows[3] is a row, made when it is asked for, rows["tokens"] a column.

    Args:
        columns: float64 arrays of the same length.
        places: which of their rows; None: all.
    """

    def __init__(self, columns: Mapping[str, np.ndarray], places: np.ndarray | None = None):
        self._columns = columns
        self._places = np.arange(len(next(iter(columns.values()), ()))) if places is None else places

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Rows":
        """Of rows that are there already, all with the same columns."""
        return cls({name: np.array([row[name] for row in rows], dtype=float) for name in (rows[0] if rows else ())})

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, which):
        if isinstance(which, str):
            return self._columns[which][self._places]
        if isinstance(which, slice):
            return Rows(self._columns, self._places[which])
        place = self._places[which]
        return {name: float(column[place]) for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def has(self, column: str) -> bool:
        """Whether there is such a column."""
        return column in self._columns

    def where(self, chosen: np.ndarray) -> "Rows":
        """The rows at which a mask is true, or at given places."""
        return Rows(self._columns, self._places[chosen])

    def by(self, column: str) -> dict[int, "Rows"]:
        """Stretches of rows with the same value in a column, which does not come back to one that it had."""
        values = self[column]
        starts = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)
        ends = [*starts[1:], len(values)]
        return {int(values[a]): Rows(self._columns, self._places[a:b]) for a, b in zip(starts, ends, strict=True)}


def parse_rows(text: bytes) -> np.ndarray:
    """Whole lines of a CSV of numbers: [rows, columns], float64; an empty cell is NaN.

    Raises:
        ValueError: it holds something else, or rows of different lengths.
    """
    text = b"\n" + text.replace(b"\r\n", b"\n")
    for _ in range(2):  # ,,, has two empty cells that share a comma
        text = text.replace(b",,", b",nan,")
    text = text.replace(b"\n,", b"\nnan,").replace(b",\n", b",nan\n")
    return np.loadtxt(text.decode().splitlines()[1:], delimiter=",", ndmin=2, comments=None)


class NumberLog:
    """A CSV of numbers that may grow while it is read: every row is read once.

    A program that died, or writes just now, leaves half a line at the end: it waits until it is whole.

    Args:
        path: the file; it may be missing, and have no rows yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self.columns: tuple[str, ...] = ()

    def new(self) -> Iterator[np.ndarray]:
        """The rows that were not read before, in pieces: [rows, columns], float64.

        Raises:
            ValueError: there is something else in it than numbers.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if not self.columns:
                header = file.readline()
                if not header.endswith(b"\n"):
                    return
                self.columns, self._offset = tuple(header.decode().strip().split(",")), len(header)
            file.seek(self._offset)
            rest = b""
            while piece := file.read(_PIECE):
                whole, newline, rest = (rest + piece).rpartition(b"\n")
                if newline:
                    self._offset += len(whole) + 1
                    yield parse_rows(whole + b"\n")

    def all(self) -> Rows:
        """Everything that is there, where nothing has been read yet."""
        pieces = list(self.new())
        table = np.concatenate(pieces) if pieces else np.empty((0, len(self.columns)))
        return Rows({name: table[:, place] for place, name in enumerate(self.columns)})
