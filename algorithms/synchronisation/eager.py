"""Eager updates: a mean that takes a whole round to arrive, corrected by the own part, which is there
(arXiv 2502.12996)."""

import torch

from algorithms.synchronisation.method import Group, Member, Method
from algorithms.synchronisation.outer_step import nesterov_step


class EagerDiLoCo(Method):
    """Worker m, whose share in means is w_m, begins a round with its own x_m, moves by D_m, and does not wait for the
    others: E_m = D' + w_m (D_m - D_m'), with D' and D_m' of the round before, 0 in the first;
    v_m = mu v_m + E_m;  x_m = x_m - lr (E_m + mu v_m). Then D = mean_m D_m travels behind the next round.

    What is evaluated, saved and merged is the weighted mean of all x_m; the paper does not say.

    A worker keeps D_m' - D': one that is new is taken to have moved as the mean did, and the mean may be merged. Its
    velocity begins with 0; in a merge workers keep their own or, as everything else, begin anew.
    """

    temporaries = staticmethod(lambda settings, workers: 2.0)
    trainer_state = ("mean",)
    worker_state = ("velocity", "deviation")
    own_copy = "anchor"
    shares_copy = False
    shards = True

    def exchange(self, group: Group) -> None:
        last = group.shared["mean"]

        def difference(member: Member) -> torch.Tensor:
            own, deviation, share = (
                member.start - member.parameters,
                member.state["deviation"],
                group.weights[member.index],
            )
            eager = member.here(last).mul(1 - share).add_(deviation, alpha=-share).add_(own, alpha=share)
            velocity = member.state["velocity"]
            nesterov_step(member.start, eager, velocity, self.outer.learning_rate, self.outer.momentum)
            deviation.copy_(own)
            return own

        mean = group.mean(difference, last, behind=group.inner_steps)
        if mean is None:
            return
        for member in group.members():
            member.state["deviation"].sub_(member.here(mean))
        last.copy_(mean)
