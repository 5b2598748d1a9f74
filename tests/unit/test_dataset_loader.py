"""Datasets by name: python_docs and text; C4 and IMDB have files of their own."""

import dataclasses

import pytest
import torch

from fabrics.config_checks import CHECKS
from fabrics.data import dataset_loader
from fabrics.data.dataset_loader import load_data
from fabrics.data.documents import document_hash
from fabrics.data.python_docs import python_documents
from fabrics.data.tokenization import END_OF_TEXT
from tests.support.helpers import CPU, text_of
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

CONVERSATION = "\n\n".join(f"{number}: a paragraph of\nsome lines, é" for number in range(60))


@pytest.fixture
def make(cache_dir):
    """A function from values to a checked configuration."""

    def configured(**values):
        defaults = {"number_of_outer_steps": 1, "sequence_length": 32, "vocab_size": 400, "cache_dir": str(cache_dir)}
        return parse_config(defaults | values, (), CHECKS)[0]

    return configured


def test_python_docs_holds_out_documents_and_fills_sequences(make):
    data = load_data(make(data_sample_size=300, val_size=40))
    assert dict(data.documents) == {"train": 300, "validation": 40}
    assert data.dataset == "python_docs"
    pool = python_documents()[:340]
    held_out = set(sorted(pool, key=document_hash)[:40])
    text = END_OF_TEXT.join(document for document in pool if document not in held_out) + END_OF_TEXT
    assert text.startswith(text_of(data))
    assert len(text_of(data)) > 0.99 * len(text)


def test_an_evaluation_reads_a_bounded_number_of_sequences(make, monkeypatch):
    config = make(data_sample_size=300, val_size=40)
    whole = load_data(config).validation
    monkeypatch.setattr(dataset_loader, "MOST_VALIDATION_SEQUENCES", 7)
    bounded = load_data(config).validation
    last = len(whole) - 1
    chosen = [last * number // 6 for number in range(7)]  # of all documents: a source may be sorted
    assert 7 < len(whole)
    expected = whole.batch(chosen, CPU)["input_ids"]
    assert torch.equal(bounded.batch(range(len(bounded)), CPU)["input_ids"], expected)


def test_data_of_other_documents_have_another_fingerprint(make):
    """Also if the examples that it looks at are the same."""
    data = load_data(make(data_sample_size=300, val_size=40))
    assert dataclasses.replace(data).fingerprint() == data.fingerprint()
    assert dataclasses.replace(data, content="another").fingerprint() != data.fingerprint()


MANY = "max_tokens: {} are 5.0 passes over the training data; if validation gets worse, lower it or add data"


@pytest.mark.parametrize(("passes", "lines"), [(4, []), (5, [MANY])])
def test_more_than_four_passes_over_the_data_are_logged(make, caplog, passes, lines):
    sample = {"data_sample_size": 300, "val_size": 40}
    tokens = passes * 32 * len(load_data(make(**sample)).train)
    with caplog.at_level("INFO"):
        load_data(make(**sample, max_tokens=tokens))
    assert [line for line in caplog.messages if "passes" in line] == [line.format(f"{tokens:,}") for line in lines]


@pytest.mark.parametrize(("val_size", "told"), [(20, 0), (150, 1)])
def test_a_large_validation_part_is_told(make, caplog, val_size, told, monkeypatch):
    """However little of it is evaluated."""
    monkeypatch.setattr(dataset_loader, "MOST_VALIDATION_SEQUENCES", 1)
    with caplog.at_level("INFO"):
        load_data(make(data_sample_size=300, val_size=val_size))
    assert sum("much of the text is for validation" in line for line in caplog.messages) == told


def test_documents_that_fill_no_sequence_are_an_error(make):
    with pytest.raises(ConfigError, match=r"sequence_length: the 1 training documents do not fill"):
        load_data(make(data_sample_size=1, val_size=1, sequence_length=500_000))


def test_too_few_documents_say_what_was_skipped(make, tmp_path):
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "two.txt").write_text(" ")
    with pytest.raises(
        ConfigError, match=r"has 1 document, .*: blank_lines makes .* Skipped: 1 empty \(first: .*two\.txt\)$"
    ):
        load_data(make(dataset="text", text_files=[str(tmp_path)]))


def test_text_files_of_ones_own(make, tmp_path):
    for number, part in enumerate(CONVERSATION.split("\n\n")):
        (tmp_path / f"{number:03d}.txt").write_text(part, encoding="utf-8")
    (tmp_path / "all.md").write_text(CONVERSATION, encoding="utf-8")
    files = load_data(make(dataset="text", text_files=[str(tmp_path / "*.txt")], val_size=5))
    blocks = load_data(
        make(dataset="text", text_files=[str(tmp_path / "all.md")], text_documents="blank_lines", val_size=5)
    )
    assert files.dataset == "text"
    assert files.source == f"60 text files ({tmp_path}/*.txt)"
    assert dict(files.documents) == dict(blocks.documents) == {"train": 55, "validation": 5}
    assert text_of(files) == text_of(blocks)
    assert "a paragraph of\nsome lines, é" + END_OF_TEXT in text_of(files)


def test_a_changed_file_is_read_again(make, tmp_path):
    path = tmp_path / "all.md"
    path.write_text(CONVERSATION, encoding="utf-8")
    config = make(dataset="text", text_files=[str(path)], text_documents="blank_lines", val_size=5)
    assert load_data(config).documents["train"] == 55
    path.write_text(CONVERSATION + "\n\nanother", encoding="utf-8")
    assert load_data(config).documents["train"] == 56


def test_text_needs_files_that_are_there(make, tmp_path):
    with pytest.raises(ConfigError, match=r"dataset: text cannot be loaded: .*/none\*: no such file"):
        load_data(make(dataset="text", text_files=[str(tmp_path / "none*")]))
