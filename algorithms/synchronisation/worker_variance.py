"""How far workers are apart, estimated from a few numbers of each (arXiv 2405.20988).

From the drifts u_m = x_m - p, p any point that all know, their variance is mean |u_m|^2 - |mean u_m|^2. Of the latter a
worker cannot tell; what it sends instead is linear in u_m, so that the mean of it is that of mean u_m.

Where devices have parts of u_m, `total` adds what each finds in its own.
"""

from collections.abc import Callable

import torch

from algorithms.batch.across_workers import inner_product, sketch

# An AMS sketch, as in the paper, with the error that the authors' code expects of it.
_ROWS, _WIDTH = 5, 250
_SKETCH_ERROR = _WIDTH**-0.5

SKETCHED = 1 + _ROWS * _WIDTH  # numbers of a worker
LINEAR = 2


Total = Callable[[torch.Tensor], torch.Tensor]


def _alone(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


def squared_norm(vector: torch.Tensor, total: Total = _alone) -> torch.Tensor:
    """[1]."""
    return total(inner_product(vector, vector).view(1)).to(vector.dtype)


def linear_numbers(drift: torch.Tensor, direction: torch.Tensor, total: Total = _alone) -> torch.Tensor:
    """|u|^2 and <direction, u>."""
    return total(torch.stack([inner_product(other, drift) for other in (drift, direction)])).to(drift.dtype)


def sketched_numbers(drift: torch.Tensor, sketched: Callable = sketch, total: Total = _alone) -> torch.Tensor:
    """|u|^2 and a sketch of u, with the signs that all have; sketched: as algorithms.batch.across_workers.sketch."""
    return torch.cat([squared_norm(drift, total), sketched(drift, 0, _WIDTH, _ROWS)])


def spread(mean: torch.Tensor) -> float:
    """The variance of the workers, from the mean of their numbers; linear: never below it, with a direction of norm 1.

    sketched: the median of the rows is |mean u|^2 within its error mostly, and divided by 1 + error hardly ever above.
    """
    squared, seen = mean[0].item(), mean[1:].double()
    if len(mean) == LINEAR:
        return squared - seen.item() ** 2
    return squared - seen.view(_ROWS, _WIDTH).square().sum(1).median().item() / (1 + _SKETCH_ERROR)
