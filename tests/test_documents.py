"""Documents: readers of real formats, damaged ones included, and the split into training and validation."""

import gzip
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.documents import (
    EMPTY,
    NOT_JSON,
    DatasetError,
    Skipped,
    Source,
    blank_line_blocks,
    document_hash,
    json_documents,
    matching_files,
    python_documents,
    split,
    whole_files,
)
from tests.helpers import without_privileges
from utils.config import ConfigError

TEXTS = [f"document {index} of some" for index in range(100)]


def source(texts, validation=None) -> Source:
    return Source(
        "texts",
        {},
        lambda skipped: iter(texts),
        None if validation is None else lambda skipped: iter(validation),
    )


def texts_of(parts) -> tuple[list[str], list[str]]:
    return [text for _, text in parts.train(Skipped())], [text for _, text in parts.validation(Skipped())]


def shard(path, lines) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def record(text) -> str:
    return json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"})


# The split


def test_documents_are_held_out_by_the_hash_of_their_text():
    train, validation = texts_of(split(source(TEXTS), None, 10))
    assert sorted(train + validation) == sorted(TEXTS)
    assert set(validation) == set(sorted(TEXTS, key=document_hash)[:10])
    # The order of the source stays, and does not matter to what is held out.
    assert train == [text for text in TEXTS if text in set(train)]
    assert set(texts_of(split(source(TEXTS[::-1]), None, 10))[1]) == set(validation)


def test_one_document_in_twenty_is_held_out_by_default():
    assert [len(part) for part in texts_of(split(source(TEXTS), None, None))] == [95, 5]
    assert [len(part) for part in texts_of(split(source(TEXTS), 40, None))] == [40, 2]
    assert [len(part) for part in texts_of(split(source(TEXTS[:3]), None, None))] == [2, 1]


def test_only_as_much_is_read_as_is_needed():
    read = []

    def documents(skipped):
        for index in itertools.count():
            read.append(index)
            yield f"text {index}"

    parts = split(Source("endless", {}, documents), 30, 6)
    assert [len(part) for part in texts_of(parts)] == [30, 6]
    assert max(read) <= 36


@given(st.lists(st.sampled_from("abcdefghijkl"), min_size=8, max_size=40), st.integers(1, 3), st.booleans())
def test_no_text_is_in_both_parts_whatever_repeats(texts, val_size, own_validation):
    if len(set(texts)) <= 2 * val_size:
        return
    validation = texts[: 2 * val_size] if own_validation else None
    skipped = Skipped()
    parts = split(source(texts, validation), None, val_size)
    train = [text for _, text in parts.train(skipped)]
    held_out = [text for _, text in parts.validation(Skipped())]
    assert len(held_out) == val_size
    assert not set(train) & set(held_out)
    repeats = skipped.counts.get("the same text as a validation document", 0)
    first = 0 if own_validation else val_size
    assert len(train) + repeats + first == len(texts)


def test_a_validation_part_of_its_own_is_used_from_its_beginning():
    train, validation = texts_of(split(source(TEXTS, ["v1", "document 3 of some", "v2"]), 50, 2))
    assert validation == ["v1", "document 3 of some"]
    assert train == [text for text in TEXTS if text != "document 3 of some"][:50]
    assert texts_of(split(source(TEXTS, ["v1", "v2"]), None, None))[1] == ["v1", "v2"]
    assert texts_of(split(source(TEXTS, ["v1", "v2"]), 20, None))[1] == ["v1"]
    assert texts_of(split(source(TEXTS, ["v1", "v2"]), 80, None))[1] == ["v1", "v2"]


@pytest.mark.parametrize(
    ("train", "validation", "own", "message"),
    [
        (None, 100, None, "val_size: must be below the 100 documents of the dataset, got 100"),
        (96, 5, None, "data_sample_size: 95 documents are left for training beside 5 for validation, got 96"),
        (50, 3, ["a", "b"], "val_size: the validation part has 2 documents, got 3"),
        (50, 1, [], "val_size: the validation part has 0 documents, got 1"),
        (101, 2, ["a", "b"], "data_sample_size: 100 documents are left for training beside 2 for validation, got 101"),
    ],
)
def test_too_few_documents_are_an_error_that_says_how_many_there_are(train, validation, own, message):
    with pytest.raises(ConfigError, match=message):
        texts_of(split(source(TEXTS, own), train, validation))


def test_repeats_of_validation_texts_do_not_count_as_training_documents():
    texts = [*TEXTS, *TEXTS[:5]]
    with pytest.raises(ConfigError, match=r"data_sample_size: \d+ documents are left"):
        texts_of(split(source(texts), 100, 5))


# Readers


