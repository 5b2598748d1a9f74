"""The methods without a barrier once more, as their papers write them, by a clock of their own; see oracles.py.

`own`: inner steps that each worker makes in a round of H. The clock goes on over the whole run, a unit is an inner step
of the fastest worker: worker i makes its k-th step until k H / own_i, and later by the answers that it has waited for.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tests.support.oracles import History, Problem, Workers, fragment_indices, nesterov


def step_times(
    own: Sequence[int], inner_steps: int, rounds: int, leg: int = 1, travel: Fraction = Fraction(0)
) -> list[list[Fraction]]:
    """When each worker makes its steps, where after every `leg` of them it waits for an answer."""

    def time(i: int, k: int) -> Fraction:
        return Fraction(k * inner_steps, own[i]) + (k - 1) // leg * travel

    most = range(1, rounds * inner_steps + 1)
    return [[time(i, k) for k in most if time(i, k) <= rounds * inner_steps] for i in range(len(own))]


def delayed_nesterov_by_the_clock(
    problem: Problem, times: Sequence[Sequence[Fraction]], leg: int, buffer: int, lr: float, momentum: float
) -> History:
    """A worker arrives after every `leg` of its steps and goes on from phi (arXiv 2401.09135, Algorithm 3, c = 0)."""
    history, workers, thetas, begins = History(), Workers(problem), problem.starts(), problem.starts()
    phi, arrivals = problem.start.copy(), 0
    m, gathered = np.zeros_like(phi), np.zeros_like(phi)
    steps = sorted((time, i, k) for i, own in enumerate(times) for k, time in enumerate(own, 1))
    for t in range(problem.rounds):
        for _, i, k in [step for step in steps if t < step[0] / problem.inner_steps <= t + 1]:
            thetas[i] = workers.step(i, k - 1, thetas[i])
            if k % leg == 0:
                g = begins[i] - thetas[i]
                gathered, arrivals = gathered + g, arrivals + 1
                phi = phi - lr * g / buffer
                if arrivals % buffer == 0:
                    m = momentum * m + gathered / buffer
                    phi = phi - lr * momentum * m
                    gathered = np.zeros_like(phi)
                thetas[i] = begins[i] = phi.copy()
        history.add(phi, thetas)
    return history


def decoupled_diloco(
    problem: Problem,
    own: Sequence[int],
    fragments: int,
    quorum: int,
    grace: float,
    travel: Sequence[float],
    steps: int,
    mixing: float,
    lr: float,
    momentum: float,
) -> History:
    """w_i = tokens_i^2 / steps_i,  D_p = sum w_i (phi_p - theta_i,p) / sum w_i over those that are there, then Nesterov
    (arXiv 2604.21428); when and who as in the docstring of the method.

    grace, travel: in units of the clock; of every fragment, until its answer is there. Shared: phi.
    """
    history, workers, places = History(), Workers(problem), fragment_indices(problem, fragments, "strided")
    phi, thetas, everybody = problem.start.copy(), problem.starts(), range(problem.workers)
    v = [np.zeros(len(each)) for each in places]
    made = [0] * problem.workers
    due = [[math.ceil((p + 1) * steps / fragments)] * problem.workers for p in range(fragments)]  # own steps when ready
    given = [[0] * problem.workers for _ in range(fragments)]
    under_way: list[dict[int, int]] = [{} for _ in range(fragments)]  # who has no answer yet, and gave after what step
    arrives = [0] * fragments

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
            if under_way[p] and arrives[p] == now:
                answer(p)
            if under_way[p]:
                continue
            times = [Fraction(due[p][i] * problem.inner_steps, own[i]) for i in everybody]
            closes = max(min(sorted(times)[min(quorum, len(times)) - 1] + Fraction(grace), max(times)), arrives[p])
            if closes > now:
                continue
            there = [i for i in everybody if times[i] <= closes]
            counts = {i: made[i] - given[p][i] for i in there}
            tokens = {i: counts[i] * problem.weights[i] for i in there}
            w = {i: tokens[i] ** 2 / counts[i] for i in there}
            d = sum(w[i] * (phi[places[p]] - thetas[i][places[p]]) for i in there) / sum(w.values())
            phi[places[p]], v[p] = nesterov(phi[places[p]], d, v[p], lr, momentum)
            for i in there:
                given[p][i], due[p][i] = made[i], made[i] + steps
            under_way[p], arrives[p] = {i: made[i] for i in there}, math.ceil(now + Fraction(travel[p]))
            if arrives[p] == now:
                answer(p)
        if now % problem.inner_steps == 0:
            history.add(phi, thetas)
    return history
