"""Recomputed activations: the same bits, fewer tensors. And the type of parameters."""

import functools

import pytest
import torch

from algorithms.batch.per_example import step_estimate
from fabrics.data.examples import PackedSequences
from fabrics.models.initialisation import recompute_activations
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import backward
from tests.support.helpers import (
    CPU,
    light_cluster,
    probed_backward,
    random_sequences,
    separable_texts,
    tiny_bert,
    tiny_cluster,
    tiny_llama,
)
from utils.config.schema import ConfigError

MODELS = {
    "llama": (lambda: tiny_llama(num_hidden_layers=4), lambda: PackedSequences(random_sequences(8))),
    "tied llama": (lambda: tiny_llama(tied=True, num_hidden_layers=4), lambda: PackedSequences(random_sequences(8))),
    "bert with dropout": (lambda: tiny_bert(dropout=0.3, num_hidden_layers=4), lambda: separable_texts(8)),
}


def saved_by(work) -> tuple[int, int]:
    """Return the number of storages, and their bytes, that autograd keeps until the backward pass."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return len(sizes), sum(sizes.values())


def _pass(run, working, examples, results) -> None:
    results.append(run(working, examples, range(8)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("probed", [False, True], ids=["plain", "with statistics"])
def test_recomputation_gives_the_same_bits_with_less_than_half_of_the_tensors(name, probed):
    (build, data), found = MODELS[name], []
    for recomputes in (False, True):
        module, examples = build().train(), data()
        if recomputes:
            recompute_activations(module, "microllama")
        working, results = FlatModel(module, CPU), []
        torch.manual_seed(1)  # of dropout
        run = probed_backward if probed else backward
        saved = saved_by(functools.partial(_pass, run, working, examples, results))
        loss, estimate = (results[0][0], step_estimate([results[0][1]])) if probed else (results[0], None)
        found.append((saved, loss, estimate, working.gradient))
    (plain, *expected), (fewer, *numbers) = found
    assert fewer[0] < plain[0] / 2
    assert fewer[1] < plain[1] / 2
    assert torch.equal(numbers[0], expected[0])
    assert numbers[1] == expected[1]
    assert torch.equal(numbers[2], expected[2])


def test_frozen_embeddings_need_no_gradient():
    model = tiny_llama()
    model.get_input_embeddings().requires_grad_(False)
    recompute_activations(model, "microllama")
    assert not model.get_input_embeddings()(torch.tensor([[1, 2]])).requires_grad


def test_all_layers_of_a_run_recompute_their_activations_if_it_is_configured():
    for recomputes in (False, True):
        cluster = tiny_cluster(activation_checkpointing=recomputes)
        layers = [m for m in cluster.model.module.modules() if hasattr(m, "gradient_checkpointing")]
        assert layers
        assert all(layer.gradient_checkpointing is recomputes for layer in layers)


def test_a_module_that_cannot_recompute_is_refused():
    with pytest.raises(ConfigError, match="activation_checkpointing: must be false with model_type microllama"):
        light_cluster(activation_checkpointing=True)