def test_shards_are_read_in_order_and_what_is_unusable_is_counted(tmp_path):
    big = "real text, many times over. " * 40_000
    shard(
        tmp_path / "a.json.gz", [record("first"), "this is not JSON", record(""), record("  \n"), record("é 東京 🙂")]
    )
    shard(tmp_path / "b.json.gz", [record("x"), '{"url": "no text"}', '{"text": 3}', "[1]", record(big)])
    (tmp_path / "c.json").write_bytes(record("plain").encode() + b"\n\xff\xfe broken\n" + b'{"text": "half \\ud83d"}\n')
    skipped = Skipped()
    documents = list(json_documents([tmp_path / name for name in ("a.json.gz", "b.json.gz", "c.json")])(skipped))
    assert documents == ["first", "é 東京 🙂", "x", big, "plain", "half ?"]
    assert skipped.counts == {NOT_JSON: 5, EMPTY: 2}
    assert skipped.first == {NOT_JSON: f"{tmp_path}/a.json.gz:2", EMPTY: f"{tmp_path}/a.json.gz:3"}
    assert str(skipped).startswith(f"5 not a JSON object with a text (first: {tmp_path}/a.json.gz:2), 2 empty")


def test_a_shard_that_is_cut_off_is_an_error_at_its_place(tmp_path):
    path = tmp_path / "c4-train.00000-of-00001.json.gz"
    shard(path, [record(text * 50) for text in python_documents()[:200]])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = []
    with pytest.raises(DatasetError, match=r"json\.gz: damaged or cut off after line \d+: .*end-of-stream"):
        found.extend(json_documents([path])(Skipped()))
    assert 10 < len(found) < 190


def test_a_shard_with_damaged_bytes_is_an_error(tmp_path):
    path = tmp_path / "shard.json.gz"
    shard(path, [record(text) for text in python_documents()[:200]])
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 50] = bytes(50)
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="damaged or cut off after line"):
        list(json_documents([path])(Skipped()))


def test_files_folders_and_globs(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", ".hidden.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()

    def names(patterns, suffixes=("",)):
        return [path.name for path in matching_files([str(tmp_path / pattern) for pattern in patterns], suffixes)]

    assert names([""]) == ["a.txt", "b.txt", "c.md"]
    assert names([""], (".md",)) == ["c.md"]
    assert names(["*.txt", "b.txt", "c.md"]) == ["a.txt", "b.txt", "c.md"]
    with pytest.raises(DatasetError, match=r"x\*: no such file"):
        matching_files([str(tmp_path / "x*")])
    with pytest.raises(DatasetError, match=r"no file \*\.gz in it"):
        matching_files([str(tmp_path)], (".gz",))


def test_a_folder_or_file_without_read_permission_is_an_error(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "a.txt").write_text("text")
    secret = tmp_path / "secret.txt"
    secret.write_text("text")
    closed.chmod(0o000)
    secret.chmod(0o000)
    with without_privileges(tmp_path):
        with pytest.raises(DatasetError, match="closed: Permission denied"):
            matching_files([str(closed)])
        with pytest.raises(DatasetError, match=r"secret\.txt: Permission denied"):
            list(whole_files([secret])(Skipped()))
    closed.chmod(0o700)


def test_a_document_is_a_file_or_a_block_between_blank_lines(tmp_path):
    first, second, third = (tmp_path / name for name in ("1.txt", "2.txt.gz", "3.txt"))
    first.write_text("\n\none\ntwo\n\n \t\nthree\n", encoding="utf-8-sig")
    with gzip.open(second, "wt", encoding="utf-8") as file:
        file.write("vier è\r\n\r\ncinq")
    third.write_text(" \n")
    paths, skipped = [first, second, third], Skipped()
    assert list(blank_line_blocks(paths)(skipped)) == ["one\ntwo", "three", "vier è", "cinq"]
    assert list(whole_files(paths)(skipped)) == ["\n\none\ntwo\n\n \t\nthree\n", "vier è\r\n\r\ncinq"]
    assert skipped.counts == {EMPTY: 2}
    (tmp_path / "latin.txt").write_bytes("è".encode("latin-1"))
    for read in (whole_files, blank_line_blocks):
        with pytest.raises(DatasetError, match=r"latin\.txt: not UTF-8 text: .* at byte 0"):
            list(read([tmp_path / "latin.txt"])(Skipped()))


def test_python_documents_are_real_english_each_once():
    documents = python_documents()
    assert len(set(documents)) == len(documents) > 5000
    size = sum(len(document.encode()) for document in documents)
    assert 1_500_000 < size < 4_000_000
    text = "\n".join(documents)
    assert all(phrase in text for phrase in ('The "if" statement is used for conditional execution', "Return a new"))
    assert text.count(" the ") > 10_000
