"""Eager updates: a mean that takes a whole round to arrive, corrected by the worker's own part, which is there already
(arXiv 2502.12996)."""

import torch

from algorithms.synchronisation.group import Group, LocalWorker, MeanOfWorkers
from algorithms.synchronisation.method import Capabilities, Method
from algorithms.synchronisation.outer_step import nesterov_step


class EagerDiLoCo(Method):
    """Worker m, with weight w_m in means, begins a round with its own x_m, moves by D_m, and does not wait for others:
    E_m = D' + w_m (D_m - D_m'), with D' and D_m' of the round before, 0 in the first;
    v_m = mu v_m + E_m;  x_m = x_m - lr (E_m + mu v_m). Then D = mean_m D_m travels behind the next round.

    The weighted mean of all x_m is evaluated, saved and merged; the paper does not say.

    A worker keeps D_m' - D': a new worker is taken to have moved as the mean did, and the mean may be merged. Its
    velocity starts at 0; in a merge workers keep their own unless outer momentum is reset.
    """

    capabilities = Capabilities(averages_copies=True, temporaries=2.0, shards=True)
    state = ("mean",)
    worker_state = ("velocity", "deviation")
    keeps = "anchor"

    def incoming(self, group: Group) -> MeanOfWorkers:
        return group.mean(behind=group.inner_steps)

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        own = worker.start - worker.parameters
        deviation = worker.state["deviation"]
        weight = group.weights[worker.index]
        last_mean = worker.here(group.shared["mean"])
        eager = last_mean.mul(1 - weight).add_(deviation, alpha=-weight).add_(own, alpha=weight)
        nesterov_step(worker.start, eager, worker.state["velocity"], self.outer.learning_rate, self.outer.momentum)
        deviation.copy_(own)
        return own

    def apply(self, group: Group, mean: torch.Tensor) -> None:
        for worker in group.local:
            worker.state["deviation"].sub_(worker.here(mean))
        group.shared["mean"].copy_(mean)
