"""IMDB: reading and choosing reviews, and a BERT that learns from them."""

import json

import pytest
import torch

from cluster import Cluster
from configs.make_samples import paragraphs_and_docstrings, write_imdb
from fabrics.config_checks import CHECKS
from fabrics.data import token_store
from fabrics.data.dataset_loader import load_data
from fabrics.data.documents import DatasetError, Skipped
from fabrics.data.imdb import choose, encode_reviews, hub_reviews, local_reviews
from fabrics.data.tokenization import train_tokenizer
from tests.support.helpers import CPU, Recorder
from trainers import Trainer
from utils.config.reading import parse_config
from utils.config.schema import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The layout of aclImdb, of real text."""
    folder = tmp_path_factory.mktemp("aclImdb")
    write_imdb(folder, 60, 20)
    return folder


@pytest.fixture
def make(tmp_path):
    def make(**values):
        defaults = {
            "dataset": "imdb",
            "model_type": "bert",
            "number_of_outer_steps": 2,
            "data_sample_size": 100,
            "samples_per_class": 15,
            "sequence_length": 32,
            "vocab_size": 500,
            "max_batch_size": 16,
            "cache_dir": str(tmp_path / "cache"),
        }
        return parse_config(defaults | values, (), CHECKS)[0]

    return make


ROWS = [(f'A "film",\nnumber {number} é', number % 2) for number in range(60)]


# Reading


def test_the_folders_of_acl_imdb_are_read(folder):
    skipped = Skipped()
    (folder / "test" / "pos" / "empty_9.txt").write_text(" \n")
    reviews = local_reviews(str(folder), skipped)
    (folder / "test" / "pos" / "empty_9.txt").unlink()
    positive, negative = paragraphs_and_docstrings()
    assert set(reviews["test"]) == {(text, 1) for text in positive[:20]} | {(text, 0) for text in negative[:20]}
    assert set(reviews["train"]) == {(text, 1) for text in positive[20:80]} | {(text, 0) for text in negative[20:80]}
    assert skipped.counts == {"empty": 1}


def test_another_layout_is_an_error(tmp_path, folder):
    for path in (tmp_path / "none", folder.with_name("acl*")):
        with pytest.raises(DatasetError, match=r"train/neg: no such file"):
            local_reviews(str(path), Skipped())
    (tmp_path / "train" / "neg").mkdir(parents=True)
    with pytest.raises(DatasetError, match=r"train/neg: no \*\.txt in it"):
        local_reviews(str(tmp_path), Skipped())
    (tmp_path / "train" / "neg" / "0_1.txt").write_bytes(b"\xff")
    with pytest.raises(DatasetError, match=r"0_1\.txt:1: not UTF-8 text"):
        local_reviews(str(tmp_path), Skipped())


def test_the_hub_gives_texts_and_labels(make, tmp_path):
    """`datasets` reads a folder as it reads a repository of the hub with the same files."""
    for name, rows in (("train", ROWS[:40]), ("test", ROWS[40:])):
        lines = (json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    reviews = hub_reviews(Skipped(), str(tmp_path))
    assert reviews == {"train": ROWS[:40], "test": ROWS[40:]}
    with pytest.raises(ConfigError, match="dataset: imdb cannot be loaded: stanfordnlp/imdb: ConnectionError"):
        load_data(make())


# Choosing


def test_evaluation_is_balanced_and_shares_no_text_with_training():
    test = [(f"test {number}", int(number < 30)) for number in range(100)]
    train = [(f"train {number}", number % 2) for number in range(100)] + test[:50]
    reviews = {"train": train, "test": test}
    skipped = Skipped()
    chosen, evaluation = choose(reviews, 1, None, 20, skipped)
    assert [label for _, label in evaluation] == [0, 1] * 20
    assert len(set(evaluation)) == 40
    assert set(evaluation) <= set(test)
    assert not set(chosen) & set(evaluation)
    repeats = len(set(test[:50]) & set(evaluation))
    assert len(chosen) == 150 - repeats
    assert skipped.counts == {"the same text as an evaluation review": repeats}
    # Shuffled, and by the seed.
    assert chosen != sorted(chosen, key=train.index)
    assert choose(reviews, 1, 30, 20, Skipped()) == (chosen[:30], evaluation)
    assert choose(reviews, 2, None, 20, Skipped())[1] != evaluation
    assert len(choose(reviews, 1, None, None, Skipped())[1]) == 60


@pytest.mark.parametrize(
    ("train", "test", "train_size", "per_class", "message"),
    [
        (ROWS, [*ROWS[:8], ("x", 0)], None, 5, "samples_per_class: class pos has 4 reviews .*, got 5"),
        (ROWS, [("x", 1)], None, None, "samples_per_class: class neg has 0 reviews"),
        (ROWS[:50], ROWS[50:], 51, 5, "data_sample_size: 50 reviews are left .* beside 10 .*got 51"),
    ],
)
def test_too_few_reviews_say_how_many_there_are(train, test, train_size, per_class, message):
    with pytest.raises(ConfigError, match=message):
        choose({"train": train, "test": test}, 1, train_size, per_class, Skipped())


def test_special_tokens_that_a_review_spells_out_are_text(make):
    tokenizer = train_tokenizer(["a good [SEP] film"], 60, "classification")
    part = encode_reviews(make(), [("good [SEP] film", 1)], tokenizer, "training")
    assert part.tokens.tolist().count(tokenizer.sep_token_id) == 1


def test_a_tokenizer_that_cuts_on_the_other_side_finds_no_tokens_in_the_cache(make):
    tokenizer = train_tokenizer(["a good film"], 60, "classification")
    config = make(sequence_length=4)
    right = encode_reviews(config, [("a good film", 1)], tokenizer, "training").tokens.tolist()
    tokenizer.truncation_side = "left"
    left = encode_reviews(config, [("a good film", 1)], tokenizer, "training").tokens.tolist()
    assert len(left) == len(right) == 4
    assert left != right


# Training


def test_reviews_become_padded_sequences_with_their_classes(make, folder):
    data = load_data(make(imdb_local_path=str(folder)))
    assert (data.task, data.class_names) == ("classification", ("neg", "pos"))
    assert dict(data.documents) == {"train": 100, "validation": 30}
    _, evaluation = choose(local_reviews(str(folder), Skipped()), 42, 100, 15, Skipped())
    batch = data.validation.batch(range(30), CPU)
    assert batch["labels"].tolist() == [label for _, label in evaluation]
    for row, (text, _) in enumerate(evaluation):
        tokens = data.tokenizer(text, truncation=True, max_length=32)["input_ids"]
        assert batch["input_ids"][row, : len(tokens)].tolist() == tokens
        assert batch["attention_mask"][row].sum() == len(tokens)
    assert batch["input_ids"].shape[1] == 32


def test_reviews_are_tokenised_once(make, folder, monkeypatch):
    written = []
    write = token_store._write_arrays
    monkeypatch.setattr(token_store, "_write_arrays", lambda path, arrays: written.append(path) or write(path, arrays))
    first, second = (load_data(make(imdb_local_path=str(folder))).fingerprint() for _ in range(2))
    assert first == second
    assert len(set(written)) == len(written) == 2
    load_data(make(imdb_local_path=str(folder), sequence_length=16))
    assert len(set(written)) == 4


def test_the_digest_of_the_data_depends_on_the_classes(make, folder, monkeypatch):
    digest = load_data(make(imdb_local_path=str(folder))).content
    chosen = choose

    def relabelled(*arguments):
        train, evaluation = chosen(*arguments)
        return [(text, 1 - label) for text, label in train], evaluation

    monkeypatch.setattr("fabrics.data.imdb.choose", relabelled)
    assert load_data(make(imdb_local_path=str(folder))).content != digest


def parameters_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the trainer's parameters by name."""
    working = trainer.worker_group.model
    working.load(trainer.parameters)
    return {name: tensor.detach().clone() for name, tensor in working.module.named_parameters()}


