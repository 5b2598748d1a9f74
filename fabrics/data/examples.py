"""Training and validation examples, read by index in batches; task-neutral for the trainers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from algorithms.batch.losses import IGNORE_INDEX

if TYPE_CHECKING:  # adloco.Worker does without transformers, whose import takes a second
    from transformers import PreTrainedTokenizerBase

# The length of a padded batch is a multiple of this.
_WIDTH = 64


class Examples(Protocol):
    """A sequence of examples that is read in batches."""

    def __len__(self) -> int:
        """Number of examples."""

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the model's keyword arguments with `labels`, batch first (see algorithms.batch.losses)."""

    def tokens(self, indices: Sequence[int]) -> int:
        """Return the tokens in these examples, without padding."""

    @property
    def tokens_per_example(self) -> int | None:
        """Tokens of every example if all have the same length, else None."""

    @property
    def largest(self) -> int:
        """Index of the longest example: a batch of it needs the most memory."""


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device; to a GPU asynchronously, from pinned memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class PackedSequences:
    """Token sequences of equal length for a causal language model: [examples, sequence_length]."""

    largest = 0

    def __init__(self, tokens: np.ndarray):
        # A plain view: indexing a memmap is several times slower.
        self._tokens = np.asarray(tokens)
        self.tokens_per_example: int | None = self._tokens.shape[1]

    def __len__(self) -> int:
        return self._tokens.shape[0]

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        return self._tokens[indices]

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        input_ids = _to_device(self._rows(np.asarray(indices)).astype(np.int64), device)
        # The loss shifts the labels (algorithms.batch.losses): they are the inputs themselves.
        return {"input_ids": input_ids, "labels": input_ids}

    def tokens(self, indices: Sequence[int]) -> int:
        return len(indices) * self.tokens_per_example


class PaddedSequences:
    """Token sequences of different lengths, padded on the right.

    A batch has the length of its longest sequence, rounded up to a multiple of 64: few lengths need little memory and
    code on a GPU, and fill its matrix units. Labels mask the padding. Causal attention needs no mask for it: no token
    sees a later one. Classifiers get a mask.

    Args:
        tokens: [total]; all sequences joined, any integer type, in memory or memory-mapped.
        offsets: [examples + 1]; start of each sequence, and the end of the last.
        classes: [examples]; class of each sequence; None for a causal language model.
        targets: [total]; the tokens to predict, for a causal language model; None: all.
    """

    tokens_per_example: int | None = None

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        limit: int,
        padding: int,
        classes: np.ndarray | None = None,
        targets: np.ndarray | None = None,
    ):
        self._tokens = np.asarray(tokens)
        self._starts = np.asarray(offsets)[:-1]
        self._lengths = np.minimum(np.diff(offsets), limit)
        self._limit = limit
        self._padding = padding
        self._classes = classes
        self._targets = targets

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def largest(self) -> int:
        return int(self._lengths.argmax())

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        indices = np.asarray(indices)
        lengths = self._lengths[indices]
        columns = np.arange(min(-(-lengths.max() // _WIDTH) * _WIDTH, self._limit))
        mask = columns < lengths[:, None]
        input_ids = np.full(mask.shape, self._padding, dtype=np.int64)
        places = (self._starts[indices][:, None] + columns)[mask]
        input_ids[mask] = self._tokens[places]
        if self._classes is not None:
            labels = self._classes[indices]
        else:
            predicted = mask.copy()
            if self._targets is not None:
                predicted[mask] = self._targets[places]
            labels = np.where(predicted, input_ids, IGNORE_INDEX)
        batch = {"input_ids": input_ids, "labels": labels.astype(np.int64)}
        if self._classes is not None:
            batch["attention_mask"] = mask.astype(np.int64)
        return {name: _to_device(array, device) for name, array in batch.items()}

    def tokens(self, indices: Sequence[int]) -> int:
        return int(self._lengths[np.asarray(indices, dtype=np.int64)].sum())


class PackedDocuments(PackedSequences):
    """Documents that are joined in a given order and cut into sequences of equal length, without a copy.

    Args:
        tokens: [total]; all documents joined, any integer type, in memory or memory-mapped.
        offsets: [documents + 1]; start of each document, and the end of the last.
        groups: document indices of each group, in order; no sequence spans two groups, and only the last partial
            sequence of each group is lost.

    Attributes:
        sizes: sequences of each group; sequences are sorted by group.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, groups: Sequence[np.ndarray], sequence_length: int):
        self._tokens = np.asarray(tokens)
        offsets = np.asarray(offsets)
        self.tokens_per_example: int | None = sequence_length
        order = np.concatenate(groups)
        # In the joined text: the end of each document, and the shift from there to its tokens.
        lengths = offsets[order + 1] - offsets[order]
        self._ends = np.cumsum(lengths)
        self._shifts = offsets[order] - (self._ends - lengths)
        ends = np.concatenate([[0], self._ends])[np.cumsum([0, *map(len, groups)])]
        self.sizes: tuple[int, ...] = tuple((np.diff(ends) // sequence_length).tolist())
        self._group_starts = ends[:-1]
        self._first_sequences = np.cumsum([0, *self.sizes])

    def __len__(self) -> int:
        return int(self._first_sequences[-1])

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        groups = np.searchsorted(self._first_sequences, indices, side="right") - 1
        starts = self._group_starts[groups] + (indices - self._first_sequences[groups]) * self.tokens_per_example
        places = starts[:, None] + np.arange(self.tokens_per_example)
        return self._tokens[places + self._shifts[np.searchsorted(self._ends, places, side="right")]]


@dataclass(frozen=True)
class TaskData:
    """The data of a run.

    Attributes:
        task: causal_lm or classification.
        tokenizer: saved with the final model; None: the data are not text.
        shares: documents, examples and tokens of each share of non-IID data, by which training examples are sorted;
            None: trainers read random subsets.
        content: digest of all documents and of the tokenizer, however training divides and cuts them; None: unknown.
    """

    task: str
    dataset: str
    source: str
    train: Examples
    validation: Examples
    tokenizer: "PreTrainedTokenizerBase | None" = None
    documents: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    shares: Sequence[Mapping[str, int]] | None = None
    content: str | None = None

    def fingerprint(self) -> str:
        """Return a digest of the content, and of 32 examples of each part, to compare processes and resumed runs."""
        digest = hashlib.sha256(str(self.content).encode())
        if self.shares is not None:
            digest.update(f"{self.shares}".encode())
        for examples in (self.train, self.validation):
            chosen = np.unique(np.linspace(0, len(examples) - 1, 32).astype(np.int64))
            batch = examples.batch(chosen, torch.device("cpu"))
            digest.update(str(len(examples)).encode())
            for name in sorted(batch):
                digest.update(batch[name].numpy().tobytes())
        return digest.hexdigest()
