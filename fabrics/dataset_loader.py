"""Datasets: from raw text to examples that are read by index.

A dataset is a function from the config to `TaskData`, registered in DATASETS. What it returns is task-neutral:
trainers ask `Examples` for batches of keyword arguments of the model and never look inside.
"""

import ast
import functools
import hashlib
import logging
import pydoc_data.topics
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fabrics.models import is_pretrained, load_pretrained_tokenizer
from utils.config import Config, ConfigError
from utils.utils import write_text_atomically

logger = logging.getLogger("adloco.dataset")

END_OF_TEXT = "<|endoftext|>"


class Examples(Protocol):
    """A list of examples that is read in batches."""

    def __len__(self) -> int:
        """How many examples there are."""

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        """The model's keyword arguments with `labels`, batch first: see algorithms.losses."""

    def tokens(self, indices: Sequence[int]) -> int:
        """Tokens in these examples, padding excluded."""


class PackedSequences:
    """Token sequences of one length, for a causal language model; no padding.

    Args:
        tokens: [examples, sequence_length], any integer type.
    """

    def __init__(self, tokens: np.ndarray):
        self._tokens = torch.from_numpy(tokens)

    def __len__(self) -> int:
        return self._tokens.shape[0]

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        rows = torch.as_tensor(np.asarray(indices))
        input_ids = self._tokens[rows].to(device, torch.long, non_blocking=True)
        # The loss shifts the labels (algorithms.losses): they are the inputs themselves.
        return {"input_ids": input_ids, "labels": input_ids}

    def tokens(self, indices: Sequence[int]) -> int:
        return len(indices) * self._tokens.shape[1]


@dataclass(frozen=True)
class TaskData:
    """Everything a run needs to know about its data.

    task: causal_lm or classification. tokenizer: saved beside the final model. documents: how many were used,
    by part.
    """

    task: str
    train: Examples
    validation: Examples
    tokenizer: PreTrainedTokenizerBase
    documents: Mapping[str, int]


def pack(token_lists: Sequence[Sequence[int]], end_of_text: int, sequence_length: int) -> np.ndarray:
    """Documents joined, an end-of-text token after each, cut into full sequences [n, sequence_length].

    Nothing is lost but the last partial sequence.
    """
    length = sum(len(tokens) + 1 for tokens in token_lists)
    stream = np.empty(length, dtype=np.int32)
    position = 0
    for tokens in token_lists:
        stream[position : position + len(tokens)] = tokens
        position += len(tokens)
        stream[position] = end_of_text
        position += 1
    return stream[: length // sequence_length * sequence_length].reshape(-1, sequence_length)


def train_tokenizer(documents: Sequence[str], vocab_size: int, cache_dir: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `documents`, from the cache if they were seen before.

    The cache is keyed by a hash of everything the result depends on; a damaged entry is made again.
    """
    digest = hashlib.sha256(f"byte-level BPE 1, {vocab_size}".encode())
    for document in documents:
        encoded = document.encode("utf-8", "replace")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    path = cache_dir / "tokenizers" / f"{digest.hexdigest()[:32]}.json"
    tokenizer = None
    if path.exists():
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            logger.warning("cached tokenizer %s is damaged and will be trained again: %s", path, error)
    if tokenizer is None:
        logger.info("training a tokenizer of %d tokens on %s documents", vocab_size, f"{len(documents):,}")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents, trainer)
        write_text_atomically(path, tokenizer.to_str())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def split_documents(
    documents: Sequence[str], seed: int, train_size: int | None, val_size: int | None
) -> tuple[list[str], list[str]]:
    """Shuffled with the seed: `val_size` documents held out (None: one in twenty), then `train_size` (None: all).

    Raises:
        ConfigError: there are not enough documents.
    """
    if val_size is None:
        val_size = max(1, len(documents) // 20)
    if val_size >= len(documents):
        raise ConfigError(f"val_size: must be below the {len(documents)} documents of the dataset, got {val_size}")
    available = len(documents) - val_size
    if train_size is not None and train_size > available:
        raise ConfigError(
            f"data_sample_size: {available} documents are left for training beside {val_size} for validation, "
            f"got {train_size}"
        )
    order = np.random.default_rng([seed, 0]).permutation(len(documents))
    chosen = order[val_size:] if train_size is None else order[val_size : val_size + train_size]
    return [documents[i] for i in chosen], [documents[i] for i in order[:val_size]]


# Parts of the standard library folder that are not documentation for its users, or not the library at all.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__",
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def python_documents() -> tuple[str, ...]:
    """The texts of pydoc's topics and every docstring of the installed standard library, each once, in a fixed order.

    Modules are parsed, never imported: importing some of them has effects.
    """
    documents = dict.fromkeys(text.strip() for _, text in sorted(pydoc_data.topics.topics.items()))
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in tqdm(files, desc="reading docstrings", unit="file", leave=False, disable=None):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # templates and deliberately broken files have no docstrings
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                documents.setdefault(text.strip())
    return tuple(text for text in documents if text)


def load_python_docs(config: Config) -> TaskData:
    """`python_docs`: about 2 MB of real English that is on every machine with Python; no network."""
    return packed_text(config, python_documents())


def packed_text(config: Config, documents: Sequence[str]) -> TaskData:
    """Documents as packed sequences for a causal language model.

    The tokenizer is the model's own if that is pretrained, else trained on the training documents.
    """
    train, validation = split_documents(documents, config.training_seed, config.data_sample_size, config.val_size)
    if is_pretrained(config.model_config):
        tokenizer = load_pretrained_tokenizer(config.model_config)
    else:
        try:
            tokenizer = train_tokenizer(train, config.vocab_size, Path(config.cache_dir))
        except OSError as error:
            raise ConfigError(f"cache_dir: cannot write to {config.cache_dir}: {error.strerror}") from None
    parts = {}
    for name, texts in (("train", train), ("validation", validation)):
        token_lists = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        parts[name] = pack(token_lists, tokenizer.eos_token_id, config.sequence_length)
        if not len(parts[name]):
            raise ConfigError(
                f"sequence_length: the {len(texts)} {name} documents do not fill one sequence of "
                f"{config.sequence_length} tokens"
            )
    return TaskData(
        task="causal_lm",
        train=PackedSequences(parts["train"]),
        validation=PackedSequences(parts["validation"]),
        tokenizer=tokenizer,
        documents={"train": len(train), "validation": len(validation)},
    )


DATASETS = {"python_docs": load_python_docs}
