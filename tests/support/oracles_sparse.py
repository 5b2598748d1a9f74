"""The low-communication methods that send parts of their vectors; see tests/support/oracles.py."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.support.oracles import History, Problem, Vector, Workers, nesterov


def largest(values: Vector, count: int) -> Vector:
    """The places of the largest magnitudes; of equal ones, the first."""
    return np.argsort(-np.abs(values), kind="stable")[:count]


def mean_over_senders(problem: Problem, values: Sequence[Vector], sent: Sequence[Vector]) -> Vector:
    """At every place the weighted mean over those workers who sent it; 0 where nobody did."""
    total = sum(share * here * value for share, here, value in zip(problem.shares, sent, values, strict=True))
    weight = sum(share * here for share, here in zip(problem.shares, sent, strict=True))
    return np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)


def table_quantised(values: Vector, bits: int) -> Vector:
    """What arrives of some values through a table of B = 2^bits entries.

    As tplr-ai/templar does it (src/tplr/compress/topk.py, _quantize_values), here in float64:

        c = v - mean(v);  s = 6 std(c) / B, with n - 1 under the root; s = 1 where it is 0 or there is one value;
        code = clamp(round(c / s + B // 2), 0, B - 1), a half rounds to even;  table[k] = mean of c where code = k;
        what arrives is mean(v) + table[code].

    B // 2 makes the classes uneven: with two bits they are c/s < -1.5, < -0.5, < 0.5 and the rest.
    """
    if not len(values):
        return values.copy()
    size = 2**bits
    centred = values - values.mean()
    scale = 6 * math.sqrt((centred**2).sum() / max(1, len(values) - 1)) / size or 1.0
    codes = np.clip(np.round(centred / scale + size // 2), 0, size - 1)
    arriving = np.empty_like(values)
    for code in np.unique(codes):
        arriving[codes == code] = values.mean() + centred[codes == code].mean()
    return arriving


def chunk_top_k(problem: Problem, vector: Vector, density: float, chunk: int, bits: int) -> tuple[Vector, Vector]:
    """What is left of a vector, and where: the top-k of every chunk of every tensor, quantised per tensor."""
    kept, sent = np.zeros_like(vector), np.zeros_like(vector)
    for _, start, stop, _ in problem.shapes:
        places = []
        for first in range(start, stop, chunk):
            part = vector[first : min(first + chunk, stop)]
            places += [first + place for place in largest(part, max(1, round(density * len(part))))]
        places = np.array(sorted(places))
        kept[places] = vector[places] if bits == 32 else table_quantised(vector[places], bits)
        sent[places] = 1.0
    return kept, sent


def sparse_loco(
    problem: Problem, density: float, chunk: int, error_decay: float, bits: int, mean_over: str, lr: float
) -> History:
    """Top-k with error feedback, no outer momentum (arXiv 2508.15706).

    e_i <- error_decay e_i + D_i;  s_i = Q(TopK(e_i));  e_i <- e_i - s_i;  phi <- phi - lr mean_i s_i.

    Chunks are `chunk` consecutive numbers of a tensor, the last one may be shorter; each keeps max(1, round(density
    length)), where a half rounds to even. The mean is over all workers (the paper) or over those who sent a place (the
    authors' code), with the workers' weights either way.

    Not done: templar scales every worker's values down to the median of their norms, keeps an even number per chunk of
    64 x 64, and computes in float32. bits 32: nothing is quantised.
    """
    history, workers, phi = History(), Workers(problem), problem.start.copy()
    errors = [np.zeros_like(phi) for _ in range(problem.workers)]
    for t in range(problem.rounds):
        kept, sent = [], []
        for i in range(problem.workers):
            errors[i] = error_decay * errors[i] + (phi - workers.round(i, t, phi.copy()))
            values, here = chunk_top_k(problem, errors[i], density, chunk, bits)
            errors[i] = errors[i] - values
            kept.append(values)
            sent.append(here)
        mean = problem.mean(kept) if mean_over == "workers" else mean_over_senders(problem, kept, sent)
        phi = phi - lr * mean
        history.add(phi, [phi] * problem.workers)
    return history


def dct(size: int) -> Vector:
    """The orthonormal DCT-II as a matrix: row k is cos(pi (2 n + 1) k / (2 size)), scaled to length one."""
    rows = [[math.cos(math.pi * (2 * n + 1) * k / (2 * size)) for n in range(size)] for k in range(size)]
    scales = [math.sqrt((1 if k == 0 else 2) / size) for k in range(size)]
    return np.array(rows) * np.array(scales)[:, None]


def demo_blocks(problem: Problem, chunk: int) -> list[tuple[Vector, Vector, Vector]]:
    """Of every block: its places in the vector [s0, s1], and the transforms of its columns and rows."""
    blocks = []
    for name, start, stop, shape in problem.shapes:
        if len(shape) not in (1, 2):
            raise ValueError(f"{name}: {len(shape)} dimensions")
        places = np.arange(start, stop).reshape((1, *shape) if len(shape) == 1 else shape)
        s0, s1 = (max(s for s in range(1, chunk + 1) if side % s == 0) for side in places.shape)
        for row in range(0, places.shape[0], s0):
            for column in range(0, places.shape[1], s1):
                blocks.append((places[row : row + s0, column : column + s1], dct(s0), dct(s1)))
    return blocks


def demo(problem: Problem, chunk: int, top_k: int, decay: float, lr: float) -> History:
    """Decoupled momentum, at every step (arXiv 2411.19870; bloc97/DeMo, demo.py).

    m_i <- decay m_i + lr g_i;  q_i = the top_k coefficients of the DCT of each block;  m_i <- m_i - IDCT(q_i);
    u = IDCT(mean of q over those who sent a coefficient);  theta <- theta (1 - lr weight_decay) - lr sign(u).

    A matrix is cut into blocks of s0 x s1, each the largest divisor of its dimension that is at most `chunk`, a vector
    into blocks of one such length. Gradients are clipped before they enter m_i. A DCT of a length that is no power of
    two has zeros, whose sign is that of a rounding error where one coefficient is all that arrives.
    """
    history, theta, blocks = History(), problem.start.copy(), demo_blocks(problem, chunk)
    m = [np.zeros_like(theta) for _ in range(problem.workers)]
    for t in range(problem.rounds):
        for step in range(t * problem.inner_steps, (t + 1) * problem.inner_steps):
            for i in range(problem.workers):
                m[i] = decay * m[i] + lr * problem.clipped(problem.gradient(i, step, theta.copy()))
            u = np.zeros_like(theta)
            for places, columns, rows in blocks:
                kept, sent = [], []
                for i in range(problem.workers):
                    coefficients = (columns @ m[i][places] @ rows.T).ravel()
                    chosen = largest(coefficients, top_k)
                    kept.append(np.zeros_like(coefficients))
                    sent.append(np.zeros_like(coefficients))
                    kept[i][chosen], sent[i][chosen] = coefficients[chosen], 1.0
                    m[i][places] -= columns.T @ kept[i].reshape(places.shape) @ rows
                mean = mean_over_senders(problem, kept, sent)
                u[places] = columns.T @ mean.reshape(places.shape) @ rows
            theta = theta * (1 - lr * problem.weight_decay) - lr * np.sign(u)
        history.add(theta, [theta] * problem.workers)
    return history


def sparta(
    problem: Problem,
    masks: Callable[[int], Vector],
    every: int = 1,
    with_diloco: bool = False,
    lr: float = 0.7,
    momentum: float = 0.9,
) -> History:
    """The mean of a random part of the parameters after every `every`-th inner step (openreview stFPf3gzq1).

    theta_i[S] <- mean_j theta_j[S], where S = masks(step) and steps count from 0 over the whole run. With DiLoCo its
    outer step follows at the end of a round. Shared: the mean of theta_i, phi with DiLoCo.
    """
    history, workers, thetas = History(), Workers(problem), problem.starts()
    phi = problem.start.copy()
    v = np.zeros_like(phi)
    for t in range(problem.rounds):
        for step in range(t * problem.inner_steps, (t + 1) * problem.inner_steps):
            thetas = [workers.step(i, step, theta) for i, theta in enumerate(thetas)]
            if (step + 1) % every == 0:
                places = masks(step)
                mean = problem.mean(thetas)[places]
                for theta in thetas:
                    theta[places] = mean
        if with_diloco:
            phi, v = nesterov(phi, problem.mean([phi - theta for theta in thetas]), v, lr, momentum)
            thetas = [phi.copy() for _ in thetas]
        history.add(phi if with_diloco else problem.mean(thetas), thetas)
    return history


def locodl(
    problem: Problem,
    probability: float,
    compressor: Callable[[int, int, Vector], Vector],
    coin: Callable[[int], bool],
    rho: float,
    chi: float,
    omega: float,
) -> History:
    """Local steps with unbiased compression (arXiv 2403.04348, Algorithm 1, without its shared function g).

    With gamma the learning rate, and u_i and v beginning with 0, at every step

        xh_i = x_i - gamma grad f_i(x_i) + gamma u_i;  yh = y + gamma v

    and where the coin that all workers share falls on the side of probability p

        d_i = C_i(xh_i - yh);  db = (1/2) mean_i d_i;  x_i = (1 - rho) xh_i + rho (yh + db);  y = yh + rho db
        u_i <- u_i + p chi / (gamma (1 + 2 omega)) (db - d_i);  v <- v + p chi / (gamma (1 + 2 omega)) db

    elsewhere x_i = xh_i, y = yh. omega is the compressors' variance: E|C(x) - x|^2 <= omega |x|^2.

    This is the algorithm as remembered; the paper's page with it was not at hand. What speaks for it: mean_i u_i + v
    stays 0, without compression and with rho = chi = 1 it is Scaffnew over the workers and y, and it reaches the exact
    minimum linearly (tests/unit/test_locodl.py).
    Shared: y.
    """
    history, xs, y, gamma = History(), problem.starts(), problem.start.copy(), problem.learning_rate
    us, v = [np.zeros_like(y) for _ in xs], np.zeros_like(y)
    rate = probability * chi / (gamma * (1 + 2 * omega))
    for t in range(problem.rounds):
        for step in range(t * problem.inner_steps, (t + 1) * problem.inner_steps):
            for i, (x, u) in enumerate(zip(xs, us, strict=True)):
                xs[i] = x - gamma * problem.clipped(problem.gradient(i, step, x.copy())) + gamma * u
            y = y + gamma * v
            if coin(step):
                d = [compressor(i, step, x - y) for i, x in enumerate(xs)]
                half = problem.mean(d) / 2
                xs = [(1 - rho) * x + rho * (y + half) for x in xs]
                y = y + rho * half
                us = [u + rate * (half - own) for u, own in zip(us, d, strict=True)]
                v = v + rate * half
        history.add(y, xs)
    return history
