"""An inner optimizer of your own: Lion (arXiv 2302.06675, Algorithm 2).

    python run.py plugins=[examples/own_optimizer.py] inner_optimizer=lion learning_rate_for_inner_opt=5e-4 \
        'inner_optimizer_config={weight_decay: 0.2}'
"""

from dataclasses import dataclass

from fabrics.training.optimizers import INNER_OPTIMIZERS, InnerOptimizer


@dataclass(frozen=True)
class Lion(InnerOptimizer):
    """x = x - lr (sign(beta_1 m + (1 - beta_1) g) + decay x), then m = beta_2 m + (1 - beta_2) g."""

    betas: tuple[float, float] = (0.9, 0.99)  # keys of inner_optimizer_config
    weight_decay: float = 0.1

    tensors = ("lion_momentum",)  # m

    def __post_init__(self):
        if self.weight_decay < 0.0:
            raise ValueError(f"weight_decay: must not be negative, got {self.weight_decay}")

    def update(self, parameters, gradient, state, learning_rate):
        momentum = state["lion_momentum"]
        direction = momentum.lerp(gradient, 1.0 - self.betas[0]).sign_()
        parameters.mul_(1.0 - learning_rate * self.weight_decay).sub_(direction, alpha=learning_rate)
        momentum.lerp_(gradient, 1.0 - self.betas[1])


INNER_OPTIMIZERS["lion"] = Lion
