"""FedOpt: the server's optimiser takes the mean pseudo-gradient for a gradient (arXiv 2003.00295, Algorithm 2)."""

from dataclasses import dataclass
from typing import Literal

from algorithms.synchronisation.method import Group, Method
from algorithms.synchronisation.outer_step import OUTER_STATE, AdaptiveValues, adaptive_step


class FedOpt(Method):
    """With D = mean_m (x - x_m) and lr the learning rate of the outer step, x = x - lr D (`avg`) or one of
    `adaptive_step`. The moments begin with zero, at the start and wherever momentum begins anew. Inside are AdamW's
    steps, where the paper has SGD's.
    """

    @dataclass(frozen=True)
    class Settings(AdaptiveValues):
        """See `adaptive_step`."""

        server_optimizer: Literal["avg", "adam", "adagrad", "yogi"] = "adam"

    temporaries = staticmethod(lambda settings, workers: float(settings.server_optimizer != "avg"))
    shards = True

    @classmethod
    def outer_keys(cls, settings) -> tuple[str, ...]:
        kept = () if settings.server_optimizer == "avg" else ("outer_momentum_at_merge",)
        return ("learning_rate_for_outer_opt", *kept)

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        self.trainer_state = OUTER_STATE.get(settings.server_optimizer, ())

    def exchange(self, group: Group) -> None:
        delta = group.mean_difference()
        if delta is None:
            return
        parameters, lr = group.shared["parameters"], self.outer.learning_rate
        if self.settings.server_optimizer == "avg":
            parameters.sub_(delta, alpha=lr)
            return
        moments = (group.shared[name] for name in self.trainer_state)
        adaptive_step(self.settings.server_optimizer, parameters, delta, *moments, lr, self.settings)
