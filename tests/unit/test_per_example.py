"""Per-example statistics against one backward pass per example."""

import math

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
    _kind,
    compared_micro_batches,
    per_example_statistics,
    step_estimate,
)
from tests.support.helpers import VOCABULARY, tiny_bert, tiny_llama

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def one_example_loss(model: nn.Module, example: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean token loss of a batch of one, written without our loss: the text's way, logits shifted."""
    labels = example["labels"]
    logits = model(**{name: value for name, value in example.items() if name != "labels"}).logits
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100)


def reference(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, float | np.ndarray]:
    """Statistics from one backward pass per example, in numpy float64 on whole gradients."""
    gradients = []
    for index in range(batch["labels"].shape[0]):
        model.zero_grad(set_to_none=True)
        one_example_loss(model, {name: value[index : index + 1] for name, value in batch.items()}).backward()
        gradients.append(
            np.concatenate(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).double().flatten().numpy()
                    for p in model.parameters()
                    if p.requires_grad
                ]
            )
        )
    gradients = np.stack(gradients)
    mean = gradients.mean(0)
    result = {"squared_norm": mean @ mean, "gradient": mean}
    if len(gradients) > 1:
        inner = gradients @ mean
        orthogonal = gradients - np.outer(inner, mean) / (mean @ mean)
        result |= {
            "variance": np.trace(np.atleast_2d(np.cov(gradients.T)))
            if gradients.shape[1] < 50
            else gradients.var(0, ddof=1).sum(),
            "inner_product_variance": inner.var(ddof=1),
            "orthogonal_variance": (orthogonal**2).sum() / (len(gradients) - 1),
        }
    return result


def assert_equal_to_reference(model: nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    expected = reference(model, batch)
    statistics = per_example_statistics(model, batch)
    tolerance = TOLERANCE[dtype]
    assert statistics.sample_size == batch["labels"].shape[0]
    assert statistics.squared_norm == pytest.approx(expected["squared_norm"], rel=tolerance)
    gradient = np.concatenate(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).double().flatten().numpy()
            for p in model.parameters()
            if p.requires_grad
        ]
    )
    np.testing.assert_allclose(
        gradient, expected["gradient"], rtol=0, atol=tolerance * math.sqrt(expected["squared_norm"])
    )
    for name in ("variance", "inner_product_variance", "orthogonal_variance"):
        if statistics.sample_size > 1:
            assert getattr(statistics, name) == pytest.approx(expected[name], rel=tolerance), name
        else:
            assert math.isnan(getattr(statistics, name)), name


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


@settings(max_examples=25, deadline=None, derandomize=True)
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
    assert_equal_to_reference(model, batch | {"labels": labels}, dtype)


@settings(max_examples=15, deadline=None, derandomize=True)
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
    assert_equal_to_reference(model, batch | {"labels": labels}, dtype)


def test_an_embedding_row_without_gradient_stays_out_of_the_statistics():
    """BERT's padding token gets no gradient from autograd, not even where it is attended to as any other."""
    model = tiny_bert(1)
    assert model.bert.embeddings.word_embeddings.padding_idx == 0
    ids = torch.tensor([[3, 0, 5, 0], [0, 7, 8, 9], [4, 4, 0, 2]])
    assert_equal_to_reference(model, {"input_ids": ids, "labels": torch.tensor([0, 1, 1])}, torch.float64)


