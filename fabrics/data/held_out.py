"""The split into training and validation documents, by the hash of their text; no text is in both parts."""

import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import partial

import numpy as np

from fabrics.data.documents import Document, Documents, Skipped, Source, document_hash
from utils.config.schema import ConfigError
from utils.progress import progress_bar
from utils.text import counted

# By default one document in twenty validates, but at most this many: they are evaluated after every round.
MOST_BY_DEFAULT = 500
_BLOCK = 4096


def default_validation_size(documents: int) -> int:
    """Return the default number of validation documents beside, or out of, this many documents."""
    return min(max(1, documents // 20), MOST_BY_DEFAULT)


@dataclass(frozen=True)
class Part:
    """Documents of one part, and their number, about; None: unknown."""

    documents: Documents
    count: int | None

    def __call__(self, skipped: Skipped) -> Iterator[Document]:
        return self.documents(skipped)


def split(source: Source, train_size: int | None, val_size: int | None) -> tuple[Part, Part | None]:
    """Return readers of the training and validation documents of a source; no text is in both.

    Validation is the beginning of the source's own validation part. Without one, the documents with the smallest
    hashes are held out: among the first train_size + val_size, or among all. Training documents whose text is held
    out are skipped.

    Args:
        train_size: use the first train_size training documents; None: all.
        val_size: None: one for every twenty of train_size, or of all documents, at most MOST_BY_DEFAULT; 0: no
            validation part.
    """
    own = source.validation is not None
    count = train_size
    if val_size == 0:
        validation = None
        held_out = frozenset()
    elif own:
        validation = Part(partial(_first, source.validation, train_size, val_size), val_size)
        held_out = frozenset(document_hash(document.text) for document in validation(Skipped()))
    else:
        held_out, count = _smallest_hashes(source, train_size, val_size)
        validation = Part(partial(_chosen, source.train, held_out), len(held_out))
    return Part(partial(_train, source.train, train_size, held_out, own), count), validation


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


def _too_few_for_training(found: int, held_out: int, wanted: int | None) -> str:
    return (
        f"data_sample_size: {found} documents are left for training beside {held_out} for validation, "
        f"got {wanted or 'null'}"
    )


def _smallest_hashes(source: Source, train_size: int | None, val_size: int | None) -> tuple[frozenset[int], int]:
    """Choose the documents to hold out in one pass that keeps 8 bytes of each, and no text; count the others."""
    if val_size is None and train_size is not None:
        val_size = default_validation_size(train_size)
    pool = None if train_size is None else train_size + val_size
    most = MOST_BY_DEFAULT if val_size is None else val_size
    documents = itertools.islice(source.train(Skipped()), pool)
    whole = pool is None
    total, unit = (source.size, "B") if whole else (pool, " documents")
    bar = progress_bar(desc="choosing validation documents", total=total, unit=unit, unit_scale=whole, leave=False)

    def hashes() -> Iterator[int]:
        for document in documents:
            bar.update(len(document.text) if whole else 1)
            yield document_hash(document.text)

    numbers = hashes()
    total = 0
    smallest = np.empty(0, dtype=np.uint64)
    while len(block := np.fromiter(itertools.islice(numbers, max(_BLOCK, most)), dtype=np.uint64)):
        total += len(block)
        # One more than are held out, to know whether another document exists.
        smallest = np.unique(np.concatenate([smallest, block]))[: most + 1]
    if val_size is None:
        val_size = default_validation_size(total)
    if len(smallest) < 2:
        raise ConfigError(
            f"dataset: {source.name} has {counted(len(smallest), 'document')}, training and validation need one each; "
            f"with dataset text, text_documents: blank_lines makes one of each block of lines"
        )
    if val_size >= len(smallest):
        raise ConfigError(f"val_size: must be below the {len(smallest)} documents of the dataset, got {val_size}")
    if pool is not None and total < pool:
        raise ConfigError(_too_few_for_training(total - val_size, val_size, train_size))
    bar.close()
    return frozenset(smallest[:val_size].tolist()), total - val_size
