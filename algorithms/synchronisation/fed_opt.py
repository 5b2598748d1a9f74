"""FedOpt: an adaptive optimizer takes the mean pseudo-gradient for a gradient (arXiv 2003.00295, Algorithm 2)."""

from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.synchronisation.group import Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method
from algorithms.synchronisation.outer_step import AdaptiveParameters, adaptive_step


@dataclass(frozen=True)
class FedOpt(Method, AdaptiveParameters):
    """With D = mean_m (x - x_m) and lr the outer learning rate, x = x - lr D ("avg") or one of `adaptive_step`.

    The moments start at zero, also where momentum is reset. Inner steps are AdamW's; the paper has SGD's.
    """

    server_optimizer: Literal["avg", "adam", "adagrad", "yogi"] = "adam"

    @property
    def capabilities(self) -> Capabilities:
        temporaries = 0.0 if self.server_optimizer == "avg" else 1.0
        return Capabilities(outer_keys=("learning_rate_for_outer_opt",), temporaries=temporaries, shards=True)

    @property
    def state(self) -> tuple[str, ...]:
        return () if self.server_optimizer == "avg" else ("first_moment", "second_moment")

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        return worker.pseudo_gradient(group.shared["parameters"])

    def apply(self, group: Group, delta: torch.Tensor) -> None:
        parameters = group.shared["parameters"]
        lr = group.outer.learning_rate
        if self.server_optimizer == "avg":
            parameters.sub_(delta, alpha=lr)
            return
        first, second = (group.shared[name] for name in self.state)
        adaptive_step(self.server_optimizer, parameters, delta, first, second, lr, self)
