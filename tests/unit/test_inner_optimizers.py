"""Inner optimizers against PyTorch's own on a copy of the model; and that their state is all that they remember."""

import copy

import pytest
import torch
from torch import nn

from algorithms.synchronisation import METHODS
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import check_state
from fabrics.training.optimizers import (
    INNER_OPTIMIZERS,
    WorkerOptimizer,
    base_learning_rate,
    check_inner_optimizer,
    inner_optimizer_name,
    matrices_and_rest,
)
from tests.support.helpers import CPU, make_config, tiny_bert, tiny_llama
from utils.config.schema import ConfigError

RATES = (0.01, 0.02, 0.015, 0.01, 0.005)


def build(module: nn.Module, name: str, **values):
    """A model of this module, and an inner optimizer over it."""
    model = FlatModel(module, CPU)
    return model, WorkerOptimizer(model, make_config(inner_optimizer=name, **values))


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """Random gradients, the same for the same names and step."""
    generator = torch.Generator().manual_seed(step)
    for _, parameter in sorted(parameters.items()):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def is_inside(name: str) -> bool:
    """Return whether a Llama's parameter belongs to a projection of attention or MLP."""
    return name.endswith("proj.weight")


def assert_same_parameters(module: nn.Module, other: nn.Module) -> None:
    for (name, parameter), (_, expected) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def freeze_first_layer(module: nn.Module) -> nn.Module:
    module.model.layers[0].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "module",
    [
        lambda: tiny_llama(),
        lambda: tiny_llama(dtype=torch.float32),
        lambda: tiny_llama(tied=True),
        lambda: freeze_first_layer(tiny_llama()),
    ],
    ids=["float64", "float32", "tied", "frozen"],
)
def test_muon_is_torchs_inside_and_adamw_for_the_rest(module):
    module = module()
    expected, before = copy.deepcopy(module), copy.deepcopy(module)
    values = {"weight_decay": 0.3, "inner_optimizer_config": {"betas": [0.8, 0.95]}}
    model, optimizer = build(module, "muon", **values)
    named = trainable(expected)
    theirs = [
        torch.optim.Muon(
            [parameter for name, parameter in named.items() if is_inside(name)],
            momentum=0.95,
            weight_decay=0.3,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [parameter for name, parameter in named.items() if not is_inside(name)],
            betas=(0.8, 0.95),
            weight_decay=0.3,
            fused=True,
        ),
    ]
    for step, rate in enumerate(RATES):
        set_gradients(trainable(model.module), step)
        set_gradients(named, step)
        optimizer.step(rate)
        for other in theirs:
            other.param_groups[0]["lr"] = rate
            other.step()
    assert_same_parameters(model.module, expected)
    for (name, parameter), (_, old) in zip(model.module.named_parameters(), before.named_parameters(), strict=True):
        assert torch.equal(parameter, old) != parameter.requires_grad, name


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_adamw_and_sgd_are_torchs_own_over_the_flat_parameters(name):
    values = {"weight_decay": 0.3} | ({"inner_optimizer_config": {"betas": [0.8, 0.95]}} if name == "adamw" else {})
    model, optimizer = build(tiny_llama(), name, **values)
    expected = nn.Parameter(model.parameters.detach().clone())
    theirs = {
        "adamw": lambda: torch.optim.AdamW([expected], betas=(0.8, 0.95), weight_decay=0.3, fused=True),
        "sgd": lambda: torch.optim.SGD([expected], fused=True),
    }[name]()
    for step, rate in enumerate(RATES):
        set_gradients(trainable(model.module), step)
        expected.grad = model.gradient.clone()
        optimizer.step(rate)
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
    assert torch.equal(model.parameters, expected)
    for key, tensor in theirs.state[expected].items():
        if tensor is not None:  # SGD's momentum
            assert torch.equal(optimizer.state_dict()[key], tensor)