@pytest.mark.parametrize("single_seed", [True, False])
def test_a_pretrained_berts_head_is_drawn_anew_identically_or_per_trainer(make, folder, tmp_path, single_seed):
    first = make(imdb_local_path=str(folder))
    cluster = Cluster(first, load_data(first))
    paths = cluster.save_models(tmp_path, Recorder())
    config = make(
        imdb_local_path=str(folder),
        model_config={"name": str(paths[0]), "pretrained": True},
        need_to_reinit_output_layers=True,
        single_seed=single_seed,
        number_of_initial_trainers=2,
    )
    again = Cluster(config, load_data(config))
    old, own, other = (parameters_of(trainer) for trainer in (cluster.trainers[0], *again.trainers.values()))
    for name, tensor in own.items():
        if name == "classifier.weight":
            assert not tensor.equal(old[name])
            assert tensor.equal(other[name]) == single_seed
        elif name != "classifier.bias":
            assert tensor.equal(old[name])
            assert tensor.equal(other[name])
    assert again.model.module.config.id2label == {0: "neg", 1: "pos"}


def test_a_model_with_another_number_of_classes_is_refused(make, folder):
    config = make(imdb_local_path=str(folder), model_config={"preset": "demo", "num_labels": 3})
    with pytest.raises(ConfigError, match=r"model_config\.num_labels: the data has 2 classes, got 3"):
        Cluster(config, load_data(config))
