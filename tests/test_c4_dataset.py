"""C4, from raw shards to perplexity: tests, and a check of anybody's own configuration.

    python tests/test_c4_dataset.py [--config PATH] [key=value ...]

loads the C4 source that the configuration names, decodes its tokens back to text, looks for documents that are in both
parts, and computes perplexity with the configured model and with one whose perplexity is known. Without --config it
checks configs/c4_microllama_small.yaml, which needs no network.
"""

import argparse
import json
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import run as program
from c4 import tokenize_c4
from cluster import CHECKS, CHOICES
from configs import make_samples
from fabrics import c4
from fabrics.dataset_loader import load_data
from fabrics.documents import DatasetError, Skipped, document_hash, python_documents
from fabrics.eval_tool import evaluate
from fabrics.examples import Examples, PackedSequences, PaddedSequences
from fabrics.language_modelling import task_data
from fabrics.models import build_model
from fabrics.tokenised import TokenisedPart, TokenisedSet, write_tokenised
from fabrics.tokenization import train_tokenizer
from utils.config import Config, ConfigError, load_config

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")

# The check


class UniformModel(torch.nn.Module):
    """Every token is as likely as every other: its perplexity is the size of the vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocabulary, dtype=torch.float64))


class Beginning:
    """The first few of some examples."""

    def __init__(self, examples: Examples, count: int):
        self._examples, self._count = examples, min(count, len(examples))

    def __len__(self) -> int:
        return self._count

    def batch(self, indices, device):
        return self._examples.batch(indices, device)


def part_documents(part: TokenisedPart, count: int | None = None):
    """The tokens of the first documents, end-of-text excluded."""
    for index in range(len(part) if count is None else min(count, len(part))):
        yield part.tokens[part.offsets[index] : part.offsets[index + 1] - 1]


def decoded_exactly(documents: TokenisedSet, part: TokenisedPart, count: int) -> tuple[int, int, int]:
    """Of the first `count` documents: how many there are, how many decode to the very text that was tokenised (by its
    stored hash), and how many decode to a text of the same tokens."""
    exact = stable = total = 0
    for index, tokens in enumerate(part_documents(part, count)):
        text = documents.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        exact += document_hash(text) == part.hashes[index]
        stable += documents.tokenizer(text, add_special_tokens=False)["input_ids"] == tokens.tolist()
        total += 1
    return total, exact, stable


def in_both(documents: TokenisedSet) -> int:
    """How many training documents have the tokens of a validation document; hashes of texts are not trusted here."""
    held_out = {tokens.tobytes() for tokens in part_documents(documents.validation)}
    progress = tqdm(part_documents(documents.train), "comparing parts", len(documents.train), disable=None)
    return sum(tokens.tobytes() in held_out for tokens in progress)


def check(config: Config) -> list[str]:
    """Print what is found; the problems."""
    problems = []
    name, documents = c4.open_c4(config)
    data = task_data(config, "c4", name, documents)
    vocabulary = len(data.tokenizer)
    print(f"source: {name}")
    print(
        f"documents: {data.documents['train']:,} to train on in {len(data.train):,} sequences of up to "
        f"{config.sequence_length} tokens, {data.documents['validation']:,} to validate on in {len(data.validation):,}"
    )
    for part_name, part in (("train", documents.train), ("validation", documents.validation)):
        total, exact, stable = decoded_exactly(documents, part, 200)
        print(f"decoding {part_name}: {exact} of {total} documents give back their exact text, {stable} their tokens")
        if max(exact, stable) < total:
            problems.append(f"{part_name}: {total - max(exact, stable)} documents cannot be decoded")
    first = next(part_documents(documents.train)).tolist()
    print(f"the first training document begins: {documents.tokenizer.decode(first)[:80]!r}")
    both = in_both(documents)
    print(f"documents in both parts: {both}")
    if both:
        problems.append(f"{both} training documents are validation documents as well")
    uniform = evaluate(UniformModel(vocabulary), Beginning(data.validation, 8), "causal_lm", 1, CPU).metric
    print(f"perplexity of uniform logits: {uniform:.6f}, vocabulary: {vocabulary}")
    if abs(uniform - vocabulary) > 1e-9 * vocabulary:
        problems.append(f"uniform logits have perplexity {uniform}, not {vocabulary}")
    model = build_model(
        config.model_type, config.model_config, data.tokenizer, config.sequence_length, config.training_seed
    )
    validation = Beginning(data.validation, 64)
    result = evaluate(model.eval(), validation, "causal_lm", config.eval_batch_size, CPU)
    state = "pretrained" if config.model_config.get("pretrained") is True else "untrained"
    print(f"perplexity of the {state} model on {len(validation)} validation sequences: {result.metric:.2f}")
    if not 1.0 < result.metric < 100 * vocabulary:
        problems.append(f"the model's perplexity is {result.metric}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """0: all is well; 1: a check failed; 2: the source or the model cannot be loaded."""
    small = ROOT / "configs" / "c4_microllama_small.yaml"
    parser = argparse.ArgumentParser(description="Check that a configuration's C4 is loaded as it should be.")
    parser.add_argument("--config", type=Path, default=small, help="default: configs/c4_microllama_small.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        config, _ = load_config(options.config, options.overrides, CHOICES, CHECKS)
        if config.dataset != "c4":
            raise ConfigError(f"dataset: this checks c4, {options.config} has {config.dataset}")
        if options.config == small and config.c4_local_path and not Path(config.c4_local_path).exists():
            make_samples.main(Path(config.c4_local_path).parent)
        problems = check(config)
    except (ConfigError, DatasetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("all is well")
    return 1 if problems else 0


# Tests


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A repository of C4, as the hub has it, of real text."""
    folder = tmp_path_factory.mktemp("c4")
    make_samples.write_c4(folder, 600, 60)
    return folder


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(python_documents()[:500], 600).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory, shards, tokenizer_folder):
    folder = tmp_path_factory.mktemp("tokenised") / "set"
    arguments = ["--model_name", str(tokenizer_folder), "--input", str(shards), "--output_dir", str(folder)]
    assert tokenize_c4.main([*arguments, "--data_sample_size", "500", "--create_eval_split", "--eval_size", "50"]) == 0
    return folder