@pytest.mark.parametrize("name", list(INNER_OPTIMIZERS))
def test_an_optimizer_with_the_state_of_another_goes_on_like_it(name):
    """Whatever it knows of earlier steps is in the tensors of its state, by reference."""
    first, optimizer = build(tiny_llama(), name)
    for step in range(3):
        set_gradients(trainable(first.module), step)
        optimizer.step(0.01)
    second, other = build(copy.deepcopy(first.module), name)
    for key, tensor in other.state_dict().items():
        assert not tensor.any()
        tensor.copy_(optimizer.state_dict()[key])
        assert tensor.any()
    for model, each in ((first, optimizer), (second, other)):
        set_gradients(trainable(model.module), 3)
        each.step(0.02)
    assert_same_parameters(second.module, first.module)


def test_the_state_has_the_bytes_of_the_parameters_without_gaps():
    model = FlatModel(tiny_llama(), CPU)
    inside = sum(p.numel() for name, p in trainable(model.module).items() if is_inside(name))
    rest = model.parameter_count - inside
    found = {name: kind().state_bytes(model) for name, kind in INNER_OPTIMIZERS.items()}
    # Eight bytes per element. Muon's AdamW counts the steps of embedding, head and the five norms.
    assert found == {"adamw": 4 + 16 * model.parameter_count, "muon": 8 * inside + 16 * rest + 4 * 7, "sgd": 0}


def test_the_last_linear_layer_is_the_output_layer_where_the_model_does_not_say():
    module = tiny_bert()
    names = {parameter: name for name, parameter in module.named_parameters()}
    matrices, rest = matrices_and_rest(module)
    assert len(matrices) == 2 * 6 + 1  # of each layer, and the pooler
    assert all(names[matrix].startswith(("bert.encoder", "bert.pooler")) for matrix in matrices)
    assert {names[p] for p in rest if p.ndim == 2 and "embeddings" not in names[p]} == {"classifier.weight"}


def test_a_model_without_matrices_is_refused_by_muon_alone():
    module = tiny_llama()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not is_inside(name))
    model = FlatModel(module, CPU)
    check_inner_optimizer(make_config(inner_optimizer="adamw"), model)
    with pytest.raises(ConfigError, match="inner_optimizer: muon needs a trainable matrix") as error:
        check_inner_optimizer(make_config(inner_optimizer="muon"), model)
    assert len(error.value.problems) == 1
    check_inner_optimizer(make_config(inner_optimizer="muon"), FlatModel(tiny_llama(), CPU))


def test_the_methods_own_optimizer_where_none_is_given_and_its_learning_rate():
    values = {"lr_sgd": 0.5, "learning_rate_for_inner_opt": 0.1}
    for algorithm, given, name, rate in (
        ("DiLoCo", None, "adamw", 0.1),
        ("LocalSGD", None, "sgd", 0.5),
        ("DiLoCo", "sgd", "sgd", 0.5),
        ("LocalSGD", "muon", "muon", 0.1),
    ):
        config = make_config(distributed_algo=algorithm, inner_optimizer=given, **values)
        assert inner_optimizer_name(config) == name
        assert base_learning_rate(config) == rate


def test_a_method_whose_settings_give_its_state_the_name_of_a_moment_is_refused(monkeypatch):
    name, model = "exp_avg_sq", FlatModel(tiny_llama(), CPU)
    monkeypatch.setattr(METHODS["DiLoCo"], "worker_state", (name,))
    check_state(make_config(inner_optimizer="sgd"), model)
    with pytest.raises(ConfigError, match="distributed_algo: DiLoCo: worker_state has 'exp_avg_sq', which is kept"):
        check_state(make_config(), model)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_state_that_waits_in_host_memory_changes_no_bits(name):
    """Two workers of one model take turns; the state in between is theirs, and no copy of it on the device is left."""
    runs = []
    for offload in (False, True):
        config = make_config(inner_optimizer=name, offload_moments=offload)
        model = FlatModel(tiny_llama(), CPU)
        workers = [WorkerOptimizer(model, config) for _ in range(2)]
        for step in range(4):
            worker = workers[step // 2 % 2]
            with worker.steps():
                set_gradients(trainable(model.module), step)
                worker.step(RATES[step])
        runs.append([model.parameters.data, *(tensor for worker in workers for tensor in worker.state_dict().values())])
        assert (workers[0]._step is None) == offload
    assert all(torch.equal(offloaded, plain) for offloaded, plain in zip(*runs, strict=True))
