"""Per-example statistics against one backward pass per example."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from algorithms.batch.per_example import (
    PerExampleProbe,
    UnsupportedModuleError,
    compared_micro_batches,
    step_estimate,
)
from tests.support.helpers import (
    VOCABULARY,
    example_gradients,
    flat_gradient,
    per_example_statistics,
    sample_statistics,
    tiny_bert,
    tiny_llama,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def one_example_loss(model: nn.Module, example: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean token loss of a batch of one, the way of the textbooks: with shifted logits."""
    labels = example["labels"]
    logits = model(**{name: value for name, value in example.items() if name != "labels"}).logits
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100)


def assert_equal_to_single_passes(model: nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    b = len(batch["labels"])
    examples = [{name: value[index : index + 1] for name, value in batch.items()} for index in range(b)]
    gradients = example_gradients(model, examples, one_example_loss).numpy()
    mean = gradients.mean(0)
    found = per_example_statistics(model, batch)
    assert found.sample_size == b
    assert found.squared_norm == pytest.approx(mean @ mean, rel=TOLERANCE[dtype])
    np.testing.assert_allclose(flat_gradient(model).numpy(), mean, rtol=0, atol=TOLERANCE[dtype] * np.linalg.norm(mean))
    if b == 1:
        assert math.isnan(found.variance)
        return
    inner = gradients @ mean
    orthogonal = gradients - np.outer(inner, mean) / (mean @ mean)
    assert found.variance == pytest.approx(gradients.var(0, ddof=1).sum(), rel=TOLERANCE[dtype])
    assert found.inner_product_variance == pytest.approx(inner.var(ddof=1), rel=TOLERANCE[dtype])
    assert found.orthogonal_variance == pytest.approx((orthogonal**2).sum() / (b - 1), rel=TOLERANCE[dtype])


def statistics_of(probe: PerExampleProbe) -> SimpleNamespace:
    """Return the statistics after a backward pass of the mean over the examples."""
    b = probe.batch_size
    return sample_statistics(probe.squared_norms * b**2, probe.inner_products * b, probe.squared_norm.item())


def freeze(model: nn.Module, pattern: int) -> None:
    """Freeze a varying choice of parameters, never all of them."""
    parameters = list(model.parameters())
    for index, parameter in enumerate(parameters):
        parameter.requires_grad_((pattern >> (index % 6)) % 2 == 0)
    parameters[-1].requires_grad_(True)


def token_batch(generator: np.random.Generator, examples: int, length: int, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(generator.integers(1, VOCABULARY, (examples, length)))
    # Repeated tokens within an example meet in one row of the embedding.
    ids[:, length // 2] = ids[:, 0]
    batch = {"input_ids": ids}
    if padded:
        lengths = torch.from_numpy(generator.integers(2, length + 1, examples))
        mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask}
    return batch


@settings(max_examples=15, derandomize=True)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32]),
    examples=st.integers(1, 9),
    length=st.integers(2, 14),
    heads=st.sampled_from([(2, 1), (4, 2), (2, 2)]),
    width=st.sampled_from([8, 16, 24]),
    layers=st.integers(1, 2),
    tied=st.booleans(),
    padded=st.booleans(),
    biased=st.booleans(),
    frozen=st.sampled_from([0, 0, 0b000101, 0b110010]),
    seed=st.integers(0, 10_000),
)
def test_llama_statistics_equal_single_backward_passes(
    dtype, examples, length, heads, width, layers, tied, padded, biased, frozen, seed
):
    model = tiny_llama(
        seed,
        dtype,
        tied,
        hidden_size=width,
        intermediate_size=width + 8,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        attention_bias=biased,
    )
    freeze(model, frozen)
    batch = token_batch(np.random.default_rng(seed), examples, length, padded)
    labels = batch["input_ids"]
    if padded:
        labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    assert_equal_to_single_passes(model, batch | {"labels": labels}, dtype)


@settings(max_examples=10, derandomize=True)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32]),
    examples=st.integers(1, 9),
    length=st.integers(2, 14),
    width=st.sampled_from([8, 16]),
    classes=st.integers(2, 4),
    padded=st.booleans(),
    frozen=st.sampled_from([0, 0, 0b001001, 0b100110]),
    seed=st.integers(0, 10_000),
)
def test_bert_statistics_equal_single_backward_passes(dtype, examples, length, width, classes, padded, frozen, seed):
    model = tiny_bert(
        seed, dtype, hidden_size=width, intermediate_size=width + 8, num_attention_heads=2, num_labels=classes
    )
    freeze(model, frozen)
    generator = np.random.default_rng(seed)
    batch = token_batch(generator, examples, length, padded)
    labels = torch.from_numpy(generator.integers(0, classes, examples))
    assert_equal_to_single_passes(model, batch | {"labels": labels}, dtype)


