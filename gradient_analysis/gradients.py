"""Exact gradients of a model on a sample: the full gradient F, gradients of batches, and statistics of both.

Memory does not depend on the number of examples or batches: parameters and gradient (float32), the full gradient
(float64) and a float32 copy of it during the per-example pass, 20 bytes per parameter, and the activations of one
micro-batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.batch.calc_batch import BatchTestParameters, augmented_inner_product_test, inner_product_test, norm_test
from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.batch.per_example import PerExampleProbe
from fabrics.data.examples import Examples
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import backward
from utils.progress import progress_bar

# Flat gradients are compared in float64, this many elements at a time.
_CHUNK = 2**20


@dataclass(frozen=True)
class BatchGradient:
    """The gradient g_B of a batch, compared with the full gradient F.

    Attributes:
        deviation: ||g_B - F||.
        norm: ||g_B||.
        cosine: cosine of the angle between g_B and F; NaN if one of them is zero.
    """

    deviation: float
    norm: float
    cosine: float


class Gradients:
    """Gradients of the mean loss over examples, in eval mode (no dropout).

    Args:
        indices: the sample: indices into the dataset, [examples].

    Attributes:
        full: the full gradient F, [parameters], float64; zero before `compute_full`.
        loss: mean loss of the sample.
        noise_scale_error: standard error of V / ||G||^2; NaN before `example_statistics`.
    """

    def __init__(self, working: FlatModel, examples: Examples, indices: np.ndarray, micro_batch: int):
        working.module.eval()
        self._working = working
        self._examples = examples
        self._indices = indices
        self._micro_batch = micro_batch
        self.full = torch.zeros_like(working.parameters.data, dtype=torch.float64)
        self.loss = 0.0
        self.noise_scale_error = math.nan

    @property
    def squared_norm(self) -> float:
        """||F||^2."""
        return self.full.dot(self.full).item()

    def compute_full(self) -> None:
        """Compute the full gradient: all examples with equal weight, summed in float64."""
        loss = torch.zeros((), dtype=torch.float64, device=self._working.device)
        for part in progress_bar(self._micro_batches(self._indices), desc="full gradient", unit=" micro-batches"):
            self._working.gradient.zero_()
            loss += self._add_gradient(part).double()
            self.full += self._working.gradient
        self.full /= len(self._indices)
        self.loss = loss.item() / len(self._indices)

    def of_batch(self, indices: np.ndarray) -> BatchGradient:
        """Compute the gradient of a batch and compare it with the full gradient."""
        gradient = self._working.gradient.zero_()
        for part in self._micro_batches(indices):
            self._add_gradient(part)
        sums = torch.zeros(3, dtype=torch.float64, device=gradient.device)
        for start in range(0, len(gradient), _CHUNK):
            own = gradient[start : start + _CHUNK].double() / len(indices)
            full = self.full[start : start + _CHUNK]
            sums += torch.stack([(own - full).square().sum(), own.square().sum(), own.dot(full)])
        squared_distance, squared_norm, product = sums
        lengths = squared_norm.sqrt() * self.squared_norm**0.5
        cosine = product / lengths if lengths > 0 else torch.full_like(product, torch.nan)
        return BatchGradient(squared_distance.sqrt().item(), squared_norm.sqrt().item(), cosine.item())

    def example_statistics(self) -> GradientStatistics:
        """Compute the statistics of the gradients of single examples, with F for their mean, in one pass.

        The squared norm is that of the true gradient: ||F||^2 has V / n of the noise of the n examples.
        """
        direction = self.full.to(self._working.parameters.dtype)
        squares = []
        products = []
        parts = self._micro_batches(self._indices)
        for part in progress_bar(parts, desc="single examples", unit=" micro-batches"):
            self._working.gradient.zero_()
            with PerExampleProbe(self._working.module, len(part), self._working.views(direction)) as probe:
                self._add_gradient(part)
            squares.append(probe.squared_norms.double().cpu())
            products.append(probe.inner_products.double().cpu())
        count = len(self._indices)
        own_squares = torch.cat(squares)
        own_products = torch.cat(products)
        variance = (own_squares.sum().item() - count * self.squared_norm) / (count - 1)
        self.noise_scale_error = noise_scale_error(own_squares, own_products)
        return GradientStatistics(
            examples=count,
            squared_norm=self.squared_norm - variance / count,
            variance=variance,
            inner_product_variance=own_products.var().item(),
            overlap=0.0,
        )

    def _add_gradient(self, indices: np.ndarray) -> torch.Tensor:
        """Add the gradient of the sum of these examples' losses to the model's gradient; return that sum."""
        return backward(self._working, self._examples, indices, weight=len(indices))

    def _micro_batches(self, indices: np.ndarray) -> list[np.ndarray]:
        return [indices[start : start + self._micro_batch] for start in range(0, len(indices), self._micro_batch)]


def noise_scale_error(squares: torch.Tensor, products: torch.Tensor) -> float:
    """Return the standard error of V / ||G||^2 of a sample: the jackknife, without each of its examples in turn.

    Args:
        squares: n_i = ||g_i||^2, [examples].
        products: <g_i, F>, [examples].
    """
    count = len(squares)
    if count < 3:
        return math.nan
    with_others = (count * products - squares) / (count - 1)  # <g_i, mean of the others>; their mean is ||G||^2
    squared_norms = (with_others.sum() - 2 * with_others) / (count - 2)
    mean_squares = (squares.sum() - squares) / (count - 1)
    scales = mean_squares / squared_norms - 1  # as V is the mean square less ||G||^2
    return ((count - 1) * scales.var(correction=0).item()) ** 0.5


def requests(statistics: GradientStatistics, batch: int, parameters: Mapping[str, float]) -> list[tuple]:
    """Return the batch that each test would request, for eighths to eightfold values of its parameter.

    Args:
        batch: batch size of the plain norm test; also returned by tests without an answer.

    Returns:
        (test, factor, parameter, request in examples). The inner product tests are debiased; "orthogonality" is the
        second part of the augmented inner product test.
    """
    rows = []
    for factor in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        eta = factor * parameters["eta"]
        theta = factor * parameters["vartheta"]
        nu = factor * parameters["nu"]
        plain = norm_test(statistics, BatchTestParameters(eta=eta), batch)
        debiased = norm_test(statistics, BatchTestParameters(eta=eta, debias=True), batch)
        inner = inner_product_test(statistics, BatchTestParameters(theta=theta, debias=True), batch)
        # A huge theta disables the inner product test, so that only orthogonality is tested.
        augmented = BatchTestParameters(theta=1e9, nu=nu, debias=True)
        orthogonality = augmented_inner_product_test(statistics, augmented, batch)
        rows += [
            ("norm_test", factor, eta, plain or batch),
            ("norm_test, debias", factor, eta, debiased or batch),
            ("inner_product_test, debias", factor, theta, inner or batch),
            ("orthogonality, debias", factor, nu, orthogonality or batch),
        ]
    return rows


def draw_batches(indices: np.ndarray, batch: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Cut as many batches from a random permutation of a sample as it fills."""
    order = generator.permutation(indices)
    return [order[start : start + batch] for start in range(0, len(order) - batch + 1, batch)]
