"""The optimisers of the inner steps, over one flat parameter.

The learning rate is not theirs to know: it is set at every inner step. Their state is there from the beginning, as
AdamW would make it at its first step, so that every worker has the same tensors at any time.
"""

import torch

from utils.config import Config


def _adamw(parameters: torch.nn.Parameter, config: Config) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        [parameters],
        betas=tuple(config.adam_betas),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    optimizer.state[parameters] = {
        "step": torch.zeros((), dtype=torch.float32, device=parameters.device),
        "exp_avg": torch.zeros_like(parameters.data),
        "exp_avg_sq": torch.zeros_like(parameters.data),
    }
    return optimizer


def _sgd(parameters: torch.nn.Parameter, config: Config) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameters], fused=True)


INNER_OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}
