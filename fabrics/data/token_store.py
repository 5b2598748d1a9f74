"""Tokenised documents on disk: written once, block by block, and mapped into memory ever after.

A set is a folder:

    metadata.json           what it was made from and with, and how much of it there is
    tokenizer/              the tokenizer, as a Hugging Face folder
    train/, validation/     tokens.bin: every document followed by end-of-text, one after the other (uint16 or uint32)
                            offsets.bin: where each document begins, and the end of the last (int64)
                            hashes.bin: document_hash of each text (uint64)

Whole documents are kept, so that one set serves every sequence length, packed or not. It is written under another
name and renamed when it is complete. What an interrupted run leaves there is continued by the next: the state of the
last complete block is in state.json, and what was written after it is cut off.

Memory: one block of documents and its tokens for each process, whatever the number of documents.
"""

import itertools
import json
import logging
import multiprocessing
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
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
from utils.utils import batched, write_json_atomically

logger = logging.getLogger("adloco.dataset")

FORMAT = 1
BLOCK_DOCUMENTS = 500
_OFFSET, _HASH = np.dtype("<i8"), np.dtype("<u8")


# Reading


@dataclass(frozen=True)
class TokenisedPart:
    """Tokens of documents, mapped from files.

    Attributes:
        tokens: [tokens], every document followed by end-of-text.
        offsets: [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]].
        hashes: [documents], document_hash of each text.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)

    def first(self, documents: int | None) -> "TokenisedPart":
        """Only so many documents; None: all."""
        if documents is None:
            return self
        return TokenisedPart(
            self.tokens[: self.offsets[documents]], self.offsets[: documents + 1], self.hashes[:documents]
        )

    def packed(self, sequence_length: int) -> np.ndarray:
        """All documents, cut into full sequences [n, sequence_length]; only the last partial one is lost. No copy."""
        return self.tokens[: len(self.tokens) // sequence_length * sequence_length].reshape(-1, sequence_length)


@dataclass(frozen=True)
class TokenisedSet:
    """A complete folder; see the module.

    Attributes:
        validation: None where the set has no such part.
        origins: of the source that it is made from; empty: nobody knows where its documents come from.
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
    """What is written about a set.

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
    """Map a complete set into memory; nothing but metadata and tokenizer is read.

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
    """The smallest type that holds every token: vocabularies may have gaps, so their length does not tell."""
    return np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")


class _PartWriter:
    """Appends blocks of tokenised documents to the files of one part, from a known state on."""

    def __init__(self, folder: Path, dtype: np.dtype, documents: int, tokens: int):
        folder.mkdir(exist_ok=True)
        self._dtype, self.documents, self.tokens = dtype, documents, tokens
        self._files = {}
        for name, size in (
            ("tokens", tokens * dtype.itemsize),
            ("offsets", (documents + 1) * _OFFSET.itemsize),
            ("hashes", documents * _HASH.itemsize),
        ):
            path = folder / f"{name}.bin"
            path.touch()
            self._files[name] = path.open("r+b")
            self._files[name].truncate(size)
            self._files[name].seek(size)

    def append(self, hashes: list[int], documents: list[np.ndarray]) -> None:
        """Add documents, end-of-text included; they are on the disk when this returns.

        Raises:
            ConfigError: a token is larger than the type of the file; nothing is written then.
        """
        block = np.concatenate(documents)
        largest = int(block.max())
        if largest > np.iinfo(self._dtype).max:
            raise ConfigError(
                f"tokenizer: gives the token {largest}, which is not in its vocabulary and does not fit into "
                f"{self._dtype.name}"
            )
        ends = self.tokens + np.cumsum([len(document) for document in documents])
        self.documents, self.tokens = self.documents + len(documents), int(ends[-1])
        self._files["tokens"].write(block.astype(self._dtype).tobytes())
        self._files["offsets"].write(ends.astype(_OFFSET).tobytes())
        self._files["hashes"].write(np.array(hashes, _HASH).tobytes())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """The tokens of each text, uint32, followed by end-of-text."""
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array([*tokens, tokenizer.eos_token_id], dtype=np.uint32) for tokens in ids]


_process_tokenizer: PreTrainedTokenizerBase | None = None


def _start_process(tokenizer: PreTrainedTokenizerBase) -> None:
    global _process_tokenizer
    _process_tokenizer = tokenizer
    # The processes are the parallelism; threads on top would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_in_process(texts: list[str]) -> list[np.ndarray]:
    return encode(_process_tokenizer, texts)


Block = list[tuple[int, str]]


@contextmanager
def _encoder(
    tokenizer: PreTrainedTokenizerBase, processes: int
) -> Iterator[Callable[[Iterable[Block]], Iterator[tuple[list[int], list[np.ndarray]]]]]:
    """A function from blocks of (hash, text) to blocks of hashes and tokens, in order, reading little ahead."""
    if processes == 1:
        # The tokenizer's own threads use all cores.
        yield lambda blocks: (
            ([number for number, _ in block], encode(tokenizer, [text for _, text in block])) for block in blocks
        )
        return

    def in_processes(blocks: Iterable[Block]) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        waiting = deque()
        for block in blocks:
            hashes, texts = [number for number, _ in block], [text for _, text in block]
            waiting.append((hashes, pool.apply_async(_encode_in_process, (texts,))))
            if len(waiting) == 2 * processes:
                hashes, result = waiting.popleft()
                yield hashes, result.get()
        for hashes, result in waiting:
            yield hashes, result.get()

    with multiprocessing.get_context("spawn").Pool(processes, _start_process, (tokenizer,)) as pool:
        yield in_processes


