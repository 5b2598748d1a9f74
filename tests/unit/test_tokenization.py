"""Tokenizers: what is trained, what is loaded, and how two are distinguished."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from fabrics.data import tokenization
from fabrics.data.tokenization import (
    END_OF_TEXT,
    describe,
    end_of_text,
    fingerprint,
    load_tokenizer,
    named_tokenizer,
    padding,
    train_tokenizer,
    with_short_words,
)
from tests.support.helpers import make_config
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["naïve café, 東京, \t tabs and  spaces\n", "the cluster owns the nodes " * 20]


def test_byte_level_bpe_gives_every_text_back():
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    assert len(tokenizer) <= 300
    for text in [*DOCUMENTS, "unseen: ßæ 🙂"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    assert end_of_text(tokenizer) == padding(tokenizer) == tokenizer.eos_token_id


def test_training_sees_no_long_word(monkeypatch):
    monkeypatch.setattr(tokenization, "LONGEST_WORD", 5)
    text = "a few short words\n" + "ACGT" * 4 + " \t" * 9 + "end"
    assert with_short_words(text) == "a few short words\nACGTA\nCGTAC\nGTACG\nT \t \t end"
    assert with_short_words("12345") == "12345"
    tokenizer = train_tokenizer([text * 9], 400)
    assert max(len(token) for token in tokenizer.get_vocab() if set(token) <= set("ACGT")) == 5
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_word_piece_is_berts():
    tokenizer = train_tokenizer(["The cluster owns the nodes. " * 9], 60, "classification")
    ids = tokenizer("THE nodes 東", truncation=True, max_length=20)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "[CLS]"
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["[UNK]", "[SEP]"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the nodes"
    assert padding(tokenizer) == tokenizer.pad_token_id == 0
    assert len(tokenizer("the " * 50, truncation=True, max_length=20)["input_ids"]) == 20
    with pytest.raises(ConfigError, match=r"tokenizer: .* has no end-of-text token"):
        end_of_text(tokenizer)


def test_the_same_documents_give_the_same_tokenizer_in_another_process(programs):
    program = (
        "from pathlib import Path; from fabrics.data.tokenization import *; "
        "documents = Path('README.md').read_text(encoding='utf-8').split('\\n\\n'); "
        "print(*(fingerprint(train_tokenizer(documents, 500, task)) for task in ('causal_lm', 'classification')))"
    )
    documents = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    assert programs.run("-c", program).stdout.split() == [
        fingerprint(train_tokenizer(documents, 500, task)) for task in ("causal_lm", "classification")
    ]


def test_only_the_beginning_of_a_corpus_is_learned(monkeypatch):
    monkeypatch.setattr(tokenization, "TRAINING_CHARACTERS", 100)
    read = []

    def documents():
        for index in range(10_000):
            read.append(index)
            yield "words " * 5

    train_tokenizer(documents(), 300)
    assert len(read) == 4


def test_equal_tokenizers_have_equal_fingerprints_wherever_they_lie(tmp_path):
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path), "tokenizer")
    # A call leaves its truncation behind in the tokenizer.
    again(["a b c"] * 3, truncation=True, max_length=2, padding=True)
    assert fingerprint(again) == fingerprint(tokenizer) == fingerprint(train_tokenizer(DOCUMENTS, 300))
    others = [train_tokenizer(DOCUMENTS, 299), train_tokenizer([*DOCUMENTS, "something else entirely"], 300)]
    backend = train_tokenizer(DOCUMENTS, 300).backend_tokenizer
    others.append(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="the"))
    assert len({fingerprint(other) for other in [tokenizer, *others]}) == 4
    assert describe(again) == f"{tmp_path} (300 tokens, fingerprint {fingerprint(tokenizer)})"


def test_the_configs_tokenizer_wins_over_the_models(tmp_path):
    for name, size in (("own", 300), ("model", 280)):
        train_tokenizer(DOCUMENTS, size).save_pretrained(tmp_path / name)
    model = {"name": str(tmp_path / "model"), "pretrained": True}
    assert len(named_tokenizer(make_config(tokenizer=str(tmp_path / "own"), model_config=model))) == 300
    assert len(named_tokenizer(make_config(model_config=model))) == 280
    assert named_tokenizer(make_config(model_config={"preset": "demo"})) is None


def test_a_tokenizer_that_cannot_be_loaded_names_its_key():
    with pytest.raises(ConfigError, match=r"^tokenizer: cannot load the tokenizer '/no/such'"):
        named_tokenizer(make_config(tokenizer="/no/such"))
    with pytest.raises(ConfigError, match=r"^model_config\.name: cannot load the tokenizer '/no/such'"):
        named_tokenizer(make_config(model_config={"name": "/no/such", "pretrained": True}))
