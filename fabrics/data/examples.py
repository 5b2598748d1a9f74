"""Examples: what trainers read, by index and in batches, without knowing what task it is."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from algorithms.batch.losses import IGNORE_INDEX


class Examples(Protocol):
    """A list of examples that is read in batches."""

    def __len__(self) -> int:
        """How many examples there are."""

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        """The model's keyword arguments with `labels`, batch first: see algorithms.batch.losses."""

    def tokens(self, indices: Sequence[int]) -> int:
        """Tokens in these examples, padding excluded."""

    @property
    def tokens_per_example(self) -> int | None:
        """Tokens of every example, where all have the same number: they are counted without looking then; else None."""

    @property
    def largest(self) -> int:
        """The index of an example that no other needs more memory than: a batch of it is the worst case."""


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array there; a GPU copies it while the program goes on, which takes memory that stays in place."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class PackedSequences:
    """Token sequences of one length, for a causal language model; no padding.

    Args:
        tokens: [examples, sequence_length], any integer type, in memory or mapped into it.
    """

    largest = 0

    def __init__(self, tokens: np.ndarray):
        # A plain view: indexing the subclass for mapped files costs several times as much.
        self._tokens = np.asarray(tokens)
        self.tokens_per_example: int | None = self._tokens.shape[1]

    def __len__(self) -> int:
        return self._tokens.shape[0]

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        input_ids = _to_device(self._tokens[np.asarray(indices)].astype(np.int64), device)
        # The loss shifts the labels (algorithms.batch.losses): they are the inputs themselves.
        return {"input_ids": input_ids, "labels": input_ids}

    def tokens(self, indices: Sequence[int]) -> int:
        return len(indices) * self.tokens_per_example


class PaddedSequences:
    """Token sequences of different lengths, padded on the right to the longest of their batch.

    Padding is masked out of attention and out of the labels, so that it counts nowhere.

    Args:
        tokens: all sequences one after the other, [total], any integer type, in memory or mapped into it.
        offsets: where each begins, and the end of the last, [examples + 1].
        limit: longest sequence; what is beyond it is cut off.
        padding: the token to pad with.
        classes: the class of each sequence, [examples]; None for a causal language model, which predicts the
            sequence itself.
    """

    tokens_per_example: int | None = None

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, limit: int, padding: int, classes: np.ndarray | None = None
    ):
        self._tokens, self._offsets = np.asarray(tokens), np.asarray(offsets)
        self._limit, self._padding, self._classes = limit, padding, classes

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.minimum(self._offsets[indices + 1] - self._offsets[indices], self._limit)

    @cached_property
    def largest(self) -> int:
        return int(self._lengths(np.arange(len(self))).argmax())

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        indices = np.asarray(indices)
        lengths = self._lengths(indices)
        columns = np.arange(lengths.max())
        mask = columns < lengths[:, None]
        input_ids = np.full(mask.shape, self._padding, dtype=np.int64)
        input_ids[mask] = self._tokens[(self._offsets[indices][:, None] + columns)[mask]]
        labels = np.where(mask, input_ids, IGNORE_INDEX) if self._classes is None else self._classes[indices]
        batch = {"input_ids": input_ids, "attention_mask": mask.astype(np.int64), "labels": labels.astype(np.int64)}
        return {name: _to_device(array, device) for name, array in batch.items()}

    def tokens(self, indices: Sequence[int]) -> int:
        return int(self._lengths(np.asarray(indices, dtype=np.int64)).sum())


