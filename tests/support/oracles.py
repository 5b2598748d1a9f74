"""Independent implementations of the synchronisation methods, as their papers write them, in numpy with float64.

A method takes a `Problem` and returns a `History`: after each round, the parameters that are evaluated, and those that
each worker continues from. Symbols: theta[i] parameters of worker i, phi the synchronised parameters, w_i the weights.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Vector = np.ndarray
History = list[tuple[Vector, list[Vector]]]


@dataclass
class Problem:
    """Training by M workers over `rounds` rounds of H inner steps.

    Attributes:
        start: the initial parameters.
        gradient: from a worker, an inner step (from 0, over the whole run) and parameters to the worker's gradient.
        weights: of the workers in means, in any unit.
        ends: the inner steps of the run, from 1, with which each worker ends its own.
        warmup_steps: inner steps of the run over which the learning rate grows.
        clip: the largest norm of a gradient.
        shapes: (name, start, stop, shape) of the tensors in the vector.
    """

    start: Vector
    workers: int
    inner_steps: int
    rounds: int
    gradient: Callable[[int, int, Vector], Vector]
    weights: Sequence[float]
    ends: Sequence[Sequence[int]]
    learning_rate: float
    warmup_steps: int
    betas: tuple[float, float]
    weight_decay: float
    clip: float | None
    shapes: Sequence[tuple[str, int, int, tuple[int, ...]]]

    @property
    def shares(self) -> Vector:
        return np.array(self.weights) / sum(self.weights)

    def mean(self, vectors: Sequence[Vector]) -> Vector:
        return sum(share * vector for share, vector in zip(self.shares, vectors, strict=True))

    def clipped(self, gradient: Vector) -> Vector:
        if self.clip is None:
            return gradient
        return gradient * min(1.0, self.clip / (np.linalg.norm(gradient) + 1e-6))

    def starts(self) -> list[Vector]:
        return [self.start.copy() for _ in range(self.workers)]

    def steps(self, number: int) -> range:
        """The inner steps of a round, over the whole run."""
        return range(number * self.inner_steps, (number + 1) * self.inner_steps)


class Workers:
    """The inner steps of all workers: AdamW (arXiv 1711.05101, Algorithm 2), or plain SGD."""

    def __init__(self, problem: Problem, sgd: bool = False):
        self.problem = problem
        self.sgd = sgd
        self.lr = problem.learning_rate
        self.m = [0.0] * problem.workers
        self.v = [0.0] * problem.workers
        self.t = [0] * problem.workers

    def update(self, i: int, theta: Vector, g: Vector) -> Vector:
        lr = self.lr
        if self.sgd:
            return theta - lr * g
        beta1, beta2 = self.problem.betas
        self.t[i] += 1
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        m = self.m[i] / (1 - beta1 ** self.t[i])
        v = self.v[i] / (1 - beta2 ** self.t[i])
        return theta - lr * self.problem.weight_decay * theta - lr * m / (np.sqrt(v) + 1e-8)

    def step(self, i: int, step: int, theta: Vector) -> Vector:
        return self.update(i, theta, self.problem.clipped(self.problem.gradient(i, step, theta)))

    def step_all(self, step: int, thetas: Sequence[Vector]) -> list[Vector]:
        """Let the workers make a step that end one of their own with this step of the run, from 0."""
        self.lr = self.problem.learning_rate * min(1.0, (step + 1) / max(1, self.problem.warmup_steps))
        thetas = list(thetas)
        for i, ends in enumerate(self.problem.ends):
            if step + 1 in ends:
                thetas[i] = self.step(i, ends.index(step + 1), thetas[i])
        return thetas

    def round(self, number: int, thetas: Sequence[Vector]) -> list[Vector]:
        for step in self.problem.steps(number):
            thetas = self.step_all(step, thetas)
        return thetas


def nesterov(phi: Vector, d: Vector, v: Vector, lr: float, momentum: float) -> tuple[Vector, Vector]:
    """Return phi and v after v <- momentum v + D;  phi <- phi - lr (D + momentum v)."""
    v = momentum * v + d
    return phi - lr * (d + momentum * v), v


def local_sgd(problem: Problem) -> History:
    """phi <- mean_i theta_i (arXiv 1805.09767)."""
    history, workers, phi = [], Workers(problem, sgd=True), problem.start
    for t in range(problem.rounds):
        phi = problem.mean(workers.round(t, [phi] * problem.workers))
        history.append((phi, [phi] * problem.workers))
    return history


def diloco(problem: Problem, lr: float = 0.7, momentum: float = 0.9) -> History:
    """D = mean_i (phi - theta_i), then Nesterov's step (arXiv 2311.08105, Algorithm 1)."""
    history, workers, phi, v = [], Workers(problem), problem.start, 0.0
    for t in range(problem.rounds):
        d = phi - problem.mean(workers.round(t, [phi] * problem.workers))
        phi, v = nesterov(phi, d, v, lr, momentum)
        history.append((phi, [phi] * problem.workers))
    return history