def test_the_padding_row_of_an_embedding_stays_out_of_the_statistics():
    """Autograd gives BERT's padding token no gradient, not even where it is attended to like any other."""
    ids = torch.tensor([[3, 0, 5, 0], [0, 7, 8, 9], [4, 4, 0, 2]])
    assert_equal_to_single_passes(tiny_bert(1), {"input_ids": ids, "labels": torch.tensor([0, 1, 1])}, torch.float64)


def squared_outputs(model: nn.Module, row: torch.Tensor) -> torch.Tensor:
    return model(row.unsqueeze(0)).square().sum()


def assert_variance_is_that_of_single_examples(module: type[nn.Module]) -> None:
    """For a module that takes inputs [6, 3, 5]."""
    torch.manual_seed(0)
    model, x = module(), torch.randn(6, 3, 5, dtype=torch.float64)
    gradients = example_gradients(model, x, squared_outputs).numpy()
    with PerExampleProbe(model, batch_size=6) as probe:
        model(x).square().sum((1, 2)).mean().backward()
    assert statistics_of(probe).variance == pytest.approx(gradients.var(0, ddof=1).sum(), rel=1e-12)


def test_a_module_called_twice_counts_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5, dtype=torch.float64)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    assert_variance_is_that_of_single_examples(Twice)


def test_layers_may_get_their_input_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Embedding(3, 5, dtype=torch.float64)
            self.inner = nn.Linear(5, 2, dtype=torch.float64)

        def forward(self, x):
            return self.inner(input=x + self.positions(input=torch.arange(3).unsqueeze(0)))

    assert_variance_is_that_of_single_examples(Named)


class OffsetNorm(nn.Module):
    """Scales by 1 + weight, as Gemma does."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:]) * (1 + self.weight)


def test_a_norm_of_ones_own_counts_as_it_computes():
    own_norm = type("RMSNorm", (OffsetNorm,), {})
    assert_variance_is_that_of_single_examples(lambda: nn.Sequential(own_norm(5), nn.Linear(5, 2, dtype=torch.float64)))


# Modules that are not supported


def test_a_sharded_module_counts_as_its_own_class():
    """FSDP2 derives a class, as for the linear layers of a BERT on shard groups with autocast."""

    class FSDPModule:
        pass

    module, model = nn.Linear(3, 2), nn.Bilinear(3, 3, 1)
    for sharded in (module, model):
        kind = type(sharded)
        sharded.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    PerExampleProbe(nn.Sequential(module), batch_size=2)
    with pytest.raises(UnsupportedModuleError, match=r"'0' of class Bilinear"):
        PerExampleProbe(nn.Sequential(model), batch_size=2)


def test_an_unknown_module_is_named_unless_it_is_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 2))
    with pytest.raises(UnsupportedModuleError, match=r"'1' of class Bilinear.*across_workers"):
        PerExampleProbe(model, batch_size=2)
    model[1].requires_grad_(False)
    PerExampleProbe(model, batch_size=2)


def test_a_class_that_has_only_the_name_of_a_known_one_is_refused():
    for own in (type("Linear", (nn.Linear,), {})(4, 4), type("RMSNorm", (nn.ParameterList,), {})([torch.ones(4)])):
        with pytest.raises(UnsupportedModuleError, match=rf"'0' of class {type(own).__name__} of "):
            PerExampleProbe(nn.Sequential(own), batch_size=2)


@pytest.mark.parametrize("examples", [2, 3])  # with three there are as many positions as examples
def test_positions_without_a_dimension_of_examples_say_what_helps(examples):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(5, 4), nn.Embedding(3, 4)

        def forward(self, tokens):
            return self.token(tokens) + self.position(torch.arange(3))

    expected = r"'position' got \(3,\); give it positions.expand_as\(tokens\)"
    with pytest.raises(UnsupportedModuleError, match=expected):
        probes_of(Positions(), torch.zeros(examples, 3, dtype=torch.long), (examples,))


class Sneaky(nn.Module):
    """Uses a parameter outside the module that owns it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.inner(x) + F.linear(x, self.inner.weight) * 3.0


