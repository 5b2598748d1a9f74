"""Documents: readers of real formats, damaged ones included."""

import gzip
import json

import pytest

from fabrics.data.documents import (
    EMPTY,
    NOT_JSON,
    DatasetError,
    Skipped,
    blank_line_blocks,
    json_documents,
    matching_files,
    python_documents,
    whole_files,
)
from tests.support.helpers import without_privileges


def shard(path, lines) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def record(text) -> str:
    return json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"})


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
