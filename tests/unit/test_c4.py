"""C4: where it comes from, and what happens where it does not."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import run as program
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
from tests.support.helpers import TINY_ARCHITECTURE, Recorder, warnings_of
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def text_of(data) -> str:
    """The training text as it is read back from packed sequences."""
    rows = data.train.batch(range(len(data.train)), CPU)["input_ids"]
    return data.tokenizer.decode(rows.flatten().tolist())


def test_sources_are_tried_in_order_and_named(make_c4, c4_shards, tokenised_c4, tmp_path, caplog):
    caplog.set_level("INFO", "adloco.dataset")
    both = {"c4_tokenized_path": tokenised_c4, "c4_local_path": c4_shards}
    assert load_data(make_c4(**both)).source.startswith(f"{tokenised_c4} (tokenised from {c4_shards}")
    assert f"C4 comes from c4_tokenized_path: {tokenised_c4}" in caplog.text
    missing = load_data(make_c4(**both | {"c4_tokenized_path": tmp_path / "none"}))
    assert missing.source == f"{c4_shards}/en (2 training and 1 validation shards)"
    assert f"C4 cannot be read from c4_tokenized_path: {tmp_path}/none: no tokenised set" in caplog.text
    assert f"C4 comes from c4_local_path: {c4_shards}/en" in caplog.text
    with pytest.raises(ConfigError) as caught:
        load_data(make_c4(c4_tokenized_path="/none", c4_local_path="/nothing", dataset_fallback="none"))
    message = str(caught.value)
    assert message.startswith("dataset: c4 cannot be loaded: c4_tokenized_path: /none: no tokenised set")
    assert "; c4_local_path: /nothing: no such file; hub: allenai/c4 (en): ConnectionError" in message


@pytest.mark.parametrize("streaming", [True, False])
def test_the_hub_gives_the_documents_of_its_shards(make_c4, c4_shards, monkeypatch, streaming):
    """The library reads a folder as it reads a repository of the hub with the same files."""
    monkeypatch.setattr(c4, "REPOSITORY", str(c4_shards))
    data = load_data(make_c4(c4_streaming=streaming, vocab_size=501 + streaming))
    assert data.source == f"{c4_shards} (en) on the hub, {'streamed' if streaming else 'downloaded'}"
    assert data.fallback_reason is None
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
        load_data(make_c4(c4_local_path=c4_shards / "en" / "c4-validation*", dataset_fallback="none"))


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
    assert load_data(make_c4(c4_tokenized_path=tokenised_c4, tokenizer=tmp_path / "moved")).fallback_reason is None


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


@pytest.mark.parametrize("fallback", ["python_docs", "none"])
def test_a_failed_load_says_so_and_never_passes_silently(tmp_path, cache_dir, c4_shards, capsys, fallback):
    (shard,) = c4.matching_files([str(c4_shards / "en" / "c4-train.00000*")])
    broken = tmp_path / "c4-train.00000-of-00001.json.gz"
    broken.write_bytes(shard.read_bytes()[:5000])
    arguments = [
        *("dataset=c4", f"c4_local_path={broken}", f"dataset_fallback={fallback}", f"log_dir={tmp_path / 'logs'}"),
        *("data_sample_size=300", "val_size=20", "sequence_length=32", "vocab_size=400", f"cache_dir={cache_dir}"),
        *(
            "clearml=off",
            "plot_at_end=false",
            "number_of_outer_steps=1",
            "number_of_inner_steps_between_outers=1",
            "number_of_initial_trainers=1",
            "processes=1",
        ),
    ]
    code = program.main(["--config", str(ROOT / "config.yaml"), *arguments])
    captured = capsys.readouterr()
    reason = f"c4_local_path: {broken}: damaged or cut off after line"
    if fallback == "none":
        assert code == 2
        assert f"error: dataset: c4 cannot be loaded: {reason}" in captured.err
        assert not (tmp_path / "logs").exists()
        return
    assert code == 0
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name.startswith("microllama_python_docs_")
    summary = json.loads((folder / "model_training_report" / "summary.json").read_text())
    assert (summary["dataset"], summary["dataset_asked_for"]) == ("python_docs", "c4")
    assert summary["dataset_fallback_reason"].startswith(reason)
    warning = f"DATASET FALLBACK: trained on python_docs because c4 could not be loaded: {reason}"
    assert any(line.startswith(warning) for line in warnings_of(folder))
    for text in (captured.out + captured.err, (folder / "training_log.log").read_text()):
        assert f"warning: {warning}" in text
        assert "hub: allenai/c4 (en): ConnectionError" in text


def test_a_fallback_that_fails_as_well_reports_both(make_c4):
    with pytest.raises(ConfigError) as caught:
        load_data(make_c4(data_sample_size=10**6))
    first, second = caught.value.problems
    assert first.startswith("dataset: c4 cannot be loaded: hub: ")
    assert second.startswith("dataset_fallback: nor can python_docs: data_sample_size: ")


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
