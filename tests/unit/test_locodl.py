"""LoCoDL converges linearly to the exact minimum: its own exchanges on quadratics in float64, expectations exact.

With X_m, Y, U_m and V the distances of x_m, y, u_m and v from where nothing moves (U_m from grad f_m at the minimum),

    psi = (sum |X_m|^2 + M |Y|^2) / lr + lr (1 + 2 omega) / (p^2 chi) (sum |U_m|^2 + M |V|^2).

Before the coin X_m is W_m + lr U_m, with |W_m|^2 <= max((1 - lr mu)^2, (1 - lr L)^2) |X_m|^2, and so for Y with the
shared function g. With D^2 their spread about the mean of all 2 M an exchange takes 2 rho - rho^2 (1 + omega_av) >= chi
times D^2 off their squares. Of the corrections' new squares p chi / lr D^2 is the part that takes this back, and their
products with the old ones, as sum U_m + M V = 0, are those of U_m with X_m and of V with Y. So E psi' is at most
(sum |W_m|^2 + M |W_y|^2) / lr and 1 - p^2 chi / (1 + 2 omega) of the other sum: at most tau psi, with tau the largest
of the three numbers. Without g W_y is Y, and all that follows is that psi does not grow.
"""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algorithms.flat import random_positions
from algorithms.synchronisation.encodings.encoding import PLAIN
from algorithms.synchronisation.group import Inner, LocalWorker, WorkerMessages
from algorithms.synchronisation.locodl import LoCoDL
from utils.distributed.reductions import Messages

MU, L = 0.5, 2.0
# Workers, numbers, of which a message has how many; probability, learning rate.
CASES = [
    (2, 2, 2, 0.5, 0.5),
    (2, 2, 1, 0.5, 0.5),
    (2, 2, 1, 1.0, 0.9),
    (3, 2, 1, 0.4, 0.5),
    (2, 3, 1, 0.5, 0.3),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def hessians(workers: int, size: int) -> torch.Tensor:
    """Of the workers' functions, [workers, size, size]: eigenvalues from MU to L, in directions of each one's own."""
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
        generator=lambda: generator,
        messages=lambda size: WorkerMessages(Messages(torch.device("cpu")), None, [], PLAIN, 0, y),
    )
    method.exchange(group)
    return torch.cat([x, y, corrections, control])


def outcomes(workers: int, size: int, count: int, probability: float) -> list[tuple[float, int]]:
    """All that may be drawn in a step: how likely it is, and a seed with which it is."""
    messages, found = (size**workers if count == 1 else 1), {}
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        communicates = torch.rand((), generator=generator, dtype=torch.float64).item() < probability
        drawn = [random_positions(size, count, generator).tolist() for _ in range(workers * communicates)]
        found.setdefault(str(drawn if count < size else communicates), (communicates, seed))
        if len(found) == messages + (probability < 1):
            return [(probability / messages if talk else 1 - probability, seed) for talk, seed in found.values()]


@functools.cache
def steps_of(case, shared: float) -> tuple[list[tuple[float, np.ndarray]], np.ndarray, float]:
    """A step around the minimum: matrices and how likely they are, the weights of psi, and tau.

    Where the sum of U_m and M V is 0, in coordinates in which psi is the sum of squares.
    """
    workers, size, count, probability, lr = case
    method, curvature, rows = LoCoDL(probability, count / size), hessians(workers, size), 2 * workers + 2
    omega = size / count - 1
    chi = 1 / (1 + omega / workers)

    def step(state: torch.Tensor, seed: int) -> torch.Tensor:
        state = state.view(rows, size)
        gradients = torch.einsum("mij,mj->mi", curvature, state[:workers])
        return stepped(method, state, gradients, shared, lr, torch.Generator().manual_seed(seed)).flatten()

    draws = outcomes(workers, size, count, probability)
    matrices = [np.stack([step(e, seed) for e in torch.eye(rows * size, dtype=torch.float64)], 1) for _, seed in draws]
    heavy = lr * (1 + 2 * omega) / (probability**2 * chi)
    root = np.sqrt([1 / lr] * workers + [workers / lr] + [heavy] * workers + [workers * heavy])
    total = np.kron(np.array([0] * (workers + 1) + [1] * workers + [-workers]), np.eye(size))  # kept is -u_m
    scale = np.repeat(root, size)
    zero = np.linalg.svd(total / scale)[2][size:].T
    for matrix in matrices:
        np.testing.assert_allclose(total @ matrix @ (zero / scale[:, None]), 0, atol=1e-12)
    scaled = [zero.T @ (scale[:, None] * matrix / scale) @ zero for matrix in matrices]
    tau = max((1 - lr * MU) ** 2, (1 - lr * L) ** 2, 1 - probability**2 * chi / (1 + 2 * omega))
    return [(likely, matrix) for (likely, _), matrix in zip(draws, scaled, strict=True)], tau


def largest_growth(steps) -> float:
    """The largest E psi' / psi of a step, from anywhere."""
    return np.linalg.eigvalsh(sum(likely * matrix.T @ matrix for likely, matrix in steps)).max()


@every_case
def test_with_a_shared_function_every_step_shrinks_what_is_left_as_is_derived(case):
    steps, tau = steps_of(case, MU)
    assert largest_growth(steps) < tau + 1e-12
    assert largest_growth(steps) > 1 - 1.4 * (1 - tau)  # another constant would show


@every_case
def test_without_one_what_is_left_never_grows_and_shrinks_linearly_in_the_end(case):
    """E (z z^T) is mapped linearly by a step; its spectral radius is the rate in the end, wherever the run begins."""
    steps, tau = steps_of(case, 0.0)
    assert largest_growth(steps) < 1 + 1e-12
    radius = np.abs(np.linalg.eigvals(sum(likely * np.kron(matrix, matrix) for likely, matrix in steps))).max()
    assert radius < 1 - 0.9 * (1 - tau)


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
