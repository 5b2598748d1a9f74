"""Other ways to compute: bfloat16 over float32 parameters, and a compiled model."""

import functools

import pytest
import torch

from algorithms.batch.per_example import step_estimate
from fabrics.data.examples import PackedSequences
from fabrics.models.initialisation import compile_mode
from fabrics.pool.eval_tool import evaluate_batches
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import backward
from tests.support.helpers import CPU, light_cluster, make_config, probed_backward, random_sequences, tiny_llama
from utils.config.schema import ConfigError


def test_autocast_computes_in_bfloat16_and_keeps_everything_else_in_float32():
    working = FlatModel(tiny_llama(dtype=torch.float32), CPU, torch.bfloat16)
    exact = FlatModel(tiny_llama(dtype=torch.float32), CPU)
    examples = PackedSequences(random_sequences(8))
    batch = {"input_ids": examples.batch([0, 1], CPU)["input_ids"]}
    for model in (working, light_cluster(autocast="bfloat16").model):
        assert model.logits(batch).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    for model in (working, exact):
        backward(model, examples, range(8))
    assert working.parameters.dtype == working.gradient.dtype == torch.float32
    difference = (working.gradient - exact.gradient).norm() / exact.gradient.norm()
    assert 1e-5 < difference < 0.03


def test_statistics_under_autocast_are_those_of_one_example_at_a_time():
    """The examples' gradients as autocast rounds them: so the loop runs under autocast, too."""
    working = FlatModel(tiny_llama(dtype=torch.float32), CPU, torch.bfloat16)
    examples = PackedSequences(random_sequences(6))
    gradients = []
    for index in range(6):
        backward(working, examples, [index])
        gradients.append(working.gradient.double().clone())
        working.gradient.zero_()
    rows = torch.stack(gradients)
    _, probe = probed_backward(working, examples, range(6))
    assert step_estimate([probe]).variance == pytest.approx(rows.var(0).sum().item(), rel=0.02)
    assert probe.squared_norm.item() == pytest.approx(rows.mean(0).square().sum().item(), rel=0.02)


def test_a_compiled_model_gives_the_same_gradients_and_statistics(monkeypatch):
    """Through the compiler's front end; code generation would only cost time here. Attention has no mask there."""
    graphs, ran = [], []

    def front_end(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = functools.partial(torch.compile, backend=front_end)

    def compile_and_count(module, mode):
        inner = compiled(module)

        def run(**batch):
            ran.append(len(batch["input_ids"]))
            return inner(**batch)

        return run

    monkeypatch.setattr(torch, "compile", compile_and_count)
    torch.compiler.set_stance("default")  # a pass with statistics that another test left open keeps it eager
    examples, found = PackedSequences(random_sequences(8)), []
    for wanted in (False, True):
        working = FlatModel(tiny_llama(num_hidden_layers=1), CPU, compiled=wanted)
        backward(working, examples, range(5))
        first = working.gradient.clone()
        working.gradient.zero_()
        _, probe = probed_backward(working, examples, range(5))
        backward(working, examples, range(3))
        backward(working, examples, range(8))
        evaluate_batches(working, examples, 4, [0, 1])
        found.append((first, step_estimate([probe]).variance))
    assert ran == [2, 5, 3, 8]  # first of all for two examples, and neither the pass with hooks nor evaluation
    assert len(graphs) == 1
    attention = torch.nn.functional.scaled_dot_product_attention
    (called,) = (node for node in graphs[0].graph.nodes if node.target is attention)
    assert (called.kwargs.get("attn_mask"), called.kwargs["is_causal"]) == (None, True)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=1e-12)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-12)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("key", "device", "parameters", "expected"),
    [
        (False, "cuda:0", 10, False),
        (True, "cuda:0", 10, True),
        ("auto", "cuda:0", 10_000_000, "reduce-overhead"),
        ("auto", "cuda:0", 10_000_001, True),
        ("auto", "cpu", 10, False),
    ],
)
def test_compile_model_auto_decides_by_device_and_size(key, device, parameters, expected):
    module = torch.nn.Linear(parameters, 1, bias=False, device="meta")
    assert compile_mode(make_config(compile_model=key), torch.device(device), module) == expected


def test_compile_model_compiles_or_is_refused_without_a_compiler(monkeypatch):
    assert light_cluster().model._compiled_module is None
    assert light_cluster(compile_model="auto").model._compiled_module is None
    assert light_cluster(compile_model=True).model._compiled_module is not None
    with pytest.raises(ConfigError, match="compile_model: must be true or false on CPUs, got reduce-overhead"):
        light_cluster(compile_model="reduce-overhead")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile_model: true needs the C\+\+ compiler no-such-compiler"):
        light_cluster(compile_model=True)