@pytest.fixture
def make(cache_dir, tmp_path):
    """A function from values to a checked configuration with dataset c4."""

    def configured(**values):
        defaults = {
            "dataset": "c4",
            "number_of_outer_steps": 1,
            "data_sample_size": 400,
            "val_size": 40,
            "sequence_length": 32,
            "vocab_size": 500,
            "cache_dir": str(cache_dir),
        }
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(defaults | {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}))
        return load_config(path, (), CHOICES, CHECKS)[0]

    return configured


def text_of(data) -> str:
    """The training text as it is read back from packed sequences."""
    rows = data.train.batch(range(len(data.train)), CPU)["input_ids"]
    return data.tokenizer.decode(rows.flatten().tolist())


def test_sources_are_tried_in_order_and_named(make, shards, tokenised, tmp_path, caplog):
    caplog.set_level("INFO", "adloco.dataset")
    both = {"c4_tokenized_path": tokenised, "c4_local_path": shards}
    assert load_data(make(**both)).source.startswith(f"{tokenised} (tokenised from {shards}")
    assert f"C4 comes from c4_tokenized_path: {tokenised}" in caplog.text
    missing = load_data(make(**both | {"c4_tokenized_path": tmp_path / "none"}))
    assert missing.source == f"{shards}/en (2 training and 1 validation shards)"
    assert f"C4 cannot be read from c4_tokenized_path: {tmp_path}/none: no tokenised set" in caplog.text
    assert f"C4 comes from c4_local_path: {shards}/en" in caplog.text
    with pytest.raises(ConfigError) as caught:
        load_data(make(c4_tokenized_path="/none", c4_local_path="/nothing", dataset_fallback="none"))
    message = str(caught.value)
    assert message.startswith("dataset: c4 cannot be loaded: c4_tokenized_path: /none: no tokenised set")
    assert "; c4_local_path: /nothing: no such file; hub: allenai/c4 (en): ConnectionError" in message


@pytest.mark.parametrize("streaming", [True, False])
def test_the_hub_gives_the_documents_of_its_shards(make, shards, monkeypatch, streaming, cache_dir):
    """The library reads a folder as it reads a repository of the hub with the same files."""
    monkeypatch.setattr(c4, "REPOSITORY", str(shards))
    data = load_data(make(c4_streaming=streaming, vocab_size=501 + streaming))
    assert data.source == f"{shards} (en) on the hub, {'streamed' if streaming else 'downloaded'}"
    assert data.fallback_reason is None
    source = c4.local_source(str(shards), "en")
    expected = list(source.train(Skipped()))[:400]
    assert "<|endoftext|>".join(expected).startswith(text_of(data))
    assert data.documents == {"train": 400, "validation": 40}
    assert list(c4.hub_source("en", streaming, str(shards)).validation(Skipped())) == list(source.validation(Skipped()))


def test_the_hub_is_not_read_as_a_whole(make):
    with pytest.raises(ConfigError, match="data_sample_size: C4 on the hub is too large"):
        load_data(make(data_sample_size=None))


def test_an_unknown_language_is_an_error_that_names_those_there_are(shards):
    for streaming in (True, False):
        with pytest.raises(DatasetError, match=r"ValueError: .*'tlh' not found.*'en'"):
            next(c4.hub_source("tlh", streaming, str(shards)).train(Skipped()))


