"""The oracles against each other, against torch.optim, and against what their papers say of them."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.support import oracles, oracles_sparse
from tests.support.oracles import Problem

SHAPES = [
    ("embed.weight", 0, 12, (4, 3)),
    ("layers.0.q.weight", 12, 28, (4, 4)),
    ("layers.0.norm.weight", 28, 32, (4,)),
    ("layers.1.q.weight", 32, 48, (4, 4)),
    ("layers.2.q.weight", 48, 64, (2, 8)),
    ("norm.weight", 64, 69, (5,)),
]
SIZE = SHAPES[-1][2]


def quadratics(noise: float = 0.1, **values) -> Problem:
    """Worker i has 1/2 sum_k a_ik (theta_k - c_ik)^2 and, if any, noise of its own in every step."""
    problem = Problem(np.zeros(0), 4, 4, 3, None, shapes=SHAPES, weight_decay=0.05)
    problem = dataclasses.replace(problem, **values)
    generator = np.random.default_rng(7)
    curvature = generator.uniform(0.5, 2.0, (problem.workers, SIZE))
    centre = generator.normal(size=(problem.workers, SIZE))

    def gradient(worker, step, theta):
        own = np.random.default_rng([worker, step]).normal(size=SIZE)
        return curvature[worker] * (theta - centre[worker]) + noise * own

    return dataclasses.replace(problem, start=generator.normal(size=SIZE), gradient=gradient)


def minimum(problem: Problem) -> np.ndarray:
    """Of the mean of quadratics without noise."""
    zero = problem.mean([problem.gradient(i, 0, np.zeros(SIZE)) for i in range(problem.workers)])
    one = problem.mean([problem.gradient(i, 0, np.ones(SIZE)) for i in range(problem.workers)])
    return -zero / (one - zero)


def assert_same(found: oracles.History, expected: oracles.History, tolerance: float = 1e-13) -> None:
    np.testing.assert_allclose(found.shared, expected.shared, rtol=0, atol=tolerance)
    np.testing.assert_allclose(found.workers, expected.workers, rtol=0, atol=tolerance)


@pytest.fixture(params=[None, [3.0, 1.0, 2.0, 2.0]], ids=["equal", "weighted"])
def problem(request) -> Problem:
    return quadratics(weights=request.param)


# The inner steps


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 2.0])
def test_inner_steps_equal_those_of_torch(kind, clip):
    problem = quadratics(clip=clip)
    theta, workers = problem.start, oracles.Workers(problem, kind)
    expected = torch.nn.Parameter(torch.tensor(problem.start))
    optimizer = (
        torch.optim.AdamW([expected], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.05)
        if kind == "adamw"
        else torch.optim.SGD([expected], lr=0.01)
    )
    clipped = 0
    for step in range(12):
        gradient = problem.gradient(1, step, expected.detach().numpy().copy())
        expected.grad = torch.tensor(gradient)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([expected], clip)
        clipped += not np.allclose(expected.grad, gradient)
        optimizer.step()
        theta = workers.step(1, step, theta)
        np.testing.assert_allclose(theta, expected.detach(), rtol=0, atol=1e-14)
    assert clipped == (12 if clip else 0)


# Methods with one copy for all


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0)])
def test_diloco_is_torch_sgd_on_the_pseudo_gradients(lr, momentum):
    problem = quadratics()
    history = oracles.diloco(problem, lr, momentum)
    expected = torch.nn.Parameter(torch.tensor(problem.start))
    optimizer = torch.optim.SGD([expected], lr=lr, momentum=momentum, nesterov=momentum > 0)
    workers = oracles.Workers(problem)
    for t, shared in enumerate(history.shared):
        start = expected.detach().numpy().copy()
        ends = [workers.round(i, t, start.copy()) for i in range(4)]
        expected.grad = torch.tensor(start - np.mean(ends, axis=0))
        optimizer.step()
        np.testing.assert_allclose(shared, expected.detach(), rtol=0, atol=1e-14)


def test_without_momentum_and_with_rate_one_diloco_is_federated_averaging(problem):
    problem = dataclasses.replace(problem, inner_optimizer="sgd")
    assert_same(oracles.diloco(problem, 1.0, 0.0), oracles.local_sgd(problem))


def test_one_step_of_sgd_a_round_is_data_parallel(problem):
    problem = dataclasses.replace(problem, inner_steps=1, rounds=6, inner_optimizer="sgd")
    assert_same(oracles.local_sgd(problem), oracles.synchronous(problem))


def test_data_parallel_training_clips_the_mean_gradient():
    problem = quadratics(clip=1.0, inner_optimizer="sgd", inner_steps=1, rounds=1)
    step = (problem.start - oracles.synchronous(problem).shared[0]) / problem.learning_rate
    mean = np.mean([problem.gradient(i, 0, problem.start) for i in range(4)], axis=0)
    np.testing.assert_allclose(step, mean / np.linalg.norm(mean), rtol=1e-5)
    assert not np.allclose(oracles.local_sgd(problem).shared[0], oracles.synchronous(problem).shared[0])


def test_one_worker_alone_has_no_need_of_a_mean():
    problem = quadratics(workers=1)
    assert_same(oracles.diloco(problem, 1.0, 0.0), oracles.synchronous(problem))


def test_averaging_on_the_server_is_diloco_without_momentum(problem):
    assert_same(oracles.fed_opt(problem, "avg", 0.6), oracles.diloco(problem, 0.6, 0.0))


@pytest.mark.parametrize("rounds", [1, 2])
def test_server_optimizers_on_paper(rounds):
    """Everybody moves by -1 a round: G = -1, m = -(1 - b1), then -(1 - b1^2); v from tau^2 = 0.25 as each has it."""
    gradient = lambda worker, step, theta: np.ones(1)  # noqa: E731
    problem = Problem(np.zeros(1), 2, 1, rounds, gradient, learning_rate=1.0, inner_optimizer="sgd")
    v = {"adagrad": [1.25, 2.25], "adam": [0.25 * 0.75 + 0.25, 0.25 * 0.75**2 + 1 - 0.75**2], "yogi": [0.5, 0.75]}
    for name, seconds in v.items():
        found = oracles.fed_opt(problem, name, server_lr=0.1, beta1=0.9, beta2=0.75, tau=0.5).shared[-1]
        firsts = [0.1, 0.19]
        steps = [0.1 * m / (second**0.5 + 0.5) for m, second in zip(firsts, seconds, strict=True)]
        assert found.item() == pytest.approx(-sum(steps[:rounds]), abs=1e-14)


# Fragments


def test_streaming_everything_at_once_is_diloco(problem):
    for merge in ("mix", "progress"):
        found = oracles.streaming_diloco(problem, 1, 0, 0.0, merge, "strided", 0.7, 0.9)
        assert_same(found, oracles.diloco(problem, 0.7, 0.9))


def test_fragments_are_whole_blocks():
    """Blocks: [embed, norm], layer 0, layer 1, layer 2."""
    rest, layers = [*range(12), *range(64, 69)], [[*range(12, 32)], [*range(32, 48)], [*range(48, 64)]]
    strided = oracles.fragment_indices(quadratics(), 2, "strided")
    assert [places.tolist() for places in strided] == [sorted(rest + layers[1]), layers[0] + layers[2]]
    sequential = oracles.fragment_indices(quadratics(), 2, "sequential")
    assert [places.tolist() for places in sequential] == [sorted(rest + layers[0]), layers[1] + layers[2]]


def test_a_number_within_a_word_makes_no_layer():
    problem = Problem(
        np.zeros(3), 1, 1, 1, None, shapes=[("fc1.w", 0, 1, (1,)), ("a.2", 1, 2, (1,)), ("a.b3", 2, 3, (1,))]
    )
    assert [places.tolist() for places in oracles.fragment_indices(problem, 2, "strided")] == [[0, 2], [1]]


@pytest.mark.parametrize("merge", ["mix", "progress"])
def test_streaming_on_paper(merge):
    """Constant gradients 1 and 3, SGD with rate 1: two fragments of one number, H = 4, sent after 2 and 4, 1 step late.

    phi_0 is -lr 4 after step 2; at step 3 the workers are at -3 and -9 there, and were at -2 and -6 when it was sent.
    """
    gradient = lambda worker, step, theta: np.full(2, 1.0 + 2.0 * worker)  # noqa: E731
    shapes = [("a", 0, 1, (1,)), ("b.0", 1, 2, (1,))]
    problem = Problem(np.zeros(2), 2, 4, 1, gradient, learning_rate=1.0, shapes=shapes, inner_optimizer="sgd")
    history = oracles.streaming_diloco(problem, 2, 1, 0.5, merge, "strided", 0.5, 0.9)
    phi = np.array([-0.5 * 4.0 * 1.9, -0.5 * 8.0 * 1.9])
    np.testing.assert_allclose(history.shared[0], phi, rtol=1e-14)
    third = [-1.5 + phi[0] / 2, -4.5 + phi[0] / 2] if merge == "mix" else [phi[0] - 1.0, phi[0] - 3.0]
    np.testing.assert_allclose(history.workers[0], [[third[0] - 1.0, -4.0], [third[1] - 3.0, -12.0]], rtol=1e-14)
    # One step later the second fragment has arrived.
    history = oracles.streaming_diloco(dataclasses.replace(problem, rounds=2), 2, 1, 0.0, "mix", "strided", 1.0, 0.0)
    last = history.shared[0][1]
    assert [workers[1] for workers in history.workers[1]] == [last - 3.0, last - 9.0]


# A copy for each


def test_eager_with_one_worker_is_diloco():
    problem = quadratics(workers=1)
    assert_same(oracles.eager_diloco(problem, 0.7, 0.9), oracles.diloco(problem, 0.7, 0.9))


def test_eager_on_paper():
    """Constant gradients 1 and 3: E = 1/2 and 3/2 first, 2 afterwards; without momentum, phi falls by that."""
    gradient = lambda worker, step, theta: np.full(1, 1.0 + 2.0 * worker)  # noqa: E731
    problem = Problem(np.zeros(1), 2, 1, 2, gradient, learning_rate=1.0, inner_optimizer="sgd")
    history = oracles.eager_diloco(problem, 1.0, 0.0)
    assert [[phi.item() for phi in workers] for workers in history.workers] == [[-0.5, -1.5], [-2.5, -3.5]]
    assert [phi.item() for phi in history.shared] == [-1.0, -3.0]
    # With 3/4 of the weight, worker 0 has E = 3/4, then 3/2.
    history = oracles.eager_diloco(dataclasses.replace(problem, weights=[3, 1]), 1.0, 0.0)
    assert [workers[0].item() for workers in history.workers] == [-0.75, -2.25]


def test_noloco_in_one_group_is_heavy_ball():
    problem, lr, momentum = quadratics(), 0.7, 0.5
    history = oracles.noloco(problem, [[[2, 0, 3, 1]]] * 3, lr, momentum, consensus=0.4)
    workers, phi, d = oracles.Workers(problem), problem.start, 0.0
    for t, shared in enumerate(history.shared):
        d = momentum * d + lr * (np.mean([workers.round(i, t, phi) for i in range(4)], axis=0) - phi)
        phi = phi + d
        np.testing.assert_allclose(shared, phi, rtol=0, atol=1e-14)
        np.testing.assert_allclose(history.workers[t], [phi] * 4, rtol=0, atol=1e-14)


def test_noloco_on_paper():
    """Constant gradients 1 and 3, alone first: d = -1 and -3. Then together, where both the mean movement and the mean
    phi are -2: d = -0.5 - 2 - 0.25 and -1.5 - 2 + 0.25."""
    gradient = lambda worker, step, theta: np.full(1, 1.0 + 2.0 * worker)  # noqa: E731
    problem = Problem(np.zeros(1), 2, 1, 2, gradient, [3, 1], learning_rate=1.0, inner_optimizer="sgd")
    history = oracles.noloco(problem, [[[0], [1]], [[1, 0]]], lr=1.0, momentum=0.5, consensus=0.25)
    assert [[phi.item() for phi in workers] for workers in history.workers] == [[-1.0, -3.0], [-3.75, -6.25]]
    assert [phi.item() for phi in history.shared] == [-1.5, -4.375]


def test_delayed_nesterov_of_one_worker_is_diloco():
    problem = quadratics(workers=1)
    assert_same(oracles.delayed_nesterov(problem, 1, 0.7, 0.9), oracles.diloco(problem, 0.7, 0.9))


def test_a_buffer_of_all_workers_makes_nesterov_of_their_mean():
    """Gradients that do not see the parameters: who begins where makes no difference."""
    problem = quadratics(inner_optimizer="sgd")
    blind = dataclasses.replace(problem, gradient=lambda i, step, theta: problem.gradient(i, step, np.zeros(SIZE)))
    found, expected = oracles.delayed_nesterov(blind, 4, 0.7, 0.9), oracles.diloco(blind, 0.7, 0.9)
    np.testing.assert_allclose(found.shared, expected.shared, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(found.workers[0][3], found.shared[0])
    assert np.abs(found.workers[0][2] - found.shared[0]).max() > 1e-3


# When the workers are apart


@pytest.mark.parametrize("monitor", ["linear", "exact"])
def test_fda_with_threshold_zero_averages_at_every_step(monitor, problem):
    every_step = dataclasses.replace(problem, inner_steps=1, rounds=12, inner_optimizer="adamw")
    expected = oracles.local_sgd(every_step).shared[3::4]
    xi = np.eye(SIZE)[0]
    found = oracles.fda(problem, 0.0, monitor, 1, None, xi)
    np.testing.assert_allclose(found.shared, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.workers, [[shared] * 4 for shared in expected], rtol=0, atol=1e-13)


def test_fda_counts_steps_over_rounds():
    """Nobody is ever far enough: after 6 steps, in the second round, they synchronise; then after 12."""
    history = oracles.fda(quadratics(), 1e9, "exact", 1, 6)
    together = oracles.fda(quadratics(inner_steps=6, rounds=1), 1e9, "exact", 1, 6).shared[0]
    spread = [np.std(workers, axis=0).max() for workers in history.workers]
    assert spread[0] > 0
    assert spread[1] > 0
    assert spread[2] == 0
    problem = quadratics()
    averaged = oracles.diloco(dataclasses.replace(problem, inner_steps=6, rounds=2), 1.0, 0.0)
    np.testing.assert_allclose(together, averaged.shared[0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(history.shared[2], averaged.shared[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("monitor", "threshold", "meetings"),
    [("linear", 5.0, [2, 5, 8, 11]), ("exact", 5.0, [3, 6, 9, 12]), ("exact", 9.0, [4, 8, 12])],
)
def test_fda_on_paper(monitor, threshold, meetings):
    """Gradients (1, 1) and (1, -1): after k steps |u|^2 = 2 k^2 and the variance is k^2, which must be above Theta.

    The first xi, across the mean movement, says 2 k^2; afterwards xi is along it, and says k^2.
    """
    gradient = lambda worker, step, theta: np.array([1.0, 1.0 - 2.0 * worker])  # noqa: E731
    problem = Problem(np.zeros(2), 2, 1, 12, gradient, learning_rate=1.0, inner_optimizer="sgd")
    history = oracles.fda(problem, threshold, monitor, 1, None, np.array([0.0, 1.0]))
    assert [t + 1 for t, (first, second) in enumerate(history.workers) if (first == second).all()] == meetings


def test_fda_looks_only_so_often():
    found = oracles.fda(quadratics(inner_steps=2, rounds=6), 0.0, "exact", 4, None)
    expected = oracles.diloco(quadratics(), 1.0, 0.0)
    np.testing.assert_allclose(found.shared[1::2], expected.shared, rtol=0, atol=1e-13)


def test_the_linear_monitor_is_never_below_the_variance(problem):
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        drifts = generator.normal(size=(4, SIZE)) + generator.normal() * generator.normal(size=SIZE)
        xi = generator.normal(size=SIZE)
        variance = oracles.drift_estimate(problem, drifts, "exact", xi)
        centre = problem.mean(drifts)
        assert variance == pytest.approx(problem.mean([(u - centre) @ (u - centre) for u in drifts]))
        ratios.append(oracles.drift_estimate(problem, drifts, "linear", xi / np.linalg.norm(xi)) / variance)
        best = oracles.drift_estimate(problem, drifts, "linear", centre / np.linalg.norm(centre))
        assert best == pytest.approx(variance)
    assert min(ratios) >= 1
    assert max(ratios) > 1.5


# Parts of vectors


@pytest.mark.parametrize("mean_over", ["workers", "senders"])
def test_sparse_loco_that_sends_everything_is_federated_averaging(mean_over, problem):
    found = oracles_sparse.sparse_loco(problem, 1.0, 7, 0.5, 32, mean_over, 0.8)
    assert_same(found, oracles.diloco(problem, 0.8, 0.0))


@pytest.mark.parametrize("bits", [32, 2])
def test_what_is_sent_and_what_is_left_are_all_there_was(bits, monkeypatch):
    """Without decay: sum over rounds of D = sum of what was sent + the error; that of what was sent is in phi."""
    left, sent, original = {}, [], oracles_sparse.chunk_top_k

    def recorded(problem, vector, *arguments):
        found = original(problem, vector, *arguments)
        left[len(sent) % 4] = vector - found[0]
        sent.append(found[0])
        return found

    monkeypatch.setattr(oracles_sparse, "chunk_top_k", recorded)
    problem = quadratics(inner_optimizer="sgd")
    history = oracles_sparse.sparse_loco(problem, 0.25, 8, 1.0, bits, "workers", 1.0)
    workers, moved, start = oracles.Workers(problem), np.zeros((4, SIZE)), problem.start
    for t, shared in enumerate(history.shared):
        moved += [start - workers.round(i, t, start) for i in range(4)]
        start = shared
    for i in range(4):
        np.testing.assert_allclose(sum(sent[i::4]) + left[i], moved[i], rtol=0, atol=1e-13)
    np.testing.assert_allclose(problem.start - start, sum(sent) / 4, rtol=0, atol=1e-13)


def test_sparse_loco_on_paper():
    """D = (2, 1.5) a round, one of two is sent, half of the error stays: e = (2, 1.5), (2, 2.25), (3, 1.5)."""
    gradient = lambda worker, step, theta: np.array([2.0, 1.5])  # noqa: E731
    shapes = [("a", 0, 2, (2,))]
    problem = Problem(np.zeros(2), 1, 1, 3, gradient, learning_rate=1.0, shapes=shapes, inner_optimizer="sgd")
    history = oracles_sparse.sparse_loco(problem, 0.5, 2, 0.5, 32, "workers", 1.0)
    assert np.array(history.shared).tolist() == [[-2.0, 0.0], [-2.0, -2.25], [-5.0, -2.25]]


def test_top_k_is_taken_from_every_chunk_of_every_tensor():
    """Chunks [3 -5 5 | 1] and [-2 2]; of equal magnitudes the first. Half of 3 rounds to 2, of 1 to 1, of 2 to 1."""
    problem = Problem(np.zeros(6), 1, 1, 1, None, shapes=[("a", 0, 4, (2, 2)), ("b", 4, 6, (2,))])
    vector = np.array([3.0, -5.0, 5.0, 1.0, -2.0, 2.0])
    kept, sent = oracles_sparse.chunk_top_k(problem, vector, 0.5, 3, 32)
    assert kept.tolist() == [0, -5, 5, 1, -2, 0]
    assert sent.tolist() == [0, 1, 1, 1, 1, 0]
    kept, _ = oracles_sparse.chunk_top_k(problem, vector, 0.01, 3, 32)
    assert kept.tolist() == [0, -5, 0, 1, -2, 0]


def test_the_mean_over_senders_leaves_the_others_out():
    problem = Problem(np.zeros(3), 2, 1, 1, None, weights=[3, 1])
    values, sent = [np.array([4.0, 2.0, 0]), np.array([0, 6.0, 0])], [np.array([1.0, 1, 0]), np.array([0, 1.0, 0])]
    assert oracles_sparse.mean_over_senders(problem, values, sent).tolist() == [4.0, 3.0, 0.0]
    assert problem.mean(values).tolist() == [3.0, 3.0, 0.0]


def test_the_table_on_paper():
    """Mean 0, std sqrt(20 / 4), scale 3.354: -3 and 3 are at -0.89 and 0.89 and get codes 1 and 3, the rest code 2."""
    values = np.array([-3.0, 3.0, 1.0, -1.0, 0.0])
    assert oracles_sparse.table_quantised(values, 2).tolist() == [-3.0, 3.0, 0.0, 0.0, 0.0]
    assert oracles_sparse.table_quantised(values + 10, 2).tolist() == [7.0, 13.0, 10.0, 10.0, 10.0]
    # Std sqrt(80 / 13), scale 3.721: +-2 and +-6 are at 0.54 and 1.61; only below the mean are there two classes.
    uneven = np.array([-6.0, -2.0, 2.0, 6.0, *[0.0] * 10])
    assert oracles_sparse.table_quantised(uneven, 2).tolist() == [-6.0, -2.0, 4.0, 4.0, *[0.0] * 10]
    # Std sqrt(2), not 1: both are at 0.47.
    assert oracles_sparse.table_quantised(np.array([-1.0, 1.0]), 2).tolist() == [0.0, 0.0]
    assert oracles_sparse.table_quantised(np.full(3, 0.5), 2).tolist() == [0.5] * 3
    assert oracles_sparse.table_quantised(np.array([2.0]), 2).tolist() == [2.0]


def test_the_table_keeps_the_mean_and_at_most_four_values():
    values = np.random.default_rng(1).normal(size=500)
    found = oracles_sparse.table_quantised(values, 2)
    assert len(np.unique(found)) == 4
    assert found.mean() == pytest.approx(values.mean())
    assert ((found - values) ** 2).sum() == pytest.approx((values**2).sum() - (found**2).sum())
    errors = [np.abs(oracles_sparse.table_quantised(values, bits) - values).mean() for bits in (2, 4, 6)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_the_dct_is_orthonormal_and_is_a_dct():
    for size in (1, 2, 5, 8):
        np.testing.assert_allclose(oracles_sparse.dct(size) @ oracles_sparse.dct(size).T, np.eye(size), atol=1e-14)
    # Of two numbers: their sum and their difference, over the root of two.
    np.testing.assert_allclose(oracles_sparse.dct(2) * 2**0.5, [[1, 1], [1, -1]], atol=1e-15)
    # The real part of the Fourier transform of the signal and its mirror image, half a place off.
    signal = np.random.default_rng(2).normal(size=8)
    mirrored = np.fft.fft([*signal, *signal[::-1]])[:8] * np.exp(-0.5j * np.pi * np.arange(8) / 8)
    np.testing.assert_allclose(oracles_sparse.dct(8) @ signal, mirrored.real / 4 / [2**0.5, *[1] * 7], atol=1e-14)


def test_blocks_are_the_largest_divisors():
    shapes = [("a", 0, 60, (6, 10)), ("b", 60, 67, (7,)), ("c", 67, 76, (9,))]
    blocks = oracles_sparse.demo_blocks(Problem(np.zeros(76), 1, 1, 1, None, shapes=shapes), 5)
    assert [places.shape for places, *_ in blocks] == [(3, 5)] * 4 + [(1, 1)] * 7 + [(1, 3)] * 3
    assert blocks[1][0].tolist() == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [25, 26, 27, 28, 29]]
    assert sorted(np.concatenate([places.ravel() for places, *_ in blocks])) == list(range(76))


def test_demo_that_sends_everything_is_sign_descent():
    problem, lr = quadratics(), 0.01
    history = oracles_sparse.demo(problem, 4, 1000, 0.9, lr)
    theta = problem.start
    for step in range(12):
        mean = np.mean([problem.gradient(i, step, theta) for i in range(4)], axis=0)
        theta = theta * (1 - lr * problem.weight_decay) - lr * np.sign(mean)
        if step % 4 == 3:
            np.testing.assert_allclose(history.shared[step // 4], theta, rtol=0, atol=1e-14)


def test_demo_keeps_what_it_does_not_send():
    """One coefficient of two, so either the mean of both numbers goes or half their difference.

    m = (1.5, 0.5): the mean 1 goes. m = 0.9 (0.5, -0.5) + (1.5, 0.5) = (1.95, 0.05): again. m = 0.9 (0.95, -0.95) +
    (1.5, 0.5) = (2.355, -0.355): the difference is larger now, and the second number rises.
    """
    gradient = lambda worker, step, theta: np.array([3.0, 1.0])  # noqa: E731
    problem = Problem(np.zeros(2), 1, 1, 3, gradient, weight_decay=0.0, shapes=[("a", 0, 2, (2,))])
    history = oracles_sparse.demo(problem, 2, 1, 0.9, 0.5)
    np.testing.assert_allclose(history.shared, [[-0.5, -0.5], [-1.0, -1.0], [-1.5, -0.5]], atol=1e-15)


def test_sparta_that_shares_everything_averages_at_every_step(problem):
    every_step = dataclasses.replace(problem, inner_steps=1, rounds=12, inner_optimizer="adamw")
    found = oracles_sparse.sparta(problem, lambda step: np.arange(SIZE))
    np.testing.assert_allclose(found.shared, oracles.local_sgd(every_step).shared[3::4], rtol=0, atol=1e-13)


def test_sparta_that_shares_nothing_leaves_diloco(problem):
    nothing = lambda step: np.array([], dtype=int)  # noqa: E731
    found = oracles_sparse.sparta(problem, nothing, 1, True, 0.7, 0.9)
    assert_same(found, oracles.diloco(problem, 0.7, 0.9))


def test_sparta_shares_what_the_mask_says_when_it_says():
    asked = []

    def masks(step):
        asked.append(step)
        return np.array([step, 50])

    history = oracles_sparse.sparta(quadratics(rounds=2), masks, every=2)
    assert asked == [1, 3, 5, 7]
    for last, workers in zip((3, 7), history.workers, strict=True):
        spread = np.ptp(workers, axis=0)
        assert sorted(np.flatnonzero(spread == 0)) == [last, 50]


# LoCoDL


def random_half(worker: int, step: int, vector: np.ndarray) -> np.ndarray:
    """Every number with probability 1/2, twice as large: unbiased, omega = 1."""
    return 2 * vector * (np.random.default_rng([worker, step, 1]).random(len(vector)) < 0.5)


def coin(step: int) -> bool:
    return np.random.default_rng([step, 2]).random() < 0.5


@pytest.mark.parametrize(("compressor", "omega", "rho"), [(lambda i, t, x: x, 0.0, 1.0), (random_half, 1.0, 0.5)])
def test_locodl_reaches_the_minimum_of_workers_that_differ(compressor, omega, rho):
    """LocalSGD does not: it stops where the workers' drifts cancel."""
    problem = quadratics(noise=0.0, rounds=150, learning_rate=0.2)
    history = oracles_sparse.locodl(problem, 0.5, compressor, coin, rho, rho, omega)
    optimum = minimum(problem)
    distance = [np.abs(y - optimum).max() for y in (history.shared[0], history.shared[-1])]
    assert distance[1] < 1e-7 < 0.1 < distance[0]
    np.testing.assert_allclose(history.workers[-1], [optimum] * 4, atol=1e-7)
    assert np.abs(oracles.local_sgd(problem).shared[-1] - optimum).max() > 1e-2