@dataclass(frozen=True)
class Recipe:
    """What a tokenised set is made from and with.

    Attributes:
        arguments: plain data that decides the content of the set.
        source: the source's name, for people.
        parts: divides the source into documents; it is called only when there is work to do.
        tokenizer: from the parts to the tokenizer, which may have to be trained on them.
        details: what else belongs into the metadata.
    """

    arguments: Mapping[str, Any]
    source: str
    parts: Callable[[], Parts]
    tokenizer: Callable[[Parts], PreTrainedTokenizerBase]
    details: Mapping[str, Any]


def is_written(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder holds the complete set of this recipe.

    Raises:
        ConfigError: it holds another.
        DatasetError: there is something else at that place.
    """
    if not folder.exists() or (folder.is_dir() and not os.listdir(folder)):
        return False
    made_with, wanted = read_metadata(folder).get("arguments", {}), json.loads(json.dumps(recipe.arguments))
    if made_with != wanted:
        different = [key for key in wanted | made_with if wanted.get(key) != made_with.get(key)]
        changes = "; ".join(f"{key}: {made_with.get(key)} there, {wanted.get(key)} asked for" for key in different)
        raise ConfigError(f"{folder}: holds a set made with other arguments ({changes}); name another or remove it")
    return True


def write_tokenised(folder: Path, recipe: Recipe, processes: int = 1) -> TokenisedSet:
    """Make the set of a recipe at `folder`, or continue to, or find it there.

    Several programs may ask for the same set at once: one works, the others wait.

    Raises:
        ConfigError: there are too few documents, another set is there, or it cannot be written.
        DatasetError: the source cannot be read.
    """
    partial, lock = folder.with_name(folder.name + ".partial"), folder.with_name(f".{folder.name}.lock")
    try:
        if not is_written(folder, recipe):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                if not is_written(folder, recipe):
                    _write(partial, recipe, processes)
                    os.replace(partial, folder)
                # Whoever waits for the lock, or makes a new one, finds the set complete.
                lock.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write {error.filename or 'it'}: {error.strerror or error}") from None
    return open_tokenised(folder)


def _read_state(partial: Path, arguments: dict) -> dict | None:
    """The state that an interrupted run of the same recipe left, if it is usable."""
    try:
        state = json.loads((partial / "state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return state if state.get("arguments") == arguments else None


def _write(partial: Path, recipe: Recipe, processes: int) -> None:
    """Fill the folder, or continue to."""
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
        # Read back even where it has just been made: what is stored is what is used.
        tokenizer = load_tokenizer(str(partial / "tokenizer"), "tokenizer")
        end_of_text(tokenizer)
        dtype = _token_type(tokenizer)
        with _encoder(tokenizer, processes) as encoder:
            for name, documents in (("validation", parts.validation), ("train", parts.train)):
                if documents is not None and "complete" not in state["parts"].get(name, {}):
                    _write_part(partial, name, documents, dtype, encoder, state)
    except ConfigError:
        shutil.rmtree(partial, ignore_errors=True)  # other values make another set: nobody would continue this one
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
    encoder: Callable[[Iterable[Block]], Iterator[tuple[list[int], list[np.ndarray]]]],
    state: dict,
) -> None:
    """Tokenise the documents of one part that are not there yet; the state is written after every block."""
    sizes = state["parts"].setdefault(name, {"documents": 0, "tokens": 0, "longest_document": 0})
    skipped = Skipped()
    # What is done already is read again, which is cheap, and counts what it skips again.
    ahead = itertools.islice(documents(skipped), sizes["documents"], None)
    with (
        closing(_PartWriter(partial / name, dtype, sizes["documents"], sizes["tokens"])) as writer,
        tqdm(
            desc=f"tokenising {name} documents",
            unit=" documents",
            total=state["arguments"].get(f"{name}_documents"),
            initial=sizes["documents"],
            # It may take hours: a log file gets a line now and then.
            mininterval=0.1 if sys.stderr.isatty() else 30.0,
        ) as progress,
    ):
        for hashes, tokens in encoder(batched(ahead, BLOCK_DOCUMENTS)):
            writer.append(hashes, tokens)
            longest = max(sizes["longest_document"], *(len(document) for document in tokens))
            sizes.update(documents=writer.documents, tokens=writer.tokens, longest_document=longest)
            write_json_atomically(partial / "state.json", state)
            progress.update(len(hashes))
    sizes["complete"] = True
    for reason, count in skipped.counts.items():
        total = state["skipped"].setdefault(reason, {"documents": 0, "first": skipped.first[reason]})
        total["documents"] += count
    write_json_atomically(partial / "state.json", state)
