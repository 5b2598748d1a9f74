"""Samples of text: the right prompts, the model's distribution, no side effects."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from fabrics.data.examples import PackedSequences
from fabrics.models import continuations as module_under_test
from fabrics.models.continuations import COUNT, NEW_TOKENS, PROMPT_TOKENS, continuations, sample_tokens
from fabrics.training.flat_model import FlatModel
from tests.support.helpers import CPU, VOCABULARY, padded, separable_texts, tiny_data, tiny_llama


@pytest.fixture
def working():
    working = FlatModel(tiny_llama(max_position_embeddings=128), CPU)
    return working, working.parameters.detach().clone()


def data_of(validation, **values):
    return dataclasses.replace(tiny_data(), validation=validation, **values)


def prompts(count: int = 3, length: int = 7) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (count, length)))


def test_with_one_candidate_sampling_equals_greedy_generation(monkeypatch):
    model = tiny_llama().eval()
    monkeypatch.setattr(module_under_test, "TOP_K", 1)
    expected = model.generate(
        prompts(), attention_mask=torch.ones_like(prompts()), do_sample=False, max_new_tokens=11, eos_token_id=None
    )
    assert sample_tokens(model, prompts(), 11, seed=0).tolist() == expected[:, 7:].tolist()


def test_tokens_are_drawn_from_the_models_distribution(monkeypatch):
    """The first token of 20,000 equal prompts: the TOP_K most likely tokens at the temperature, and no others."""
    monkeypatch.setattr(module_under_test, "TOP_K", 5)
    model, prompt = tiny_llama().eval(), prompts(1, 2)
    with torch.no_grad():
        logits = model(input_ids=prompt).logits[0, -1]
    kept = logits.topk(5).indices
    expected = torch.zeros(VOCABULARY, dtype=torch.float64)
    expected[kept] = (logits[kept] / 0.8).softmax(-1)
    drawn = sample_tokens(model, prompt.repeat(20_000, 1), 1, seed=3)
    shares = torch.bincount(drawn[:, 0], minlength=VOCABULARY) / 20_000
    assert torch.allclose(shares.double(), expected, atol=0.015)  # four standard deviations
    assert shares[expected == 0].sum() == 0


def test_the_seed_decides_and_no_global_generator_changes(working):
    model, parameters = working
    texts = data_of(PackedSequences(np.random.default_rng(1).integers(5, VOCABULARY, (50, 64))))
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    first = continuations(model, parameters, texts, seed=1)
    torch.rand(5)
    assert continuations(model, parameters, texts, seed=1) == first
    other = continuations(model, parameters, texts, seed=2)
    assert {text.prompt for text in other}.isdisjoint(text.prompt for text in first)
    torch.set_rng_state(states[0])
    continuations(model, parameters, texts, seed=1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert model.module.training


def test_the_given_parameters_are_sampled_from(working):
    model, parameters = working
    texts = data_of(PackedSequences(np.random.default_rng(1).integers(5, VOCABULARY, (9, 64))))
    first = continuations(model, parameters, texts, seed=1)
    model.load(torch.zeros_like(parameters))
    assert continuations(model, parameters, texts, seed=1) == first
    assert continuations(model, -parameters, texts, seed=1) != first


@pytest.mark.parametrize(
    ("sequence_length", "prompt", "new"), [(9, 4, 5), (64, 32, 32), (128, PROMPT_TOKENS, NEW_TOKENS)]
)
def test_packed_texts_end_with_the_sequence(working, monkeypatch, sequence_length, prompt, new):
    model, parameters = working
    tokens = np.random.default_rng(1).integers(5, VOCABULARY, (50, sequence_length))
    data = data_of(PackedSequences(tokens))
    monkeypatch.setattr(type(data.tokenizer), "decode", lambda self, tokens, **_: tuple(tokens))
    monkeypatch.setattr(
        module_under_test, "sample_tokens", lambda _, prompts, new, seed: torch.full((len(prompts), new), 7)
    )
    found = continuations(model, parameters, data, seed=0)
    assert len(found) == COUNT == 3
    rows = {tuple(row[:prompt]): tuple(row[prompt : prompt + new]) for row in tokens.tolist()}
    assert [text.reference for text in found] == [rows[text.prompt] for text in found]
    assert [len(text.continuation) for text in found] == [new] * 3


def test_texts_end_at_the_end_of_text_token(working, monkeypatch):
    model, parameters = working
    data = data_of(PackedSequences(np.tile(np.array([[7, 8, 9, 6, 5, 0, 4, 4]]), (4, 1))))
    assert data.tokenizer.eos_token_id == 0
    monkeypatch.setattr(type(data.tokenizer), "decode", lambda self, tokens, **_: list(tokens))
    monkeypatch.setattr(module_under_test, "sample_tokens", lambda *arguments: torch.tensor([[1, 2, 0, 3]] * 3))
    (text, *_) = continuations(model, parameters, data, seed=0)
    assert (text.prompt, text.continuation, text.reference) == ([7, 8, 9, 6], [1, 2], [5])


def test_texts_of_other_lengths_and_of_classes_are_not_continued(working):
    model, parameters = working
    assert continuations(model, parameters, data_of(separable_texts(9), task="classification"), seed=0) == []
    assert continuations(model, parameters, data_of(padded([[1], [2, 3]])), seed=0) == []
