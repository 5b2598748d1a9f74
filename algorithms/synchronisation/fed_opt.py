"""FedOpt: the server's optimizer takes the mean pseudo-gradient for a gradient (arXiv 2003.00295, Algorithm 2)."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.synchronisation.group import Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method
from algorithms.synchronisation.outer_step import OUTER_STATE, AdaptiveValues, adaptive_step


class FedOpt(Method):
    """With D = mean_m (x - x_m) and lr the outer learning rate, x = x - lr D (`avg`) or one of `adaptive_step`.

    The moments start at zero, also wherever momentum is reset. Inner steps are AdamW's; the paper has SGD's.
    """

    @dataclass(frozen=True)
    class Settings(AdaptiveValues):
        """See `adaptive_step`."""

        server_optimizer: Literal["avg", "adam", "adagrad", "yogi"] = "adam"

    capabilities = Capabilities(outer_keys=("learning_rate_for_outer_opt",), temporaries=1.0, shards=True)

    def __init__(self, settings, outer, blocks):
        super().__init__(settings, outer, blocks)
        self.state = OUTER_STATE.get(settings.server_optimizer, ())

    @classmethod
    def configured(cls, settings: Settings) -> Capabilities:
        if settings.server_optimizer != "avg":
            return cls.capabilities
        return dataclasses.replace(cls.capabilities, outer_keys=("learning_rate_for_outer_opt",), temporaries=0.0)

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        return worker.difference(group.shared["parameters"])

    def apply(self, group: Group, delta: torch.Tensor) -> None:
        parameters = group.shared["parameters"]
        learning_rate = self.outer.learning_rate
        if self.settings.server_optimizer == "avg":
            parameters.sub_(delta, alpha=learning_rate)
            return
        first, second = (group.shared[name] for name in self.state)
        adaptive_step(self.settings.server_optimizer, parameters, delta, first, second, learning_rate, self.settings)