def test_raw_and_tokenised_shards_give_the_same_examples(make, shards, tokenised, tokenizer_folder):
    raw = load_data(make(c4_local_path=shards, tokenizer=tokenizer_folder))
    ready = load_data(make(c4_tokenized_path=tokenised))
    for own, other in ((raw.train, ready.train), (raw.validation, ready.validation)):
        assert len(own) == len(other) > 10
        indices = range(len(own))
        assert torch.equal(own.batch(indices, CPU)["input_ids"], other.batch(indices, CPU)["input_ids"])
    assert isinstance(ready.train, PackedSequences)


def test_without_packing_a_document_is_a_padded_sequence(make, shards):
    data = load_data(make(c4_local_path=shards, packing=False))
    assert isinstance(data.train, PaddedSequences)
    assert (len(data.train), len(data.validation)) == (400, 40)
    texts = list(c4.local_source(str(shards), "en").train(Skipped()))[:400]
    for index in (0, 7, 399):
        tokens = [*data.tokenizer(texts[index])["input_ids"], data.tokenizer.eos_token_id][:32]
        batch = data.train.batch([index, data.train.largest], CPU)
        assert batch["input_ids"][0, : len(tokens)].tolist() == tokens
        assert batch["attention_mask"].sum(1).tolist() == [len(tokens), 32]


def test_shards_without_a_validation_part_hold_documents_out(make, shards, tmp_path):
    train = tmp_path / "train"
    train.mkdir()
    for path in sorted((shards / "en").glob("c4-train*")):
        shutil.copy(path, train)
    documents = c4.open_c4(make(c4_local_path=train))[1]
    assert (len(documents.train), len(documents.validation)) == (400, 40)
    assert in_both(documents) == 0
    every = {document_hash(text) for text in python_documents()[:600]}
    assert set(documents.validation.hashes.tolist()) < every


def test_a_glob_and_a_single_shard(make, shards):
    (shard,) = c4.matching_files([str(shards / "en" / "c4-train.00000*")])
    for pattern in (shard, shards / "en" / "c4-train.0000[0]-*.json.gz"):
        data = load_data(make(c4_local_path=pattern, data_sample_size=250, val_size=20))
        assert data.documents == {"train": 250, "validation": 20}
    with pytest.raises(ConfigError, match="only validation shards, none to train on"):
        load_data(make(c4_local_path=shards / "en" / "c4-validation*", dataset_fallback="none"))


def test_another_tokenizer_than_the_models_is_an_error_that_names_both(make, tokenised, tokenizer_folder, tmp_path):
    train_tokenizer(["another language altogether"], 300).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError) as caught:
        load_data(make(c4_tokenized_path=tokenised, tokenizer=tmp_path / "other"))
    message = str(caught.value)
    assert message.startswith(f"c4_tokenized_path: {tokenised} was tokenised with {tokenizer_folder} (600 tokens")
    assert f"the model's tokenizer is {tmp_path}/other (" in message
    # The same tokenizer at another place is the same.
    shutil.copytree(tokenizer_folder, tmp_path / "moved")
    assert load_data(make(c4_tokenized_path=tokenised, tokenizer=tmp_path / "moved")).fallback_reason is None


def test_too_few_documents_say_how_many_there_are(make, shards, tokenised):
    with pytest.raises(ConfigError, match="data_sample_size: 600 documents are left for training beside 40"):
        load_data(make(c4_local_path=shards, data_sample_size=601))
    with pytest.raises(ConfigError, match=r"data_sample_size: .*set.* has 500 training documents, got 501"):
        load_data(make(c4_tokenized_path=tokenised, data_sample_size=501))
    with pytest.raises(ConfigError, match=r"val_size: .*set.* has 50 validation documents, got 51"):
        load_data(make(c4_tokenized_path=tokenised, val_size=51))


def test_a_set_without_validation_documents_says_what_to_do(make, shards, tokenizer_folder, tmp_path, capsys):
    arguments = ["--model_name", str(tokenizer_folder), "--input", str(shards), "--output_dir", str(tmp_path / "set")]
    assert tokenize_c4.main([*arguments, "--data_sample_size", "100"]) == 0
    assert "no validation documents: --create_eval_split" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has no validation documents; tokenise with --create_eval_split"):
        load_data(make(c4_tokenized_path=tmp_path / "set", data_sample_size=50))


def test_skipped_records_are_counted_in_log_and_data(make, shards, tmp_path, caplog):
    make_samples.write_shard(tmp_path / "c4-train.00000-of-00002.json.gz", [*python_documents()[:300], "", " "])
    (tmp_path / "c4-train.00001-of-00002.json").write_text('{"text": "cut\n')
    with caplog.at_level("INFO", "adloco.dataset"):
        data = load_data(make(c4_local_path=tmp_path, data_sample_size=None, val_size=15))
    assert data.documents == {"train": 285, "validation": 15}
    assert data.skipped == {"empty": 2, "not a JSON object with a text": 1}
    assert "skipped 2 documents: empty (first: " in caplog.text


