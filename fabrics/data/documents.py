"""Sources of documents.

A source can be read any number of times, always in the same order, with at most one document (or file) in memory.
"""

import ast
import codecs
import collections
import functools
import glob
import gzip
import hashlib
import itertools
import json
import logging
import os
import pydoc_data.topics
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

logger = logging.getLogger("adloco.dataset")

EMPTY, NOT_JSON = "empty", "not a JSON object with a text"


class DatasetError(RuntimeError):
    """A source cannot be read; the message names it and the reason."""


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


Documents = Callable[[Skipped], Iterator[str]]
# Pairs of text and origin (file, host, class or module).
Origins = Callable[[], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Source:
    """Documents to train on, and perhaps others to validate on.

    Attributes:
        name: description for the log.
        identity: plain data that changes whenever the documents may.
        train: reads the documents from the start and counts skipped records.
        validation: the same for the source's own validation part; None: it has none.
        origins: readers of (text, origin) for train, and for validation if it exists; empty: origins are unknown.
    """

    name: str
    identity: Mapping[str, Any]
    train: Documents
    validation: Documents | None = None
    origins: tuple[Origins, ...] = ()


def document_hash(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


# Readers


def _open(path: Path) -> IO[bytes]:
    """Open a plain or gzip file, told apart by its first bytes."""
    file = path.open("rb")
    if file.peek(2)[:2] == b"\x1f\x8b":
        file.close()
        return gzip.open(path, "rb")
    return file


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
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


def json_records(path: Path, skipped: Skipped) -> Iterator[tuple[str, dict]]:
    """Yield place and object of each line that is a JSON object with a text; skip others."""
    for number, line in _lines(path):
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError:  # bad JSON, or bytes that are not UTF-8
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            skipped.add(NOT_JSON, place)
        elif not record["text"].strip():
            skipped.add(EMPTY, place)
        else:
            # JSON can express half a surrogate pair, UTF-8 cannot: it becomes a question mark.
            yield place, record | {"text": record["text"].encode("utf-8", "replace").decode("utf-8")}


def json_documents(paths: Sequence[Path]) -> Documents:
    """The texts of JSON-lines files, plain or gzip: C4's shards."""

    def read(skipped: Skipped) -> Iterator[str]:
        for path in paths:
            for _, record in json_records(path, skipped):
                yield record["text"]

    return read


def whole_files(paths: Sequence[Path]) -> Documents:
    """One document per text file (UTF-8, plain or gzip)."""

    def read(skipped: Skipped) -> Iterator[str]:
        for path in paths:
            text = _decode(b"".join(line for _, line in _lines(path)), path)
            if text.strip():
                yield text
            else:
                skipped.add(EMPTY, str(path))

    return read


def blank_line_blocks(paths: Sequence[Path]) -> Documents:
    """One document per block of lines between blank lines (UTF-8 text, plain or gzip)."""

    def read(skipped: Skipped) -> Iterator[str]:
        for path in paths:
            found = False
            for blank, lines in itertools.groupby(_lines(path), key=lambda item: not item[1].strip()):
                if not blank:
                    found = True
                    yield _decode(b"".join(line for _, line in lines), path).strip()
            if not found:
                skipped.add(EMPTY, str(path))

    return read


def _decode(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def matching_files(patterns: Sequence[str], suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Expand paths, folders or globs to files, each once, sorted within a pattern.

    Args:
        suffixes: the files of a folder to use; hidden files are excluded.

    Raises:
        DatasetError: a pattern matches no file, or a folder cannot be read.
    """
    found: dict[Path, None] = {}
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
        found |= dict.fromkeys(paths)
    return list(found)


def file_identities(paths: Sequence[Path]) -> list[list]:
    """Return absolute path, size and modification time of each file."""
    try:
        stats = [(path.resolve(), path.stat()) for path in paths]
    except OSError as error:
        raise DatasetError(f"{error.filename}: {error.strerror}") from None
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


# Python's own documentation

# Folders of the standard library without user documentation.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__",
}  # fmt: skip


def documentable(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the nodes that may have a docstring, outer before inner; expressions are not visited."""
    waiting = collections.deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            waiting.extend(getattr(node, part, ()))


def docstrings(source: bytes) -> list[str]:
    """Return the docstrings of a module, outer before inner; files that do not parse have none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the parsed code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    return [text.strip() for node in documentable(tree) if (text := ast.get_docstring(node))]


@functools.lru_cache(maxsize=1)
def python_documents() -> tuple[str, ...]:
    """Return pydoc's topics and all docstrings of the standard library, each once, in order of hash."""
    documents = dict.fromkeys(text for text, _ in python_origins())
    # A fixed random order: otherwise a sample would consist of neighbours in a module.
    return tuple(sorted((text for text in documents if text), key=document_hash))


def python_origins() -> Iterator[tuple[str, str]]:
    """Yield pydoc's topics and the docstrings of the standard library, each with its module or package."""
    for _, text in sorted(pydoc_data.topics.topics.items()):
        yield text.strip(), "pydoc's topics"
    for module, text in standard_library_docstrings():
        yield text, module


@functools.lru_cache(maxsize=1)
def standard_library_docstrings() -> list[tuple[str, str]]:
    """Return pairs of module (or package) and docstring, in order of path.

    Modules are parsed, never imported: importing some of them has side effects.
    """
    found = []
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    for path in tqdm(files, desc="reading docstrings", unit=" files", leave=False, disable=None):
        module = path.relative_to(root).parts[0].removesuffix(".py")
        found += [(module, text) for text in docstrings(path.read_bytes())]
    return found


def python_docs_source() -> Source:
    """About 2 MB of real English that is on every machine with Python."""
    return Source(
        name=f"the documentation of Python {sys.version.split()[0]}",
        identity={"python": sys.version, "stdlib": sysconfig.get_path("stdlib")},
        train=lambda skipped: iter(python_documents()),
        origins=(python_origins,),
    )
