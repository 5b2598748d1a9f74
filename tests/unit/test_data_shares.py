"""Non-IID data: which documents are in which share, and which divisions are refused."""

import itertools
import json
import sys

import numpy as np
import pytest

from configs.make_samples import write_imdb
from fabrics.config_checks import CHECKS
from fabrics.data import partition
from fabrics.data.c4 import c4_documents, host
from fabrics.data.dataset_loader import DATASETS, Dataset, load_data
from fabrics.data.examples import PackedDocuments, TaskData
from fabrics.data.partition import labels_by_cluster, share_count, shares_of_labels
from fabrics.data.python_docs import python_documents
from fabrics.data.token_store import TokenisedPart
from fabrics.data.tokenization import END_OF_TEXT
from tests.support.helpers import CPU, tiny_data
from utils.config.reading import parse_config
from utils.config.schema import ConfigError


def make(**values):
    return parse_config({"number_of_outer_steps": 1} | values, (), CHECKS)[0]


@pytest.fixture
def make_text(cache_dir, tmp_path):
    """Return a function from the letters of files and other values to a configuration that trains on them.

    Each file has 40 documents of one letter.
    """

    def configured(names: str, **values):
        for letter in names:
            documents = [" ".join([letter * 3] * (3 + number)) for number in range(40)]
            (tmp_path / f"{letter}.txt").write_text("\n\n".join(documents))
        defaults = {
            "dataset": "text",
            "text_files": [str(tmp_path / f"{letter}.txt") for letter in names],
            "text_documents": "blank_lines",
            "sequence_length": 16,
            "vocab_size": 300,
            "val_size": 12,
            "cache_dir": str(cache_dir),
        }
        return make(**defaults | values)

    return configured


def by_share(data: TaskData) -> list[dict]:
    """Return the examples of each share as one batch."""
    sizes = [share["examples"] for share in data.shares]
    ends = np.cumsum(sizes)
    assert ends[-1] == len(data.train)
    return [data.train.batch(range(end - size, end), CPU) for end, size in zip(ends, sizes, strict=True)]


def texts_by_share(data: TaskData) -> list[str]:
    return [data.tokenizer.decode(batch["input_ids"].flatten()) for batch in by_share(data)]


def test_whole_labels_go_to_the_share_that_has_least():
    # 7 | 5 | 4, then 3 to the third (7), 2 to the second (7), 1 to the first: the lowest number of equals.
    sizes = np.array([1, 7, 2, 4, 5, 3])
    assert shares_of_labels(np.arange(6), sizes, 3).tolist() == [0, 0, 1, 2, 1, 2]
    # The same with the sizes divided over two documents of each label.
    assert shares_of_labels(np.tile(np.arange(6), 2), np.tile(sizes / 2, 2), 3).tolist() == [0, 0, 1, 2, 1, 2] * 2


# Examples


def test_documents_are_packed_by_group_and_in_order():
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 99, size) for size in generator.integers(1, 30, 40)]
    offsets = np.cumsum([0, *map(len, documents)])
    groups = [np.array([5, 3, 38]), np.array([0]), np.setdiff1d(np.arange(40), [5, 3, 38, 0])]
    packed = PackedDocuments(np.concatenate(documents), offsets, groups, 7)
    expected = []
    for group, size in zip(groups, packed.sizes, strict=True):
        stream = np.concatenate([documents[number] for number in group])
        assert size == len(stream) // 7
        expected += stream[: size * 7].reshape(-1, 7).tolist()
    assert len(packed) == len(expected)
    assert packed.batch(range(len(packed)), CPU)["input_ids"].tolist() == expected
    chosen = generator.permutation(len(packed))[:9]
    assert packed.batch(chosen, CPU)["labels"].tolist() == [expected[index] for index in chosen]
    assert packed.tokens(chosen) == 63


