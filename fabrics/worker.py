"""A worker: a node's inner optimiser over the working model of its device, and the passes that it makes there.

A worker's parameters and gradients are reached through its WorkingModel alone, as flat tensors: a worker whose model is
spread over several devices would bring another one of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.gradient_statistics import GradientStatistics, PerExampleProbe
from algorithms.losses import example_losses
from algorithms.outer_step import DISTRIBUTED_ALGORITHMS
from fabrics.examples import Examples
from fabrics.working_model import WorkingModel
from utils.compression import COMMUNICATION_DTYPES
from utils.config import Config


@dataclass(frozen=True)
class Node:
    """A worker slot on a device. max_batch: its largest micro-batch."""

    id: int
    device: torch.device
    max_batch: int


class Worker:
    """A node while it works for a trainer: the state of its inner optimiser over the device's working model.

    With an encoding that keeps errors, also what the last pseudo-gradient lost on its way.
    """

    def __init__(self, node: Node, working: WorkingModel, config: Config):
        self.node = node
        self.working = working
        kind = DISTRIBUTED_ALGORITHMS[config.distributed_algo].inner_optimizer
        self.optimizer = INNER_OPTIMIZERS[kind](working.parameters, config)
        keeps_error = COMMUNICATION_DTYPES[config.communication_dtype].keeps_error
        self.error = torch.zeros_like(working.parameters.data) if keeps_error else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The optimiser's state and the error, by reference."""
        state = dict(self.optimizer.state[self.working.parameters])
        return state if self.error is None else state | {"error": self.error}

    def reset(self) -> None:
        """Let the optimiser begin anew: moments and step count are zero."""
        for tensor in self.optimizer.state[self.working.parameters].values():
            tensor.zero_()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a copy of `state`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


# The learning rate is not theirs to know: it is set at every inner step. Their state is there from the beginning, as
# AdamW would make it at its first step, so that every worker has the same tensors at any time.


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


def backward(
    working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, hooked: bool = False
) -> torch.Tensor:
    """Add the gradient of `weight` times the mean loss of these examples; that product, detached.

    hooked: layers of the module have hooks.
    """
    batch = examples.batch(indices, working.device)
    labels = batch.pop("labels")
    loss = example_losses(working.logits(batch, hooked), labels).mean() * weight
    loss.backward()
    return loss.detach()


def probed_backward(
    working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0
) -> tuple[torch.Tensor, GradientStatistics]:
    """As `backward`, into a gradient that holds nothing yet, with the statistics of these examples."""
    with PerExampleProbe(working.module, batch_size=len(indices)) as probe:
        loss = backward(working, examples, indices, weight, hooked=True)
    return loss, probe.statistics(loss_weight=weight)
