"""Tokenised documents on disk: written once, block by block, then memory-mapped.

A set is a folder:

    metadata.json           its source, arguments, tokenizer and sizes
    tokenizer/              the tokenizer, as a Hugging Face folder
    train/, validation/     tokens.bin: all documents, each followed by end-of-text (uint16 or uint32)
                            offsets.bin: the start of each document, and the end of the last (int64)
                            hashes.bin: document_hash of each text (uint64)

Documents are kept whole, so one set serves every sequence length, packed or not. A set is written to <name>.partial
and renamed when complete. An interrupted run is continued: state.json describes the last complete block, and bytes
after it are cut off. Memory: one block of documents.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabrics.data.documents import DatasetError, Origins, Skipped
from fabrics.data.held_out import Parts
from fabrics.data.tokenization import end_of_text, fingerprint, load_tokenizer, vocabulary_size
from utils.config.schema import ConfigError
from utils.files import write_json_atomically

logger = logging.getLogger("adloco.dataset")

FORMAT = 1
BLOCK_DOCUMENTS = 500
_OFFSET, _HASH = np.dtype("<i8"), np.dtype("<u8")


# Reading


@dataclass(frozen=True)
class TokenisedPart:
    """Memory-mapped tokens of documents.

    Attributes:
        tokens: [tokens]; each document is followed by end-of-text.
        offsets: [documents + 1]; document i is tokens[offsets[i]:offsets[i + 1]].
        hashes: [documents]; document_hash of each text.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)

    def first(self, documents: int | None) -> "TokenisedPart":
        """Return the part with only the first documents; None: all."""
        if documents is None:
            return self
        return TokenisedPart(
            self.tokens[: self.offsets[documents]], self.offsets[: documents + 1], self.hashes[:documents]
        )

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
    """A complete set.

    Attributes:
        validation: None: the set has no such part.
        origins: see `documents.Source`; empty: unknown.
    """

    folder: Path
    metadata: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    train: TokenisedPart
    validation: TokenisedPart | None
    origins: tuple[Origins, ...] = ()


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise DatasetError(f"{path}: damaged: {size} bytes instead of {count * dtype.itemsize}")
    return np.memmap(path, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def read_metadata(folder: Path) -> dict:
    """Read metadata.json.

    Raises:
        DatasetError: the folder holds no complete set of this format.
    """
    path = folder / "metadata.json"
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(f"{folder}: no tokenised set: {path} does not exist") from None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise DatasetError(f"{path}: damaged: not JSON") from None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise DatasetError(f"{path}: not a tokenised set of format {FORMAT}")
    return metadata


def open_tokenised(folder: Path) -> TokenisedSet:
    """Map a complete set into memory; only metadata and tokenizer are read.

    Raises:
        DatasetError: the folder holds no complete, undamaged set.
    """
    metadata = read_metadata(folder)
    parts = {}
    try:
        dtype = np.dtype(metadata["dtype"])
        for name, sizes in metadata["parts"].items():
            parts[name] = TokenisedPart(
                _mapped(folder / name / "tokens.bin", dtype, sizes["tokens"]),
                _mapped(folder / name / "offsets.bin", _OFFSET, sizes["documents"] + 1),
                _mapped(folder / name / "hashes.bin", _HASH, sizes["documents"]),
            )
        train = parts["train"]
    except OSError as error:
        raise DatasetError(f"{error.filename}: damaged: {error.strerror}") from None
    except (KeyError, TypeError) as error:
        raise DatasetError(f"{folder}/metadata.json: damaged: {error!r}") from None
    try:
        tokenizer = load_tokenizer(str(folder / "tokenizer"), "tokenizer")
    except ConfigError as error:
        raise DatasetError(f"{folder}: damaged: {error}") from None
    if fingerprint(tokenizer) != metadata["tokenizer"]["fingerprint"]:
        raise DatasetError(f"{folder}/tokenizer: damaged: not the tokenizer that metadata.json names")
    if dtype.itemsize < _token_type(tokenizer).itemsize:
        raise DatasetError(f"{folder}: damaged: tokens of {dtype.name} cannot hold the tokenizer's largest")
    return TokenisedSet(folder, metadata, tokenizer, train, parts.get("validation"))


# Writing


def _token_type(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """The smallest type that holds every token; vocabularies may have gaps, so the largest token decides."""
    return np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")


class _PartWriter:
    """Appends blocks of tokenised documents to the files of one part, after the first `documents` documents."""

    def __init__(self, folder: Path, dtype: np.dtype, documents: int, tokens: int):
        folder.mkdir(exist_ok=True)
        self.documents = documents
        self.tokens = tokens
        self._types = {"tokens": dtype, "offsets": _OFFSET, "hashes": _HASH}
        sizes = {"tokens": tokens, "offsets": documents + 1, "hashes": documents}
        self._files = {}
        for name, size in sizes.items():
            path = folder / f"{name}.bin"
            path.touch()
            file = path.open("r+b")
            file.truncate(size * self._types[name].itemsize)
            file.seek(0, os.SEEK_END)
            self._files[name] = file

    def append(self, hashes: list[int], documents: list[np.ndarray]) -> None:
        """Write documents, end-of-text included, and sync them to disk."""
        ends = self.tokens + np.cumsum([len(document) for document in documents])
        self.documents += len(documents)
        self.tokens = int(ends[-1])
        blocks = {"tokens": np.concatenate(documents), "offsets": ends, "hashes": np.array(hashes, _HASH)}
        for name, file in self._files.items():
            file.write(blocks[name].astype(self._types[name]).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Return the tokens of each text, followed by end-of-text (uint32)."""
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array([*tokens, tokenizer.eos_token_id], dtype=np.uint32) for tokens in ids]


@dataclass(frozen=True)
class Recipe:
    """How to make a tokenised set.

    Attributes:
        arguments: plain data that decides the content of the set.
        source: name of the source.
        parts: splits the source; called only when there is work to do.
        tokenizer: loads the tokenizer, or trains it on the parts.
        details: further entries of the metadata.
    """

    arguments: Mapping[str, Any]
    source: str
    parts: Callable[[], Parts]
    tokenizer: Callable[[Parts], PreTrainedTokenizerBase]
    details: Mapping[str, Any]


def is_written(folder: Path, recipe: Recipe) -> bool:
    """Return True if the folder holds the complete set of this recipe.

    Raises:
        ConfigError: it holds another set.
        DatasetError: it holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not os.listdir(folder)):
        return False
    made_with, wanted = read_metadata(folder).get("arguments", {}), json.loads(json.dumps(recipe.arguments))
    if made_with != wanted:
        different = [key for key in wanted | made_with if wanted.get(key) != made_with.get(key)]
        changes = "; ".join(f"{key}: {made_with.get(key)} there, {wanted.get(key)} requested" for key in different)
        raise ConfigError(f"{folder}: holds a set made with other arguments ({changes}); name another or remove it")
    return True


def write_tokenised(folder: Path, recipe: Recipe) -> TokenisedSet:
    """Make the set of a recipe at `folder`, continue an interrupted one, or open the complete one.

    If several programs request the same set at once, one works and the others wait.

    Raises:
        ConfigError: there are too few documents, the folder holds another set, or it cannot be written.
        DatasetError: the source cannot be read.
    """
    partial, lock = folder.with_name(folder.name + ".partial"), folder.with_name(f".{folder.name}.lock")
    try:
        if not is_written(folder, recipe):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                if not is_written(folder, recipe):
                    _write(partial, recipe)
                    os.replace(partial, folder)
                # Programs that wait for the lock, or create it again, find the set complete.
                lock.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write {error.filename or 'it'}: {error.strerror or error}") from None
    return open_tokenised(folder)


def _read_state(partial: Path, arguments: dict) -> dict | None:
    try:
        state = json.loads((partial / "state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return state if state.get("arguments") == arguments else None


def _write(partial: Path, recipe: Recipe) -> None:
    arguments = json.loads(json.dumps(recipe.arguments))
    state = _read_state(partial, arguments)
    try:
        parts = recipe.parts()
        if state is None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            tokenizer = recipe.tokenizer(parts)
            name = tokenizer.name_or_path or "trained on the documents"
            tokenizer.save_pretrained(partial / "tokenizer")
            state = {"arguments": arguments, "tokenizer": name, "parts": {}, "skipped": {}}
            write_json_atomically(partial / "state.json", state)
        else:
            done = sum(part["documents"] for part in state["parts"].values())
            logger.info("continuing an interrupted tokenisation after %s documents", f"{done:,}")
        # The stored tokenizer is the one to use.
        tokenizer = load_tokenizer(str(partial / "tokenizer"), "tokenizer")
        end_of_text(tokenizer)
        dtype = _token_type(tokenizer)
        for name, documents in (("validation", parts.validation), ("train", parts.train)):
            if documents is not None and "complete" not in state["parts"].get(name, {}):
                _write_part(partial, name, documents, dtype, tokenizer, state)
    except ConfigError:
        shutil.rmtree(partial, ignore_errors=True)  # a corrected recipe would not continue it
        raise
    sizes = {name: {k: v for k, v in part.items() if k != "complete"} for name, part in state["parts"].items()}
    metadata = {
        "format": FORMAT,
        "source": recipe.source,
        **recipe.details,
        "tokenizer": {
            "name": state["tokenizer"],
            "fingerprint": fingerprint(tokenizer),
            "vocabulary": len(tokenizer),
            "end_of_text": tokenizer.eos_token_id,
        },
        "dtype": dtype.str,
        "parts": sizes,
        "skipped": state["skipped"],
        "arguments": arguments,
    }
    write_json_atomically(partial / "metadata.json", metadata)
    (partial / "state.json").unlink()


def _write_part(
    partial: Path,
    name: str,
    documents: Callable[[Skipped], Iterator[tuple[int, str]]],
    dtype: np.dtype,
    tokenizer: PreTrainedTokenizerBase,
    state: dict,
) -> None:
    """Tokenise the missing documents of one part; the state is saved after every block."""
    sizes = state["parts"].setdefault(name, {"documents": 0, "tokens": 0, "longest_document": 0})
    skipped = Skipped()
    # Reading the finished documents again is cheap and counts the skipped records.
    ahead = itertools.islice(documents(skipped), sizes["documents"], None)
    with (
        closing(_PartWriter(partial / name, dtype, sizes["documents"], sizes["tokens"])) as writer,
        tqdm(
            desc=f"tokenising {name} documents",
            unit=" documents",
            total=state["arguments"].get(f"{name}_documents"),
            initial=sizes["documents"],
            # In a log file: one line per 30 seconds.
            mininterval=0.1 if sys.stderr.isatty() else 30.0,
        ) as progress,
    ):
        while block := list(itertools.islice(ahead, BLOCK_DOCUMENTS)):
            tokens = encode(tokenizer, [text for _, text in block])
            writer.append([number for number, _ in block], tokens)
            longest = max(sizes["longest_document"], *(len(document) for document in tokens))
            sizes.update(documents=writer.documents, tokens=writer.tokens, longest_document=longest)
            write_json_atomically(partial / "state.json", state)
            progress.update(len(block))
    sizes["complete"] = True
    for reason, count in skipped.counts.items():
        total = state["skipped"].setdefault(reason, {"documents": 0, "first": skipped.first[reason]})
        total["documents"] += count
    write_json_atomically(partial / "state.json", state)