def test_sources_are_files_and_no_example_is_of_two_shares(make_text):
    config = make_text("abcdef", data_split="sources", number_of_initial_trainers=3)
    data = load_data(config)
    texts = texts_by_share(data)
    letters = [set(text.replace(END_OF_TEXT, "")) - {" "} for text in texts]
    assert sorted(letter for own in letters for letter in own) == list("abcdef")
    records = data.shares
    assert sum(share["documents"] for share in records) == data.documents["train"] == 228
    assert [share["tokens"] // 16 for share in records] == [share["examples"] for share in records]
    assert texts_by_share(load_data(config)) == texts


def test_iid_shares_have_equal_sizes_and_validation_is_the_same_for_every_split(make_text):
    iid = load_data(make_text("ab", data_split_over="workers", data_shares=5))
    sizes = [share["examples"] for share in iid.shares]
    assert max(sizes) - min(sizes) <= 6
    plain = load_data(make_text("ab", number_of_initial_trainers=2))
    split = load_data(make_text("ab", number_of_initial_trainers=2, data_split="sources"))
    everything = range(len(plain.validation))
    for data in (iid, split):
        expected = plain.validation.batch(everything, CPU)["input_ids"]
        assert data.validation.batch(everything, CPU)["input_ids"].equal(expected)


def test_clusters_of_many_documents_are_those_of_a_sample_found_in_blocks(monkeypatch):
    """Documents of tokens 0 to 9, or 10 to 19: distinguished in blocks of 4, by a sample of 20 of 60 documents.

    The latter have more tokens: they are cluster 0.
    """
    generator = np.random.default_rng(0)
    lengths = [9 + number % 5 + number % 2 for number in range(60)]
    tokens = [generator.integers(0, 10, length) + 10 * (number % 2) for number, length in enumerate(lengths)]
    part = TokenisedPart(np.concatenate(tokens), np.cumsum([0, *lengths]), np.arange(60, dtype=np.uint64))
    monkeypatch.setattr(partition, "SAMPLED_DOCUMENTS", 20)
    monkeypatch.setattr(partition, "_BLOCK_DOCUMENTS", 4)
    assert labels_by_cluster(part, 20, 2, 42).tolist() == [1, 0] * 30


def test_every_share_gets_one_cluster(make_text):
    """Documents of one letter each: their text tells the cluster, and is the same in every process."""
    config = make_text("ab", data_split="clusters", number_of_initial_trainers=2)
    texts = texts_by_share(load_data(config))
    assert texts_by_share(load_data(config)) == texts
    assert {text.split()[0][0] for text in texts} == {"a", "b"}


def test_hosts_are_the_sources_of_c4(make_c4, tokenised_c4, tmp_path):
    assert host({"url": "https://User@Example.ORG:8080/a?b"}) == "example.org"
    assert {host(record) for record in ({}, {"url": 3}, {"url": "http://[/"}, {"url": "no url"})} == {"no host"}
    texts = python_documents()[:300]
    shard = tmp_path / "c4-train.00000-of-00001.json"
    records = [{"text": text, "url": f"https://host{number % 3}.org/{number}"} for number, text in enumerate(texts)]
    shard.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    documents = c4_documents(make_c4(c4_local_path=tmp_path, data_sample_size=250, val_size=20))
    train = documents.train
    found = [documents.tokenizer.decode(train.tokens[begin:end]) for begin, end in itertools.pairwise(train.offsets)]
    numbers = {f"{text}{END_OF_TEXT}": number for number, text in enumerate(texts)}
    assert train.read_origins() == [f"host{numbers[text] % 3}.org" for text in found]
    with pytest.raises(ConfigError, match="data_split: the training documents have 1 labels, too few for 2 shares"):
        load_data(make_c4(c4_tokenized_path=tokenised_c4, data_split="sources", number_of_initial_trainers=2))


# Divisions that are refused


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"data_split": "sources", "number_of_initial_trainers": 3},
            "data_split: the training documents have 2 labels, too few for 3 shares",
        ),
        ({"data_split": "clusters", "data_shares": 5000}, "data_shares: must be at most the 68 training documents"),
        (
            {"data_split_over": "workers", "data_shares": 60},
            "data_split: the documents of share .* of 60 do not fill one example",
        ),
    ],
)
def test_documents_that_cannot_be_divided_are_an_error(make_text, values, problem):
    with pytest.raises(ConfigError, match=problem):
        load_data(make_text("ab", sequence_length=128, **values))


def test_data_without_documents_cannot_be_divided(tmp_path):
    DATASETS["own"] = Dataset("causal_lm", lambda config: tiny_data())
    write_imdb(tmp_path, 60, 20)
    reviews = {"dataset": "imdb", "imdb_local_path": str(tmp_path), "model_type": "bert", "vocab_size": 400}
    for values in ({"dataset": "own"}, reviews):
        with pytest.raises(ConfigError, match=f"data_split: dataset {values['dataset']} has no documents"):
            load_data(make(data_split="sources", **values))


def test_clusters_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="data_split: clusters needs scikit-learn"):
        make(data_split="clusters")


@pytest.mark.parametrize(
    ("values", "shares"),
    [
        ({}, {2: 4, 6: 4}),
        ({"data_shares": 7}, {2: 7, 6: 7}),
        ({"data_split_over": "workers"}, {2: 4, 4: 4, 6: 6}),
    ],
)
def test_there_is_a_share_per_trainer_or_per_node_unless_given(values, shares):
    config = make(data_split="sources", **values)
    assert {nodes: share_count(config, nodes) for nodes in shares} == shares
