"""Non-IID data: which documents are in which share, and which divisions are refused."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cluster import Cluster
from configs.make_samples import write_code, write_imdb
from fabrics.config_checks import CHECKS
from fabrics.data import partition
from fabrics.data.c4 import host
from fabrics.data.dataset_loader import DATASETS, Dataset, load_data
from fabrics.data.examples import PackedDocuments, TaskData
from fabrics.data.partition import (
    Corpus,
    assign_documents,
    clusters_of,
    dirichlet_proportions,
    share_count,
    total_variation,
    whole_labels,
)
from fabrics.data.python_docs import python_documents
from fabrics.data.token_store import TokenisedPart, encode
from fabrics.data.tokenization import END_OF_TEXT, load_tokenizer
from fabrics.pool.eval_tool import evaluate
from tests.support.helpers import CPU, TINY_ARCHITECTURE, Recorder, padded, tiny_data
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
    ends = np.cumsum(data.shares.sizes)
    assert ends[-1] == len(data.train)
    return [data.train.batch(range(end - size, end), CPU) for end, size in zip(ends, data.shares.sizes, strict=True)]


def texts_by_share(data: TaskData) -> list[str]:
    return [data.tokenizer.decode(batch["input_ids"].flatten()) for batch in by_share(data)]


# Proportions


def test_whole_labels_go_to_the_share_that_has_least():
    # 7 | 5 | 4, then 3 to the third (7), 2 to the second (7), 1 to the first: the lowest number of equals.
    owners = whole_labels(np.array([1, 7, 2, 4, 5, 3]), 3).argmax(1)
    assert owners.tolist() == [0, 0, 1, 2, 1, 2]


def test_shares_get_their_proportion_of_each_labels_tokens():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 3000)
    lengths = generator.integers(1, 50, 3000)
    proportions = np.array([[0.1, 0.2, 0.7], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    shares = assign_documents(labels, lengths, proportions, generator)
    for label, wanted in enumerate(proportions):
        tokens = np.bincount(shares[labels == label], weights=lengths[labels == label], minlength=3)
        assert tokens / tokens.sum() == pytest.approx(wanted, abs=2 * 50 / tokens.sum())
        assert not tokens[wanted == 0].any()
    assert (assign_documents(labels, lengths, proportions, np.random.default_rng(1)) != shares).mean() > 0.2


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.05, 0.55, 0.75), (1.0, 0.2, 0.45), (1000.0, 0.0, 0.03)])
def test_a_small_alpha_is_skewed_and_a_large_one_near_iid(alpha, least, most):
    """Four shares without a common label have a total variation of 0.75."""
    sizes = np.full(40, 1000.0)
    for seed in range(5):
        proportions = dirichlet_proportions(sizes, 4, alpha, np.random.default_rng(seed))
        assert proportions.sum(1) == pytest.approx(np.ones(40))
        assert least <= total_variation(proportions.T * sizes) <= most
    assert dirichlet_proportions(np.ones(2), 4, 1e-3, np.random.default_rng(0)) is None


def test_total_variation_is_the_fraction_to_exchange():
    assert total_variation(np.array([[3, 0], [0, 3]])) == 0.5
    assert total_variation(np.array([[1, 2], [10, 20]])) == pytest.approx(0.0, abs=1e-12)
    assert total_variation(np.array([[4, 0], [2, 2]])) == 0.25


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


def test_chosen_sequences_are_those_of_others():
    texts = padded([[number] * length for number, length in enumerate([3, 9, 4, 7, 5])])
    chosen = texts.chosen(np.array([4, 1, 0]))
    assert (len(chosen), chosen.largest, chosen.tokens([0, 2])) == (3, 1, 8)
    assert chosen.batch([2, 0], CPU)["labels"].equal(texts.batch([0, 4], CPU)["labels"])


def test_sources_are_files_and_no_example_is_of_two_shares(make_text):
    config = make_text("abcdef", data_split="sources", number_of_initial_trainers=3)
    data = load_data(config)
    texts = texts_by_share(data)
    letters = [set(text.replace(END_OF_TEXT, "")) - {" "} for text in texts]
    assert sorted(letter for own in letters for letter in own) == list("abcdef")
    record = data.shares.record
    assert sum(share["documents"] for share in record["shares"]) == data.documents["train"] == 228
    assert [share["examples"] for share in record["shares"]] == list(data.shares.sizes)
    assert [len(share["largest_labels"]) for share in record["shares"]] == [2, 2, 2]
    assert (record["labels"], record["total_variation"]) == (6, pytest.approx(2 / 3, abs=0.02))
    assert texts_by_share(load_data(config)) == texts


def test_iid_shares_have_equal_sizes_and_validation_is_the_same_for_every_split(make_text):
    iid = load_data(make_text("ab", data_split_over="workers", data_shares=5))
    assert max(iid.shares.sizes) - min(iid.shares.sizes) <= 6
    plain = load_data(make_text("ab", number_of_initial_trainers=2))
    split = load_data(make_text("ab", number_of_initial_trainers=2, data_split="sources"))
    everything = range(len(plain.validation))
    for data in (iid, split):
        expected = plain.validation.batch(everything, CPU)["input_ids"]
        assert data.validation.batch(everything, CPU)["input_ids"].equal(expected)


def tokenised(texts: list[str], tokenizer) -> TokenisedPart:
    documents = encode(tokenizer, texts)
    hashes = np.arange(len(texts), dtype=np.uint64)
    return TokenisedPart(np.concatenate(documents), np.cumsum([0, *map(len, documents)]), hashes)


def test_clusters_tell_code_from_prose(tmp_path, tokenizer_folder):
    write_code(tmp_path, 12)
    files = [path.read_text(encoding="utf-8").split("\n\n") for path in sorted(tmp_path.iterdir())]
    code = [block for blocks in files for block in blocks if len(block) > 200]
    prose = [text for text in python_documents() if len(text) > 400]
    tokenizer = load_tokenizer(str(tokenizer_folder), "tokenizer")
    parts = [tokenised(code[first:last] + prose[first:last], tokenizer) for first, last in ((0, 150), (150, 180))]
    train, validation = clusters_of(Corpus(*parts, len(tokenizer), None, ""), 2, 42)
    for found, documents in ((train, 150), (validation, 30)):
        of_code = found[:documents]
        of_prose = found[documents:]
        assert max((of_code == own).mean() + (of_prose == 1 - own).mean() for own in (0, 1)) > 1.6  # 1 by chance
    tokens = np.bincount(train, weights=parts[0].lengths)
    assert tokens[0] >= tokens[1]


def test_clusters_of_many_documents_are_those_of_a_sample_found_in_blocks(monkeypatch):
    """Documents of tokens 0 to 9, or 10 to 19: distinguished in blocks of 4, by a sample of 20 of 60 documents."""
    generator = np.random.default_rng(0)
    lengths = [9 + number % 5 for number in range(60)]
    tokens = [generator.integers(0, 10, length) + 10 * (number % 2) for number, length in enumerate(lengths)]
    part = TokenisedPart(np.concatenate(tokens), np.cumsum([0, *lengths]), np.arange(60, dtype=np.uint64))
    monkeypatch.setattr(partition, "SAMPLED_DOCUMENTS", 20)
    monkeypatch.setattr(partition, "_BLOCK_DOCUMENTS", 4)
    train, validation = clusters_of(Corpus(part, part.first(7), 20, None, ""), 2, 42)
    assert train[0] != train[1]
    assert train.tolist() == train[:2].tolist() * 30
    assert validation.tolist() == train[:7].tolist()


def test_clusters_are_found_once_and_again_if_the_cache_is_damaged(make_text, monkeypatch):
    config = make_text("ab", data_split="clusters", number_of_initial_trainers=2)
    first = texts_by_share(load_data(config))
    with monkeypatch.context() as patch:
        patch.setattr(partition, "clusters_of", None)
        assert texts_by_share(load_data(config)) == first
    (cached,) = Path(config.cache_dir, "clusters").glob("*_2_seed_42.npz")
    whole = cached.read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 1
    for damaged in (bytes(flipped), whole[:-30], b"", b"junk"):
        cached.write_bytes(damaged)
        assert texts_by_share(load_data(config)) == first
        assert cached.read_bytes() == whole
    cached.unlink()
    cached.mkdir()
    assert texts_by_share(load_data(config)) == first


def test_hosts_are_the_sources_of_c4(make_c4, tokenised_c4, tmp_path):
    assert host({"url": "https://User@Example.ORG:8080/a?b"}) == "example.org"
    assert {host(record) for record in ({}, {"url": 3}, {"url": "http://[/"}, {"url": "no url"})} == {"no host"}
    texts = python_documents()[:300]
    shard = tmp_path / "c4-train.00000-of-00001.json"
    records = [{"text": text, "url": f"https://host{number % 3}.org/{number}"} for number, text in enumerate(texts)]
    shard.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    values = {"c4_local_path": tmp_path, "data_sample_size": 250, "val_size": 20, "number_of_initial_trainers": 3}
    data = load_data(make_c4(data_split="sources", **values))
    labels = [share["largest_labels"] for share in data.shares.record["shares"]]
    assert sorted(labels, key=str) == [{"host0.org": 1.0}, {"host1.org": 1.0}, {"host2.org": 1.0}]
    ready = make_c4(c4_tokenized_path=tokenised_c4, data_split="sources", number_of_initial_trainers=1)
    (share,) = load_data(ready).shares.record["shares"]
    assert share["largest_labels"] == {"example.org": 1.0}


def test_classes_are_the_sources_of_imdb(tmp_path):
    write_imdb(tmp_path, 60, 20)
    values = {"dataset": "imdb", "imdb_local_path": str(tmp_path), "model_type": "bert", "vocab_size": 400}
    data = load_data(make(data_split="sources", number_of_initial_trainers=2, validation_per_share=True, **values))
    for share, batch in enumerate(by_share(data)):
        (name,) = data.shares.record["shares"][share]["largest_labels"]
        own = data.shares.validation[share]
        classes = {*batch["labels"].tolist(), *own.batch(range(len(own)), CPU)["labels"].tolist()}
        assert classes == {data.class_names.index(name)}


def test_a_trainer_is_evaluated_on_every_share(make_text):
    config = make_text(
        "abcd",
        data_split="sources",
        data_split_over="workers",
        data_shares=4,
        validation_per_share=True,
        model_config=TINY_ARCHITECTURE,
        number_of_initial_trainers=2,
        number_of_inner_steps_between_outers=3,
        number_of_outer_steps=4,
        max_batch_size=8,
        eval_batch_size=5,
    )
    data = load_data(config)
    cluster, recorder = Cluster(config, data), Recorder()
    final = cluster.train(recorder)
    module = cluster.models[CPU].module.eval()
    (trainer,) = cluster.trainers.values()
    cluster.models[CPU].load(trainer.parameters)
    evaluation = final[trainer.id]
    assert evaluation.loss == evaluate(module, data.validation, data.task, 5, CPU).loss
    assert len(evaluation.shares) == 4
    for own, examples in zip(evaluation.shares, data.shares.validation, strict=True):
        assert own == evaluate(module, examples, data.task, 5, CPU)
    assert [len(result.evaluations[0].shares) for result in recorder.rounds] == [4] * 4
    assert sorted(trainer.cursor.positions) == [0, 1, 2, 3]
    assert sum(trainer.cursor.positions.values()) == cluster.counters.examples


# Divisions that are refused


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"dirichlet_alpha": 0}, "dirichlet_alpha: should be greater than 0"),
        ({"data_split": "source"}, "data_split: must be one of iid, clusters, sources, dirichlet"),
        ({"data_split": "sources", "data_shares": 3}, "data_shares: must be at least the 4 trainers, got 3"),
        ({"validation_per_share": True}, "validation_per_share: needs data that are in shares"),
        ({"weigh_shares": True}, "weigh_shares: needs data that are in shares"),
        (
            {"data_split": "sources", "weigh_shares": True, "number_of_initial_trainers": 1},
            "weigh_shares: needs data_split_over workers, or several trainers",
        ),
        (
            {"data_split_over": "workers", "weigh_shares": True, "distributed_algo": "NoLoCo"},
            "weigh_shares: must be false with NoLoCo",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused(values, problem):
    with pytest.raises(ConfigError) as caught:
        make(**values)
    assert [line[: len(problem)] for line in caught.value.problems] == [problem]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"data_split": "sources", "number_of_initial_trainers": 3},
            r"data_split: .* 2 labels \(.*a\.txt, .*b\.txt\), too few for 3 shares",
        ),
        ({"data_split": "dirichlet", "dirichlet_alpha": 0.001}, "dirichlet_alpha: 0.001 leaves one of 4 shares"),
        ({"data_split": "clusters", "data_shares": 5000}, "data_shares: must be at most the 68 training documents"),
        ({"data_split_over": "workers"}, "data_shares: must be given where data are loaded before there are nodes"),
        (
            {"data_split_over": "workers", "data_shares": 60},
            "data_split: the documents of share .* of 60 do not fill one example",
        ),
    ],
)
def test_documents_that_cannot_be_divided_are_an_error(make_text, values, problem):
    with pytest.raises(ConfigError, match=problem):
        load_data(make_text("ab", sequence_length=128, **values))


def test_a_plugins_dataset_without_documents_cannot_be_divided():
    DATASETS["own"] = Dataset("causal_lm", lambda config: tiny_data())
    with pytest.raises(ConfigError, match="data_split: dataset own has no documents"):
        load_data(make(dataset="own", data_split="dirichlet"))


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
    config = make(data_split="dirichlet", **values)
    assert {nodes: share_count(config, nodes) for nodes in shares} == shares