class PackedDocuments:
    """Documents, joined in an order of one's own and cut into sequences of one length; nothing is copied.

    Args:
        tokens: all documents one after the other, [total], any integer type, in memory or mapped into it.
        offsets: where each begins, and the end of the last, [documents + 1].
        groups: numbers of documents; no sequence holds documents of two groups, and those of a group are joined in
            the order given. Of each group only the last partial sequence is lost.
        sequence_length: of the sequences.

    Attributes:
        sizes: sequences of each group, which come one group after the other.
    """

    largest = 0

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, groups: Sequence[np.ndarray], sequence_length: int):
        self._tokens, offsets = np.asarray(tokens), np.asarray(offsets)
        self.tokens_per_example: int | None = sequence_length
        order = np.concatenate(groups)
        # All documents, in order, as one text: where each ends there, and how far from there its tokens lie.
        lengths = offsets[order + 1] - offsets[order]
        self._ends = np.cumsum(lengths)
        self._shifts = offsets[order] - (self._ends - lengths)
        ends = np.concatenate([[0], self._ends])[np.cumsum([0, *map(len, groups)])]
        self.sizes = tuple((np.diff(ends) // sequence_length).tolist())
        self._group_starts, self._first_sequences = ends[:-1], np.cumsum([0, *self.sizes])

    def __len__(self) -> int:
        return int(self._first_sequences[-1])

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        indices = np.asarray(indices)
        groups = np.searchsorted(self._first_sequences, indices, side="right") - 1
        starts = self._group_starts[groups] + (indices - self._first_sequences[groups]) * self.tokens_per_example
        places = starts[:, None] + np.arange(self.tokens_per_example)
        tokens = self._tokens[places + self._shifts[np.searchsorted(self._ends, places, side="right")]]
        input_ids = _to_device(tokens.astype(np.int64), device)
        return {"input_ids": input_ids, "labels": input_ids}

    def tokens(self, indices: Sequence[int]) -> int:
        return len(indices) * self.tokens_per_example


class Chosen:
    """Some of other examples, in an order of one's own.

    Args:
        examples: the others.
        order: which of them, by number.
    """

    def __init__(self, examples: Examples, order: np.ndarray):
        self._examples, self._order = examples, order
        self.tokens_per_example: int | None = examples.tokens_per_example

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        return self._examples.batch(self._order[np.asarray(indices)], device)

    def tokens(self, indices: Sequence[int]) -> int:
        return self._examples.tokens(self._order[np.asarray(indices, dtype=np.int64)])

    @cached_property
    def largest(self) -> int:
        there = np.flatnonzero(self._order == self._examples.largest)
        return int(there[0]) if len(there) else max(range(len(self)), key=lambda index: self.tokens([index]))


@dataclass(frozen=True)
class DataShares:
    """How the training examples are shared out, where they are by what they are.

    Attributes:
        sizes: examples of each share; they come one share after the other.
        validation: examples of each share, which are among those that all are validated on; empty: they are not
            evaluated by share.
        record: of the shares, as plain values.
        digest: of which document is in which share, so that processes that have found that out by themselves agree.
    """

    sizes: tuple[int, ...]
    validation: tuple[Examples, ...]
    record: Mapping[str, Any]
    digest: str = ""


@dataclass(frozen=True)
class TaskData:
    """Everything a run needs to know about its data.

    Attributes:
        task: causal_lm or classification.
        dataset: what it really is: the fallback's name after a fallback.
        source: where it came from, in words.
        tokenizer: saved beside the final model; None: the data are no text.
        documents: how many were used, by part.
        skipped: records of the source that were left out, by reason.
        class_names: of a classification, by class.
        fallback_reason: why this is not the dataset that the config asks for.
        shares: how the training examples are shared out; None: at random.
    """

    task: str
    dataset: str
    source: str
    train: Examples
    validation: Examples
    tokenizer: PreTrainedTokenizerBase | None = None
    documents: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    fallback_reason: str | None = None
    shares: DataShares | None = None

    def fingerprint(self) -> str:
        """Equal for equal data, as far as their sizes and a few dozen examples tell: for a run that is resumed."""
        digest = hashlib.sha256()
        if self.shares is not None:
            digest.update(str(self.shares.sizes).encode())
        for examples in (self.train, self.validation):
            chosen = np.unique(np.linspace(0, len(examples) - 1, 32).astype(np.int64))
            batch = examples.batch(chosen, torch.device("cpu"))
            digest.update(str(len(examples)).encode())
            for name in sorted(batch):
                digest.update(batch[name].numpy().tobytes())
        return digest.hexdigest()
