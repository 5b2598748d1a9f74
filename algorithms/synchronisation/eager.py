"""Eager updates: DiLoCo whose mean takes a whole round to arrive, while a worker's own part is there at once
(arXiv 2502.12996)."""

import torch

from algorithms.synchronisation.diloco import nesterov_step
from algorithms.synchronisation.group import Group, LocalWorker, WorkerMean
from algorithms.synchronisation.method import Capabilities, Method


class EagerDiLoCo(Method):
    """Worker m, with weight w_m in means, starts a round from its own x_m, moves by D_m, and does not wait for others:

        E_m = D' + w_m (D_m - D_m');  v_m = mu v_m + E_m;  x_m = x_m - lr (E_m + mu v_m)

    D' and D_m' are those of the previous round, 0 in the first. D = mean_m D_m is sent during the next round.

    The weighted mean of all x_m is evaluated, saved and merged; the paper does not say what to evaluate.

    A worker keeps D_m' - D', so that a new worker, with zeros, counts as one that moved like the mean, and the mean can
    be merged. A new worker's velocity is 0; in a merge workers keep theirs. A lone worker's E is D: nothing of it is
    left for the next round, whose D' is 0.
    """

    capabilities = Capabilities(averages_copies=True, overlaps=True, temporaries=2.0, shards=True)
    state = ("mean",)
    worker_state = ("velocity", "deviation")
    keeps = "anchor"

    def incoming(self, group: Group) -> WorkerMean:
        return group.mean(behind=group.clock.inner_steps)

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        own = worker.start - worker.parameters
        deviation = worker.state["deviation"]
        weight = group.weights[worker.index]
        last_mean = worker.to_device(group.shared["mean"])
        eager = last_mean.mul(1 - weight).add_(deviation, alpha=-weight).add_(own, alpha=weight)
        nesterov_step(worker.start, eager, worker.state["velocity"], group.outer.learning_rate, group.outer.momentum)
        deviation.copy_(own)
        return own

    def apply(self, group: Group, mean: torch.Tensor) -> None:
        for worker in group.local_workers:
            worker.state["deviation"].sub_(worker.to_device(mean))
        group.shared["mean"].copy_(mean)
        if group.lone:
            group.shared["mean"].zero_()
