"""Conversations: which tokens are targets, and what is refused."""

import dataclasses
import json
import logging

import pytest
import torch

from fabrics.config_checks import CHECKS
from fabrics.data import messages
from fabrics.data.dataset_loader import load_data
from fabrics.data.documents import DatasetError, Document, Skipped
from fabrics.data.messages import answers_in, check_opening, conversations, encode, written
from fabrics.data.tokenization import train_tokenizer
from tests.support.chat import NUMBERS, assistant, chat_tokenizer, small_talk, user, write_messages
from tests.support.helpers import CPU
from utils.config.reading import parse_config
from utils.config.schema import ConfigError


@pytest.fixture
def make(tmp_path):
    """Configurations on a file of conversations."""
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def make(talk, **values):
        defaults = {
            "dataset": "messages",
            "text_files": [write_messages(tmp_path / "chat.jsonl", talk)],
            "tokenizer": str(tmp_path / "tokenizer"),
            "number_of_outer_steps": 2,
            "number_of_initial_trainers": 1,
            "sequence_length": 64,
            "val_size": 1,
            "max_batch_size": 8,
            "cache_dir": str(tmp_path / "cache"),
        }
        return parse_config(defaults | values, (), CHECKS)[0]

    return make


def numbers(text: str) -> list[int]:
    return [-100 if word == "-" else NUMBERS[word] for word in text.split()]


def examples_by_length(data) -> dict[int, dict[str, torch.Tensor]]:
    """Return each training and validation example as a batch of its own, by its tokens."""
    return {
        part.tokens([index]): part.batch([index], CPU)
        for part in (data.train, data.validation)
        for index in range(len(part))
    }


def test_only_answers_and_the_token_that_ends_them_are_targets(make):
    """Two turns, and one with a system message."""
    system = {"role": "system", "content": "w9"}
    talk = [
        [user("w1 w2"), assistant("w3"), user("w4"), assistant("w5 w6")],
        [system, user("w1"), assistant("w2")],
    ]
    data = load_data(make(talk))
    found = examples_by_length(data)
    text = "<user> w1 w2 <end> <assistant> w3 <end> <user> w4 <end> <assistant> w5 w6 <end>"
    aims = "- - - - - w3 <end> - - - - w5 w6 <end>"
    assert found[14]["input_ids"][0, :14].tolist() == numbers(text)
    assert found[14]["labels"][0].tolist() == numbers(aims) + [-100] * 50
    assert found[9]["labels"][0].tolist() == numbers("- - - - - - - w2 <end>") + [-100] * 55
    # The library's own tokens of the conversation.
    assert data.tokenizer.apply_chat_template(talk[0])["input_ids"] == numbers(text)


def test_conversations_are_cut_and_those_without_an_answer_left_are_skipped(make):
    talk = [[user(f"w{n}"), assistant("w2 w3 w4 w5")] for n in range(4)] + [[user("w1 " * 6), assistant("w1")]]
    data = load_data(make(talk, sequence_length=6, val_size=2))
    for part in (data.train, data.validation):
        batch = part.batch(range(len(part)), CPU)
        assert batch["labels"].tolist() == [numbers("- - - - w2 w3")] * len(part)
    assert data.documents["train"] + data.documents["validation"] == 4
    assert data.skipped == {"without an answer within sequence_length": 1}
    with pytest.raises(ConfigError, match=r"sequence_length: no validation .* within 3 tokens: 1 without an answer"):
        load_data(make(talk, sequence_length=3))


def test_a_conversation_that_is_cut_leads_to_no_warning_of_its_length(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = chat_tokenizer()
    tokenizer.model_max_length = 4
    document = Document(json.dumps([user("w1"), assistant("w2 w3 w4")]), "chat.jsonl:1")
    part, _ = encode(lambda skipped: iter([document]), tokenizer, 5, Skipped(), "training")
    assert len(part.tokens) == 5
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[]", 'must be an object with a list "messages"'),
        ('{"messages": []}', 'must be an object with a list "messages"'),
        ('{"messages": [{"role": "user"}]}', 'message 1 must have a "role" and a "content"'),
        ('{"messages": [{"role": "user", "content": "w1"}]}', 'no message has the role "assistant"'),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "begins with an answer"),
        ('{"messages": [{"role": "assistant", "content": "w1", "weight": 0}]}', 'an answer has a "weight"'),
        ('{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}', 'has "tools" or "tool_calls"'),
        ('{"messages": [{"role": "assistant", "content": "w1"}], "tools": [{}]}', 'has "tools" or "tool_calls"'),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, problem):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [user("w1"), assistant("w2")]}) + "\n\n" + line + "\n")
    skipped = Skipped()
    with pytest.raises(DatasetError, match=rf"chat\.jsonl:3: {problem}"):
        list(conversations([file], skipped))
    assert skipped.first == {"empty": f"{file}:2"}


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [user("w1 \ud83d"), assistant("\U0001f600")]}))  # in ASCII
    (document,) = conversations([file], Skipped())
    assert json.loads(document.text) == [user("w1 ?"), assistant("\U0001f600")]


def test_a_template_with_the_date_writes_the_same_text_on_every_day():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} " + tokenizer.chat_template
    text = written(tokenizer, [user("w1"), assistant("w2")])
    assert text == "26 Jul 2024 <user> w1 <end> <assistant> w2 <end> "


