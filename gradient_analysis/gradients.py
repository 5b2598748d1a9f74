"""Gradients of a model on a sample: the full one, those of batches, and what single examples contribute.

Memory: the parameters and their gradient (float32), the full gradient (float64), and while single examples are looked
at the full gradient once more (float32): 20 bytes per parameter and the activations of one micro-batch, whatever the
number of examples and batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from algorithms.batch.losses import example_losses, logits_of
from algorithms.batch.per_example import PerExampleProbe, SampleStatistics
from fabrics.data.examples import Examples
from fabrics.models.attention import unmasked
from fabrics.training.flat_model import FlatModel

# Vectors of model size are compared in float64, so many numbers at a time.
_CHUNK = 2**20


@dataclass(frozen=True)
class BatchGradient:
    """One batch against the full gradient: ||g_B - F||, ||g_B||, and the cosine of the angle between them."""

    deviation: float
    norm: float
    cosine: float


@dataclass(frozen=True)
class ExampleGradients:
    """The gradients g_i of single examples.

    Attributes:
        squared_norms: ||g_i||^2, [examples], float64.
        inner_products: <g_i, F>, [examples], float64.
        statistics: exact for the sample: V, P and O as in algorithms.batch.per_example, with g = F.
        variance_by_layer: each parameter's part of V, by name; they add up to it.
    """

    squared_norms: np.ndarray
    inner_products: np.ndarray
    statistics: SampleStatistics
    variance_by_layer: dict[str, float]


class Gradients:
    """Gradients of a model, in eval mode (no dropout), of the mean over examples of each one's mean loss.

    Args:
        working: the model.
        examples: what the indices count.
        indices: the sample, [examples].
        micro_batch: examples that are run at once.
    """

    def __init__(self, working: FlatModel, examples: Examples, indices: np.ndarray, micro_batch: int):
        working.module.eval()
        self._working, self._examples, self._indices, self._micro_batch = working, examples, indices, micro_batch
        self.full = torch.zeros_like(working.parameters.data, dtype=torch.float64)
        self.loss = 0.0

    def _add(self, indices: np.ndarray) -> torch.Tensor:
        """Add the gradient of the sum of these examples' losses to the model's; that sum."""
        batch = self._examples.batch(indices, self._working.device)
        labels = batch.pop("labels")
        with unmasked(self._working.module, batch):
            loss = example_losses(logits_of(self._working.module(**batch)), labels).sum()
            loss.backward()
        return loss.detach().double()

    def _micro_batches(self, indices: np.ndarray) -> Iterable[np.ndarray]:
        return (indices[start : start + self._micro_batch] for start in range(0, len(indices), self._micro_batch))

    def compute_full(self) -> None:
        """The full gradient, every example with the same weight, summed in float64."""
        loss = torch.zeros((), dtype=torch.float64, device=self._working.device)
        parts = list(self._micro_batches(self._indices))
        for part in tqdm(parts, desc="full gradient", unit=" micro-batches", disable=None):
            self._working.gradient.zero_()
            loss += self._add(part)
            self.full += self._working.gradient
        self.full /= len(self._indices)
        self.loss = loss.item() / len(self._indices)

    @property
    def squared_norm(self) -> float:
        """||F||^2."""
        return self.full.dot(self.full).item()

    def of_batch(self, indices: np.ndarray) -> BatchGradient:
        """One batch, given by its examples."""
        gradient = self._working.gradient.zero_()
        for part in self._micro_batches(indices):
            self._add(part)
        distance = norm = product = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for start in range(0, len(gradient), _CHUNK):
            own = gradient[start : start + _CHUNK].double() / len(indices)
            full = self.full[start : start + _CHUNK]
            distance = distance + (own - full).square().sum()
            norm, product = norm + own.square().sum(), product + own.dot(full)
        lengths = norm.sqrt() * self.squared_norm**0.5
        cosine = product / lengths if lengths > 0 else torch.full_like(product, torch.nan)
        return BatchGradient(distance.sqrt().item(), norm.sqrt().item(), cosine.item())

    def of_batches(self, batches: Sequence[np.ndarray], name: str) -> list[BatchGradient]:
        """Several batches, with progress."""
        return [self.of_batch(batch) for batch in tqdm(batches, desc=name, unit=" batches", leave=False, disable=None)]

    def of_examples(self) -> ExampleGradients:
        """Every example of the sample by itself, exactly, out of one pass in micro-batches."""
        direction = self.full.to(self._working.parameters.dtype)
        parts = list(self._micro_batches(self._indices))
        squares, products = [], []
        by_layer: dict[torch.nn.Parameter, torch.Tensor] = {}
        for part in tqdm(parts, desc="single examples", unit=" micro-batches", disable=None):
            self._working.gradient.zero_()
            with PerExampleProbe(self._working.module, len(part), self._working.views(direction)) as probe:
                self._add(part)
            squares.append(probe.squared_norms.double().cpu())
            products.append(probe.inner_products.double().cpu())
            for parameter, value in probe.squared_norms_by_parameter.items():
                by_layer[parameter] = by_layer.get(parameter, 0.0) + value
        squared_norms, inner_products = torch.cat(squares).numpy(), torch.cat(products).numpy()
        count, squared_norm = len(self._indices), self.squared_norm
        names = {parameter: name for name, parameter in self._working.module.named_parameters()}
        variances = {
            names[parameter]: ((by_layer[parameter] - count * view.square().sum()) / (count - 1)).item()
            for parameter, view in self._working.views(self.full).items()
        }
        orthogonal = (squared_norms - inner_products**2 / squared_norm).sum() / (count - 1) if squared_norm else 0.0
        statistics = SampleStatistics(
            sample_size=count,
            squared_norm=squared_norm,
            variance=(squared_norms.sum() - count * squared_norm) / (count - 1),
            inner_product_variance=float(inner_products.var(ddof=1)),
            orthogonal_variance=float(orthogonal),
        )
        return ExampleGradients(squared_norms, inner_products, statistics, variances)
