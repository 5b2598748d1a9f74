"""Every low-communication method once more, as its paper writes it: what the real ones are tested against.

Nothing here is ours: numpy in float64, loops over workers, copies everywhere. A method takes a `Problem` and returns a
`History`. Sparse methods are in `tests/support/oracles_sparse.py`.

Symbols: theta[i] parameters of worker i, phi the synchronised copy, D_i = phi - theta_i, w_i the workers' weights.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray


@dataclass
class Problem:
    """What is trained, by M workers over `rounds` rounds of H inner steps.

    Attributes:
        start: the initial parameters, [n] in float64.
        gradient: of worker and inner step (from 0, over the whole run) at some parameters.
        weights: of the workers in every mean; equal ones unless given. They need not sum to one.
        weight_decay: of AdamW (and of DeMo); SGD has none.
        clip: the largest norm of a gradient, as torch.nn.utils.clip_grad_norm_ has it; None: any.
        shapes: (name, start, stop, shape) of the tensors in the vector.
        inner_optimizer: "adamw" or "sgd"; None: what the method's paper uses.
    """

    start: Vector
    workers: int
    inner_steps: int
    rounds: int
    gradient: Callable[[int, int, Vector], Vector]
    weights: Sequence[float] | None = None
    learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = None
    shapes: Sequence[tuple[str, int, int, tuple[int, ...]]] = ()
    inner_optimizer: str | None = None

    @property
    def shares(self) -> list[float]:
        """The weights, with sum one."""
        weights = [1.0] * self.workers if self.weights is None else list(self.weights)
        return [weight / sum(weights) for weight in weights]

    def mean(self, vectors: Sequence[Vector]) -> Vector:
        """The weighted mean over all workers."""
        return sum(share * vector for share, vector in zip(self.shares, vectors, strict=True))

    def clipped(self, gradient: Vector) -> Vector:
        if self.clip is None:
            return gradient.copy()
        return gradient * min(1.0, self.clip / (np.linalg.norm(gradient) + 1e-6))

    def starts(self) -> list[Vector]:
        """A copy of the initial parameters for every worker."""
        return [self.start.copy() for _ in range(self.workers)]


@dataclass
class History:
    """shared: what is evaluated, after every round. workers: what each worker goes on from, after every round."""

    shared: list[Vector] = field(default_factory=list)
    workers: list[list[Vector]] = field(default_factory=list)

    def add(self, shared: Vector, workers: Sequence[Vector]) -> None:
        self.shared.append(shared.copy())
        self.workers.append([vector.copy() for vector in workers])


class AdamW:
    """Decoupled weight decay, bias correction (arXiv 1711.05101, Algorithm 2, the decay times the learning rate)."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.m = self.v = np.zeros_like(problem.start)
        self.t = 0

    def step(self, theta: Vector, gradient: Vector) -> Vector:
        lr, (beta1, beta2), self.t = self.problem.learning_rate, self.problem.betas, self.t + 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        self.v = beta2 * self.v + (1 - beta2) * gradient**2
        m, v = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        return theta - lr * self.problem.weight_decay * theta - lr * m / (np.sqrt(v) + self.problem.epsilon)


