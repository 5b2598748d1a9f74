"""LoCoDL converges linearly to the exact minimum of the mean function: its own exchanges on quadratics in float64."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algorithms.synchronisation.encodings import PLAIN
from algorithms.synchronisation.group import Inner, LocalWorker, WorkerMessages
from algorithms.synchronisation.locodl import LoCoDL
from utils.distributed.reductions import Messages

MU, L = 0.5, 2.0


def hessians(workers: int, size: int) -> torch.Tensor:
    """Return the Hessians of the workers' functions [workers, size, size]: eigenvalues MU to L, own directions."""
    generator = np.random.default_rng(0)
    turns = [np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(workers)]
    return torch.from_numpy(np.stack([turn * np.linspace(MU, L, size) @ turn.T for turn in turns]))


def stepped(
    method: LoCoDL, state: torch.Tensor, gradients: torch.Tensor, shared: float, lr: float, generator: torch.Generator
) -> torch.Tensor:
    """An inner step of all workers, and its exchange.

    Args:
        state: [2 M + 2, size]: of each worker its parameters, y, of each what is added to its gradient, and v.
        gradients: [M, size]. shared: the curvature of the shared function, with its minimum at zero.
    """
    workers = len(gradients)
    x, y, corrections, control = state.clone().split([workers, 1, workers, 1])
    x -= lr * (gradients + corrections)
    y -= lr * shared * y
    members = [LocalWorker(m, x[m], y[0], None, {"correction": corrections[m]}) for m in range(workers)]
    group = SimpleNamespace(
        shared={"parameters": y[0], "control": control[0]},
        values={},
        weights=[1 / workers] * workers,
        lone=False,
        inner=Inner(0.0, None, lr),
        local_workers=members,
        clock=SimpleNamespace(generator=lambda: generator),
        messages=lambda size: WorkerMessages(Messages(torch.device("cpu")), None, [], PLAIN, 0, y),
    )
    method.exchange(group)
    return torch.cat([x, y, corrections, control])


@pytest.mark.parametrize(("count", "probability"), [(16, 0.3), (8, 0.5), (4, 0.7)])
def test_workers_that_differ_reach_the_exact_minimum_of_their_mean_linearly(count, probability):
    workers, size, lr = 4, 16, 0.5
    method, curvature = LoCoDL(probability, count / size), hessians(workers, size)
    centres = torch.from_numpy(np.random.default_rng(1).normal(size=(workers, size)))
    optimum = torch.linalg.solve(curvature.sum(0), torch.einsum("mij,mj->i", curvature, centres))
    gradients_at = lambda x: torch.einsum("mij,mj->mi", curvature, x - centres)  # noqa: E731
    state, distances = torch.zeros(2 * workers + 2, size, dtype=torch.float64), []
    for step in range(600):
        if step % 120 == 0:
            distances.append((state[: workers + 1] - optimum).abs().max().item())
        generator = torch.Generator().manual_seed(step)
        state = stepped(method, state, gradients_at(state[:workers]), 0.0, lr, generator)
    assert distances[0] > 0.5
    for before, after in itertools.pairwise(distances):
        assert after < max(0.1 * before, 1e-12)
    expected = torch.cat([optimum.expand(workers + 1, size), -gradients_at(optimum), torch.zeros(1, size)])
    torch.testing.assert_close(state, expected.double(), rtol=0, atol=1e-9)
