"""Documents: where text comes from, one document at a time.

A source hands out its documents as often as it is asked to, always in the same order, and never holds more than
one of them (or one file's) in memory.
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
    """A source cannot be read; the message names it and says why. Another source may do."""


class SourceLostError(DatasetError):
    """A source cannot be read to its end though it had begun: another would be other data."""


@dataclass
class Skipped:
    """Records that were left out: how many for each reason, and where the first of them was."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Count one."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, place)

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason} (first: {self.first[reason]})" for reason, count in self.counts.items())


Documents = Callable[[Skipped], Iterator[str]]
# The text and the origin of documents: the file, host or module that each comes from.
Origins = Callable[[], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Source:
    """Documents to train on, and perhaps others to validate on.

    Attributes:
        name: for the log, in words.
        identity: plain data that differs whenever the documents may.
        train: begins to read from the start; what it leaves out goes to the Skipped.
        validation: the same for the source's own validation part; None: it has none.
        origins: the same, with where each document comes from: of train, and of validation where there is such a part;
            empty: nobody knows.
    """

    name: str
    identity: Mapping[str, Any]
    train: Documents
    validation: Documents | None = None
    origins: tuple[Origins, ...] = ()


def document_hash(text: str) -> int:
    """64 bits that depend on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


# Readers


def _open(path: Path) -> IO[bytes]:
    """A file, unpacked if it begins as gzip does, whatever it is called."""
    file = path.open("rb")
    if file.peek(2)[:2] == b"\x1f\x8b":
        file.close()
        return gzip.open(path, "rb")
    return file


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a plain or gzip file; a file that cannot be read to its end is a DatasetError."""
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
    """The place and the object of every line that is a JSON object with a text; others are skipped."""
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
            # Half a surrogate pair, which JSON can write and UTF-8 cannot, becomes a question mark.
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
    """The files that paths, folders or globs mean, each once, sorted within a pattern.

    Args:
        suffixes: which files of a folder are meant; hidden ones never are.

    Raises:
        DatasetError: a pattern means no file, or a folder cannot be read.
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
    """Absolute path, size and time of change of each file."""
    try:
        stats = [(path.resolve(), path.stat()) for path in paths]
    except OSError as error:
        raise DatasetError(f"{error.filename}: {error.strerror}") from None
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


# Python's own documentation

# Parts of the standard library folder that are not documentation for its users, or not the library at all.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__",
}  # fmt: skip


def documentable(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Whatever may have a docstring, outer before inner; expressions, most of a tree, are not looked into."""
    waiting = collections.deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            waiting.extend(getattr(node, part, ()))


def docstrings(source: bytes) -> list[str]:
    """Those of a module, outer before inner; templates and deliberately broken files have none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the parser thinks of other people's code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    return [text.strip() for node in documentable(tree) if (text := ast.get_docstring(node))]


@functools.lru_cache(maxsize=1)
def python_documents() -> tuple[str, ...]:
    """pydoc's topics and every docstring of the installed standard library, each once, in order of hash."""
    documents = dict.fromkeys(text for text, _ in python_origins())
    # A fixed random order: neighbours in a module would be neighbours in any sample.
    return tuple(sorted((text for text in documents if text), key=document_hash))


def python_origins() -> Iterator[tuple[str, str]]:
    """pydoc's topics and every docstring of the standard library, with the module or package of each."""
    for _, text in sorted(pydoc_data.topics.topics.items()):
        yield text.strip(), "pydoc's topics"
    for module, text in standard_library_docstrings():
        yield text, module


@functools.lru_cache(maxsize=1)
def standard_library_docstrings() -> list[tuple[str, str]]:
    """Those of the modules in order of path, outer before inner, each after its module or the package that it is in.

    Modules are parsed, never imported: importing some of them has effects.
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