def synchronous(problem: Problem) -> History:
    """Data parallel: gradients are averaged at every inner step, then clipped."""
    history, theta = [], problem.start
    optimizer = Workers(dataclasses.replace(problem, workers=1))
    for t in range(problem.rounds):
        for step in problem.steps(t):
            mean = problem.mean([problem.gradient(i, step, theta) for i in range(problem.workers)])
            theta = optimizer.update(0, theta, problem.clipped(mean))
        history.append((theta, [theta] * problem.workers))
    return history


def fed_opt(problem: Problem, server_optimizer: str, beta1=0.9, beta2=0.99, tau=1e-3, lr: float = 0.03) -> History:
    """Adaptive server optimisers (arXiv 2003.00295, Algorithm 2), with AdamW inside, where the paper has SGD."""
    history, workers, phi, m, v = [], Workers(problem), problem.start, 0.0, tau**2
    for t in range(problem.rounds):
        delta = problem.mean(workers.round(t, [phi] * problem.workers)) - phi
        m = beta1 * m + (1 - beta1) * delta
        if server_optimizer == "adagrad":
            v = v + delta**2
        elif server_optimizer == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        phi = phi + lr * m / (np.sqrt(v) + tau)
        history.append((phi, [phi] * problem.workers))
    return history


def fragment_indices(shapes, count: int) -> list[Vector]:
    """Return the positions of every fragment.

    A tensor's group is its name up to the first part that is a number; group 0 has the tensors without one. Group b is
    in fragment b % P.
    """
    layers = [re.match(r"(?:[^.]*\.)*?\d+(?=\.|$)", name) for name, *_ in shapes]
    keys = ["" if layer is None else layer.group() for layer in layers]
    groups = ["", *dict.fromkeys(key for key in keys if key)]
    found = [[] for _ in range(count)]
    for key, (_, start, stop, _) in zip(keys, shapes, strict=True):
        found[groups.index(key) % count] += range(start, stop)
    return [np.array(sorted(places), dtype=int) for places in found]


