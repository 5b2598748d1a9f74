"""C4: where it comes from, and what happens where it does not."""

import json
import shutil

import pytest
import torch

from c4 import tokenize_c4
from cluster import Cluster
from configs import make_samples
from fabrics.data import c4
from fabrics.data.dataset_loader import load_data
from fabrics.data.documents import DatasetError, Skipped, document_hash, python_documents
from fabrics.data.examples import PackedSequences, PaddedSequences
from fabrics.data.token_store import write_tokenised
from fabrics.data.tokenization import train_tokenizer
from tests.integration.test_c4_dataset import in_both
from tests.support.helpers import TINY_ARCHITECTURE, Recorder
from utils.config.schema import ConfigError

CPU = torch.device("cpu")


def text_of(data) -> str:
    """The training text as it is read back from packed sequences."""
    rows = data.train.batch(range(len(data.train)), CPU)["input_ids"]
    return data.tokenizer.decode(rows.flatten().tolist())


def test_the_configured_source_is_read_and_no_other(make_c4, c4_shards, tokenised_c4):
    assert load_data(make_c4(c4_tokenized_path=tokenised_c4)).source.startswith(f"{tokenised_c4} (tokenised from ")
    assert load_data(make_c4(c4_local_path=c4_shards)).source == f"{c4_shards}/en (2 training and 1 validation shards)"
    for values, reason in (
        ({"c4_tokenized_path": "/none"}, "/none: no tokenised set"),
        ({"c4_local_path": "/nothing"}, "/nothing: no such file; dataset=python_docs works"),
        ({}, r"allenai/c4 \(en\): ConnectionError"),
    ):
        with pytest.raises(ConfigError, match=f"dataset: c4 cannot be loaded: {reason}"):
            load_data(make_c4(**values))
    with pytest.raises(ConfigError, match="c4_local_path: must be null with c4_tokenized_path"):
        make_c4(c4_tokenized_path=tokenised_c4, c4_local_path=c4_shards)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_hub_gives_the_documents_of_its_shards(make_c4, c4_shards, monkeypatch, streaming):
    """The library reads a folder as it reads a repository of the hub with the same files."""
    monkeypatch.setattr(c4, "REPOSITORY", str(c4_shards))
    data = load_data(make_c4(c4_streaming=streaming, vocab_size=501 + streaming))
    assert data.source == f"{c4_shards} (en) on the hub, {'streamed' if streaming else 'downloaded'}"
    source = c4.local_source(str(c4_shards), "en")
    expected = list(source.train(Skipped()))[:400]
    assert "".join(f"{document}<|endoftext|>" for document in expected).startswith(text_of(data))
    assert data.documents == {"train": 400, "validation": 40}
    assert list(c4.hub_source("en", streaming, str(c4_shards)).validation(Skipped())) == list(
        source.validation(Skipped())
    )


def test_the_hub_is_not_read_as_a_whole(make_c4):
    with pytest.raises(ConfigError, match="data_sample_size: C4 on the hub is too large"):
        load_data(make_c4(data_sample_size=None))


def test_an_unknown_language_is_an_error_that_names_those_there_are(c4_shards):
    for streaming in (True, False):
        with pytest.raises(DatasetError, match=r"ValueError: .*'tlh' not found.*'en'"):
            next(c4.hub_source("tlh", streaming, str(c4_shards)).train(Skipped()))


def test_raw_and_tokenised_shards_give_the_same_examples(make_c4, c4_shards, tokenised_c4, tokenizer_folder):
    raw = load_data(make_c4(c4_local_path=c4_shards, tokenizer=tokenizer_folder))
    ready = load_data(make_c4(c4_tokenized_path=tokenised_c4))
    for own, other in ((raw.train, ready.train), (raw.validation, ready.validation)):
        assert len(own) == len(other) > 10
        indices = range(len(own))
        assert torch.equal(own.batch(indices, CPU)["input_ids"], other.batch(indices, CPU)["input_ids"])
    assert isinstance(ready.train, PackedSequences)


def test_without_packing_a_document_is_a_padded_sequence(make_c4, c4_shards):
    data = load_data(make_c4(c4_local_path=c4_shards, packing=False))
    assert isinstance(data.train, PaddedSequences)
    assert (len(data.train), len(data.validation)) == (400, 40)
    texts = list(c4.local_source(str(c4_shards), "en").train(Skipped()))[:400]
    for index in (0, 7, 399):
        tokens = [*data.tokenizer(texts[index])["input_ids"], data.tokenizer.eos_token_id][:32]
        batch = data.train.batch([index, data.train.largest], CPU)
        assert batch["input_ids"][0, : len(tokens)].tolist() == tokens
        assert batch["attention_mask"].sum(1).tolist() == [len(tokens), 32]


def test_shards_without_a_validation_part_hold_documents_out(make_c4, c4_shards, tmp_path):
    train = tmp_path / "train"
    train.mkdir()
    for path in sorted((c4_shards / "en").glob("c4-train*")):
        shutil.copy(path, train)
    documents = c4.open_c4(make_c4(c4_local_path=train))[1]
    assert (len(documents.train), len(documents.validation)) == (400, 40)
    assert in_both(documents) == 0
    every = {document_hash(text) for text in python_documents()[:600]}
    assert set(documents.validation.hashes.tolist()) < every


