"""FedOpt: an adaptive optimizer takes the mean pseudo-gradient for a gradient (arXiv 2003.00295, Algorithm 2)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.synchronisation.group import Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method, require


@dataclass(frozen=True)
class FedOpt(Method):
    """With D = mean_m (x - x_m), the paper's -Delta, and lr the outer learning rate,

        m = beta1 m + (1 - beta1) D;  x = x - lr m / (v^(1/2) + tau), with
        adagrad  v = v + D^2
        yogi     v = v - (1 - beta2) D^2 sign(v - D^2)
        adam     v = beta2 v + (1 - beta2) D^2

    There is no bias correction: v starts at tau^2, the least that the paper allows. "second_moment" is v - tau^2, so
    that it starts at zero as m does. Inner steps are AdamW's; the paper has SGD's.

    Attributes:
        server_optimizer: the rule.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: added to its square root; the larger, the less adaptive the step.
    """

    server_optimizer: Literal["adam", "adagrad", "yogi"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    capabilities = Capabilities(outer_keys=("learning_rate_for_outer_opt",), temporaries=1.0, shards=True)
    state = ("first_moment", "second_moment")

    def __post_init__(self):
        require(self, "at least 0 and less than 1", lambda value: 0 <= value < 1, "beta1", "beta2")
        require(self, "a positive number", lambda value: 0 < value < math.inf, "tau")

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        return worker.pseudo_gradient(group.shared["parameters"])

    def apply(self, group: Group, delta: torch.Tensor) -> None:
        parameters = group.shared["parameters"]
        lr = group.outer.learning_rate
        first, second = (group.shared[name] for name in self.state)
        offset = self.tau**2
        first.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        squares = delta.square_()
        if self.server_optimizer == "adagrad":
            second.add_(squares)
        elif self.server_optimizer == "adam":
            second.mul_(self.beta2).add_(squares.sub_(offset), alpha=1 - self.beta2)
        else:
            second.sub_(squares.mul_((second + offset).sub_(squares).sign_()), alpha=1 - self.beta2)
        root = second.add(offset).clamp_min_(0.0).sqrt_()  # rounding may have made v slightly negative
        parameters.addcdiv_(first, root.add_(self.tau), value=-lr)
