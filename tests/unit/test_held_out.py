"""The split into training and validation documents."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.data.documents import DatasetError, Document, Skipped, Source, document_hash, split
from utils.config.schema import ConfigError

TEXTS = [f"document {index} of some" for index in range(100)]


def source(texts, validation=None) -> Source:
    def reader(texts):
        return lambda skipped: (Document(text, "") for text in texts)

    return Source("texts", {}, reader(texts), None if validation is None else reader(validation))


def texts_of(parts) -> tuple[list[str], list[str]]:
    train, validation = ([document.text for document in part(Skipped())] for part in parts)
    return train, validation


def test_documents_are_held_out_by_the_hash_of_their_text():
    train, validation = texts_of(split(source(TEXTS), None, 10))
    assert sorted(train + validation) == sorted(TEXTS)
    assert set(validation) == set(sorted(TEXTS, key=document_hash)[:10])
    # The order of the source stays, and does not matter to what is held out.
    assert train == [text for text in TEXTS if text in set(train)]
    assert set(texts_of(split(source(TEXTS[::-1]), None, 10))[1]) == set(validation)


@pytest.mark.parametrize("val_size", [None, 10])
def test_documents_that_change_between_the_passes_are_an_error(val_size):
    texts = list(TEXTS)
    _, validation = split(source(texts), None, val_size)
    texts.remove(min(texts, key=document_hash))
    with pytest.raises(DatasetError, match=r"^the documents have changed while they were read$"):
        list(validation(Skipped()))


@pytest.mark.parametrize(
    ("documents", "train_size", "expected"),
    [(100, None, (95, 5)), (100, 40, (40, 2)), (3, None, (2, 1)), (12_000, None, (11_500, 500))],
)
def test_one_document_in_twenty_and_at_most_500_are_held_out_by_default(documents, train_size, expected):
    texts = [f"text {index}" for index in range(documents)]
    train, validation = texts_of(split(source(texts), train_size, None))
    assert (len(train), len(validation)) == expected
    pool = texts[: sum(expected)]
    assert set(validation) == set(sorted(pool, key=document_hash)[: expected[1]])


def test_the_source_is_read_once_to_choose_and_once_for_each_part():
    passes = []

    def documents(skipped):
        passes.append(skipped)
        skipped.add("bad", "line 1")
        yield from (Document(text, "") for text in TEXTS)

    (train, validation), skipped = split(Source("", {}, documents), 60, 10), Skipped()
    assert len(list(validation(skipped))) == 10
    assert len(passes) == 2
    assert len(list(train(skipped))) == 60
    assert len(passes) == 3
    # Both parts come from the same documents: what they leave out is counted once.
    assert skipped.counts == {"bad": 1}


def test_only_as_much_is_read_as_is_needed_and_no_text_is_kept():
    alive = set()
    read = []

    class Text(str):
        def __init__(self, text):
            alive.add(id(self))

        def __del__(self):
            alive.discard(id(self))

    def documents(skipped):
        for index in itertools.count():
            read.append(index)
            assert len(alive) <= 2
            yield Document(Text(f"text {index}"), "")

    train, _ = split(Source("endless", {}, documents), 300, 60)
    assert sum(1 for _ in train(Skipped())) == 300
    assert max(read) <= 360


@given(st.lists(st.sampled_from("abcdefghijkl"), min_size=8, max_size=40), st.integers(1, 3), st.booleans())
def test_no_text_is_in_both_parts_whatever_repeats(texts, val_size, own_validation):
    if len(set(texts)) <= 2 * val_size:
        return
    validation = texts[: 2 * val_size] if own_validation else None
    skipped = Skipped()
    parts = split(source(texts, validation), None, val_size)
    train = [document.text for document in parts[0](skipped)]
    _, held_out = texts_of(parts)
    assert len(held_out) == val_size
    assert not set(train) & set(held_out)
    repeats = skipped.counts.get("the same text as a validation document", 0)
    first = 0 if own_validation else val_size
    assert len(train) + repeats + first == len(texts)


def test_the_sources_own_validation_part_is_used_from_its_beginning():
    train, validation = texts_of(split(source(TEXTS, ["v1", "document 3 of some", "v2"]), 50, 2))
    assert validation == ["v1", "document 3 of some"]
    assert train == [text for text in TEXTS if text != "document 3 of some"][:50]
    own = [f"validation {index}" for index in range(700)]
    assert [texts_of(split(source(TEXTS, own), size, None))[1] for size in (None, 100)] == [own[:500], own[:5]]
    assert texts_of(split(source(TEXTS, own[:2]), 80, None))[1] == own[:2]


def test_the_default_leaves_a_document_to_train_on_however_many_are_repeats():
    train, validation = texts_of(split(source(["first", "second"] * 20), None, None))
    assert len(validation) == 1
    assert len(train) == 20


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