def streaming_diloco(problem: Problem, fragments: int, delay: int, mixing=None, lr=0.7, momentum=0.9) -> History:
    """Fragment p is sent after inner step (p + 1) H / P, and applied `delay` steps later (arXiv 2501.18512).

    Without a delay it replaces the workers' own, with one it is mixed with them half and half.
    """
    if mixing is None:
        mixing = 0.5 if delay else 0.0
    interval = problem.inner_steps // fragments
    places = fragment_indices(problem.shapes, fragments)
    history, workers, phi, thetas = [], Workers(problem), problem.start.copy(), problem.starts()
    v = [0.0] * fragments
    in_flight = {}  # from the inner step after which it arrives to what was sent
    for t in range(problem.rounds):
        for step in problem.steps(t):
            thetas = workers.step_all(step, thetas)
            done = step + 1
            if done % interval == 0:
                p = (done // interval - 1) % fragments
                d = phi[places[p]] - problem.mean([theta[places[p]] for theta in thetas])
                phi[places[p]], v[p] = nesterov(phi[places[p]], d, v[p], lr, momentum)
                in_flight[done + delay] = (p, phi[places[p]].copy())
            if done in in_flight:
                p, new = in_flight.pop(done)
                for theta in thetas:
                    theta[places[p]] = mixing * theta[places[p]] + (1 - mixing) * new
        history.append((phi.copy(), [theta.copy() for theta in thetas]))
    return history


def eager_diloco(problem: Problem, lr: float = 0.7, momentum: float = 0.9) -> History:
    """E_i = D^(t-1) + w_i (D_i^t - D_i^(t-1)), then Nesterov's step on (phi_i, v_i) (arXiv 2502.12996)."""
    history, workers, phis = [], Workers(problem), problem.starts()
    old = [0.0] * problem.workers
    v = [0.0] * problem.workers
    for t in range(problem.rounds):
        new = [phi - theta for phi, theta in zip(phis, workers.round(t, phis), strict=True)]
        for i, share in enumerate(problem.shares):
            eager = problem.mean(old) + share * (new[i] - old[i])
            phis[i], v[i] = nesterov(phis[i], eager, v[i], lr, momentum)
        old = new
        history.append((problem.mean(phis), list(phis)))
    return history


def noloco(problem: Problem, groups: Sequence[Sequence[Sequence[int]]], momentum: float, consensus: float) -> History:
    """d_i <- momentum d_i + 0.7 mean_g(theta_j - phi_j) + consensus (mean_g(phi_j) - phi_i);  phi_i <- phi_i + d_i
    (arXiv 2506.10911, with the sign of the authors' code); groups: of every round."""
    history, workers, phis = [], Workers(problem), problem.starts()
    d = [0.0] * problem.workers
    for t in range(problem.rounds):
        thetas = workers.round(t, phis)
        moved = [theta - phi for theta, phi in zip(thetas, phis, strict=True)]
        before = list(phis)
        for group in groups[t]:
            for i in group:
                centre = np.mean([before[j] for j in group], axis=0) - before[i]
                d[i] = momentum * d[i] + 0.7 * np.mean([moved[j] for j in group], axis=0) + consensus * centre
                phis[i] = before[i] + d[i]
        history.append((problem.mean(phis), list(phis)))
    return history


def largest(values: Vector, count: int) -> Vector:
    """Return the positions of the largest magnitudes; of equal ones, the first."""
    return np.argsort(-np.abs(values), kind="stable")[:count]


def mean_over_senders(problem: Problem, values: Sequence[Vector], sent: Sequence[Vector]) -> Vector:
    """Return at every position the weighted mean over the workers that sent it; 0 where none did."""
    total = problem.mean([here * value for here, value in zip(sent, values, strict=True)])
    weight = problem.mean(sent)
    return np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)