class SGD:
    """Without momentum and weight decay."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def step(self, theta: Vector, gradient: Vector) -> Vector:
        return theta - self.problem.learning_rate * gradient


class Workers:
    """The inner steps of all workers; the state of their optimisers stays theirs for the whole run."""

    def __init__(self, problem: Problem, default: str = "adamw"):
        kind = {"adamw": AdamW, "sgd": SGD}[problem.inner_optimizer or default]
        self.problem = problem
        self.optimizers = [kind(problem) for _ in range(problem.workers)]

    def step(self, worker: int, step: int, theta: Vector) -> Vector:
        """Inner step number `step` of one worker."""
        gradient = self.problem.clipped(self.problem.gradient(worker, step, theta.copy()))
        return self.optimizers[worker].step(theta, gradient)

    def round(self, worker: int, number: int, theta: Vector) -> Vector:
        """All inner steps of one worker in a round; rounds count from 0."""
        for step in range(number * self.problem.inner_steps, (number + 1) * self.problem.inner_steps):
            theta = self.step(worker, step, theta)
        return theta


def nesterov(phi: Vector, d: Vector, v: Vector, lr: float, momentum: float) -> tuple[Vector, Vector]:
    """v <- momentum v + D;  phi <- phi - lr (D + momentum v). Returns phi and v."""
    v = momentum * v + d
    return phi - lr * (d + momentum * v), v


def local_sgd(problem: Problem) -> History:
    """phi <- mean_i theta_i, SGD inside (arXiv 1805.09767)."""
    history, workers, phi = History(), Workers(problem, "sgd"), problem.start.copy()
    for t in range(problem.rounds):
        phi = problem.mean([workers.round(i, t, phi.copy()) for i in range(problem.workers)])
        history.add(phi, [phi] * problem.workers)
    return history


def diloco(problem: Problem, lr: float, momentum: float) -> History:
    """D = mean_i (phi - theta_i), then Nesterov's step (arXiv 2311.08105, Algorithm 1)."""
    history, workers, phi = History(), Workers(problem), problem.start.copy()
    v = np.zeros_like(phi)
    for t in range(problem.rounds):
        d = problem.mean([phi - workers.round(i, t, phi.copy()) for i in range(problem.workers)])
        phi, v = nesterov(phi, d, v, lr, momentum)
        history.add(phi, [phi] * problem.workers)
    return history


def synchronous(problem: Problem) -> History:
    """Data parallel: one optimiser, gradients averaged at every inner step and clipped after that."""
    history, theta = History(), problem.start.copy()
    optimizer = Workers(dataclasses.replace(problem, workers=1, weights=None)).optimizers[0]
    for t in range(problem.rounds):
        for step in range(t * problem.inner_steps, (t + 1) * problem.inner_steps):
            mean = problem.mean([problem.gradient(i, step, theta.copy()) for i in range(problem.workers)])
            theta = optimizer.step(theta, problem.clipped(mean))
        history.add(theta, [theta] * problem.workers)
    return history


def fed_opt(
    problem: Problem,
    server_optimizer: str,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
) -> History:
    """Adaptive server optimisers (arXiv 2003.00295, Algorithm 2); AdamW inside, where the paper has SGD.

    G = mean_i theta_i - phi (ascent), m <- beta1 m + (1 - beta1) G, phi <- phi + server_lr m / (sqrt(v) + tau), where
    Adagrad has v <- v + G^2, Yogi v <- v - (1 - beta2) G^2 sign(v - G^2), Adam v <- beta2 v + (1 - beta2) G^2. There is
    no bias correction; m begins with 0, v with tau^2. With "avg", phi <- phi + server_lr G.
    """
    history, workers, phi = History(), Workers(problem), problem.start.copy()
    m, v = np.zeros_like(phi), np.full_like(phi, tau**2)
    for t in range(problem.rounds):
        g = problem.mean([workers.round(i, t, phi.copy()) - phi for i in range(problem.workers)])
        if server_optimizer == "avg":
            phi = phi + server_lr * g
        else:
            m = beta1 * m + (1 - beta1) * g
            v = {
                "adagrad": v + g**2,
                "yogi": v - (1 - beta2) * g**2 * np.sign(v - g**2),
                "adam": beta2 * v + (1 - beta2) * g**2,
            }[server_optimizer]
            phi = phi + server_lr * m / (np.sqrt(v) + tau)
        history.add(phi, [phi] * problem.workers)
    return history


