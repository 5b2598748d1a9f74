"""Documents, tokenizer, packing, splits and the order of the data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.data_order import DataCursor, draw_subset
from fabrics.dataset_loader import DATASETS, END_OF_TEXT, pack, python_documents, split_documents, train_tokenizer
from tests.helpers import make_config
from utils.config import ConfigError


@given(st.lists(st.lists(st.integers(1, 99), max_size=20), min_size=1, max_size=20), st.integers(2, 9))
def test_packing_loses_nothing_but_the_last_partial_sequence(documents, length):
    packed = pack(documents, 0, length)
    stream = [token for document in documents for token in [*document, 0]]
    assert packed.shape[1] == length
    assert packed.flatten().tolist() == stream[: len(stream) // length * length]


def test_documents_are_split_without_overlap_and_by_seed():
    documents = [f"document {index}" for index in range(100)]
    train, validation = split_documents(documents, 1, None, 10)
    assert len(validation) == 10
    assert sorted(train + validation) == sorted(documents)
    assert split_documents(documents, 1, 30, 10) == (train[:30], validation)
    assert split_documents(documents, 2, None, 10)[1] != validation
    assert len(split_documents(documents, 1, None, None)[1]) == 5


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [(None, 100, "val_size: must be below the 100 documents"), (96, 5, "data_sample_size: 95 documents are left")],
)
def test_too_few_documents(train, validation, message):
    with pytest.raises(ConfigError, match=message):
        split_documents([str(index) for index in range(100)], 0, train, validation)


def test_python_documents_are_real_english_each_once():
    documents = python_documents()
    assert len(set(documents)) == len(documents) > 5000
    size = sum(len(document.encode()) for document in documents)
    assert 1_500_000 < size < 4_000_000
    text = "\n".join(documents)
    assert all(phrase in text for phrase in ('The "if" statement is used for conditional execution', "Return a new"))
    assert text.count(" the ") > 10_000


def test_tokenizer_round_trips_and_comes_from_the_cache(tmp_path):
    documents = ["naïve café, 東京, \t tabs and  spaces\n", "the cluster owns the nodes " * 20]
    tokenizer = train_tokenizer(documents, 300, tmp_path)
    assert len(tokenizer) <= 300
    for text in [*documents, "unseen: ßæ 🙂"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    (path,) = (tmp_path / "tokenizers").iterdir()
    stamp = path.stat().st_mtime_ns
    again = train_tokenizer(documents, 300, tmp_path)
    assert path.stat().st_mtime_ns == stamp
    assert again.get_vocab() == tokenizer.get_vocab()
    assert train_tokenizer([*documents, "x"], 300, tmp_path) is not None
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2


def test_a_damaged_cached_tokenizer_is_trained_again(tmp_path):
    tokenizer = train_tokenizer(["some text to learn from"], 280, tmp_path)
    (path,) = (tmp_path / "tokenizers").iterdir()
    path.write_text(path.read_text()[:100])
    assert train_tokenizer(["some text to learn from"], 280, tmp_path).get_vocab() == tokenizer.get_vocab()
    assert len(path.read_text()) > 100


def test_python_docs_holds_out_documents_and_fills_sequences(cache_dir):
    config = make_config(
        data_sample_size=300, val_size=40, sequence_length=64, vocab_size=400, cache_dir=str(cache_dir)
    )
    data = DATASETS["python_docs"](config)
    assert dict(data.documents) == {"train": 300, "validation": 40}
    assert (len(data.train), len(data.validation)) > (10, 1)
    train, validation = split_documents(python_documents(), config.training_seed, 300, 40)
    assert not set(train) & set(validation)
    tokens = [token for index in range(len(data.train)) for token in data.train._tokens[index].tolist()]
    text = END_OF_TEXT.join(train) + END_OF_TEXT
    assert text.startswith(data.tokenizer.decode(tokens))
    assert len(data.tokenizer.decode(tokens)) > 0.98 * len(text)


def test_documents_that_fill_no_sequence_are_an_error(cache_dir):
    config = make_config(data_sample_size=1, val_size=1, sequence_length=500_000, cache_dir=str(cache_dir))
    with pytest.raises(ConfigError, match=r"sequence_length: the 1 train documents do not fill one sequence"):
        DATASETS["python_docs"](config)


@pytest.mark.parametrize(("trainers", "examples"), [(4, 100), (3, 100), (1, 7), (7, 50)])
def test_default_subsets_are_a_random_partition(trainers, examples):
    subsets = [draw_subset(5, trainer, trainers, examples, None) for trainer in range(trainers)]
    assert sorted(np.concatenate(subsets).tolist()) == list(range(examples))
    if trainers > 1:
        assert subsets[0].tolist() != list(range(len(subsets[0])))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_a_fraction_of_the_data_for_every_trainer(fraction):
    subsets = [draw_subset(5, trainer, 4, 100, fraction) for trainer in range(4)]
    for subset in subsets:
        assert len(np.unique(subset)) == len(subset) == round(100 * fraction)
    assert subsets[0].tolist() != subsets[1].tolist() or fraction == 1.0


def test_an_epoch_sees_every_example_once_and_the_next_in_another_order():
    cursor = DataCursor(3, 0, np.arange(20, 50))
    first, second = cursor.peek(0, 30).tolist(), cursor.peek(30, 30).tolist()
    assert sorted(first) == sorted(second) == list(range(20, 50))
    assert first != second


@given(st.integers(1, 40), st.lists(st.integers(1, 25), min_size=1, max_size=12))
def test_the_order_is_a_function_of_the_position_alone(size, steps):
    walker, stream = DataCursor(1, 2, np.arange(size)), []
    for step in steps:
        stream.extend(walker.peek(0, step).tolist())
        walker.advance(step)
    fresh = DataCursor(1, 2, np.arange(size))
    assert fresh.peek(0, sum(steps)).tolist() == stream
    assert fresh.peek(steps[0], sum(steps[1:])).tolist() == stream[steps[0] :]
    fresh.load_state_dict(walker.state_dict())
    assert fresh.peek(0, 7).tolist() == walker.peek(0, 7).tolist()


def test_the_order_differs_between_trainers_and_seeds():
    orders = {tuple(DataCursor(seed, trainer, np.arange(30)).peek(0, 30)) for seed in (1, 2) for trainer in (0, 1)}
    assert len(orders) == 4


def test_a_merged_cursor_walks_the_union():
    cursor = DataCursor(1, 0, np.arange(10))
    before = cursor.peek(0, 10).tolist()
    cursor.advance(4)
    cursor.unite([DataCursor(1, 1, np.arange(5, 20)), DataCursor(1, 2, np.arange(30, 32))])
    assert sorted(cursor.peek(0, 22).tolist()) == [*range(20), 30, 31]
    assert [index for index in cursor.peek(0, 22) if index < 10] != before


def test_a_merge_of_trainers_with_the_same_data_begins_a_new_order():
    cursor = DataCursor(1, 0, np.arange(30))
    before = cursor.peek(0, 30).tolist()
    cursor.unite([DataCursor(1, 1, np.arange(30))])
    assert sorted(cursor.peek(0, 30).tolist()) == sorted(before)
    assert cursor.peek(0, 30).tolist() != before
