"""Tokenised documents on disk: content, interruption, damage, several programs at once."""

import itertools
import os
import resource
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fabrics.data import token_store
from fabrics.data.documents import DatasetError, Document, Skipped, Source, document_hash, split
from fabrics.data.python_docs import python_docs_source, python_documents
from fabrics.data.token_store import Recipe, content_digest, encode, open_tokenised, tokenised
from fabrics.data.tokenization import END_OF_TEXT, fingerprint, train_tokenizer, vocabulary_size
from tests.support.helpers import without_privileges
from tests.support.programs import LIMIT_SECONDS
from utils.config.schema import ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(python_documents()[:500], 500)


def source_of(texts=None, read=None) -> Source:
    """Texts that come from two places in turn."""
    texts = python_documents() if texts is None else texts
    documents = [Document(text, "é\neven" if number % 2 == 0 else "odd") for number, text in enumerate(texts)]
    return Source("some texts", {"texts": len(texts)}, read or (lambda skipped: iter(documents)))


def write(folder, tokenizer, texts=None, train=200, validation=20, read=None, cache=False):
    recipe = Recipe(source_of(texts, read), train, validation, tokenizer=tokenizer)
    return tokenised(folder, recipe, cache)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content_of(path: Path, left: str) -> None:
    """Replace a file by what damage leaves."""
    whole = path.read_bytes() if path.is_file() else b""
    half = len(whole) // 2
    contents = {"truncated": whole[:half], "empty": b"", "junk": b"\xff\xfe junk", "whole": whole}
    contents["flipped"] = whole[:half] + bytes(byte ^ 1 for byte in whole[half : half + 1]) + whole[half + 1 :]
    path.unlink(missing_ok=True)
    if left == "folder":
        path.mkdir()
    elif left != "missing":
        path.write_bytes(contents[left])