def table_quantised(values: Vector, bits: int) -> Vector:
    """Return what arrives of values through a table of 2^bits entries (tplr-ai/templar, _quantize_values)."""
    size = 2**bits
    centred = values - values.mean()
    scale = 6 * math.sqrt((centred**2).sum() / max(1, len(values) - 1)) / size or 1.0
    codes = np.clip(np.round(centred / scale + size // 2), 0, size - 1)
    arriving = np.empty_like(values)
    for code in np.unique(codes):
        arriving[codes == code] = values.mean() + centred[codes == code].mean()
    return arriving


def chunk_top_k(problem: Problem, vector: Vector, density: float, chunk: int, bits: int) -> Vector:
    """Return the top-k of every chunk of every tensor, quantised per tensor; of a lone worker everything."""
    if problem.workers == 1:
        return vector
    kept = np.zeros_like(vector)
    for _, start, stop, _ in problem.shapes:
        places = []
        for first in range(start, stop, chunk):
            part = vector[first : min(first + chunk, stop)]
            places += [first + place for place in largest(part, max(1, round(density * len(part))))]
        kept[places] = vector[places] if bits == 32 else table_quantised(vector[places], bits)
    return kept


def sparse_loco(problem: Problem, density, chunk, error_decay, bits, lr: float = 0.7) -> History:
    """e_i <- b e_i + D_i;  s_i = Q(TopK(e_i));  e_i <- e_i - s_i;  phi <- phi - lr mean_i s_i (arXiv 2508.15706)."""
    history, workers, phi = [], Workers(problem), problem.start
    errors = [0.0] * problem.workers
    for t in range(problem.rounds):
        kept = []
        for i, theta in enumerate(workers.round(t, [phi] * problem.workers)):
            errors[i] = error_decay * errors[i] + phi - theta
            values = chunk_top_k(problem, errors[i], density, chunk, bits)
            errors[i] = errors[i] - values
            kept.append(values)
        phi = phi - lr * problem.mean(kept)
        history.append((phi, [phi] * problem.workers))
    return history


def dct(size: int) -> Vector:
    """Return the orthonormal DCT-II as a matrix."""
    rows = [[math.cos(math.pi * (2 * n + 1) * k / (2 * size)) for n in range(size)] for k in range(size)]
    return np.array(rows) * np.array([math.sqrt((1 if k == 0 else 2) / size) for k in range(size)])[:, None]


def tiles(problem: Problem, chunk: int) -> list[tuple[Vector, Vector, Vector]]:
    """Return of every tile its positions [s0, s1] and the transforms of its columns and rows."""
    found = []
    for _, start, stop, shape in problem.shapes:
        places = np.arange(start, stop).reshape((1, *shape) if len(shape) == 1 else shape)
        s0, s1 = (max(s for s in range(1, chunk + 1) if side % s == 0) for side in places.shape)
        for row in range(0, places.shape[0], s0):
            for column in range(0, places.shape[1], s1):
                found.append((places[row : row + s0, column : column + s1], dct(s0), dct(s1)))
    return found


def demo(problem: Problem, chunk: int, top_k: int, decay: float) -> History:
    """m_i <- decay m_i + lr g_i;  q_i = top-k of the DCT of each tile;  m_i <- m_i - IDCT(q_i);
    u = IDCT(mean of q over senders);  theta <- theta (1 - lr weight_decay) - lr sign(u) (arXiv 2411.19870; demo.py)."""
    history, theta, lr = [], problem.start.copy(), problem.learning_rate
    m = [np.zeros_like(theta) for _ in range(problem.workers)]
    for t in range(problem.rounds):
        for step in problem.steps(t):
            for i in range(problem.workers):
                m[i] = decay * m[i] + lr * problem.clipped(problem.gradient(i, step, theta))
            alone = problem.workers == 1  # it sends nothing: all of m is its update
            u, m[0] = (m[0], 0.0 * m[0]) if alone else (np.zeros_like(theta), m[0])
            for places, columns, rows in [] if alone else tiles(problem, chunk):
                kept = [np.zeros(places.size) for _ in m]
                sent = [np.zeros(places.size) for _ in m]
                for i in range(problem.workers):
                    coefficients = (columns @ m[i][places] @ rows.T).ravel()
                    chosen = largest(coefficients, top_k)
                    kept[i][chosen] = coefficients[chosen]
                    sent[i][chosen] = 1.0
                    m[i][places] -= columns.T @ kept[i].reshape(places.shape) @ rows
                u[places] = columns.T @ mean_over_senders(problem, kept, sent).reshape(places.shape) @ rows
            theta = theta * (1 - lr * problem.weight_decay) - lr * np.sign(u)
        history.append((theta, [theta] * problem.workers))
    return history


def sparta(problem: Problem, masks: Callable[[int], Vector], with_diloco: bool) -> History:
    """theta_i[S] <- mean_j theta_j[S] after every inner step, S = masks(step) (openreview stFPf3gzq1)."""
    history, workers, phi, thetas, v = [], Workers(problem), problem.start, problem.starts(), 0.0
    for t in range(problem.rounds):
        for step in problem.steps(t):
            thetas = workers.step_all(step, thetas)
            places = masks(step)
            mean = problem.mean(thetas)[places]
            for theta in thetas:
                theta[places] = mean
        if with_diloco:
            phi, v = nesterov(phi, phi - problem.mean(thetas), v, 0.7, 0.9)
            thetas = [phi] * problem.workers
        history.append((phi if with_diloco else problem.mean(thetas), [theta.copy() for theta in thetas]))
    return history


def fda(problem: Problem, threshold: float, check_every=1, max_inner_steps=math.inf, monitor="linear") -> History:
    """A mean where mean |u|^2 - (mean <xi, u>)^2 is above the threshold, xi the direction in which phi moved last; at
    first 0 (arXiv 2405.20988, the linear monitor; of the other one only what its estimates do not change)."""
    history, workers, phi, thetas = [], Workers(problem), problem.start, problem.starts()
    xi, since = np.zeros_like(phi), 0
    for t in range(problem.rounds):
        for step in problem.steps(t):
            thetas = workers.step_all(step, thetas)
            since += 1
            drifts = [theta - phi for theta in thetas]
            estimate = problem.mean([u @ u for u in drifts]) - problem.mean([xi @ u for u in drifts]) ** 2
            if since >= max_inner_steps or (since % check_every == 0 and estimate > threshold):
                before, phi, since = phi, problem.mean(thetas), 0
                thetas = [phi] * problem.workers
                xi = (phi - before) / np.linalg.norm(phi - before)
        history.append((problem.mean(thetas), thetas))
    return history


def locodl(problem: Problem, probability, compressor, coin, omega) -> History:
    """The equations of the method's docstring, with u_i in place of the correction (arXiv 2403.04348, from memory).

    compressor: from a worker, a step and a vector to C_i of it. coin: True at the steps that communicate.
    """
    history, xs, y, gamma = [], problem.starts(), problem.start, problem.learning_rate
    us, v = [0.0] * problem.workers, 0.0
    rho = chi = 1 / (1 + omega / problem.workers)
    rate = probability * chi / (gamma * (1 + 2 * omega))
    for t in range(problem.rounds):
        for step in problem.steps(t):
            xs = [x - gamma * problem.gradient(i, step, x) + gamma * us[i] for i, x in enumerate(xs)]
            y = y + gamma * v
            if coin(step):
                d = [compressor(i, step, x - y) for i, x in enumerate(xs)]
                half = problem.mean(d) / 2
                xs = [(1 - rho) * x + rho * (y + half) for x in xs]
                y = y + rho * half
                us = [u + rate * (half - own) for u, own in zip(us, d, strict=True)]
                v = v + rate * half
        history.append((y, xs))
    return history


# Methods without a barrier. A clock runs over the whole run, in inner steps of the fastest worker. `own` has the inner
# steps that each worker makes in a round of H: worker i makes its k-th step at k H / own_i, or later if it waited.


def step_times(
    own: Sequence[int], inner_steps: int, rounds: int, leg: int = 1, wait=Fraction(0)
) -> list[list[Fraction]]:
    """Return the times of each worker's steps, if after every `leg` of them it waits for an answer."""
    end = rounds * inner_steps
    times = [[Fraction(k * inner_steps, o) + (k - 1) // leg * wait for k in range(1, end + 1)] for o in own]
    return [[time for time in each if time <= end] for each in times]


def delayed_nesterov(problem: Problem, times: Sequence[Sequence[Fraction]], leg: int, buffer: int) -> History:
    """A worker arrives after every `leg` of its steps and continues from phi (arXiv 2401.09135, Algorithm 3, c = 0):
    phi <- phi - lr g / K, and at every K-th arrival m <- mu m + mean g;  phi <- phi - lr mu m. lr 0.7, mu 0.9."""
    history, workers, thetas, starts = [], Workers(problem), problem.starts(), problem.starts()
    phi, m, gathered, arrivals = problem.start, 0.0, 0.0, 0
    steps = sorted((time, i, k) for i, own in enumerate(times) for k, time in enumerate(own, 1))
    for t in range(problem.rounds):
        for _, i, k in [step for step in steps if t < step[0] / problem.inner_steps <= t + 1]:
            thetas[i] = workers.step(i, k - 1, thetas[i])
            if k % leg == 0:
                g = starts[i] - thetas[i]
                phi = phi - 0.7 * g / buffer
                gathered = gathered + g
                arrivals += 1
                if arrivals % buffer == 0:
                    m = 0.9 * m + gathered / buffer
                    phi = phi - 0.7 * 0.9 * m
                    gathered = 0.0
                thetas[i] = starts[i] = phi
        history.append((phi, list(thetas)))
    return history


def decoupled(
    problem: Problem, own: Sequence[int], fragments, quorum, travel: Sequence[float], steps, mixing
) -> History:
    """w_i = tokens_i^2 / steps_i,  D_p = sum w_i (phi_p - theta_i,p) / sum w_i over the workers that are ready, then
    Nesterov (arXiv 2604.21428; who and when as in the method's docstring).

    travel: of every fragment, until its answer is there.
    """
    places = fragment_indices(problem.shapes, fragments)
    history, workers, phi, thetas = [], Workers(problem), problem.start.copy(), problem.starts()
    everybody = range(problem.workers)
    v = [0.0] * fragments
    made = [0] * problem.workers
    due = [[math.ceil((p + 1) * steps / fragments)] * problem.workers for p in range(fragments)]  # own steps when ready
    sent = [[0] * problem.workers for _ in range(fragments)]  # own steps when last sent
    under_way: list[dict[int, int]] = [{} for _ in range(fragments)]  # own steps when sent, of workers without answer
    back = [0] * fragments

    def answer(p: int) -> None:
        for i, since in under_way[p].items():
            share = mixing if made[i] > since else 0.0
            thetas[i][places[p]] = share * thetas[i][places[p]] + (1 - share) * phi[places[p]]
        under_way[p] = {}

    for now in range(1, problem.rounds * problem.inner_steps + 1):
        for i in everybody:
            while Fraction((made[i] + 1) * problem.inner_steps, own[i]) <= now:
                thetas[i] = workers.step(i, made[i], thetas[i])
                made[i] += 1
        for p in range(fragments):
            if under_way[p] and back[p] == now:
                answer(p)
            if under_way[p]:
                continue
            times = [Fraction(due[p][i] * problem.inner_steps, own[i]) for i in everybody]
            closes = max(sorted(times)[min(quorum, len(times)) - 1], back[p])
            if closes > now:
                continue
            ready = [i for i in everybody if times[i] <= closes]
            count = {i: made[i] - sent[p][i] for i in ready}
            w = {i: (count[i] * problem.weights[i]) ** 2 / count[i] for i in ready}
            d = sum(w[i] * (phi[places[p]] - thetas[i][places[p]]) for i in ready) / sum(w.values())
            phi[places[p]], v[p] = nesterov(phi[places[p]], d, v[p], 0.7, 0.9)
            for i in ready:
                sent[p][i] = made[i]
                due[p][i] = made[i] + steps
            under_way[p] = {i: made[i] for i in ready}
            back[p] = math.ceil(now + Fraction(travel[p]))
            if back[p] == now:
                answer(p)
        if now % problem.inner_steps == 0:
            history.append((phi.copy(), [theta.copy() for theta in thetas]))
    return history
