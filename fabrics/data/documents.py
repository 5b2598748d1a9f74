"""Documents: sources of text, and readers of text files.

A source can be read any number of times, always in the same order, with at most one document or file in memory.
"""

import codecs
import glob
import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

EMPTY = "empty"
NOT_JSON = "not a JSON object with a text"


class DatasetError(RuntimeError):
    """A source cannot be read; the message names it and the reason."""


class Document(NamedTuple):
    """A text and its origin: a file, host, module or class, by which non-IID data are divided."""

    text: str
    origin: str


@dataclass
class Skipped:
    """Number of skipped records and the place of the first, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, place)

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason} (first: {self.first[reason]})" for reason, count in self.counts.items())


# Reads documents from the start, and counts skipped records.
Documents = Callable[[Skipped], Iterator[Document]]


@dataclass(frozen=True)
class Source:
    """Documents to train on, and perhaps others to validate on.

    Attributes:
        name: description for the log.
        identity: plain data that changes whenever the documents may.
        validation: reads the source's own validation part; None: it has none.
        size: bytes of the documents, about; None: unknown.
    """

    name: str
    identity: Mapping[str, Any]
    train: Documents
    validation: Documents | None = None
    size: int | None = None


def document_hash(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


# Readers of one file


def _open(path: Path) -> IO[bytes]:
    file = path.open("rb")
    if file.peek(2)[:2] == b"\x1f\x8b":
        file.close()
        return gzip.open(path, "rb")
    return file


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a plain or gzip file; DatasetError if it is damaged."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DatasetError(f"{path}: damaged or cut off after line {number}: {error}") from None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from None


def _decoded(lines: Iterator[tuple[int, bytes]], path: Path) -> str:
    try:
        return b"".join(line for _, line in lines).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def json_records(path: Path, skipped: Skipped) -> Iterator[dict]:
    """Yield the JSON objects with a text, one per line; skip other lines."""
    for number, line in numbered_lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, not UTF-8, or nested too deeply
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            skipped.add(NOT_JSON, f"{path}:{number}")
        elif not record["text"].strip():
            skipped.add(EMPTY, f"{path}:{number}")
        else:
            # JSON can express half a surrogate pair, UTF-8 cannot: it becomes a question mark.
            yield record | {"text": record["text"].encode("utf-8", "replace").decode("utf-8")}


def whole_file(path: Path, skipped: Skipped) -> Iterator[str]:
    """Yield the text of a file (UTF-8, plain or gzip)."""
    text = _decoded(numbered_lines(path), path)
    if text.strip():
        yield text
    else:
        skipped.add(EMPTY, str(path))


def blank_line_blocks(path: Path, skipped: Skipped) -> Iterator[str]:
    """Yield the blocks of lines between blank lines of a file (UTF-8, plain or gzip)."""
    found = False
    for _, lines in itertools.groupby(numbered_lines(path), key=lambda line: not line[1].strip()):
        text = _decoded(lines, path).strip()
        if text:
            found = True
            yield text
    if not found:
        skipped.add(EMPTY, str(path))


# Files


def matching_files(patterns: Sequence[str], suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Expand paths, folders or globs to files, each once, sorted within a pattern; DatasetError: one matches no file.

    suffixes: the files of a folder to use; hidden files are excluded.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        try:
            if path.is_dir():
                names = sorted(name for name in os.listdir(path) if name.endswith(suffixes) and name[0] != ".")
                paths = [path / name for name in names if (path / name).is_file()]
            elif path.exists():
                paths = [path]
            else:
                paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
        except OSError as error:
            raise DatasetError(f"{pattern}: {error.strerror}") from None
        if not paths:
            wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
            raise DatasetError(f"{pattern}: {f'no file {wanted} in it' if path.is_dir() else 'no such file'}")
        # A file that links or two patterns reach twice is one file.
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def file_identities(paths: Sequence[Path]) -> list[list]:
    """Return absolute path, size and modification time of each file."""
    identities = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise DatasetError(f"{error.filename}: {error.strerror}") from None
        identities.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return identities