@pytest.fixture(scope="module")
def small(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "set"
    write(folder, tokenizer, train=50, validation=5)
    return folder


def word_tokenizer(**vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words with these numbers."""
    words = Tokenizer(models.WordLevel(vocabulary | {"<eos>": 0}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


def test_a_set_holds_every_token_and_origin_of_every_document(tokenizer, tmp_path):
    documents = write(tmp_path / "set", tokenizer)
    parts = split(source_of(), 200, 20)
    for part, expected in zip((documents.train, documents.validation), parts, strict=True):
        items = list(expected(Skipped()))
        assert len(part) == len(items)
        assert part.read_origins() == [document.origin for document in items]
        assert part.hashes.tolist() == [document_hash(document.text) for document in items]
        assert part.first(7).read_origins() == [document.origin for document in items[:7]]
        for index, document in enumerate(items):
            tokens = part.tokens[part.offsets[index] : part.offsets[index + 1]]
            assert tokens.tolist() == [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
        assert part.offsets[-1] == len(part.tokens)
    assert documents.train.tokens.dtype == np.uint16
    assert fingerprint(documents.tokenizer) == fingerprint(tokenizer)
    sizes = documents.metadata["parts"]["train"]
    assert (sizes["documents"], sizes["tokens"]) == (200, len(documents.train.tokens))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    digest = content_digest([documents.train], tokenizer)
    assert digest != content_digest([documents.train.first(199)], tokenizer)
    assert digest != content_digest([documents.train], word_tokenizer(a=1))


def test_special_tokens_that_a_text_spells_out_are_text(tokenizer):
    text = f"before {END_OF_TEXT} after"
    (tokens,) = encode(tokenizer, [text])
    assert tokens.tolist().count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(tokens[:-1]) == text


@pytest.mark.parametrize("length", [2, 100])
def test_packing_loses_nothing_but_the_last_partial_sequence(tokenizer, tmp_path, length):
    part = write(tmp_path / "set", tokenizer, train=50).train
    packed = part.packed(length)
    assert packed.shape == (len(part.tokens) // length, length)
    assert packed.flatten().tolist() == part.tokens[: packed.size].tolist()
    assert np.shares_memory(packed, part.tokens)
    beginning = part.tokens[: part.offsets[7] // length * length].tolist()
    assert part.first(7).packed(length).flatten().tolist() == beginning


@pytest.mark.parametrize(("largest", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_the_largest_token_decides_the_bytes_of_all(tmp_path, largest, dtype):
    """Vocabularies may have gaps."""
    gaps = word_tokenizer(one=1, far=largest)
    assert (len(gaps), vocabulary_size(gaps)) == (3, largest + 1)
    documents = write(tmp_path / "set", gaps, ["far one far", "one one"], 1, 1)
    assert documents.train.tokens.dtype == dtype
    tokens = sorted(documents.train.tokens.tolist() + documents.validation.tokens.tolist())
    assert tokens == [0, 0, 1, 1, 1, largest, largest]


def test_blocks_end_early_where_documents_are_long(tokenizer, tmp_path, monkeypatch):
    """The memory of tokenising depends on the characters of a block; the set does not."""
    write(tmp_path / "whole", tokenizer, train=50, validation=5)
    monkeypatch.setattr(token_store, "BLOCK_CHARACTERS", 2_000)
    sizes = []
    monkeypatch.setattr(token_store, "encode", lambda own, texts: sizes.append(texts) or encode(own, texts))
    write(tmp_path / "set", tokenizer, train=50, validation=5)
    assert len(sizes) > 4
    assert all(sum(map(len, texts[:-1])) < 2_000 for texts in sizes)
    assert content(tmp_path / "set") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("stop", "blocks", "left"), [(30, 0, "whole"), (170, 2, "flipped"), (270, 3, "whole"), (270, 3, "truncated")]
)
def test_an_interrupted_set_is_continued_to_the_same_bytes(
    tokenizer, tmp_path, stop, blocks, left, caplog, monkeypatch
):
    """Blocks have 100 documents: 60 for validation and 240 for training. Damaged blocks are made again."""
    monkeypatch.setattr(token_store, "BLOCK_DOCUMENTS", 100)
    texts = python_documents()[:400]
    write(tmp_path / "whole", tokenizer, texts, 240, 60)

    class Stopped(Exception):
        pass

    passes = itertools.count()

    def read(skipped):
        # The third pass over the source writes the training part; the second the validation part.
        last = next(passes) >= (1 if stop < 60 else 2)
        for number, document in enumerate(source_of(texts).train(skipped)):
            if last and number == stop:
                raise Stopped
            yield document

    with pytest.raises(Stopped):
        write(tmp_path / "set", tokenizer, texts, 240, 60, read=read)
    assert not (tmp_path / "set").exists()
    finished = sorted(tmp_path.glob("set.partial/*/*.npz"))
    assert len(finished) == blocks
    for path in finished[-1:]:
        content_of(path, left)
    encoded = []
    monkeypatch.setattr(token_store, "encode", lambda own, texts: encoded.extend(texts) or encode(own, texts))
    with caplog.at_level("INFO", "adloco.dataset"):
        write(tmp_path / "set", tokenizer, texts, 240, 60)
    assert (f"continuing an interrupted tokenisation after {blocks} blocks" in caplog.text) == (blocks > 0)
    damaged = blocks > 0 and left != "whole"
    assert ("is damaged and will be made again" in caplog.text) == damaged
    assert len(encoded) == 300 - {0: 0, 2: 160, 3: 260}[blocks] + 60 * damaged  # the last is of validation
    assert content(tmp_path / "set") == content(tmp_path / "whole")
    assert not (tmp_path / "set.partial").exists()


def test_what_another_recipe_left_unfinished_is_not_continued(tokenizer, tmp_path):
    def interrupted(skipped):
        yield from itertools.islice(source_of().train(skipped), 700)
        raise KeyboardInterrupt

    write(tmp_path / "whole", tokenizer)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "set", tokenizer, train=690, validation=20, read=interrupted)
    write(tmp_path / "set", tokenizer)
    assert content(tmp_path / "set") == content(tmp_path / "whole")
    assert not (tmp_path / "set.partial").exists()


def test_a_finished_set_is_not_made_again_and_not_overwritten(tokenizer, tmp_path):
    write(tmp_path / "set", tokenizer)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}

    def unread(skipped):
        raise AssertionError("the source was read again")

    write(tmp_path / "set", tokenizer, read=unread)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before
    with pytest.raises(ConfigError, match=r"set: holds a set .* \(train_documents: 200 there, 190 requested\)"):
        write(tmp_path / "set", tokenizer, train=190)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("not ours")
    with pytest.raises(DatasetError, match="no complete tokenised set"):
        write(tmp_path / "other", tokenizer)
    assert (tmp_path / "other" / "precious.txt").exists()


DAMAGE = [
    *itertools.product(["SHA256SUMS", "metadata.json", "train/tokens.bin", "tokenizer/tokenizer.json"], ["flipped"]),
    *itertools.product(["SHA256SUMS", "train/tokens.bin"], ["truncated", "missing", "junk", "folder"]),
]


@pytest.mark.parametrize(("name", "left"), DAMAGE)
def test_a_damaged_set_is_an_error_and_is_made_again_in_a_cache(tokenizer, small, tmp_path, caplog, name, left):
    folder = tmp_path / "set"
    shutil.copytree(small, folder)
    content_of(folder / name, left)
    with pytest.raises(DatasetError, match=f"{folder}: no complete tokenised set: ") as error:
        open_tokenised(folder)
    assert "\n" not in str(error.value)
    write(folder, tokenizer, train=50, validation=5, cache=True)
    assert "cached documents are damaged and will be made again" in caplog.text
    assert content(folder) == content(small)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_file_in_place_of_a_cached_set_is_replaced(tokenizer, small, tmp_path):
    content_of(tmp_path / "set", "junk")
    write(tmp_path / "set", tokenizer, train=50, validation=5, cache=True)
    assert content(tmp_path / "set") == content(small)


@pytest.mark.parametrize("largest", [1_000, 60_000])
@pytest.mark.usefixtures("capsys")
def test_a_full_disk_is_an_error_and_leaves_no_set(tmp_path, largest):
    """No file may have more bytes; the tokenizer fails, or the tokens."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"cache_dir: cannot write (?s:.*)File too large"):
            tokenised(tmp_path / "set", Recipe(python_docs_source(), 900, 20, None, 300), cache=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "set").exists()


def test_a_cache_that_cannot_be_written_serves_what_it_has(tokenizer, tmp_path):
    write(tmp_path / "set", tokenizer, train=50, validation=5, cache=True)
    tmp_path.chmod(0o555)
    with without_privileges(tmp_path):
        assert len(write(tmp_path / "set", tokenizer, train=50, validation=5, cache=True).train) == 50
        with pytest.raises(ConfigError, match="cache_dir: cannot write"):
            write(tmp_path / "other", tokenizer, train=50, validation=5, cache=True)
    tmp_path.chmod(0o755)


def test_a_damaged_set_is_made_again_by_the_first_of_two_programs_alone(tokenizer, tmp_path, monkeypatch):
    """Both find it damaged before either has begun."""
    write(tmp_path / "set", tokenizer, train=50, validation=5, cache=True)
    os.truncate(tmp_path / "set" / "train" / "tokens.bin", 10)
    both_looked = threading.Barrier(2, timeout=LIMIT_SECONDS)
    existing = token_store._existing
    calls = threading.local()

    def looked(*arguments):
        found = existing(*arguments)
        if not hasattr(calls, "first"):
            calls.first = True
            both_looked.wait()
        return found

    written = []
    really = token_store._write
    monkeypatch.setattr(token_store, "_existing", looked)
    monkeypatch.setattr(token_store, "_write", lambda *arguments: written.append(1) or really(*arguments))
    programs = [
        threading.Thread(target=write, args=(tmp_path / "set", tokenizer, None, 50, 5, None, True)) for _ in range(2)
    ]
    for program in programs:
        program.start()
    for program in programs:
        program.join(LIMIT_SECONDS)
    assert written == [1]
    assert len(open_tokenised(tmp_path / "set").train) == 50


@pytest.mark.parametrize(
    ("name", "left", "cache"),
    [
        ("parent/.set.lock", "folder", True),
        ("parent/set.partial", "junk", True),
        ("parent", "junk", True),
        ("parent", "junk", False),
    ],
)
def test_what_is_in_the_way_of_a_set_is_named(tokenizer, tmp_path, name, left, cache):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    content_of(tmp_path / name, left)
    with pytest.raises(ConfigError, match=f"{'cache_dir' if cache else '--output_dir'}: cannot write .*{name}"):
        write(tmp_path / "parent" / "set", tokenizer, train=50, validation=5, cache=cache)
