"""Examples: packed and padded sequences, and that padding counts nowhere."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.batch.losses import IGNORE_INDEX
from algorithms.batch.per_example import step_estimate
from fabrics.data.examples import PackedSequences
from fabrics.pool.eval_tool import batch_count, combine, evaluate_batches
from fabrics.training.flat_model import FlatModel
from tests.support.helpers import (
    CPU,
    VOCABULARY,
    evaluate,
    example_gradients,
    make_config,
    make_trainer,
    padded,
    probed_backward,
    sequence_loss,
    tiny_bert,
    tiny_llama,
    train,
)


def random_texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, VOCABULARY, generator.integers(2, longest + 1)).tolist() for _ in range(count)]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32])
def test_packed_sequences_are_rows(dtype, tmp_path):
    tokens = np.arange(40, dtype=dtype).reshape(8, 5)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype, mode="r", shape=(8, 5))
    for examples in (PackedSequences(tokens), PackedSequences(mapped)):
        batch = examples.batch([6, 0, 6], CPU)
        assert batch["input_ids"].tolist() == tokens[[6, 0, 6]].tolist()
        assert batch["input_ids"].dtype == torch.int64
        assert batch["labels"] is batch["input_ids"]
        assert (len(examples), examples.tokens([6, 0, 6]), examples.tokens_per_example) == (8, 15, 5)


TEXTS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=70), min_size=1, max_size=9)


@given(TEXTS, st.sampled_from([1, 9, 65, 500]), st.booleans())
def test_padding_is_on_the_right_masked_and_as_wide_as_the_batch_needs(texts, limit, classified):
    classes = list(range(len(texts))) if classified else None
    examples = padded(texts, classes, limit)
    indices = np.arange(len(texts))[::-1]
    batch = examples.batch(indices, CPU)
    cut = [texts[index][:limit] for index in indices]
    longest = max(len(text) for text in cut)
    width = min(64 if longest <= 64 else 128, limit)
    assert batch["input_ids"].shape == (len(texts), width)
    for row, text in enumerate(cut):
        rest = width - len(text)
        assert batch["input_ids"][row].tolist() == [*text, *[0] * rest]
        if classified:
            assert batch["attention_mask"][row].tolist() == [*[1] * len(text), *[0] * rest]
        else:
            assert batch["labels"][row].tolist() == [*text, *[IGNORE_INDEX] * rest]
    assert ("attention_mask" in batch) == classified
    assert examples.tokens(indices) == sum(map(len, cut))
    assert examples.tokens_per_example is None
    assert min(len(texts[examples.largest]), limit) == longest


def test_classes_are_the_labels_of_a_classification():
    examples = padded([[3, 4], [5], [6, 7, 8]], [1, 0, 1])
    assert examples.batch([2, 1], CPU)["labels"].tolist() == [1, 0]
    assert examples.largest == 2


def test_padding_counts_neither_in_the_statistics_nor_in_the_gradient():
    texts = random_texts(7, 12)
    model = tiny_llama()
    gradients = example_gradients(tiny_llama(), map(torch.tensor, texts), sequence_loss)
    trainer = make_trainer(model, make_config(), padded(texts))
    working = trainer.local_workers[0].model
    _, probe = probed_backward(working, padded(texts), np.arange(7))
    mean = gradients.mean(0)
    # Llama's own norm computes in float32 whatever the model's type.
    assert probe.squared_norm.item() == pytest.approx(mean.square().sum().item(), rel=1e-4)
    variance = (gradients - mean).square().sum().item() / 6
    assert step_estimate([probe]).variance == pytest.approx(variance, rel=1e-4)
    own = torch.cat([p.grad.flatten() for p in working.module.parameters()])
    torch.testing.assert_close(own, mean, rtol=1e-4, atol=1e-7)


def test_padding_counts_neither_in_loss_nor_in_perplexity():
    texts = random_texts(7, 12)
    model = tiny_llama(dtype=torch.float32).eval()
    losses = [sequence_loss(model, torch.tensor(text)).item() for text in texts]
    expected = np.average(losses, weights=[len(text) - 1 for text in texts])
    for batch_size in (1, 2, 3):
        result = evaluate(model, padded(texts), "causal_lm", batch_size)
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert result.metric == pytest.approx(np.exp(expected), rel=1e-5)


def test_accumulated_padded_batches_are_one_batch():
    texts = random_texts(80, 12, seed=2)
    whole, parts = (
        make_trainer(tiny_llama(), make_config(INITIAL_BATCH_SIZE=7, sampling_method="none"), padded(texts), 1, largest)
        for largest in (7, 3)
    )
    train(whole, 2)
    (report, _) = train(parts, 2)
    # With threshold_switch_mode 7 > 2 * 3 is accumulated.
    assert report.workers[0].plan.micro_batches == (3, 2, 2)
    torch.testing.assert_close(parts.parameters, whole.parameters, rtol=1e-6, atol=1e-9)


def test_accuracy_is_the_share_of_correct_classes():
    texts = random_texts(50, 9)
    classes = np.random.default_rng(0).integers(0, 3, 50)
    model = tiny_bert(num_labels=3).eval()
    predicted = np.array([model(input_ids=torch.tensor([text])).logits.argmax().item() for text in texts])
    assert evaluate(model, padded(texts, classes), "classification", 8).metric == (predicted == classes).mean()


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_an_evaluation_in_parts_is_the_whole_one_bit_for_bit(workers):
    texts = random_texts(50, 9, 0)
    labelled = padded(texts, np.random.default_rng(0).integers(0, 2, 50))
    for model, examples, task in (
        (tiny_bert(dtype=torch.float32).eval(), labelled, "classification"),
        (tiny_llama(dtype=torch.float32).eval(), padded(texts), "causal_lm"),
    ):
        shares = [range(worker, batch_count(examples, 7), workers) for worker in range(workers)]
        parts = [evaluate_batches(FlatModel(model, CPU), examples, 7, share) for share in shares]
        assert combine(reversed(parts), task) == evaluate(model, examples, task, 7)
