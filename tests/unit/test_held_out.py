"""The split into training and validation: what is held out, how much is read, and how much is kept."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.data.documents import Skipped, Source, document_hash
from fabrics.data.held_out import Hashes, split
from utils.config.schema import ConfigError

TEXTS = [f"document {index} of some" for index in range(100)]


def source(texts, validation=None) -> Source:
    return Source(
        "texts",
        {},
        lambda skipped: iter(texts),
        None if validation is None else lambda skipped: iter(validation),
    )


def texts_of(parts) -> tuple[list[str], list[str]]:
    return [text for _, text in parts.train(Skipped())], [text for _, text in parts.validation(Skipped())]


def test_documents_are_held_out_by_the_hash_of_their_text():
    train, validation = texts_of(split(source(TEXTS), None, 10))
    assert sorted(train + validation) == sorted(TEXTS)
    assert set(validation) == set(sorted(TEXTS, key=document_hash)[:10])
    # The order of the source stays, and does not matter to what is held out.
    assert train == [text for text in TEXTS if text in set(train)]
    assert set(texts_of(split(source(TEXTS[::-1]), None, 10))[1]) == set(validation)


def test_one_document_in_twenty_is_held_out_by_default():
    assert [len(part) for part in texts_of(split(source(TEXTS), None, None))] == [95, 5]
    assert [len(part) for part in texts_of(split(source(TEXTS), 40, None))] == [40, 2]
    assert [len(part) for part in texts_of(split(source(TEXTS[:3]), None, None))] == [2, 1]


def test_by_default_no_more_than_500_documents_are_held_out():
    texts = [f"text {index}" for index in range(12_000)]
    train, validation = texts_of(split(source(texts), None, None))
    assert (len(train), len(validation)) == (11_500, 500)
    assert set(validation) == set(sorted(texts, key=document_hash)[:500])
    assert len(texts_of(split(source(texts), 11_000, None))[1]) == 500
    assert len(texts_of(split(source(texts), 11_000, 600))[1]) == 600
    own = [f"validation {index}" for index in range(700)]
    assert [texts_of(split(source(TEXTS, own), train, None))[1] for train in (None, 100)] == [own[:500], own[:5]]


def test_the_source_is_read_once_to_choose_and_once_for_each_part():
    passes = []

    def documents(skipped):
        passes.append(skipped)
        skipped.add("bad", "line 1")
        yield from TEXTS

    parts, skipped = split(Source("", {}, documents), 60, 10), Skipped()
    assert len(list(parts.validation(skipped))) == 10
    assert len(passes) == 2
    assert len(list(parts.train(skipped))) == 60
    assert len(passes) == 3
    # Both parts come from the same documents: what they leave out is counted once.
    assert skipped.counts == {"bad": 1}


numbers = st.lists(st.sampled_from([0, 1, 2, 2**63, 2**64 - 2, 2**64 - 1]) | st.integers(0, 2**64 - 1), max_size=20)


@given(numbers, numbers)
def test_hashes_are_a_set_of_64_bit_numbers(members, others):
    hashes = Hashes(np.array(members, dtype=np.uint64))
    assert len(hashes) == len(set(members))
    assert all((number in hashes) == (number in set(members)) for number in (*members, *others))
    assert sorted(hashes.index(number) for number in set(members)) == list(range(len(hashes)))


def test_only_as_much_is_read_as_is_needed():
    read = []

    def documents(skipped):
        for index in itertools.count():
            read.append(index)
            yield f"text {index}"

    parts = split(Source("endless", {}, documents), 30, 6)
    assert [len(part) for part in texts_of(parts)] == [30, 6]
    assert max(read) <= 36


@given(st.lists(st.sampled_from("abcdefghijkl"), min_size=8, max_size=40), st.integers(1, 3), st.booleans())
def test_no_text_is_in_both_parts_whatever_repeats(texts, val_size, own_validation):
    if len(set(texts)) <= 2 * val_size:
        return
    validation = texts[: 2 * val_size] if own_validation else None
    skipped = Skipped()
    parts = split(source(texts, validation), None, val_size)
    train = [text for _, text in parts.train(skipped)]
    held_out = [text for _, text in parts.validation(Skipped())]
    assert len(held_out) == val_size
    assert not set(train) & set(held_out)
    repeats = skipped.counts.get("the same text as a validation document", 0)
    first = 0 if own_validation else val_size
    assert len(train) + repeats + first == len(texts)


def test_a_validation_part_of_its_own_is_used_from_its_beginning():
    train, validation = texts_of(split(source(TEXTS, ["v1", "document 3 of some", "v2"]), 50, 2))
    assert validation == ["v1", "document 3 of some"]
    assert train == [text for text in TEXTS if text != "document 3 of some"][:50]
    assert texts_of(split(source(TEXTS, ["v1", "v2"]), None, None))[1] == ["v1", "v2"]
    assert texts_of(split(source(TEXTS, ["v1", "v2"]), 20, None))[1] == ["v1"]
    assert texts_of(split(source(TEXTS, ["v1", "v2"]), 80, None))[1] == ["v1", "v2"]


@pytest.mark.parametrize(
    ("train", "validation", "own", "message"),
    [
        (None, 100, None, "val_size: must be below the 100 documents of the dataset, got 100"),
        (96, 5, None, "data_sample_size: 95 documents are left for training beside 5 for validation, got 96"),
        (50, 3, ["a", "b"], "val_size: the validation part has 2 documents, got 3"),
        (50, 1, [], "val_size: the validation part has 0 documents, got 1"),
        (101, 2, ["a", "b"], "data_sample_size: 100 documents are left for training beside 2 for validation, got 101"),
    ],
)
def test_too_few_documents_are_an_error_that_says_how_many_there_are(train, validation, own, message):
    with pytest.raises(ConfigError, match=message):
        texts_of(split(source(TEXTS, own), train, validation))


def test_repeats_of_validation_texts_do_not_count_as_training_documents():
    texts = [*TEXTS, *TEXTS[:5]]
    with pytest.raises(ConfigError, match=r"data_sample_size: \d+ documents are left"):
        texts_of(split(source(texts), 100, 5))