@pytest.mark.parametrize("fallback", ["python_docs", "none"])
def test_a_failed_load_says_so_and_never_passes_silently(tmp_path, cache_dir, shards, capsys, fallback):
    (shard,) = c4.matching_files([str(shards / "en" / "c4-train.00000*")])
    broken = tmp_path / "c4-train.00000-of-00001.json.gz"
    broken.write_bytes(shard.read_bytes()[:5000])
    arguments = [
        *("dataset=c4", f"c4_local_path={broken}", f"dataset_fallback={fallback}", f"log_dir={tmp_path / 'logs'}"),
        *("data_sample_size=300", "val_size=20", "sequence_length=32", "vocab_size=400", f"cache_dir={cache_dir}"),
        *("number_of_outer_steps=1", "number_of_inner_steps_between_outers=1", "number_of_initial_trainers=1"),
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
    assert any(line.startswith(warning) for line in summary["warnings"])
    for text in (captured.out + captured.err, (folder / "training_log.log").read_text()):
        assert f"warning: {warning}" in text
        assert "hub: allenai/c4 (en): ConnectionError" in text


def test_a_fallback_that_fails_as_well_reports_both(make):
    with pytest.raises(ConfigError) as caught:
        load_data(make(data_sample_size=10**6))
    first, second = caught.value.problems
    assert first.startswith("dataset: c4 cannot be loaded: hub: ")
    assert second.startswith("dataset_fallback: nor can python_docs: data_sample_size: ")


def test_the_check_finds_all_well_where_it_is(tokenised, make, capsys):
    assert check(make(c4_tokenized_path=tokenised)) == []
    output = capsys.readouterr().out
    assert "decoding train: 200 of 200 documents give back their exact text, 200 their tokens" in output
    assert "documents in both parts: 0" in output
    assert "perplexity of uniform logits: 600.000000, vocabulary: 600" in output


def test_the_check_finds_what_is_wrong(tokenised, make, tmp_path, capsys):
    """Tokens of another document, and a validation document among the training documents."""
    broken = tmp_path / "set"
    shutil.copytree(tokenised, broken)
    tokens = np.fromfile(broken / "train" / "tokens.bin", np.uint16)
    offsets = np.fromfile(broken / "train" / "offsets.bin", np.int64)
    other = np.fromfile(broken / "validation" / "tokens.bin", np.uint16)
    ends = np.fromfile(broken / "validation" / "offsets.bin", np.int64)
    leaked = other[ends[3] : ends[4]]
    tokens = np.concatenate([leaked, tokens[offsets[1] :]])
    offsets[1:] += len(leaked) - offsets[1]
    tokens.tofile(broken / "train" / "tokens.bin")
    offsets.tofile(broken / "train" / "offsets.bin")
    metadata = json.loads((broken / "metadata.json").read_text())
    metadata["parts"]["train"]["tokens"] = len(tokens)
    (broken / "metadata.json").write_text(json.dumps(metadata))
    assert check(make(c4_tokenized_path=broken)) == ["1 training documents are validation documents as well"]
    assert "decoding train: 199 of 200 documents give back their exact text" in capsys.readouterr().out


def test_the_script_runs_on_the_small_configuration(tmp_path, cache_dir, shards, capsys):
    arguments = [f"c4_local_path={shards}", "data_sample_size=300", "val_size=50", f"cache_dir={cache_dir}"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output.endswith("all is well\n")
    assert "perplexity of the untrained model" in output
    assert main(["--config", str(ROOT / "config.yaml")]) == 2
    assert "dataset: this checks c4" in capsys.readouterr().err


def test_memory_does_not_hold_more_than_a_few_blocks(monkeypatch, tmp_path, tokenizer_folder, shards):
    """Documents are taken from the source only as they are tokenised, by one process or several."""
    options = ["--model_name", str(tokenizer_folder), "--input", str(shards), "--data_sample_size", "580"]
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
    monkeypatch.setattr("fabrics.tokenised.BLOCK_DOCUMENTS", 20)
    recipe = tokenize_c4.make_recipe(tokenize_c4.parse_arguments(options))
    for processes, ahead in ((1, 20), (2, 100)):
        taken.clear()
        write_tokenised(tmp_path / "set", recipe, processes)
        assert len(taken) == 580
        assert max(number - done for number, done in enumerate(taken)) < ahead
        shutil.rmtree(tmp_path / "set")


if __name__ == "__main__":
    sys.exit(main())
