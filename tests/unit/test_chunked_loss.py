"""The loss in chunks of tokens: the numbers of the plain loss, without a tensor of all logits."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from algorithms.batch.per_example import step_estimate
from algorithms.batch.switch_mode import ExecutionPlan
from fabrics.config_checks import CHECKS
from fabrics.data.examples import PackedSequences
from fabrics.models.attention import ARCHITECTURES
from fabrics.models.initialisation import recompute_activations
from fabrics.pool.eval_tool import evaluate_batches
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import accumulate_gradients
from tests.support.helpers import (
    CPU,
    language_model,
    light_cluster,
    random_sequences,
    tiny_llama,
)
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

PLAN = ExecutionPlan((4, 3))
TOKENS = 9


class WithPadding(PackedSequences):
    """Sequences of which one ends early, and one has a single target."""

    def batch(self, indices, device):
        found = super().batch(indices, device)
        labels = found["labels"].clone()
        labels[0, 5:] = -100
        labels[1, 2:] = -100
        return found | {"labels": labels}


def largest_tensor(work: Callable[[], object]) -> int:
    """Return the most elements of a tensor that an operation gets."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        work()
    shapes = [shape for event in recorded.events() for shape in event.input_shapes]
    return max(math.prod(shape) for shape in shapes if shape and all(isinstance(size, int) for size in shape))


def found_by(module, chunk: int | None, recomputes: bool = False, probe: bool = True):
    """Return loss, statistics, gradient and evaluation of a model."""
    if recomputes:
        recompute_activations(module, "microllama")
    model = FlatModel(module, CPU, loss_chunk_tokens=chunk)
    examples = WithPadding(random_sequences(7, TOKENS))
    loss, probes = accumulate_gradients(model, examples, PLAN, np.arange(7), probe)
    evaluated = torch.tensor(list(evaluate_batches(model, examples, 4, [0, 1]).values()))
    return loss, step_estimate(probes) if probe else None, model.gradient, evaluated


def assert_close(found, expected):
    torch.testing.assert_close(
        (found[0], found[2], found[3]), (expected[0], expected[2], expected[3]), rtol=1e-12, atol=1e-12
    )
    if expected[1] is not None:
        for name, value in vars(expected[1]).items():
            assert getattr(found[1], name) == pytest.approx(value, rel=1e-12, nan_ok=True), name


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_losses_gradients_and_evaluation_are_those_of_all_logits(architecture):
    def build():
        return language_model(architecture).double()

    expected = found_by(build(), None, probe=False)
    for chunk in (1, 4, TOKENS):
        assert_close(found_by(build(), chunk, probe=False), expected)


@pytest.mark.parametrize(
    ("wide", "tied", "recomputes"),
    [(False, False, False), (False, True, True), (True, True, False), (True, False, True)],
)
def test_statistics_are_those_of_all_logits(wide, tied, recomputes):
    """The head's shares are built where T (width + vocabulary) > width * vocabulary, as with width 8 and T 9."""

    def build():
        size = 32 if wide else 8
        return tiny_llama(tied=tied, hidden_size=size, num_attention_heads=2, num_key_value_heads=1)

    expected = found_by(build(), None)
    for chunk in (1, 4):
        assert_close(found_by(build(), chunk, recomputes), expected)


def test_no_tensor_has_the_logits_of_more_than_a_chunk():
    examples = PackedSequences(random_sequences(8, TOKENS))
    sizes = []
    for chunk in (None, 2):
        model = FlatModel(tiny_llama(vocab_size=20_000), CPU, loss_chunk_tokens=chunk)
        trained = partial(accumulate_gradients, model, examples, ExecutionPlan((8,)), np.arange(8), False)
        evaluated = partial(evaluate_batches, model, examples, 8, [0])
        sizes.append([largest_tensor(work) / 8 / 20_000 for work in (trained, evaluated)])
    assert sizes == [[TOKENS, TOKENS], [2, 2]]


def test_a_module_whose_logits_may_be_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"loss_chunk_tokens: must be null with OneTokenModel; known are .* llama"):
        light_cluster(loss_chunk_tokens=4)
    with pytest.raises(ConfigError, match="loss_chunk_tokens: must be null with devices_per_node 2, got 4"):
        parse_config({"number_of_outer_steps": 1, "loss_chunk_tokens": 4, "devices_per_node": 2}, checks=CHECKS)