def fragment_indices(problem: Problem, fragments: int, order: str) -> list[Vector]:
    """The places in the vector of every fragment, ascending.

    The block of a tensor is its name up to the first part that is a number ("model.layers.3"). Block 0 is whatever has
    no number, blocks 1, 2, ... are the layers as they come. Of B blocks, block b is in fragment b % P ("strided") or
    b P // B ("sequential").
    """
    layers = [re.match(r"(?:[^.]*\.)*?\d+(?=\.|$)", name) for name, *_ in problem.shapes]
    keys = ["" if layer is None else layer.group() for layer in layers]
    blocks = ["", *dict.fromkeys(key for key in keys if key)]
    found = [[] for _ in range(fragments)]
    for key, (_, start, stop, _) in zip(keys, problem.shapes, strict=True):
        b = blocks.index(key)
        found[b % fragments if order == "strided" else b * fragments // len(blocks)] += range(start, stop)
    return [np.array(sorted(places), dtype=int) for places in found]


def streaming_diloco(
    problem: Problem,
    fragments: int,
    delay: int,
    mixing: float,
    merge: str,
    order: str,
    lr: float,
    momentum: float,
) -> History:
    """Fragments one after the other, applied later (arXiv 2501.18512; merge "progress": 2605.20866).

    After inner step (p + 1) H / P of a round, fragment p is sent: D_p = mean_i (phi_p - theta_i,p), and Nesterov's step
    on (phi_p, v_p) is made at once. `delay` inner steps later it reaches the workers, for the last fragment in the next
    round: theta <- mixing theta + (1 - mixing) phi ("mix") or phi + (theta - theta as it was sent) ("progress").
    Shared: phi, with all that has been sent.
    """
    interval = problem.inner_steps // fragments
    assert interval * fragments == problem.inner_steps
    assert 0 <= delay < interval
    history, workers, places = History(), Workers(problem), fragment_indices(problem, fragments, order)
    phi, thetas = problem.start.copy(), problem.starts()
    v = [np.zeros(len(own)) for own in places]
    in_flight = {}  # from the inner step after which it arrives, over the whole run, to what was sent
    for t in range(problem.rounds):
        for step in range(t * problem.inner_steps, (t + 1) * problem.inner_steps):
            thetas = [workers.step(i, step, theta) for i, theta in enumerate(thetas)]
            done = step + 1
            if done % interval == 0:
                p = (done // interval - 1) % fragments
                sent = [theta[places[p]].copy() for theta in thetas]
                d = problem.mean([phi[places[p]] - theta for theta in sent])
                phi[places[p]], v[p] = nesterov(phi[places[p]], d, v[p], lr, momentum)
                in_flight[done + delay] = (p, phi[places[p]].copy(), sent)
            if done in in_flight:
                p, new, sent = in_flight.pop(done)
                for theta, before in zip(thetas, sent, strict=True):
                    now = theta[places[p]].copy()
                    theta[places[p]] = mixing * now + (1 - mixing) * new if merge == "mix" else new + (now - before)
        history.add(phi, thetas)
    return history


def eager_diloco(problem: Problem, lr: float, momentum: float) -> History:
    """The own part fresh, the others' one round old (arXiv 2502.12996).

    E_i = D^(t-1) + w_i (D_i^t - D_i^(t-1)), where D = sum_i w_i D_i and everything before the first round is 0; then
    Nesterov's step with E_i on worker i's own (phi_i, v_i), and theta_i <- phi_i. Shared: the mean of phi_i.
    """
    history, workers, phis = History(), Workers(problem), problem.starts()
    old = [np.zeros_like(phi) for phi in phis]
    v = [np.zeros_like(phi) for phi in phis]
    for t in range(problem.rounds):
        new = [phi - workers.round(i, t, phi.copy()) for i, phi in enumerate(phis)]
        for i, share in enumerate(problem.shares):
            eager = problem.mean(old) + share * (new[i] - old[i])
            phis[i], v[i] = nesterov(phis[i], eager, v[i], lr, momentum)
        old = new
        history.add(problem.mean(phis), phis)
    return history


def noloco(
    problem: Problem, groups: Sequence[Sequence[Sequence[int]]], lr: float, momentum: float, consensus: float
) -> History:
    """Small groups instead of everybody (arXiv 2506.10911, with the sign of the authors' code, not of eq. 2).

    d_i <- momentum d_i + lr mean_g(theta_j - phi_j) + consensus (mean_g(phi_j) - phi_i);  phi_i <- phi_i + d_i;
    theta_i <- phi_i. The means over a group are plain ones. Shared: the weighted mean of phi_i.

    groups: of every round, the workers of every group.
    """
    history, workers, phis = History(), Workers(problem), problem.starts()
    d = [np.zeros_like(phi) for phi in phis]
    for t in range(problem.rounds):
        assert sorted(i for group in groups[t] for i in group) == list(range(problem.workers))
        moved = [workers.round(i, t, phi.copy()) - phi for i, phi in enumerate(phis)]
        before = [phi.copy() for phi in phis]
        for group in groups[t]:
            movement = sum(moved[j] for j in group) / len(group)
            centre = sum(before[j] for j in group) / len(group)
            for i in group:
                d[i] = momentum * d[i] + lr * movement + consensus * (centre - before[i])
                phis[i] = before[i] + d[i]
        history.add(problem.mean(phis), phis)
    return history


def drift_estimate(problem: Problem, drifts: Sequence[Vector], monitor: str, xi: Vector) -> float:
    """How far the workers are apart, from u_i = theta_i - phi (arXiv 2405.20988).

    "exact": mean |u|^2 - |mean u|^2, their variance. "linear": mean |u|^2 - (mean <xi, u>)^2, never below it.
    """
    size = problem.mean([u @ u for u in drifts])
    if monitor == "exact":
        mean = problem.mean(drifts)
        return size - mean @ mean
    return size - problem.mean([xi @ u for u in drifts]) ** 2


def fda(
    problem: Problem,
    threshold: float,
    monitor: str,
    check_every: int,
    max_inner_steps: int | None,
    xi: Vector | None = None,
) -> History:
    """Federated dynamic averaging: a plain mean when the estimate is above the threshold (arXiv 2405.20988).

    Inner steps since the last synchronisation count on over rounds; after every `check_every` of them the workers look,
    and after `max_inner_steps` they synchronise whatever they see. xi (for "linear"): a unit vector for the first time,
    the direction of the last movement of phi afterwards. Shared: the mean of theta_i.
    """
    history, workers, thetas = History(), Workers(problem), problem.starts()
    phi, since = problem.start.copy(), 0
    for t in range(problem.rounds):
        for step in range(t * problem.inner_steps, (t + 1) * problem.inner_steps):
            thetas = [workers.step(i, step, theta) for i, theta in enumerate(thetas)]
            since += 1
            due = max_inner_steps is not None and since >= max_inner_steps
            if since % check_every == 0 and not due:
                due = drift_estimate(problem, [theta - phi for theta in thetas], monitor, xi) > threshold
            if due:
                before, phi, since = phi, problem.mean(thetas), 0
                thetas = [phi.copy() for _ in thetas]
                if np.linalg.norm(phi - before) > 0:
                    xi = (phi - before) / np.linalg.norm(phi - before)
        history.add(problem.mean(thetas), thetas)
    return history


def delayed_nesterov(problem: Problem, buffer: int, lr: float, momentum: float) -> History:
    """The server takes one worker at a time, momentum waits for K of them (arXiv 2401.09135, Algorithm 3, c = 0).

    On every arrival g = (what the worker began from) - theta_i is added to the buffer. On every K-th, counted over the
    whole run, m <- momentum m + buffer / K, phi <- phi - lr (momentum m + g / K), and the buffer is emptied; on the
    others phi <- phi - lr g / K. With c, there is c momentum m on the others, and 1 - c K + c times the momentum on the
    K-th (as in utnslab/halos, src/halos/opt.py); 0 is the default.

    Workers arrive in order, once a round, and go on from phi right after their arrival. Their weights say nothing.
    Shared: phi after the last arrival.
    """
    history, workers, begins = History(), Workers(problem), problem.starts()
    phi, arrivals = problem.start.copy(), 0
    m = np.zeros_like(phi)
    gathered = np.zeros_like(phi)
    for t in range(problem.rounds):
        for i in range(problem.workers):
            g = begins[i] - workers.round(i, t, begins[i].copy())
            gathered = gathered + g
            arrivals += 1
            phi = phi - lr * g / buffer
            if arrivals % buffer == 0:
                m = momentum * m + gathered / buffer
                phi = phi - lr * momentum * m
                gathered = np.zeros_like(phi)
            begins[i] = phi.copy()
        history.add(phi, begins)
    return history
