"""Tokenised documents on disk: written once, block by block, then memory-mapped.

A set is a folder; c4/guide.md describes its files. Documents are kept whole, so one set serves every sequence length.
Every block of documents is first written to a file of its own in <name>.partial, so an interrupted program repeats one
block at most. A complete set is renamed to <name>. A process that opens it verifies the checksums of all files, except
within `verified_sets`: the processes of a machine leave that to its first.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabrics.data.documents import DatasetError, Document, Skipped, Source, document_hash, split
from fabrics.data.tokenization import (
    end_of_text,
    fingerprint,
    load_tokenizer,
    named_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from utils.config.schema import Config, ConfigError
from utils.files import write_atomically, write_json_atomically
from utils.progress import progress_bar, shows_progress

logger = logging.getLogger("adloco.dataset")

FORMAT = 3
BLOCK_DOCUMENTS = 500
BLOCK_CHARACTERS = 2**22  # tokenising takes some 50 times the text
_SUMS = "SHA256SUMS"
_READ_BYTES = 1 << 20
_verified = ContextVar("verified", default=False)
_HASH = np.dtype("<u8")


@dataclass(frozen=True)
class TokenisedPart:
    """Tokens of documents, memory-mapped.

    Attributes:
        tokens: [tokens]; each document is followed by end-of-text.
        offsets: [documents + 1]; document i is tokens[offsets[i]:offsets[i + 1]].
        origins: the file with the origin of each document; None: unknown.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    origins: Path | None = None

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(np.asarray(self.offsets))

    def first(self, documents: int | None) -> "TokenisedPart":
        """Return the part with only the first documents; None: all."""
        if documents is None:
            return self
        end = self.offsets[documents]
        return TokenisedPart(self.tokens[:end], self.offsets[: documents + 1], self.hashes[:documents], self.origins)

    def read_origins(self) -> list[str]:
        with self.origins.open("rb") as file:
            return [json.loads(line) for line in itertools.islice(file, len(self))]

    def packed(self, sequence_length: int) -> np.ndarray:
        """Return a view [sequences, sequence_length] of all tokens; the last partial sequence is lost."""
        return self.tokens[: len(self.tokens) // sequence_length * sequence_length].reshape(-1, sequence_length)


def content_digest(
    parts: Iterable[TokenisedPart], tokenizer: PreTrainedTokenizerBase, classes: Iterable[np.ndarray] = ()
) -> str:
    """Return a digest of the documents of these parts, of their classes and of the tokenizer."""
    digest = hashlib.sha256(fingerprint(tokenizer).encode())
    for part in parts:
        digest.update(np.asarray(part.hashes, _HASH).tobytes())
    for labels in classes:
        digest.update(labels.tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TokenisedSet:
    """A complete set."""

    folder: Path
    metadata: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    train: TokenisedPart
    validation: TokenisedPart


@contextlib.contextmanager
def verified_sets() -> Iterator[None]:
    """Open sets without verifying checksums, as another process of this machine has just done so."""
    token = _verified.set(True)
    try:
        yield
    finally:
        _verified.reset(token)


def open_tokenised(folder: Path) -> TokenisedSet:
    """Verify a set's checksums, unless within `verified_sets`, and map it; DatasetError: not complete, or damaged."""
    try:
        if not _verified.get():
            _verify(folder)
        metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        parts = {name: _open_part(folder / name, metadata["dtype"]) for name in metadata["parts"]}
        tokenizer = load_tokenizer(str(folder / "tokenizer"), "tokenizer")
        return TokenisedSet(folder, metadata, tokenizer, parts["train"], parts["validation"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{folder}: no complete tokenised set: {type(error).__name__}: {error}") from None


def _verify(folder: Path) -> None:
    lines = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    if damaged := sorted(name for name, _ in listed.items() ^ _checksums(folder).items()):
        raise ValueError(f"{folder / damaged[0]} is damaged or missing")


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != _SUMS and path.name[0] != "."]
    size = sum(path.stat().st_size for path in paths)
    with progress_bar(desc=f"checking {folder}", total=size, unit="B", unit_scale=True, leave=False, delay=1) as bar:
        for path in sorted(paths):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(_READ_BYTES):
                    digest.update(block)
                    bar.update(len(block))
            found[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return found


def _open_part(folder: Path, dtype: str) -> TokenisedPart:
    def mapped(name: str, dtype: str) -> np.ndarray:
        path = folder / name
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    tokens = mapped("tokens.bin", dtype)
    return TokenisedPart(tokens, mapped("offsets.bin", "<i8"), mapped("hashes.bin", _HASH), folder / "origins.jsonl")


@dataclass(frozen=True)
class Recipe:
    """The documents and the tokenizer of a tokenised set. tokenizer: None: one is trained on the training documents."""

    source: Source
    train_size: int | None
    val_size: int | None
    tokenizer: PreTrainedTokenizerBase | None = None
    vocab_size: int | None = None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Plain data that decides the content of the set."""
        arguments = {
            "format": FORMAT,
            "source": self.source.identity,
            "train_documents": self.train_size,
            "validation_documents": self.val_size,
            "tokenizer": fingerprint(self.tokenizer) if self.tokenizer else {"trained": self.vocab_size},
        }
        return json.loads(json.dumps(arguments))

    @property
    def key(self) -> str:
        """Name of the set in a cache."""
        return hashlib.sha256(json.dumps(self.arguments, sort_keys=True).encode()).hexdigest()[:32]


def tokenised(folder: Path, recipe: Recipe, cache: bool) -> TokenisedSet:
    """Open the set of a recipe at `folder`; make it first, or continue an interrupted run, if it is not there.

    If several programs request the same set at once, one works and the others wait.

    cache: the folder belongs to the cache: a damaged set is made again.
    """
    folder = folder.absolute()  # the current folder has a name as well
    lock = folder.with_name(f".{folder.name}.lock")
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if documents := _existing(folder, recipe, cache):
            logger.info("%s: tokenised before, in %s", recipe.source.name, folder)
            return documents
        logger.info("reading and tokenising %s", recipe.source.name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            # Another program may have made it in the meantime.
            if not _existing(folder, recipe, cache):
                try:
                    new = _write(partial, recipe)
                except ConfigError:
                    shutil.rmtree(partial, ignore_errors=True)  # a corrected recipe would not continue it
                    raise
                _remove(folder)
                os.replace(new, folder)
                _remove(partial)
            # Programs that wait for the lock, or create it again, find the set complete.
            lock.unlink(missing_ok=True)
    except OSError as error:
        key = "cache_dir" if cache else "--output_dir"
        raise ConfigError(f"{key}: cannot write {error.filename or folder}: {error.strerror or error}") from None
    return open_tokenised(folder)


def tokenised_documents(config: Config, source: Source) -> TokenisedSet:
    """Return the tokenised documents of a source, from the cache if possible."""
    recipe = Recipe(source, config.data_sample_size, config.val_size, named_tokenizer(config), config.vocab_size)
    found = tokenised(Path(config.cache_dir) / "tokenised" / recipe.key, recipe, cache=True)
    # The cached tokenizer gives the same tokens, but may lack a chat template.
    return found if recipe.tokenizer is None else dataclasses.replace(found, tokenizer=recipe.tokenizer)


def _existing(folder: Path, recipe: Recipe, cache: bool) -> TokenisedSet | None:
    if not folder.exists() or (folder.is_dir() and not os.listdir(folder)):
        return None
    try:
        documents = open_tokenised(folder)
    except DatasetError as error:
        if not cache:
            raise
        logger.warning("cached documents are damaged and will be made again: %s", error)
        return None
    there = documents.metadata["arguments"]
    wanted = recipe.arguments
    different = [
        f"{key}: {there.get(key)} there, {wanted[key]} requested" for key in wanted if there.get(key) != wanted[key]
    ]
    if different:
        raise ConfigError(
            f"{folder}: holds a set made with other arguments ({'; '.join(different)}); name another or remove it"
        )
    return documents


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Return the tokens of each text, then end-of-text (uint32); special tokens that a text spells out are text."""
    ids = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    return [np.array([*tokens, tokenizer.eos_token_id], dtype=np.uint32) for tokens in ids]


def _write(partial: Path, recipe: Recipe) -> Path:
    """Write the complete set to a folder in `partial`, which this returns."""
    train, validation = split(recipe.source, recipe.train_size, recipe.val_size)
    tokenizer = recipe.tokenizer
    if tokenizer is None:
        tokenizer = train_tokenizer((document.text for document in train(Skipped())), recipe.vocab_size)
    name = tokenizer.name_or_path or "trained on the documents"
    new = partial / "new"
    _remove(new)
    new.mkdir(parents=True)
    save_tokenizer(tokenizer, new / "tokenizer")
    tokenizer = load_tokenizer(str(new / "tokenizer"), "tokenizer")  # the stored tokenizer is the one to use
    # The largest token decides: vocabularies may have gaps.
    dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")
    metadata = {
        "format": FORMAT,
        "dtype": dtype.str,
        "source": recipe.source.name,
        "arguments": recipe.arguments,
        "tokenizer": {"name": name, "vocabulary": len(tokenizer), "end_of_text": end_of_text(tokenizer)},
        "parts": {},
        "skipped": {},
    }
    # A block is used again only for the same documents and the same tokenizer.
    blocks = partial / f"{recipe.key}_{fingerprint(tokenizer)}"
    blocks.mkdir(exist_ok=True)
    if finished := sum(path.name[0] != "." for path in blocks.iterdir()):
        logger.info("continuing an interrupted tokenisation after %s blocks", f"{finished:,}")
    parts = (("validation", validation, recipe.val_size), ("train", train, recipe.train_size))
    for part, documents, size in parts:
        skipped = Skipped()
        progress = progress_bar(
            always=True,
            desc=f"tokenising {part} documents",
            unit=" documents",
            total=size,
            mininterval=0.1 if shows_progress() else 30.0,  # in a log file each state is a line
        )
        with progress:
            reading = documents(skipped)
            metadata["parts"][part] = _write_part(new / part, blocks, reading, tokenizer, metadata, progress)
            progress.total = progress.n  # skipped documents never come
        for reason, count in skipped.counts.items():
            total = metadata["skipped"].setdefault(reason, {"documents": 0, "first": skipped.first[reason]})
            total["documents"] += count
    write_json_atomically(new / "metadata.json", metadata)
    sums = "".join(f"{digest}  {name}\n" for name, digest in _checksums(new).items())
    (new / _SUMS).write_text(sums, encoding="utf-8")
    return new


def _write_part(
    folder: Path,
    blocks: Path,
    documents: Iterator[Document],
    tokenizer: PreTrainedTokenizerBase,
    metadata: dict,
    progress: tqdm,
) -> dict[str, int]:
    folder.mkdir()
    sizes = {"documents": 0, "tokens": 0}
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "offsets.bin").open("wb") as offsets,
        (folder / "hashes.bin").open("wb") as hashes,
        (folder / "origins.jsonl").open("wb") as origins,
    ):
        offsets.write(np.zeros(1, "<i8").tobytes())
        for number in itertools.count():
            own = _next_block(documents)
            if not own:
                return sizes
            block = _block(blocks / f"{folder.name}_{number:07d}.npz", own, tokenizer)
            ends = sizes["tokens"] + np.cumsum(block["lengths"])
            tokens.write(block["tokens"].astype(metadata["dtype"]).tobytes())
            offsets.write(ends.astype("<i8").tobytes())
            hashes.write(block["hashes"].tobytes())
            origins.write("".join(json.dumps(document.origin) + "\n" for document in own).encode())
            sizes["documents"] += len(own)
            sizes["tokens"] = int(ends[-1])
            progress.update(len(own))


def _next_block(documents: Iterator[Document]) -> list[Document]:
    block = []
    characters = 0
    for document in documents:
        block.append(document)
        characters += len(document.text)
        if len(block) == BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
            break
    return block


def _block(path: Path, documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    hashes = np.array([document_hash(document.text) for document in documents], _HASH)
    found = _read_arrays(path)
    if found is not None and np.array_equal(found.get("hashes"), hashes):
        return found
    tokens = encode(tokenizer, [document.text for document in documents])
    block = {"tokens": np.concatenate(tokens), "lengths": np.array([len(own) for own in tokens]), "hashes": hashes}
    _write_arrays(path, block)
    return block


def _read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    try:
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as file:  # the format has checksums
            return dict(file)
    except Exception as error:  # zipfile, zlib and numpy raise a dozen classes for damaged files
        logger.warning("a cached file is damaged and will be made again: %s: %s", path, error)
        return None


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_atomically(path, lambda temporary: temporary.write_bytes(content.getvalue()))


def cached_arrays(config: Config, identity: Any, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays that were made before for the same identity (plain data); else make them, and keep them."""
    key = hashlib.sha256(json.dumps([FORMAT, identity]).encode()).hexdigest()[:32]
    path = Path(config.cache_dir) / "tokenised" / f"{key}.npz"
    found = _read_arrays(path)
    if found is None:
        found = make()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove(path)
            _write_arrays(path, found)
        except OSError as error:  # the next run makes them again
            logger.warning("cache_dir: cannot write %s: %s", path, error.strerror or error)
    return found
