"""Tokenised documents on disk: content, interruption, damage, several programs at once."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.make_samples import write_c4, write_shard
from fabrics.data.c4 import local_source
from fabrics.data.documents import DatasetError, Skipped, Source, document_hash, python_documents
from fabrics.data.held_out import split
from fabrics.data.token_store import Recipe, is_written, open_tokenised, write_tokenised
from fabrics.data.tokenization import fingerprint, train_tokenizer, vocabulary_size
from tests.support.programs import LIMIT_SECONDS, wait_until
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(python_documents()[:500], 500)


def recipe(tokenizer, texts=None, train=1200, validation=60, read=None) -> Recipe:
    texts = python_documents() if texts is None else texts
    source = Source("some texts", {"texts": len(texts)}, read or (lambda skipped: iter(texts)))
    return Recipe(
        arguments={"source": source.identity, "train_documents": train, "validation_documents": validation},
        source=source.name,
        parts=lambda: split(source, train, validation),
        tokenizer=lambda parts: tokenizer,
        details={"language": "en"},
    )


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    """The content of a set that was written without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    write_tokenised(folder, recipe(tokenizer))
    return content(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_set_holds_every_token_of_every_document(tokenizer, tmp_path):
    documents = write_tokenised(tmp_path / "set", recipe(tokenizer))
    parts = split(Source("", {}, lambda skipped: iter(python_documents())), 1200, 60)
    for part, expected in ((documents.train, parts.train), (documents.validation, parts.validation)):
        items = list(expected(Skipped()))
        assert len(part) == len(items)
        for index, (number, text) in enumerate(items):
            tokens = part.tokens[part.offsets[index] : part.offsets[index + 1]]
            assert tokens.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            assert part.hashes[index] == number == document_hash(text)
        assert part.offsets[-1] == len(part.tokens)
    assert documents.train.tokens.dtype == np.uint16
    assert fingerprint(documents.tokenizer) == fingerprint(tokenizer)
    sizes = documents.metadata["parts"]["train"]
    assert sizes == {
        "documents": 1200,
        "tokens": len(documents.train.tokens),
        "longest_document": int(np.diff(documents.train.offsets).max()),
    }
    assert documents.metadata["language"] == "en"
    assert documents.metadata["tokenizer"]["vocabulary"] == len(tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


@pytest.mark.parametrize("length", [2, 64, 100])
def test_packing_loses_nothing_but_the_last_partial_sequence(tokenizer, tmp_path, length):
    part = write_tokenised(tmp_path / "set", recipe(tokenizer, train=50)).train
    packed = part.packed(length)
    assert packed.shape == (len(part.tokens) // length, length)
    assert packed.flatten().tolist() == part.tokens[: packed.size].tolist()
    assert len(part.tokens) - packed.size < length
    assert np.shares_memory(packed, part.tokens)
    assert (
        part.first(7).packed(length).flatten().tolist()
        == packed.flatten()[: part.offsets[7] // length * length].tolist()
    )


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    large = word_tokenizer(**{f"token{number}": number + 1 for number in range(2**16)})
    documents = write_tokenised(tmp_path / "set", recipe(large, ["token65535 and more", "other", "third"], 2, 1))
    assert documents.train.tokens.dtype == np.uint32
    tokens = np.concatenate([documents.train.tokens, documents.validation.tokens])
    assert tokens.max() == large.convert_tokens_to_ids("token65535") == 2**16


def word_tokenizer(**vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words with these numbers."""
    words = Tokenizer(models.WordLevel(vocabulary | {"<eos>": 0}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


def test_a_vocabulary_with_gaps_takes_as_many_bytes_as_its_largest_token(tmp_path):
    gaps = word_tokenizer(one=1, far=70_000)
    assert (len(gaps), vocabulary_size(gaps)) == (3, 70_001)
    documents = write_tokenised(tmp_path / "set", recipe(gaps, ["far one far", "one one"], 1, 1))
    tokens = sorted(documents.train.tokens.tolist() + documents.validation.tokens.tolist())
    assert tokens == [0, 0, 1, 1, 1, 70_000, 70_000]
    # As one that was written without a thought of gaps: whoever finds it must not read it.
    (tmp_path / "set" / "metadata.json").write_text(
        (tmp_path / "set" / "metadata.json").read_text().replace('"<u4"', '"<u2"')
    )
    for part in ("train", "validation"):
        path = tmp_path / "set" / part / "tokens.bin"
        np.fromfile(path, np.uint32).astype(np.uint16).tofile(path)
    with pytest.raises(DatasetError, match="set: damaged: tokens of uint16 cannot hold the tokenizer's largest"):
        open_tokenised(tmp_path / "set")


@pytest.mark.parametrize("stop", [30, 170, 270])
def test_an_interrupted_set_is_continued_to_the_same_bytes(tokenizer, tmp_path, stop, caplog, monkeypatch):
    """In blocks of 100 documents, of 60 for validation and 240 for training."""
    monkeypatch.setattr("fabrics.data.token_store.BLOCK_DOCUMENTS", 100)
    texts = python_documents()[:400]
    write_tokenised(tmp_path / "whole", recipe(tokenizer, texts, 240))

    class InterruptedError_(Exception):
        pass

    passes = itertools.count()

    def read(skipped):
        # The third pass over the source writes the training part; the second the validation part.
        last = next(passes) >= (1 if stop < 60 else 2)
        for number, text in enumerate(texts):
            if last and number == stop:
                raise InterruptedError_
            yield text

    with pytest.raises(InterruptedError_):
        write_tokenised(tmp_path / "set", recipe(tokenizer, texts, 240, read=read))
    assert not (tmp_path / "set").exists()
    partial = tmp_path / "set.partial"
    assert (partial / "state.json").exists()
    if stop > 100:
        # Half a block, as a machine that stopped in the middle of writing leaves it.
        with (partial / "train" / "tokens.bin").open("ab") as file:
            file.write(bytes(10**6))
    with caplog.at_level("INFO", "adloco.dataset"):
        write_tokenised(tmp_path / "set", recipe(tokenizer, texts, 240))
    done = {30: 0, 170: 160, 270: 260}[stop]
    assert f"continuing an interrupted tokenisation after {done:,} documents" in caplog.text
    assert content(tmp_path / "set") == content(tmp_path / "whole")
    assert not partial.exists()


def test_what_another_recipe_left_unfinished_is_not_continued(tokenizer, tmp_path, whole):
    partial = tmp_path / "set.partial"
    write_tokenised(partial, recipe(tokenizer, train=700))
    (partial / "state.json").write_text(json.dumps({"arguments": {"other": 1}, "parts": {}, "skipped": {}}))
    write_tokenised(tmp_path / "set", recipe(tokenizer))
    assert content(tmp_path / "set") == whole


def test_a_finished_set_is_not_made_again_and_not_overwritten(tokenizer, tmp_path):
    write_tokenised(tmp_path / "set", recipe(tokenizer))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}

    def unread(skipped):
        raise AssertionError("the source was read again")

    write_tokenised(tmp_path / "set", recipe(tokenizer, read=unread))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before
    with pytest.raises(ConfigError, match=r"set: holds a set .* \(train_documents: 1200 there, 1100 requested\)"):
        write_tokenised(tmp_path / "set", recipe(tokenizer, train=1100))
    (tmp_path / "other").mkdir()
    assert not is_written(tmp_path / "other", recipe(tokenizer))
    (tmp_path / "other" / "precious.txt").write_text("not ours")
    with pytest.raises(DatasetError, match="no tokenised set"):
        write_tokenised(tmp_path / "other", recipe(tokenizer))


def test_too_few_documents_leave_nothing_behind(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="data_sample_size: 90 documents are left for training beside 10"):
        write_tokenised(tmp_path / "set", recipe(tokenizer, python_documents()[:100], 1000, 10))
    own = Source("", {}, lambda skipped: iter(python_documents()[:700]), lambda skipped: iter(python_documents()[700:]))
    late = dataclasses.replace(recipe(tokenizer), parts=lambda: split(own, 1000, 10))
    with pytest.raises(ConfigError, match="data_sample_size: 700 documents are left for training beside 10"):
        write_tokenised(tmp_path / "set", late)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.truncate(folder / "train" / "tokens.bin", 1000), "tokens.bin: damaged: 1000 bytes instead"),
        (lambda folder: (folder / "validation" / "hashes.bin").unlink(), "hashes.bin: damaged: No such file"),
        (lambda folder: (folder / "metadata.json").write_text("{"), "metadata.json: damaged: not JSON"),
        (lambda folder: (folder / "metadata.json").write_text('{"format": 9}'), "not a tokenised set of format 1"),
        (lambda folder: (folder / "metadata.json").write_text('{"format": 1}'), "damaged: KeyError"),
        (lambda folder: (folder / "metadata.json").unlink(), "no tokenised set"),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), "damaged: tokenizer: cannot load"),
        (
            lambda folder: train_tokenizer(["other text"], 280).save_pretrained(folder / "tokenizer"),
            "tokenizer: damaged: not the tokenizer",
        ),
    ],
)
def test_a_damaged_set_is_an_error_that_names_the_file(tokenizer, tmp_path, damage, message):
    write_tokenised(tmp_path / "set", recipe(tokenizer, train=50, validation=5))
    damage(tmp_path / "set")
    with pytest.raises(DatasetError, match=message):
        open_tokenised(tmp_path / "set")


def test_a_folder_that_cannot_be_written_is_an_error(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"set: cannot write .*file: File exists"):
        write_tokenised(tmp_path / "file" / "set", recipe(tokenizer))


def test_who_finds_another_at_work_waits(tokenizer, tmp_path):
    thread = threading.Thread(target=write_tokenised, args=(tmp_path / "set", recipe(tokenizer)))
    with FileLock(tmp_path / ".set.lock"):
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        assert not (tmp_path / "set.partial").exists()
    thread.join(LIMIT_SECONDS)
    assert len(open_tokenised(tmp_path / "set").train) == 1200


# The script


def command(tmp_path, tokenizer_folder, *arguments) -> list[str]:
    return [
        str(ROOT / "c4" / "tokenize_c4.py"),
        "--model_name",
        str(tokenizer_folder),
        "--output_dir",
        str(tmp_path / "set"),
        *arguments,
    ]


def test_two_programs_and_a_third_ask_for_the_same_set(programs, tmp_path, tokenizer_folder):
    write_c4(tmp_path, 1500, 60)
    asked = command(
        tmp_path, tokenizer_folder, "--input", str(tmp_path), "--data_sample_size", "1400", "--create_eval_split"
    )
    both = [programs.start(*asked) for _ in range(2)]
    outputs = [program.communicate()[0] for program in both]
    assert [program.returncode for program in both] == [0, 0], outputs
    # One of them worked, the other waited.
    assert sum("tokenising train documents: 100%" in output for output in outputs) == 1
    third = programs.run(*asked)
    assert "set: is complete already, nothing to do" in third.stdout
    documents = open_tokenised(tmp_path / "set")
    assert (len(documents.train), len(documents.validation)) == (1400, 60)
    assert f"{len(documents.train.tokens):,} tokens" in third.stdout
    assert "c4_tokenized_path:" in third.stdout


def test_a_killed_program_is_continued_by_the_same_command(programs, tmp_path, tokenizer_folder):
    texts = [f"{number}: {text}" for number in range(6) for text in python_documents()[:4000]]
    write_shard(tmp_path / "c4-train.00000-of-00001.json.gz", texts)
    asked = command(
        tmp_path, tokenizer_folder, "--input", str(tmp_path), "--data_sample_size", "20000", "--create_eval_split"
    )
    state = tmp_path / "set.partial" / "state.json"
    program = programs.start(*asked)
    wait_until(lambda: state.exists() and '"train"' in state.read_text(), "a first block", program)
    program.send_signal(signal.SIGKILL)
    program.wait()
    assert not (tmp_path / "set").exists()
    again = programs.run(*asked)
    assert "continuing an interrupted tokenisation after" in again.stderr
    documents = open_tokenised(tmp_path / "set")
    assert len(documents.train) == 20_000
    source = local_source(str(tmp_path), "en")
    expected = [number for number, _ in split(source, 20_000, None).train(Skipped())]
    assert documents.train.hashes.tolist() == expected