def test_a_glob_and_a_single_shard(make_c4, c4_shards):
    (shard,) = c4.matching_files([str(c4_shards / "en" / "c4-train.00000*")])
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


def test_too_few_documents_say_how_many_there_are(make_c4, c4_shards, tokenised_c4):
    with pytest.raises(ConfigError, match="data_sample_size: 600 documents are left for training beside 40"):
        load_data(make_c4(c4_local_path=c4_shards, data_sample_size=601))
    with pytest.raises(ConfigError, match=r"data_sample_size: .*set.* has 500 training documents, got 501"):
        load_data(make_c4(c4_tokenized_path=tokenised_c4, data_sample_size=501))
    with pytest.raises(ConfigError, match=r"val_size: .*set.* has 50 validation documents, got 51"):
        load_data(make_c4(c4_tokenized_path=tokenised_c4, val_size=51))


def test_a_set_without_validation_documents_says_what_to_do(make_c4, c4_shards, tokenizer_folder, tmp_path, capsys):
    arguments = [
        "--model_name",
        str(tokenizer_folder),
        "--input",
        str(c4_shards),
        "--output_dir",
        str(tmp_path / "set"),
    ]
    assert tokenize_c4.main([*arguments, "--data_sample_size", "100"]) == 0
    assert "no validation documents: --create_eval_split" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has no validation documents; tokenise with --create_eval_split"):
        load_data(make_c4(c4_tokenized_path=tmp_path / "set", data_sample_size=50))


def test_skipped_records_are_counted_in_log_and_data(make_c4, c4_shards, tmp_path, caplog):
    make_samples.write_shard(tmp_path / "c4-train.00000-of-00002.json.gz", [*python_documents()[:300], "", " "])
    (tmp_path / "c4-train.00001-of-00002.json").write_text('{"text": "cut\n')
    with caplog.at_level("INFO", "adloco.dataset"):
        data = load_data(make_c4(c4_local_path=tmp_path, data_sample_size=None, val_size=15))
    assert data.documents == {"train": 285, "validation": 15}
    assert data.skipped == {"empty": 2, "not a JSON object with a text": 1}
    assert "skipped 2 documents: empty (first: " in caplog.text


def test_a_local_shard_that_is_damaged_half_way_is_an_error(make_c4, c4_shards, tmp_path):
    first, second = sorted((c4_shards / "en").glob("c4-train*"))
    shutil.copy(first, tmp_path)
    (tmp_path / second.name).write_bytes(second.read_bytes()[:5000])
    for size in (400, None):
        with pytest.raises(ConfigError, match=r"dataset: c4 cannot .*00001.*: damaged or cut off after line"):
            load_data(make_c4(c4_local_path=tmp_path, data_sample_size=size))


def test_memory_does_not_hold_more_than_a_few_blocks(monkeypatch, tmp_path, tokenizer_folder, c4_shards):
    """Documents are read from the source only as they are tokenised."""
    options = ["--model_name", str(tokenizer_folder), "--input", str(c4_shards), "--data_sample_size", "580"]
    taken = []
    original = c4.json_documents

    def counted(paths):
        def read(skipped):
            for text in original(paths)(skipped):
                taken.append(written())
                yield text

        return read

    def written() -> int:
        state = tmp_path / "set.partial" / "state.json"
        return json.loads(state.read_text())["parts"].get("train", {}).get("documents", 0) if state.exists() else 0

    monkeypatch.setattr(c4, "json_documents", counted)
    monkeypatch.setattr("fabrics.data.token_store.BLOCK_DOCUMENTS", 20)
    recipe = tokenize_c4.make_recipe(tokenize_c4.parse_arguments(options))
    write_tokenised(tmp_path / "set", recipe)
    assert len(taken) == 580
    assert max(number - done for number, done in enumerate(taken)) < 20


@pytest.mark.parametrize("packing", [True, False])
def test_documents_of_one_token_and_of_tens_of_thousands_train(make_c4, tmp_path, packing):
    texts = [*python_documents()[:120], "real text, many times over. " * 6_000, *["a", "b", "é", "東"] * 10]
    make_samples.write_shard(tmp_path / "c4-train.00000-of-00001.json.gz", texts)
    values = {"number_of_initial_trainers": 1, "number_of_inner_steps_between_outers": 3, "max_batch_size": 8}
    values |= {"batch_test_start": 1, "model_config": TINY_ARCHITECTURE}
    config = make_c4(c4_local_path=tmp_path, data_sample_size=None, val_size=8, packing=packing, **values)
    data, recorder = load_data(config), Recorder()
    cluster = Cluster(config, data)
    for evaluation in cluster.train(recorder).values():
        assert 1 < evaluation.metric < 600
    (report,) = recorder.rounds[0].reports.values()
    assert report.statistics.variance > 0
    if packing:
        assert len(data.train) > 700
    else:
        assert data.train.tokens(range(len(data.train))) <= 32 * len(data.train)
        assert min(data.train.tokens([index]) for index in range(len(data.train))) == 2