@pytest.mark.parametrize("sizes", [(6,), (2, 2, 2)])
def test_a_parameter_used_outside_its_module_is_refused(sizes):
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModuleError, match="do not add up"):
        step_estimate(probes_of(Sneaky(), torch.randn(6, 2, 4, dtype=torch.float64), sizes))


def test_hooks_are_gone_afterwards():
    model = tiny_llama()
    batch = token_batch(np.random.default_rng(0), 3, 6, padded=False)
    per_example_statistics(model, batch | {"labels": batch["input_ids"]})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


# Accumulated steps


def probes_of(model: nn.Module, rows: torch.Tensor, sizes: tuple[int, ...]) -> list[PerExampleProbe]:
    """Return the probes of the micro-batches of a step; the loss of a row is the sum of its squared outputs."""
    probes = []
    start = 0
    for index, size in enumerate(sizes):
        products = index in compared_micro_batches(sizes)
        with PerExampleProbe(model, batch_size=size, products=products) as probe:
            (model(rows[start : start + size]).square().sum() / len(rows)).backward()
        probes.append(probe)
        start += size
    return probes


@pytest.mark.parametrize("sizes", [(9,), (5, 4), (3, 3, 3), (2, 2, 2, 2, 1), (1,) * 9])
def test_an_accumulated_step_is_one_sample(sizes):
    """Squared norm, variance, P and R from all products of different examples, written out."""
    torch.manual_seed(0)
    model, rows = nn.Linear(4, 3, dtype=torch.float64), torch.randn(9, 2, 4, dtype=torch.float64)
    gradients = example_gradients(model, rows, squared_outputs).numpy()
    products = gradients @ gradients.T
    found = step_estimate(probes_of(model, rows, sizes))

    def others(n):
        return (products[:n, :n].sum(1) - np.diag(products)[:n]) / (n - 1)

    def spread(n, held):
        return n * (n - 1) / (n - 2) * ((others(n)[n - held :] - others(n).mean()) ** 2).mean()

    assert (found.examples, found.pairs) == (9, 72)
    assert found.squared_norm == pytest.approx(others(9).mean(), rel=1e-9)
    assert found.variance == pytest.approx(gradients.var(0, ddof=1).sum(), rel=1e-9)
    assert found.variance_error == pytest.approx(math.sqrt(np.diag(products).var(ddof=1) / 8), rel=1e-9)
    # 4 (b - 1) / (b - 2)^2 times the mean square of the last micro-batch's deviations.
    whole = spread(9, sizes[-1])
    assert found.squared_norm_error == pytest.approx(math.sqrt(4 * whole / (9 * 7)), rel=1e-9)
    if len(sizes) == 1:
        assert math.isnan(found.inner_product_variance)
        return
    n = next(n for n in np.cumsum(sizes) if n > 2)
    early = spread(n, sizes[list(np.cumsum(sizes)).index(n)])
    inner = (whole - early) / (9 - n)
    assert found.inner_product_variance == pytest.approx(inner, rel=1e-8)
    assert found.overlap == pytest.approx(early - (n - 2) * inner, rel=1e-8)


class Branch(nn.Module):
    """Uses a layer in some of its calls only."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.outer(self.inner(x) if x.mean() > 0 else x)


@pytest.mark.parametrize("first", [1, -1])
def test_a_layer_that_a_micro_batch_does_not_reach_counts(first):
    torch.manual_seed(0)
    model, rows = Branch(), torch.randn(9, 2, 4, dtype=torch.float64).abs()
    rows[:5] *= first
    rows[5:] *= -first
    gradients = example_gradients(model, rows, squared_outputs).numpy()
    products = gradients @ gradients.T
    found = step_estimate(probes_of(model, rows, (5, 4)))
    assert found.squared_norm == pytest.approx((products.sum() - np.trace(products)) / 72, rel=1e-9)
    assert found.variance == pytest.approx(gradients.var(0, ddof=1).sum(), rel=1e-9)


def test_gradients_that_overflow_tell_nothing():
    """The inner products are infinite, of both signs."""
    model, rows = nn.Linear(2, 1, bias=False), torch.tensor([[1e20], [1e20], [-1e20]]).expand(3, 2)
    with PerExampleProbe(model, batch_size=3) as probe:
        model(rows).sum().backward()
    assert set(probe.inner_products.tolist()) == {math.inf, -math.inf}
    assert not math.isfinite(step_estimate([probe]).squared_norm)
