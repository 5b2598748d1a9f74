"""Outer steps by parameter histories that anyone can recompute, and against torch.optim."""

from types import SimpleNamespace

import pytest
import torch

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.group import Outer
from algorithms.synchronisation.outer_step import nesterov_step


def test_nesterov_history_under_a_constant_pseudo_gradient():
    """lr 0.5, momentum 0.8, gradient 1: v = 1, 1.8, 2.44; x falls by 0.5 (1 + 0.8 v) = 0.9, 1.22, 1.476."""
    x, velocity, gradient = torch.zeros(2), torch.zeros(2), torch.ones(2)
    history = []
    for _ in range(3):
        nesterov_step(x, gradient, velocity, lr=0.5, momentum=0.8)
        history.append(x[0].item())
    assert history == pytest.approx([-0.9, -2.12, -3.596])
    assert gradient.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.4, 0.8), (1.0, 0.0)])
def test_nesterov_step_equals_torch_sgd_with_nesterov(lr, momentum):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator, dtype=torch.float64)
    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([expected], lr=lr, momentum=momentum, nesterov=momentum > 0.0)
    x, velocity = start.clone(), torch.zeros_like(start)
    for _ in range(5):
        gradient = torch.randn(50, generator=generator, dtype=torch.float64)
        expected.grad = gradient.clone()
        optimizer.step()
        nesterov_step(x, gradient, velocity, lr, momentum)
        torch.testing.assert_close(x, expected.detach(), rtol=1e-13, atol=1e-13)


def exchange(name: str, x: torch.Tensor, workers: list[torch.Tensor], **state: torch.Tensor) -> None:
    """A method's exchange among workers with these parameters; lr 0.5, momentum 0.8."""
    mean = torch.stack([x - worker for worker in workers]).mean(0) if workers else None
    group = SimpleNamespace(shared={"parameters": x} | state, outer=Outer(0.5, 0.8))
    method = METHODS[name]()
    assert set(method.state) == set(state)
    if mean is not None:
        method.apply(group, mean)


def test_local_sgd_takes_the_mean_of_the_workers_has_no_velocity_and_uses_sgd_inside():
    x = torch.tensor([1.0, 2.0])
    exchange("LocalSGD", x, [torch.tensor([0.0, 4.0]), torch.tensor([2.0, 1.0])])
    assert x.tolist() == [1.0, 2.5]
    assert METHODS["LocalSGD"]().capabilities.inner_optimizer == "sgd"


def test_diloco_takes_the_mean_of_the_workers_for_a_gradient():
    """Workers at -1 and 3 of x = 2: D = 1, v = 0.8 * 2 + 1 = 2.6, x falls by 0.5 (1 + 0.8 * 2.6) = 1.54."""
    x, velocity = torch.tensor([2.0]), torch.tensor([2.0])
    exchange("DiLoCo", x, [torch.tensor([-1.0]), torch.tensor([3.0])], velocity=velocity)
    assert velocity.tolist() == pytest.approx([2.6])
    assert x.tolist() == pytest.approx([0.46])


@pytest.mark.parametrize(("name", "state"), [("DiLoCo", {"velocity": torch.ones(2)}), ("LocalSGD", {})])
def test_with_nobody_left_everything_stays(name, state):
    x = torch.tensor([1.0, 2.0])
    exchange(name, x, [], **state)
    assert x.tolist() == [1.0, 2.0]
    assert all(tensor.tolist() == [1.0, 1.0] for tensor in state.values())