@pytest.mark.parametrize("width", [4, 96])
def test_both_forms_of_a_linear_layer_agree_with_numpy(width):
    """Narrow layers over long sequences build P_i, wide ones over short sequences multiply activations."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(width, width, bias=True, dtype=torch.float64)
    x = torch.randn(5, 7, width, generator=generator, dtype=torch.float64)
    target = torch.randn(5, 7, width, generator=generator, dtype=torch.float64)
    with PerExampleProbe(layer, batch_size=5) as probe:
        (layer(x) * target).sum((1, 2)).mean().backward()
    # The loss is linear in W and b, so that example i has gradient (sum_t target x^T, sum_t target).
    gradients = np.concatenate(
        [
            np.einsum("bto,bti->boi", target.numpy(), x.numpy()).reshape(5, -1),
            target.sum(1).numpy(),
        ],
        axis=1,
    )
    statistics = probe.statistics()
    assert statistics.variance == pytest.approx(gradients.var(0, ddof=1).sum(), rel=1e-12)
    assert statistics.squared_norm == pytest.approx((gradients.mean(0) ** 2).sum(), rel=1e-12)
    assert statistics.inner_product_variance == pytest.approx((gradients @ gradients.mean(0)).var(ddof=1), rel=1e-12)


def test_numbers_on_paper():
    """Gradients (1, 0), (0, 1), (1, 1), (2, 2): g = (1, 1), ||g||^2 = 2, V = 4/3, d = 1, 1, 2, 4."""
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    with PerExampleProbe(layer, batch_size=4) as probe:
        layer(x).mean().backward()
    statistics = probe.statistics()
    assert statistics.squared_norm == pytest.approx(2.0)
    assert statistics.variance == pytest.approx(4.0 / 3.0)
    assert statistics.inner_product_variance == pytest.approx(2.0)
    # n_i - d_i^2 / 2 = 1/2, 1/2, 0, 0.
    assert statistics.orthogonal_variance == pytest.approx(1.0 / 3.0)


def test_a_loss_weight_does_not_change_the_statistics():
    """An accumulated micro-batch scales its loss; the statistics are of the unscaled losses."""
    model = tiny_llama()
    batch = token_batch(np.random.default_rng(0), 4, 8, padded=False)
    expected = per_example_statistics(model, batch | {"labels": batch["input_ids"]})
    model.zero_grad()
    with PerExampleProbe(model, batch_size=4) as probe:
        logits = model(**batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        (0.3 * loss).backward()
    scaled = probe.statistics(loss_weight=0.3)
    for name in ("squared_norm", "variance", "inner_product_variance", "orthogonal_variance"):
        # Llama's norm computes in float32, where a factor of 0.3 rounds.
        assert getattr(scaled, name) == pytest.approx(getattr(expected, name), rel=1e-5)


def test_a_module_called_twice_counts_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5, dtype=torch.float64)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(6, 3, 5, dtype=torch.float64)
    gradients = []
    for example in x:
        model.zero_grad()
        model(example.unsqueeze(0)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    gradients = torch.stack(gradients)
    model.zero_grad()
    with PerExampleProbe(model, batch_size=6) as probe:
        model(x).square().sum((1, 2)).mean().backward()
    assert probe.statistics().variance == pytest.approx(gradients.var(0).sum().item(), rel=1e-12)


def test_a_module_that_is_sharded_by_itself_is_what_it_was_before():
    """FSDP2 gives it a class of its own, as the linear layers of a BERT on shard groups with autocast have."""

    class FSDPModule:
        pass

    module, model = nn.Linear(3, 2), nn.Bilinear(3, 3, 1)
    for sharded in (module, model):
        kind = type(sharded)
        sharded.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    assert _kind(module) == "Linear"
    PerExampleProbe(nn.Sequential(module), batch_size=2)
    with pytest.raises(UnsupportedModuleError, match=r"'0' of class Bilinear"):
        PerExampleProbe(nn.Sequential(model), batch_size=2)


def test_an_unknown_module_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 2))
    with pytest.raises(UnsupportedModuleError, match=r"'1' of class Bilinear.*across_workers"):
        PerExampleProbe(model, batch_size=2)


def test_a_frozen_unknown_module_is_no_problem():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1))
    model[1].requires_grad_(False)
    PerExampleProbe(model, batch_size=2)


def test_a_parameter_used_behind_its_modules_back_is_refused():
    class Sneaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x) + F.linear(x, self.inner.weight) * 3.0

    torch.manual_seed(0)
    model = Sneaky()
    with PerExampleProbe(model, batch_size=3) as probe:
        model(torch.randn(3, 2, 4)).square().sum((1, 2)).mean().backward()
    with pytest.raises(UnsupportedModuleError, match="do not add up"):
        probe.statistics()


def test_hooks_are_gone_afterwards():
    model = tiny_llama()
    batch = token_batch(np.random.default_rng(0), 3, 6, padded=False)
    per_example_statistics(model, batch | {"labels": batch["input_ids"]})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def accumulated(model: nn.Module, rows: torch.Tensor, sizes: tuple[int, ...]):
    """The estimate of a step over all rows, whose example losses are what the model makes of them."""
    probes, start, compared = [], 0, compared_micro_batches(sizes)
    model.zero_grad()
    for index, size in enumerate(sizes):
        with PerExampleProbe(model, batch_size=size, products=index in compared) as probe:
            (model(rows[start : start + size]).square().sum((1, 2)).sum() / len(rows)).backward()
        probes.append(probe)
        start += size
    return step_estimate(probes)


@pytest.mark.parametrize("sizes", [(9,), (5, 4), (3, 3, 3), (2, 2, 2, 2, 1), (1,) * 9])
def test_an_accumulated_step_is_one_sample(sizes):
    """Squared norm, variance, P and R from all products of different examples, written out."""
    torch.manual_seed(0)
    model, rows = nn.Linear(4, 3, dtype=torch.float64), torch.randn(9, 2, 4, dtype=torch.float64)
    gradients = []
    for row in rows:
        model.zero_grad()
        model(row.unsqueeze(0)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
    gradients = np.stack(gradients)
    products = gradients @ gradients.T
    found = accumulated(model, rows, sizes)

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


def test_an_accumulated_step_through_a_parameters_back_door_is_refused():
    class Sneaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x):
            return self.inner(x) + F.linear(x, self.inner.weight) * 3.0

    torch.manual_seed(0)
    with pytest.raises(UnsupportedModuleError, match="do not add up"):
        accumulated(Sneaky(), torch.randn(6, 2, 4, dtype=torch.float64), (2, 2, 2))


def test_squared_norms_alone_are_the_same():
    model = tiny_llama()
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for products in (True, False):
        model.zero_grad()
        with PerExampleProbe(model, batch_size=4, products=products) as probe:
            model(input_ids=ids).logits.square().mean((1, 2)).sum().backward()
        found.append(probe.squared_norms)
    torch.testing.assert_close(found[0], found[1])
    assert probe.inner_products.count_nonzero() == 0