def test_locodl_without_compression_is_scaffnew(problem):
    """h_i <- h_i + (p / gamma) (x - xh_i), with half of the weight on a participant that has no function: y."""
    problem = dataclasses.replace(problem, learning_rate=0.1)
    history = oracles_sparse.locodl(problem, 0.4, lambda i, t, x: x, coin, 1.0, 1.0, 0.0)
    xs = [problem.start.copy() for _ in range(5)]
    h = [np.zeros(SIZE) for _ in xs]
    weights = [*(share / 2 for share in problem.shares), 0.5]
    for step in range(12):
        gradients = [*(problem.gradient(i, step, xs[i]) for i in range(4)), 0.0]
        ahead = [x - 0.1 * (gradient - own) for x, gradient, own in zip(xs, gradients, h, strict=True)]
        xs = ahead
        if coin(step):
            mean = sum(weight * x for weight, x in zip(weights, ahead, strict=True))
            xs = [mean.copy() for _ in xs]
            h = [own + 0.4 / 0.1 * (mean - x) for own, x in zip(h, ahead, strict=True)]
        if step % 4 == 3:
            np.testing.assert_allclose(history.workers[step // 4], xs[:4], rtol=0, atol=1e-12)
            np.testing.assert_allclose(history.shared[step // 4], xs[4], rtol=0, atol=1e-12)
    assert 0 < sum(map(coin, range(12))) < 12


def test_locodl_on_paper():
    """Gradients 1 and 3, gamma 1, coins yes and no, p chi / (gamma (1 + 2 omega)) = 1/16.

    d = -1, -3 and db = -1, so x = -1, -2, y = -1/2, u = 0, 1/8, v = -1/16, which the second step adds.
    """
    gradient = lambda worker, step, theta: np.full(1, 1.0 + 2.0 * worker)  # noqa: E731
    problem = Problem(np.zeros(1), 2, 1, 2, gradient, learning_rate=1.0)
    history = oracles_sparse.locodl(problem, 0.5, lambda i, t, x: x, lambda step: step == 0, 0.5, 0.5, 1.5)
    assert np.array(history.workers).ravel().tolist() == [-1.0, -2.0, -2.0, -4.875]
    assert np.array(history.shared).ravel().tolist() == [-0.5, -0.5625]


def test_a_history_keeps_its_own_copies():
    history, vector = oracles.History(), np.zeros(2)
    history.add(vector, [vector, vector])
    vector += 1
    assert history.shared[0].tolist() == [0, 0]
    assert history.workers[0][1].tolist() == [0, 0]
