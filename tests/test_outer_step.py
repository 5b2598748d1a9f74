"""Outer steps by parameter histories that anyone can recompute, and against torch.optim."""

import pytest
import torch

from algorithms.outer_step import DISTRIBUTED_ALGORITHMS, diloco_step, local_sgd_step


def test_diloco_history_under_a_constant_pseudo_gradient():
    """lr 0.5, momentum 0.8, gradient 1: v = 1, 1.8, 2.44; x falls by 0.5 (1 + 0.8 v) = 0.9, 1.22, 1.476."""
    x, velocity, gradient = torch.zeros(2), torch.zeros(2), torch.ones(2)
    history = []
    for _ in range(3):
        diloco_step(x, gradient, velocity, lr=0.5, momentum=0.8)
        history.append(x[0].item())
    assert history == pytest.approx([-0.9, -2.12, -3.596])
    assert gradient.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.4, 0.8), (1.0, 0.0)])
def test_diloco_step_equals_torch_sgd_with_nesterov(lr, momentum):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator, dtype=torch.float64)
    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([expected], lr=lr, momentum=momentum, nesterov=momentum > 0.0)
    x, velocity = start.clone(), torch.zeros_like(start)
    for _ in range(5):
        gradient = torch.randn(50, generator=generator, dtype=torch.float64)
        expected.grad = gradient.clone()
        optimizer.step()
        diloco_step(x, gradient, velocity, lr, momentum)
        torch.testing.assert_close(x, expected.detach(), rtol=1e-13, atol=1e-13)


def test_local_sgd_step_is_the_mean_of_the_workers():
    x = torch.tensor([1.0, 2.0])
    workers = [torch.tensor([0.0, 4.0]), torch.tensor([2.0, 1.0])]
    local_sgd_step(x, torch.stack([x - worker for worker in workers]).mean(0))
    assert x.tolist() == [1.0, 2.5]


def test_local_sgd_has_no_velocity_and_uses_sgd_inside():
    algorithm = DISTRIBUTED_ALGORITHMS["LocalSGD"]
    assert (algorithm.has_velocity, algorithm.inner_optimizer) == (False, "sgd")
    x = torch.tensor([3.0])
    algorithm.outer_step(x, torch.tensor([1.0]), None, 0.7, 0.9)
    assert x.item() == 2.0