def test_a_template_that_hides_where_answers_are_is_refused(make, tmp_path):
    tokenizer = chat_tokenizer()
    talk = [user("w1"), assistant("w2"), user("w3"), assistant("w4")]
    # As some templates drop the reasoning of earlier answers.
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if loop.last else '-' }} {% endfor %}"
    with pytest.raises(ValueError, match="writes the messages up to 2 differently when others follow"):
        answers_in(tokenizer, talk, written(tokenizer, talk), 99)
    tokenizer.chat_template = "{{ raise_exception('no tools') }}"
    tokenizer.save_pretrained(tmp_path / "refusing")
    with pytest.raises(ConfigError, match=r"messages cannot be loaded: .*chat\.jsonl:\d: .*refuses .*: no tools"):
        load_data(make(small_talk(3), tokenizer=str(tmp_path / "refusing")))


def test_a_template_that_opens_answers_unasked_is_refused_unless_it_writes_nothing_before_them(make, tmp_path):
    tokenizer = chat_tokenizer()
    check_opening(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | lower }} {% endfor %}"
    check_opening(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no questions') }}"
    check_opening(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "unasked")
    with pytest.raises(ConfigError, match=r"^tokenizer: its chat template ignores .* 'assistant: ', with which it"):
        load_data(make(small_talk(3), tokenizer=str(tmp_path / "unasked")))


def test_weights_of_one_and_of_questions_are_no_problem(make):
    talk = [[user(f"w{n}") | {"weight": 0}, assistant("w2") | {"weight": weight}] for n, weight in enumerate((1, None))]
    assert load_data(make(talk)).documents == {"train": 1, "validation": 1}


def test_answers_beyond_the_cut_are_not_looked_for():
    tokenizer = chat_tokenizer()
    talk = [user("w1"), assistant("w2"), user("w3"), assistant("w4")]
    text = written(tokenizer, talk)
    first, second = answers_in(tokenizer, talk, text, len(text))
    assert answers_in(tokenizer, talk, text, second[0]) == [first]


def test_conversations_that_the_template_writes_alike_are_in_one_part(make, tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message.content", "message.content | trim")
    tokenizer.save_pretrained(tmp_path / "trims")
    talk = small_talk(40)
    spaced = [[user(question["content"] + " "), answer] for question, answer in talk]
    data = load_data(make(talk + spaced, val_size=10, tokenizer=str(tmp_path / "trims")))
    training, validation = (
        {tuple(part.batch([index], CPU)["input_ids"][0].tolist()) for index in range(len(part))}
        for part in (data.train, data.validation)
    )
    assert not training & validation
    assert data.skipped == {"the same text as a validation conversation": 80 - len(data.train) - 10}


def test_conversations_that_spell_a_special_token_are_skipped(make):
    data = load_data(make([*small_talk(5), [user("w1"), assistant("w2 <end> w3")]]))
    assert data.skipped == {"with a special token in a message": 1}


def test_a_cached_set_does_not_take_the_chat_template_away(make, tmp_path):
    plain = chat_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "text.txt").write_text("\n\n".join(f"w{number} w1 w2 w3 w4" for number in range(20)))
    values = {"dataset": "text", "text_files": [str(tmp_path / "text.txt")], "text_documents": "blank_lines"}
    values |= {"sequence_length": 4}
    assert load_data(make([], **values, tokenizer=str(tmp_path / "plain"))).tokenizer.chat_template is None
    assert load_data(make([], **values)).tokenizer.chat_template is not None


def test_conversations_are_tokenised_once(make, tmp_path, monkeypatch):
    """A second run reads the cache, unless files, cut, sizes, template or cache have changed."""
    encoded = []
    monkeypatch.setattr(messages, "encode", lambda *values: encoded.append(values[4]) or encode(*values))
    talk = [*small_talk(5), [user("w1"), assistant("w2 <end> w3")]]
    config = make(talk)
    first, second = load_data(config), load_data(config)
    assert encoded == ["validation", "training"]
    assert (second.fingerprint(), second.skipped) == (first.fingerprint(), {"with a special token in a message": 1})
    (cached,) = (tmp_path / "cache" / "tokenised").glob("*.npz")
    cached.write_bytes(b"PK")
    assert load_data(config).fingerprint() == first.fingerprint()
    cached.unlink()
    cached.mkdir()
    assert load_data(config).fingerprint() == first.fingerprint()
    assert cached.is_file()
    other = chat_tokenizer()
    other.chat_template = other.chat_template.replace("<end>", "<end> <end>")
    other.save_pretrained(tmp_path / "other")
    roles = chat_tokenizer()
    roles.bos_token = "<end>"
    roles.save_pretrained(tmp_path / "roles")
    for change in (
        {"sequence_length": 63},
        {"val_size": 2},
        {"data_sample_size": 3},
        {"tokenizer": str(tmp_path / "other")},
        {"tokenizer": str(tmp_path / "roles")},
    ):
        load_data(dataclasses.replace(config, **change))
    make(talk[1:])  # writes other files
    assert len(load_data(config).train) == len(first.train) - 1
    assert encoded == ["validation", "training"] * 9


def test_conversations_need_no_cache(make, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file in its place")
    assert len(load_data(make(small_talk(5))).train) == 4
    assert "cache_dir: cannot write" in caplog.text


def test_a_tokenizer_without_a_chat_template_is_refused(make, tmp_path):
    train_tokenizer(["w1 w2"], 300).save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="tokenizer: dataset messages needs one with a chat template"):
        load_data(make(small_talk(3), tokenizer=None))
    with pytest.raises(ConfigError, match=r"tokenizer: .*plain has no chat template, which dataset messages needs"):
        load_data(make(small_talk(3), tokenizer=str(tmp_path / "plain")))
