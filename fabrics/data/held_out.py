"""The split into training and validation documents, by the hash of their text; no text is in both parts."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from fabrics.data.documents import Skipped, Source, document_hash
from utils.config.schema import ConfigError

# By default one document in twenty validates, but at most this many: they are evaluated after every round.
MOST_BY_DEFAULT = 500
_BLOCK = 4096


def default_validation_size(documents: int) -> int:
    """Default number of validation documents beside, or out of, this many documents."""
    return min(max(1, documents // 20), MOST_BY_DEFAULT)


def sizes(train_size: int | None, val_size: int | None, validate: bool = True) -> dict[str, int | None]:
    """Return the arguments of `split` that decide the number of documents, as plain data."""
    documents = {"train_documents": train_size, "validation_documents": val_size}
    if validate and val_size is None and (train_size is None or train_size // 20 > MOST_BY_DEFAULT):
        documents["most_validation_documents"] = MOST_BY_DEFAULT
    return documents


class Hashes:
    """A set of document hashes, 8 bytes each."""

    def __init__(self, hashes: np.ndarray):
        self._sorted = np.unique(hashes)
        self._largest = int(self._sorted[-1]) if len(self._sorted) else -1

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, number: int) -> bool:
        return self.index(number) is not None

    def index(self, number: int) -> int | None:
        """Return the rank of a hash in the set; None: it is not in the set."""
        if number > self._largest:
            return None
        place = int(np.searchsorted(self._sorted, np.uint64(number)))
        return place if int(self._sorted[place]) == number else None


HashedDocuments = Callable[[Skipped], Iterator[tuple[int, str]]]


@dataclass(frozen=True)
class Parts:
    """Readers of both parts: (hash, text) pairs; each call reads from the start."""

    train: HashedDocuments
    validation: HashedDocuments | None

    def texts(self) -> Iterator[str]:
        """Training texts."""
        return (text for _, text in self.train(Skipped()))


def split(source: Source, train_size: int | None, val_size: int | None, validate: bool = True) -> Parts:
    """Divide a source into training and validation documents; no text is in both.

    Validation is the beginning of the source's own validation part. Without one, the documents with the smallest
    hashes are held out: among the first train_size + val_size, or among all. Training documents whose text is held
    out are skipped.

    Args:
        train_size: use the first train_size training documents; None: all.
        val_size: None: one for every twenty of train_size, or of all documents, at most MOST_BY_DEFAULT.
        validate: False: no validation part.

    Raises:
        ConfigError: there are fewer documents.
        DatasetError: the source cannot be read.
    """
    validation: HashedDocuments | None
    if not validate:
        held_out = Hashes(np.empty(0, dtype=np.uint64))
        validation = None
    elif source.validation is not None:
        validation = _own_validation(source, train_size, val_size)
        held_out = Hashes(np.fromiter((number for number, _ in validation(Skipped())), dtype=np.uint64))
    else:
        held_out = _smallest_hashes(source, train_size, val_size)

        def validation(skipped: Skipped) -> Iterator[tuple[int, str]]:
            # The training part counts what is skipped.
            return _first_of_each(_hashed(source.train(Skipped())), held_out)

    def train(skipped: Skipped) -> Iterator[tuple[int, str]]:
        return _first(
            _others(_hashed(source.train(skipped)), held_out, source.validation is None, skipped),
            train_size,
            train_size or 1,
            lambda found: _too_few_for_training(found, len(held_out), train_size),
        )

    return Parts(train, validation)


def _own_validation(source: Source, train_size: int | None, val_size: int | None) -> HashedDocuments:
    count = val_size
    if count is None:
        count = MOST_BY_DEFAULT if train_size is None else default_validation_size(train_size)

    def validation(skipped: Skipped) -> Iterator[tuple[int, str]]:
        return _first(
            _hashed(source.validation(skipped)),
            count,
            val_size or 1,
            lambda found: f"val_size: the validation part has {found} documents, got {val_size or 'null'}",
        )

    return validation


def _first_of_each(documents: Iterable[tuple[int, str]], chosen: Hashes) -> Iterator[tuple[int, str]]:
    """The first document of each chosen hash; reading stops after the last of them."""
    found = np.zeros(len(chosen), dtype=bool)
    missing = len(chosen)
    for number, text in documents:
        index = chosen.index(number)
        if index is not None and not found[index]:
            found[index] = True
            missing -= 1
            yield number, text
            if not missing:
                return


def _others(
    documents: Iterable[tuple[int, str]], held_out: Hashes, inside: bool, skipped: Skipped
) -> Iterator[tuple[int, str]]:
    """Documents that are not held out.

    Args:
        inside: the held-out documents come from these documents, so their first occurrence is not a duplicate.
    """
    found = np.full(len(held_out), not inside)
    for number, text in documents:
        index = held_out.index(number)
        if index is None:
            yield number, text
        elif found[index]:
            skipped.add("the same text as a validation document", repr(text[:40]))
        else:
            found[index] = True


def _hashed(documents: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((document_hash(text), text) for text in documents)


def _first(documents: Iterable, count: int | None, least: int, problem: Callable[[int], str]) -> Iterator:
    """The first `count` documents (None: all); ConfigError if there are fewer than `least`."""
    found = 0
    for item in itertools.islice(documents, count):
        found += 1
        yield item
    if found < least:
        raise ConfigError(problem(found))


def _too_few_for_training(found: int, held_out: int, wanted: int | None) -> str:
    return (
        f"data_sample_size: {found} documents are left for training beside {held_out} for validation, "
        f"got {wanted or 'null'}"
    )


def _smallest_hashes(source: Source, train_size: int | None, val_size: int | None) -> Hashes:
    """Choose the documents to hold out in one pass; memory is 8 bytes for each of them."""
    if val_size is None and train_size is not None:
        val_size = default_validation_size(train_size)
    pool = None if train_size is None else train_size + val_size
    most = MOST_BY_DEFAULT if val_size is None else val_size
    texts = itertools.islice(source.train(Skipped()), pool)
    texts = tqdm(texts, desc="choosing validation documents", unit=" documents", leave=False, disable=None)
    numbers = (document_hash(text) for text in texts)
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
            f"dataset: {source.name} has {len(smallest)} documents, training and validation need at least one each; "
            f"with dataset text, text_documents: blank_lines makes one of each block of lines"
        )
    if val_size >= len(smallest):
        raise ConfigError(f"val_size: must be below the {len(smallest)} documents of the dataset, got {val_size}")
    if pool is not None and total < pool:
        raise ConfigError(_too_few_for_training(total - val_size, val_size, train_size))
    return Hashes(smallest[:val_size])
