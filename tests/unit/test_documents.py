"""Readers of real formats, damaged ones included."""

import gzip
import json

import pytest

from fabrics.data.documents import (
    EMPTY,
    NOT_JSON,
    DatasetError,
    Skipped,
    blank_line_blocks,
    json_records,
    matching_files,
    whole_file,
)
from fabrics.data.python_docs import python_documents
from tests.support.helpers import without_privileges


def shard(path, lines) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def record(text) -> str:
    return json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"})


def read_all(read, *paths):
    """The documents of files, and the skipped records."""
    skipped = Skipped()
    return [document for path in paths for document in read(path, skipped)], skipped


def test_unusable_records_of_shards_are_skipped_and_counted(tmp_path):
    big = "real text, many times over. " * 40_000
    first, second, third = tmp_path / "a.json.gz", tmp_path / "b.json.gz", tmp_path / "c.json"
    shard(first, [record("first"), "this is not JSON", record(""), record("  \n"), record("é 東京 🙂")])
    shard(second, [record("x"), '{"url": "no text"}', '{"text": 3}', "[1]", record(big), "[" * 100_000])
    third.write_bytes(record("plain").encode() + b"\n\xff\xfe broken\n" + b'{"text": "half \\ud83d"}\n')
    records, skipped = read_all(json_records, first, second, third)
    assert [record["text"] for record in records] == ["first", "é 東京 🙂", "x", big, "plain", "half ?"]
    assert skipped.counts == {NOT_JSON: 6, EMPTY: 2}
    assert skipped.first == {NOT_JSON: f"{first}:2", EMPTY: f"{first}:3"}
    assert str(skipped).startswith(f"6 not a JSON object with a text (first: {first}:2), 2 empty")


def test_a_damaged_shard_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "c4-train.00000-of-00001.json.gz"
    shard(path, [record(text * 50) for text in python_documents()[:200]])
    content = path.read_bytes()
    half = len(content) // 2
    for damaged in (content[:half], content[:half] + bytes(50) + content[half + 50 :]):
        path.write_bytes(damaged)
        found = []
        with pytest.raises(DatasetError, match=r"json\.gz: damaged or cut off after line \d+"):
            found.extend(json_records(path, Skipped()))
        assert 10 < len(found) < 190


def test_patterns_name_files_folders_and_globs(tmp_path):
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
    with pytest.raises(DatasetError, match=r"no \*\.gz in it"):
        matching_files([str(tmp_path)], (".gz",))
    with pytest.raises(DatasetError, match=r"folder\.txt: no file in it"):
        matching_files([str(tmp_path / "folder.txt")])


def test_a_folder_stands_for_its_files_and_those_of_subfolders_if_asked(tmp_path):
    for name in ("z.txt", "b/one.txt", "a/c/two.txt", "a/three.md", ".git/four.txt", "a/.five.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert matching_files([str(tmp_path)]) == [tmp_path / "z.txt"]
    names = ("z.txt", "a/c/two.txt", "b/one.txt")
    assert matching_files([str(tmp_path)], (".txt",), subfolders=True) == [tmp_path / name for name in names]


def test_a_file_is_read_once_however_often_links_and_patterns_reach_it(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "one.txt").write_text("text")
    (folder / "up").symlink_to(tmp_path)
    patterns = [f"{tmp_path}/**/*.txt", f"{tmp_path}/a/../a/one.txt"]
    assert matching_files(patterns) == [folder / "one.txt"]


@pytest.mark.parametrize("pattern", ["", "*.txt", "two.txt"])
def test_a_link_to_a_missing_file_is_an_error(tmp_path, pattern):
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "two.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DatasetError, match=r"two\.txt: (a link to a file that is missing|no such file)"):
        matching_files([str(tmp_path / pattern)])


def test_a_folder_or_file_without_read_permission_is_an_error(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    secret = tmp_path / "secret.txt"
    secret.write_text("text")
    closed.chmod(0o000)
    secret.chmod(0o000)
    with without_privileges(tmp_path):
        with pytest.raises(DatasetError, match="closed: Permission denied"):
            matching_files([str(closed)])
        with pytest.raises(DatasetError, match=r"secret\.txt: Permission denied"):
            list(whole_file(secret, Skipped()))
    closed.chmod(0o700)


def test_a_document_is_a_file_or_a_block_between_blank_lines(tmp_path):
    first, second, third = (tmp_path / name for name in ("1.txt", "2.txt.gz", "3.txt"))
    first.write_text("\n\none\ntwo\n\n \t\nthree\n\n\xa0\u3000\n\n", encoding="utf-8-sig")
    with gzip.open(second, "wt", encoding="utf-8") as file:
        file.write("vier è\r\n\r\ncinq")
    third.write_text(" \n")
    blocks, skipped = read_all(blank_line_blocks, first, second, third)
    assert blocks == ["one\ntwo", "three", "vier è", "cinq"]
    assert skipped.counts == {EMPTY: 1}
    files, skipped = read_all(whole_file, first, second, third)
    assert files == [first.read_text(encoding="utf-8-sig"), "vier è\r\n\r\ncinq"]
    assert skipped.counts == {EMPTY: 1}
    (tmp_path / "latin.txt").write_bytes("one\n\nè".encode("latin-1"))
    for read in (whole_file, blank_line_blocks):
        with pytest.raises(DatasetError, match=r"latin\.txt:3: not UTF-8 text: "):
            list(read(tmp_path / "latin.txt", Skipped()))
