"""C4: where it comes from, and what happens where it cannot be read."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from configs import make_samples
from fabrics.data import c4, token_store
from fabrics.data.dataset_loader import load_data
from fabrics.data.documents import DatasetError, Skipped
from fabrics.data.python_docs import python_documents
from fabrics.data.tokenization import train_tokenizer
from fabrics.models.initialisation import meta_model
from tests.support.helpers import CPU, text_of
from tests.support.threads import together
from utils.config.schema import ConfigError


def test_the_configured_source_is_read_and_no_other(make_c4, c4_shards, tokenised_c4):
    assert load_data(make_c4(c4_tokenized_path=tokenised_c4)).source.startswith(f"{c4_shards}")
    assert load_data(make_c4(c4_local_path=c4_shards)).source == f"{c4_shards}/en (2 training and 1 validation shards)"
    for values, reason in (
        ({"c4_tokenized_path": "/none"}, "/none: no complete tokenised set: .*; c4/tokenize_c4.py writes one"),
        ({"c4_local_path": "/nothing"}, "/nothing: no such file; dataset=python_docs works"),
        ({}, r"allenai/c4 \(en\): ConnectionError"),
    ):
        with pytest.raises(ConfigError, match=f"dataset: c4 cannot be loaded: {reason}"):
            load_data(make_c4(**values))
    with pytest.raises(ConfigError, match="c4_local_path: must be null with c4_tokenized_path"):
        make_c4(c4_tokenized_path=tokenised_c4, c4_local_path=c4_shards)


def test_one_process_of_each_machine_verifies_a_set(make_c4, tokenised_c4, monkeypatch):
    verified = []
    verify = token_store._verify
    monkeypatch.setattr(token_store, "_verify", lambda folder: verified.append(folder) or verify(folder))
    config = make_c4(c4_tokenized_path=tokenised_c4)
    together(4, lambda process: load_data(config, process), machines=(0, 0, 1, 1))
    assert verified == [Path(tokenised_c4)] * 2


def test_the_hub_gives_the_documents_of_its_shards(make_c4, c4_shards, monkeypatch):
    """`datasets` reads a folder as it reads a repository of the hub with the same files."""
    monkeypatch.setattr(c4, "REPOSITORY", str(c4_shards))
    data = load_data(make_c4(vocab_size=501))
    assert data.source == f"{c4_shards} (en) on the hub"
    source = c4.local_source(str(c4_shards), "en")
    expected = [document.text for document in source.train(Skipped())][:400]
    assert "".join(f"{text}<|endoftext|>" for text in expected).startswith(text_of(data))
    assert data.documents == {"train": 400, "validation": 40}
    hub = c4.hub_source("en")
    assert list(hub.validation(Skipped())) == list(source.validation(Skipped()))
    with pytest.raises(ConfigError, match="data_sample_size: C4 on the hub is too large"):
        load_data(make_c4(data_sample_size=None))
    with pytest.raises(DatasetError, match=r"ValueError: .*'tlh' not found.*'en'"):
        next(c4.hub_source("tlh").train(Skipped()))


def test_raw_and_tokenised_shards_give_the_same_examples(make_c4, c4_shards, tokenised_c4, tokenizer_folder):
    raw = load_data(make_c4(c4_local_path=c4_shards, tokenizer=tokenizer_folder))
    config = make_c4(c4_tokenized_path=tokenised_c4, vocab_size=5000)
    ready = load_data(config)
    module, guesses = meta_model(config)  # a plan knows the vocabulary of the set
    assert module.config.vocab_size == len(ready.tokenizer)
    assert not guesses
    for own, other in ((raw.train, ready.train), (raw.validation, ready.validation)):
        assert len(own) == len(other) > 10
        indices = range(len(own))
        assert torch.equal(own.batch(indices, CPU)["input_ids"], other.batch(indices, CPU)["input_ids"])


def test_shards_without_a_validation_part_hold_documents_out(make_c4, c4_shards, tmp_path):
    for path in sorted((c4_shards / "en").glob("c4-train*")):
        shutil.copy(path, tmp_path)
    documents = c4.c4_documents(make_c4(c4_local_path=tmp_path))
    assert (len(documents.train), len(documents.validation)) == (400, 40)
    train, validation = (
        {part.tokens[begin:end].tobytes() for begin, end in itertools.pairwise(part.offsets)}
        for part in (documents.train, documents.validation)
    )
    assert not train & validation


def test_shards_are_named_by_a_glob_or_one_by_one(make_c4, c4_shards):
    (shard,) = (c4_shards / "en").glob("c4-train.00000*")
    for pattern in (shard, c4_shards / "en" / "c4-train.0000[0]-*.json.gz"):
        data = load_data(make_c4(c4_local_path=pattern, data_sample_size=250, val_size=20))
        assert data.documents == {"train": 250, "validation": 20}
    with pytest.raises(ConfigError, match="only validation shards, none to train on"):
        load_data(make_c4(c4_local_path=c4_shards / "en" / "c4-validation*"))


def test_another_tokenizer_than_the_models_is_an_error_that_names_both(
    make_c4, tokenised_c4, tokenizer_folder, tmp_path
):
    train_tokenizer(["another language altogether"], 300).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError) as caught:
        load_data(make_c4(c4_tokenized_path=tokenised_c4, tokenizer=tmp_path / "other"))
    message = str(caught.value)
    assert message.startswith(f"c4_tokenized_path: {tokenised_c4} was tokenised with {tokenizer_folder} (600 tokens")
    assert f"the model's tokenizer is {tmp_path}/other (" in message
    # The same tokenizer at another place is the same.
    shutil.copytree(tokenizer_folder, tmp_path / "moved")
    assert load_data(make_c4(c4_tokenized_path=tokenised_c4, tokenizer=tmp_path / "moved")).dataset == "c4"


def test_too_few_documents_of_a_tokenised_set_say_how_many_there_are(make_c4, tokenised_c4):
    with pytest.raises(ConfigError, match=r"data_sample_size: .*set.* has 500 training documents, got 501"):
        load_data(make_c4(c4_tokenized_path=tokenised_c4, data_sample_size=501))
    with pytest.raises(ConfigError, match=r"val_size: .*set.* has 50 validation documents, got 51"):
        load_data(make_c4(c4_tokenized_path=tokenised_c4, val_size=51))


def test_skipped_records_are_counted_in_log_and_data(make_c4, tmp_path, caplog):
    make_samples.write_shard(tmp_path / "c4-train.00000-of-00002.json.gz", [*python_documents()[:300], "", " "])
    (tmp_path / "c4-train.00001-of-00002.json").write_text('{"text": "cut\n')
    with caplog.at_level("INFO", "adloco.dataset"):
        data = load_data(make_c4(c4_local_path=tmp_path, data_sample_size=None, val_size=15))
    assert data.documents == {"train": 285, "validation": 15}
    assert data.skipped == {"empty": 2, "not a JSON object with a text": 1}
    assert "skipped 2 documents: empty (first: " in caplog.text
