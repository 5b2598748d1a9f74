"""Tokenised documents on disk: written once, block by block, then memory-mapped.

A set is a folder:

    metadata.json           its source, arguments, tokenizer and sizes
    tokenizer/              the tokenizer, as a Hugging Face folder
    train/, validation/     tokens.bin: all documents, each followed by end-of-text (uint16 or uint32)
                            offsets.bin: the start of each document, and the end of the last (int64)
                            hashes.bin: document_hash of each text (uint64)
                            origins.jsonl: the origin of each document, a JSON string per line

Documents are kept whole, so one set serves every sequence length. A set is written to <name>.partial and renamed when
complete. An interrupted run is continued: state.json describes the last complete block, and bytes after it are cut
off. Memory: one block of documents.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabrics.data.documents import DatasetError, Document, Documents, Skipped, Source, document_hash
from fabrics.data.held_out import Parts, split
from fabrics.data.tokenization import end_of_text, fingerprint, load_tokenizer, train_tokenizer, vocabulary_size
from utils.config.schema import ConfigError
from utils.files import write_json_atomically

logger = logging.getLogger("adloco.dataset")

FORMAT = 2
BLOCK_DOCUMENTS = 500
_OFFSET = np.dtype("<i8")
_HASH = np.dtype("<u8")


# Reading


@dataclass(frozen=True)
class TokenisedPart:
    """Tokens of documents, memory-mapped.

    Attributes:
        tokens: [tokens]; each document is followed by end-of-text.
        offsets: [documents + 1]; document i is tokens[offsets[i]:offsets[i + 1]].
        hashes: [documents]; document_hash of each text.
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
        """Return the origin of each document."""
        with self.origins.open("rb") as file:
            return [json.loads(line) for line in itertools.islice(file, len(self))]

    def packed(self, sequence_length: int) -> np.ndarray:
        """Return a view [sequences, sequence_length] of all tokens; the last partial sequence is lost."""
        return self.tokens[: len(self.tokens) // sequence_length * sequence_length].reshape(-1, sequence_length)


def content_digest(parts: Iterable[TokenisedPart], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the documents of these parts and of the tokenizer."""
    digest = hashlib.sha256(fingerprint(tokenizer).encode())
    for part in parts:
        digest.update(np.asarray(part.hashes, _HASH).tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TokenisedSet:
    """A complete set; validation is None if it has no such part."""

    folder: Path
    metadata: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    train: TokenisedPart
    validation: TokenisedPart | None


def open_tokenised(folder: Path) -> TokenisedSet:
    """Map a complete set into memory; only metadata and tokenizer are read.

    Raises:
        DatasetError: the folder holds no complete, undamaged set.
    """
    try:
        metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']}, not {FORMAT}")
        dtype = np.dtype(metadata["dtype"])
        parts = {name: _open_part(folder / name, dtype, sizes) for name, sizes in metadata["parts"].items()}
        tokenizer = load_tokenizer(str(folder / "tokenizer"), "tokenizer")
        if fingerprint(tokenizer) != metadata["tokenizer"]["fingerprint"]:
            raise ValueError(f"{folder}/tokenizer is not the tokenizer that metadata.json names")
        return TokenisedSet(folder, metadata, tokenizer, parts["train"], parts.get("validation"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{folder}: no complete tokenised set: {type(error).__name__}: {error}") from None


def _open_part(folder: Path, dtype: np.dtype, sizes: Mapping[str, int]) -> TokenisedPart:
    files = _lengths(sizes, dtype)
    for name, length in files.items():
        size = (folder / name).stat().st_size
        if size != length:
            raise ValueError(f"{folder / name} has {size} bytes instead of {length}")

    def mapped(name: str, dtype: np.dtype) -> np.ndarray:
        return np.memmap(folder / name, dtype, mode="r") if files[name] else np.empty(0, dtype)

    return TokenisedPart(
        mapped("tokens.bin", dtype),
        mapped("offsets.bin", _OFFSET),
        mapped("hashes.bin", _HASH),
        folder / "origins.jsonl",
    )


def _lengths(sizes: Mapping[str, int], dtype: np.dtype) -> dict[str, int]:
    """The bytes of each file of a part."""
    return {
        "tokens.bin": sizes["tokens"] * dtype.itemsize,
        "offsets.bin": (sizes["documents"] + 1) * _OFFSET.itemsize,
        "hashes.bin": sizes["documents"] * _HASH.itemsize,
        "origins.jsonl": sizes["origin_bytes"],
    }


# Writing


@dataclass(frozen=True)
class Recipe:
    """What a tokenised set is made of.

    Attributes:
        source: the documents.
        train_size: see `held_out.split`.
        val_size: see `held_out.split`.
        validate: whether the set has validation documents.
        tokenizer: None: one is trained on the training documents.
        vocab_size: vocabulary of a tokenizer that is trained.
    """

    source: Source
    train_size: int | None
    val_size: int | None
    validate: bool = True
    tokenizer: PreTrainedTokenizerBase | None = None
    vocab_size: int | None = None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Plain data that decides the content of the set."""
        arguments = {
            "format": FORMAT,
            "source": self.source.identity,
            "train_documents": self.train_size,
            "validation_documents": self.val_size if self.validate else 0,
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

    Args:
        cache: the folder belongs to the cache: a damaged set is made again.

    Raises:
        ConfigError: there are too few documents, the folder holds another set, or it cannot be written.
        DatasetError: the source cannot be read, or the folder holds something else and is not of the cache.
    """
    if documents := _existing(folder, recipe, cache):
        logger.info("documents of %s: tokenised before, in %s", recipe.source.name, folder)
        return documents
    logger.info("documents of %s: reading and tokenising", recipe.source.name)
    lock = folder.with_name(f".{folder.name}.lock")
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            # Another program may have made it in the meantime.
            if not _existing(folder, recipe, cache):
                _write(partial, recipe)
                if folder.exists():
                    damaged = folder.with_name(f"{folder.name}.damaged")
                    os.replace(folder, damaged)
                    shutil.rmtree(damaged, ignore_errors=True)
                os.replace(partial, folder)
            # Programs that wait for the lock, or create it again, find the set complete.
            lock.unlink(missing_ok=True)
    except OSError as error:
        key = "cache_dir" if cache else "--output_dir"
        raise ConfigError(f"{key}: cannot write {error.filename or folder}: {error.strerror or error}") from None
    return open_tokenised(folder)


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


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Return the tokens of each text, followed by end-of-text (uint32).

    Special tokens that a text spells out are text.
    """
    ids = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    return [np.array([*tokens, tokenizer.eos_token_id], dtype=np.uint32) for tokens in ids]


def _write(partial: Path, recipe: Recipe) -> None:
    try:
        parts = split(recipe.source, recipe.train_size, recipe.val_size, recipe.validate)
        state = _continued(partial, recipe) or _begun(partial, recipe, parts)
        # The stored tokenizer is the one to use.
        tokenizer = load_tokenizer(str(partial / "tokenizer"), "tokenizer")
        # The largest token decides: vocabularies may have gaps.
        dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")
        state["tokenizer"] |= {
            "fingerprint": fingerprint(tokenizer),
            "vocabulary": len(tokenizer),
            "end_of_text": end_of_text(tokenizer),
        }
        for name, documents in (("validation", parts.validation), ("train", parts.train)):
            if documents is not None and name not in state["complete"]:
                _write_part(partial, name, documents, tokenizer, dtype, state)
    except ConfigError:
        shutil.rmtree(partial, ignore_errors=True)  # a corrected recipe would not continue it
        raise
    write_json_atomically(partial / "metadata.json", {"format": FORMAT, "dtype": dtype.str} | state)
    (partial / "state.json").unlink()


def _continued(partial: Path, recipe: Recipe) -> dict | None:
    """The state of an interrupted run of the same recipe."""
    try:
        state = json.loads((partial / "state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if state.get("arguments") != recipe.arguments:
        return None
    done = sum(part["documents"] for part in state["parts"].values())
    logger.info("continuing an interrupted tokenisation after %s documents", f"{done:,}")
    return state


def _begun(partial: Path, recipe: Recipe, parts: Parts) -> dict:
    """Write the tokenizer and the first state."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tokenizer = recipe.tokenizer
    if tokenizer is None:
        tokenizer = train_tokenizer((document.text for document in parts.train(Skipped())), recipe.vocab_size)
    tokenizer.save_pretrained(partial / "tokenizer")
    state = {
        "source": recipe.source.name,
        "arguments": recipe.arguments,
        "tokenizer": {"name": tokenizer.name_or_path or "trained on the documents"},
        "parts": {},
        "complete": [],
        "skipped": {},
    }
    write_json_atomically(partial / "state.json", state)
    return state


def _write_part(
    partial: Path,
    name: str,
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    dtype: np.dtype,
    state: dict,
) -> None:
    """Tokenise the missing documents of one part; the state is saved after every block."""
    nothing = {"documents": 0, "tokens": 0, "origin_bytes": 0, "longest_document": 0}
    sizes = state["parts"].setdefault(name, nothing)
    skipped = Skipped()
    # Reading the finished documents again is cheap and counts the skipped records.
    ahead = itertools.islice(documents(skipped), sizes["documents"], None)
    with (
        closing(_PartWriter(partial / name, dtype, sizes)) as writer,
        tqdm(
            desc=f"tokenising {name} documents",
            unit=" documents",
            total=state["arguments"][f"{name}_documents"],
            initial=sizes["documents"],
            # In a log file: one line per 30 seconds.
            mininterval=0.1 if sys.stderr.isatty() else 30.0,
        ) as progress,
    ):
        while block := list(itertools.islice(ahead, BLOCK_DOCUMENTS)):
            writer.append(block, encode(tokenizer, [document.text for document in block]))
            write_json_atomically(partial / "state.json", state)
            progress.update(len(block))
    state["complete"].append(name)
    for reason, count in skipped.counts.items():
        total = state["skipped"].setdefault(reason, {"documents": 0, "first": skipped.first[reason]})
        total["documents"] += count
    write_json_atomically(partial / "state.json", state)


class _PartWriter:
    """Appends blocks of tokenised documents to the files of one part, after what `sizes` counts."""

    def __init__(self, folder: Path, dtype: np.dtype, sizes: dict):
        folder.mkdir(exist_ok=True)
        self._sizes = sizes
        self._dtype = dtype
        self._files = {}
        for name, length in _lengths(sizes, dtype).items():
            path = folder / name
            path.touch()
            self._files[name] = path.open("r+b")
            self._files[name].truncate(length)  # the first offset becomes 0
            self._files[name].seek(length)

    def append(self, documents: list[Document], tokens: list[np.ndarray]) -> None:
        """Write documents with their tokens, end-of-text included, and sync them to disk."""
        ends = self._sizes["tokens"] + np.cumsum([len(own) for own in tokens])
        blocks = {
            "tokens.bin": np.concatenate(tokens).astype(self._dtype).tobytes(),
            "offsets.bin": ends.astype(_OFFSET).tobytes(),
            "hashes.bin": np.array([document_hash(document.text) for document in documents], _HASH).tobytes(),
            "origins.jsonl": "".join(json.dumps(document.origin) + "\n" for document in documents).encode(),
        }
        for name, file in self._files.items():
            file.write(blocks[name])
            file.flush()
            os.fsync(file.fileno())
        self._sizes["documents"] += len(documents)
        self._sizes["tokens"] = int(ends[-1])
        self._sizes["origin_bytes"] += len(blocks["origins.jsonl"])
        self._sizes["longest_document"] = max(self._sizes["longest_document"], *map(len, tokens))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
