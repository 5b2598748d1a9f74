"""Documents: sources of text, readers of text files, and the split into training and validation documents.

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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from utils.config.schema import ConfigError
from utils.progress import progress_bar
from utils.text import counted

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
    """

    name: str
    identity: Mapping[str, Any]
    train: Documents
    validation: Documents | None = None


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
    texts = []
    for number, line in lines:
        try:
            texts.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path}:{number}: not UTF-8 text: {error.reason}") from None
    return "".join(texts)


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


def matching_files(patterns: Sequence[str], suffixes: tuple[str, ...] = ("",), subfolders: bool = False) -> list[Path]:
    """Expand paths, folders or globs to files, each once, sorted within a pattern; DatasetError: one matches no file.

    Args:
        suffixes: the files of a folder to use; hidden files are excluded.
        subfolders: of a folder are used as well, except hidden ones.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        try:
            if path.is_dir():
                paths = _files_of(path, suffixes, subfolders)
            elif path.exists():
                paths = [path]
            else:
                paths = [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if _is_file(path)]
        except OSError as error:
            raise DatasetError(f"{pattern}: {error.strerror}") from None
        if not paths:
            wanted = " or ".join(f"*{suffix}" if suffix else "file" for suffix in suffixes)
            raise DatasetError(f"{pattern}: {f'no {wanted} in it' if path.is_dir() else 'no such file'}")
        # A file that links or two patterns reach twice is one file.
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _files_of(folder: Path, suffixes: tuple[str, ...], subfolders: bool) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    paths = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if subfolders and name[0] != ".")
        paths += [Path(root, name) for name in sorted(names) if name.endswith(suffixes) and name[0] != "."]
    return [path for path in paths if _is_file(path)]


def _is_file(path: Path) -> bool:
    if path.is_symlink() and not path.exists():
        raise DatasetError(f"{path}: a link to a file that is missing")
    return path.is_file()


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


# The split into training and validation documents, by the hash of their text; no text is in both parts


# By default one document in twenty validates, but at most this many: they are evaluated after every round.
MOST_BY_DEFAULT = 500
_BLOCK = 4096


def default_validation_size(documents: int) -> int:
    """Return the default number of validation documents beside, or out of, this many documents."""
    return min(max(1, documents // 20), MOST_BY_DEFAULT)


def split(source: Source, train_size: int | None, val_size: int | None) -> tuple[Documents, Documents]:
    """Return readers of the training and validation documents of a source; no text is in both.

    Validation is the beginning of the source's own validation part. Without one, the documents with the smallest
    hashes are held out: among the first train_size + val_size, or among all. Training documents whose text is held
    out are skipped.

    Args:
        train_size: use the first train_size training documents; None: all.
        val_size: None: one for every twenty of train_size, or of all documents, at most MOST_BY_DEFAULT, which is
            also what is read of an own validation part beside all documents.
    """
    own = source.validation is not None
    if own:
        validation = partial(_first, source.validation, train_size, val_size)
        held_out = frozenset(document_hash(document.text) for document in validation(Skipped()))
    else:
        held_out = _smallest_hashes(source, train_size, val_size)
        validation = partial(_chosen, source.train, held_out)
    return partial(_train, source.train, train_size, held_out, own), validation


def _train(
    documents: Documents, size: int | None, held_out: Set[int], own_validation: bool, skipped: Skipped
) -> Iterator[Document]:
    """The first `size` documents that are not held out; None: all."""
    # The first occurrence of a text that is held out of these documents is the validation document itself.
    first_occurrences = set() if own_validation else set(held_out)
    found = 0
    for document in documents(skipped):
        number = document_hash(document.text)
        if number not in held_out:
            found += 1
            yield document
            if found == size:
                return
        elif number in first_occurrences:
            first_occurrences.remove(number)
        else:
            skipped.add("the same text as a validation document", repr(document.text[:40]))
    if found < (size or 1):
        raise ConfigError(_too_few_for_training(found, len(held_out), size))


def _first(documents: Documents, train_size: int | None, val_size: int | None, skipped: Skipped) -> Iterator[Document]:
    """The beginning of the source's own validation part."""
    count = val_size
    if count is None:
        count = MOST_BY_DEFAULT if train_size is None else default_validation_size(train_size)
    found = 0
    for document in itertools.islice(documents(skipped), count):
        found += 1
        yield document
    if found < (val_size or 1):
        raise ConfigError(f"val_size: the validation part has {found} documents, got {val_size or 'null'}")


def _chosen(documents: Documents, held_out: Set[int], skipped: Skipped) -> Iterator[Document]:
    """The first document of each hash; reading stops after the last of them."""
    missing = set(held_out)
    for document in documents(Skipped()):  # the training part counts what is skipped
        number = document_hash(document.text)
        if number in missing:
            missing.remove(number)
            yield document
            if not missing:
                return
    raise DatasetError("the documents have changed while they were read")


def _too_few_for_training(found: int, held_out: int, wanted: int | None) -> str:
    return (
        f"data_sample_size: {found} documents are left for training beside {held_out} for validation, "
        f"got {wanted or 'null'}"
    )


def _smallest_hashes(source: Source, train_size: int | None, val_size: int | None) -> frozenset[int]:
    """Choose the documents to hold out in one pass that keeps their hashes, and no text."""
    if val_size is None and train_size is not None:
        val_size = default_validation_size(train_size)
    pool = None if train_size is None else train_size + val_size
    most = MOST_BY_DEFAULT if val_size is None else val_size
    skipped = Skipped()
    documents = itertools.islice(source.train(skipped), pool)
    bar = progress_bar(documents, desc="choosing validation documents", total=pool, unit=" documents", leave=False)
    numbers = (document_hash(document.text) for document in bar)
    total = 0
    smallest = np.empty(0, dtype=np.uint64)
    while len(block := np.fromiter(itertools.islice(numbers, max(_BLOCK, most)), dtype=np.uint64)):
        total += len(block)
        # One more than are held out, to know whether another document exists.
        smallest = np.unique(np.concatenate([smallest, block]))[: most + 1]
    if val_size is None:
        val_size = min(default_validation_size(total), max(1, len(smallest) - 1))
    if len(smallest) < 2:
        raise ConfigError(
            f"dataset: {source.name} has {counted(len(smallest), 'document')}, training and validation need one each; "
            f"with dataset text, text_documents: blank_lines makes one of each block of lines"
            f"{f'. Skipped: {skipped}' if skipped.counts else ''}"
        )
    if val_size >= len(smallest):
        raise ConfigError(f"val_size: must be below the {len(smallest)} documents of the dataset, got {val_size}")
    if pool is not None and total < pool:
        raise ConfigError(_too_few_for_training(total - val_size, val_size, train_size))
    return frozenset(smallest[:val_size].tolist())
