"""Eager updates: DiLoCo whose mean takes a whole round to arrive, while a worker's own part is there at once
(arXiv 2502.12996)."""

from collections.abc import Collection

import torch

from algorithms.synchronisation.diloco import nesterov_step
from algorithms.synchronisation.group import Group, LocalWorker, WorkerMean
from algorithms.synchronisation.method import Capabilities, Method


class EagerDiLoCo(Method):
    """Worker m, with weight w_m in means, starts a round from its own x_m, moves by D_m, and does not wait for others:

        E_m = D' + w_m D_m - w_m' D_m';  v_m = mu v_m + E_m;  x_m = x_m - lr (E_m + mu v_m)

    D', D_m' and w_m' are those of the previous round, 0 in the first. D = mean_m D_m is sent during the next round.

    The weighted mean of all x_m is evaluated, saved and merged; the paper does not say what to evaluate. It lacks
    (1 - s) D' of what the workers have learned, with s = sum_m w_m^2. The trainer keeps this part, and worker m the
    deviation of w_m D_m from s D. So trainers can merge, and a new worker, whose deviation is 0, counts as one that
    moved like the mean. So does every worker that restarts from the mean, after a merge or after others have left.

    A new worker's velocity is 0; in a merge workers keep theirs. A lone worker's E is D, and it leaves nothing.
    """

    capabilities = Capabilities(averages_copies=True, overlaps=True, temporaries=2.0, shards=True)
    state = ("pending",)
    worker_state = ("velocity", "deviation")
    keeps = "anchor"

    def incoming(self, group: Group) -> WorkerMean:
        return group.mean(behind=group.clock.inner_steps)

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        own = worker.start - worker.parameters
        deviation = worker.state["deviation"]
        weight = group.weights[worker.index]
        if group.values.get("restarted"):
            deviation.zero_()
        eager = torch.sub(worker.to_device(group.shared["pending"]), deviation).add_(own, alpha=weight)
        nesterov_step(worker.start, eager, worker.state["velocity"], group.outer.learning_rate, group.outer.momentum)
        torch.mul(own, weight, out=deviation)
        return own

    def apply(self, group: Group, mean: torch.Tensor) -> None:
        applied = sum(weight**2 for weight in group.weights)
        for worker in group.local_workers:
            worker.state["deviation"].sub_(worker.to_device(mean), alpha=applied)
        torch.mul(mean, 1 - applied, out=group.shared["pending"])
        group.values["restarted"] = 0

    def restarted(self, values: dict[str, float], workers: Collection[int] | None) -> None:
        if workers is None:
            values["restarted"] = 1
