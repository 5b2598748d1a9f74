"""Which documents train and which validate: by the hash of their text alone, so that no text is in both parts."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from fabrics.data.documents import Skipped, Source, document_hash
from utils.config.schema import ConfigError

# Validation documents where nobody says how many: one for every twenty, but a corpus of a terabyte needs no more than
# these, which are evaluated again after every round.
MOST_BY_DEFAULT = 500
# So many validation texts are kept when they are chosen; to find more of them again the source is read once more.
KEPT_TEXTS = 1000
_BLOCK = 4096


def default_validation_size(documents: int) -> int:
    """Validation documents for so many others, or of so many in all."""
    return min(max(1, documents // 20), MOST_BY_DEFAULT)


def sizes(train_size: int | None, val_size: int | None, validate: bool = True) -> dict[str, int | None]:
    """What says how many documents `split` takes, as plain data for the arguments of a set."""
    documents = {"train_documents": train_size, "validation_documents": val_size}
    if validate and val_size is None and (train_size is None or train_size // 20 > MOST_BY_DEFAULT):
        documents["most_validation_documents"] = MOST_BY_DEFAULT
    return documents


class Hashes:
    """A set of document hashes, in 8 bytes each."""

    def __init__(self, hashes: np.ndarray):
        self._sorted = np.unique(hashes)
        self._largest = int(self._sorted[-1]) if len(self._sorted) else -1

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, number: int) -> bool:
        return self.index(number) is not None

    def index(self, number: int) -> int | None:
        """The number's place among them; None: it is not one of them."""
        if number > self._largest:
            return None
        place = int(np.searchsorted(self._sorted, np.uint64(number)))
        return place if int(self._sorted[place]) == number else None


@dataclass(frozen=True)
class HeldOut:
    """The hashes of the validation documents. texts: by hash, in the order of the source; None: they are too many."""

    hashes: Hashes
    texts: dict[int, str] | None


HashedDocuments = Callable[[Skipped], Iterator[tuple[int, str]]]


@dataclass(frozen=True)
class Parts:
    """The documents of both parts, with their hashes; each begins anew whenever it is asked for."""

    train: HashedDocuments
    validation: HashedDocuments | None

    def texts(self) -> Iterator[str]:
        """The training texts alone."""
        return (text for _, text in self.train(Skipped()))


def split(source: Source, train_size: int | None, val_size: int | None, validate: bool = True) -> Parts:
    """Divide a source into training and validation documents; no text is in both.

    Validation is the beginning of the source's own validation part. Where it has none, the documents with the
    smallest hashes are held out: among the first train_size + val_size, or among all. A training document whose text
    is held out is skipped, wherever it stands.

    Args:
        train_size: the first so many others train; None: all.
        val_size: None: one for every twenty of train_size, or of all documents, but at most MOST_BY_DEFAULT, as far as
            a validation part of the source's own goes.
        validate: False for training documents only.

    Raises:
        ConfigError: there are fewer documents.
        DatasetError: the source cannot be read.
    """
    if not validate:
        held_out, validation = HeldOut(Hashes(np.empty(0, dtype=np.uint64)), None), None
    elif source.validation is not None:
        validation = _own_validation(source, train_size, val_size)
        numbers = (number for number, _ in validation(Skipped()))
        held_out = HeldOut(Hashes(np.fromiter(numbers, dtype=np.uint64)), None)
    else:
        held_out = _smallest_hashes(source, train_size, val_size)

        def validation(skipped: Skipped) -> Iterator[tuple[int, str]]:
            if held_out.texts is not None:
                return iter(held_out.texts.items())
            # What it skips, the training part skips as well.
            return _first_of_each(_hashed(source.train(Skipped())), held_out.hashes)

    def train(skipped: Skipped) -> Iterator[tuple[int, str]]:
        return _first(
            _others(_hashed(source.train(skipped)), held_out.hashes, source.validation is None, skipped),
            train_size,
            train_size or 1,
            lambda found: _too_few_for_training(found, len(held_out.hashes), train_size),
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
    """The first document of each hash that is chosen; nothing is read after the last of them."""
    found, left = np.zeros(len(chosen), dtype=bool), len(chosen)
    for number, text in documents:
        index = chosen.index(number)
        if index is not None and not found[index]:
            found[index] = True
            left -= 1
            yield number, text
            if not left:
                return


def _others(
    documents: Iterable[tuple[int, str]], held_out: Hashes, inside: bool, skipped: Skipped
) -> Iterator[tuple[int, str]]:
    """The documents that are not held out; inside: the first of each that is comes from among these documents."""
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
    """The first `count` of them (None: all); fewer than `least` are a ConfigError that says how many there are."""
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


def _smallest_hashes(source: Source, train_size: int | None, val_size: int | None) -> HeldOut:
    """The documents to hold out; one pass over the source, and 8 bytes for each that may be one of them."""
    if val_size is None and train_size is not None:
        val_size = default_validation_size(train_size)
    pool = None if train_size is None else train_size + val_size
    most = MOST_BY_DEFAULT if val_size is None else val_size
    total, largest, texts = 0, 2**64 - 1, {}

    def hashes() -> Iterator[int]:
        nonlocal total
        documents = itertools.islice(source.train(Skipped()), pool)
        for text in tqdm(documents, desc="choosing validation documents", unit=" documents", leave=False, disable=None):
            total += 1
            number = document_hash(text)
            if most <= KEPT_TEXTS and number <= largest:
                texts.setdefault(number, text)
            yield number

    numbers, smallest = hashes(), np.empty(0, dtype=np.uint64)
    while len(block := np.fromiter(itertools.islice(numbers, max(_BLOCK, most)), dtype=np.uint64)):
        # One more than are held out, to know that there is one.
        smallest = np.unique(np.concatenate([smallest, block]))[: most + 1]
        if len(smallest) > most:
            largest = int(smallest[most - 1])
            texts = {number: text for number, text in texts.items() if number <= largest}
    if val_size is None:
        val_size = default_validation_size(total)
    if len(smallest) < 2:
        raise ConfigError(
            f"dataset: {source.name} has {len(smallest)} documents, where training and validation need one each at "
            f"least; of a file of dataset text, text_documents: blank_lines makes one for each of its blocks"
        )
    if val_size >= len(smallest):
        raise ConfigError(f"val_size: must be below the {len(smallest)} documents of the dataset, got {val_size}")
    if pool is not None and total < pool:
        raise ConfigError(_too_few_for_training(total - val_size, val_size, train_size))
    chosen = Hashes(smallest[:val_size])
    if most > KEPT_TEXTS:
        return HeldOut(chosen, None)
    return HeldOut(chosen, {number: text for number, text in texts.items() if number in chosen})
