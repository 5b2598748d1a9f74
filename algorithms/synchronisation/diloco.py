"""DiLoCo: one Nesterov step on the mean pseudo-gradient at the end of a round (arXiv 2311.08105, Algorithm 1)."""

from algorithms.synchronisation.method import Group, Method
from algorithms.synchronisation.outer_step import nesterov_step


class DiLoCo(Method):
    """D = mean_m (x - x_m);  v = mu v + D;  x = x - lr (D + mu v). Workers keep AdamW's moments, and start from x."""

    trainer_state = ("velocity",)
    shards = True

    def exchange(self, group: Group) -> None:
        delta = group.mean_difference()
        if delta is not None:
            nesterov_step(
                group.shared["parameters"],
                delta,
                group.shared["velocity"],
                self.outer.learning_rate,
                self.outer.momentum,
            )
