"""LoCoDL converges linearly to the exact minimum of the mean function.

On quadratics, by its independent implementation, to which test_methods.py compares the method.
"""

import itertools

import numpy as np
import pytest

from tests.support import oracles

MU, L = 0.5, 2.0


def hessians(workers: int, size: int) -> np.ndarray:
    """Return the Hessians of the workers' functions [workers, size, size]: eigenvalues MU to L, own directions."""
    generator = np.random.default_rng(0)
    turns = [np.linalg.qr(generator.normal(size=(size, size)))[0] for _ in range(workers)]
    return np.stack([turn * np.linspace(MU, L, size) @ turn.T for turn in turns])


@pytest.mark.parametrize(("count", "probability"), [(16, 0.3), (8, 0.5), (4, 0.7)])
def test_workers_that_differ_reach_the_exact_minimum_of_their_mean_linearly(count, probability):
    workers, size = 4, 16
    curvature = hessians(workers, size)
    centres = np.random.default_rng(1).normal(size=(workers, size))
    optimum = np.linalg.solve(curvature.sum(0), np.einsum("mij,mj->i", curvature, centres))
    problem = oracles.Problem(
        start=np.zeros(size),
        workers=workers,
        inner_steps=120,
        rounds=5,
        gradient=lambda worker, step, x: curvature[worker] @ (x - centres[worker]),
        weights=[1.0] * workers,
        ends=[range(1, 601)] * workers,
        learning_rate=0.5,
        warmup_steps=0,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        clip=None,
        shapes=[],
    )

    def compressor(worker, step, vector):
        found = np.zeros(size)
        places = np.random.default_rng([step, worker]).choice(size, count, replace=False)
        found[places] = vector[places] * size / count
        return found

    def coin(step):
        return np.random.default_rng(step).random() < probability

    history = oracles.locodl(problem, probability, compressor, coin, size / count - 1)
    distances = [np.abs(np.stack([y, *xs]) - optimum).max() for y, xs in [(problem.start, problem.starts()), *history]]
    assert distances[0] > 0.5
    for before, after in itertools.pairwise(distances):
        assert after < max(0.1 * before, 1e-12)
    assert distances[-1] < 1e-9
