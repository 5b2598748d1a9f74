"""What the gradients of whole workers say beside each other: the gradients themselves, or sketches of them.

Products of gradients of different workers are free of noise in expectation, as are those of different examples, and
there are M - 1 times as many of them: with 16 workers they make the error of ||G||^2 four times smaller. Sending
gradients (DDP-Norm, arXiv 2412.21124) costs as much as a synchronisation. A sketch of SKETCH_SIZE numbers does nearly
as well: a linear map with random signs keeps inner products in expectation (count sketch, Charikar et al. 2002), and
the scatter that it adds, ||g||^2 / SKETCH_SIZE^(1/2), is small beside that of noise in d dimensions, ||g||^2 / d^(1/2).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from algorithms.batch.gradient_statistics import SampleEstimate

SKETCH_SIZE = 1024
# With fewer workers there are too few products between sketches to know their error.
MINIMUM_WORKERS = 4
_CHUNK = 2**20


@torch.no_grad()
def sketch(vector: torch.Tensor, seed: int, size: int = SKETCH_SIZE, rows: int = 1, first: int = 0) -> torch.Tensor:
    """[rows * size] of a flat vector: sums of every size-th element with signs that are a function of place and seed.

    The signs are the same on every device, so that sketches of different workers can be multiplied, and are others in
    each row. The sketch of a vector is the sum of those of its parts; first: the place of this one's first element.
    """
    if before := first % size:
        vector = torch.nn.functional.pad(vector, (before, 0))
    found = torch.zeros(rows, size, dtype=torch.float64, device=vector.device)
    chunk = max(_CHUNK // size, 1) * size
    for start in range(0, len(vector), chunk):
        part = vector[start : start + chunk]
        place = torch.arange(start, start + len(part), dtype=torch.int64, device=vector.device)
        place.add_(first - before)
        place.add_(seed * 0x9E3779B97F4A7C1 % 2**62)
        for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):  # int64 wraps around
            place.bitwise_xor_(place >> 29).mul_(factor)
        for row, sums in enumerate(found):
            signed = part.double() * (1 - 2 * (place >> 40 + row & 1))
            sums += torch.nn.functional.pad(signed, (0, -len(part) % size)).view(-1, size).sum(0)
    return found.flatten().to(vector.dtype)


@dataclass(frozen=True)
class GradientMoments:
    """What one worker's y_m says beside the mean h over the workers; scalars, so that they can be sent.

    y_m is the sum of the gradients of its b_m examples, b_m g_m, or a sketch of that.
    squared_norm: ||y_m||^2. inner_product: <y_m, h>. mean_squared_norm: ||h||^2.
    """

    squared_norm: float
    inner_product: float
    mean_squared_norm: float


def inner_product(a: torch.Tensor, b: torch.Tensor, chunk: int = 2**20) -> torch.Tensor:
    """<a, b> of flat vectors, summed in float64, so that differences of such sums cancel to float32's last digits only.

    By chunks: no copy of model size is made, and no vector is too long for torch.dot, which takes 2^31 - 1 elements.
    """
    parts = zip(a.split(chunk), b.split(chunk), strict=True)
    return torch.stack([x.double().dot(y.double()) for x, y in parts]).sum()


@torch.no_grad()
def gradient_moments(
    vector: torch.Tensor, mean: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> GradientMoments:
    """Moments of a worker's flat vector and the mean over all workers; total: adds what others have parts of."""
    pairs = ((vector, vector), (vector, mean), (mean, mean))
    products = torch.stack([inner_product(a, b) for a, b in pairs])
    return GradientMoments(*(products if total is None else total(products)).tolist())


def across_workers_estimate(moments: Sequence[GradientMoments], batches: Sequence[int]) -> SampleEstimate:
    """Statistics of the workers' gradients.

    With B the sum of the batches b_m and g = sum b_m g_m / B the mean gradient of all their examples, V is
    sum b_m ||g_m - g||^2 / (M - 1), in the unit of one example whatever the batches, and the squared norm the mean of
    the products of two examples of different workers, (||B g||^2 - sum ||b_m g_m||^2) / (B^2 - sum b_m^2). P is that of
    the B examples' mean gradient, R / B included: one size of sample cannot tell them apart.

    Args:
        moments: of M >= 2 workers, beside the mean over these.
        batches: b_m, examples behind each gradient.
    """
    workers = len(moments)
    if workers < 2:
        raise ValueError(f"across_workers statistics need at least 2 workers, got {workers}")
    total, pairs = sum(batches), sum(batches) ** 2 - sum(b * b for b in batches)
    whole = moments[0].mean_squared_norm * workers**2  # ||B g||^2
    both = [(b, m.squared_norm, m.inner_product * workers) for b, m in zip(batches, moments, strict=True)]
    squared_norm = (whole - math.fsum(own for _, own, _ in both)) / pairs
    # b_m ||g_m - g||^2
    distances = [max(own / b - 2.0 * product / total + b * whole / total**2, 0.0) for b, own, product in both]
    variance = math.fsum(distances) / (workers - 1)
    if workers == 2:
        # One product, whose square is at least its variance; and the two distances are one number.
        error, variance_error, inner = abs(squared_norm), math.sqrt(2.0) * variance, math.nan
    else:
        # As of a sample in algorithms.batch.gradient_statistics, with workers for examples.
        others = [(product - own) / (b * (total - b)) for b, own, product in both]
        center = math.fsum(b * e for b, e in zip(batches, others, strict=True)) / total
        scatter = math.fsum(b * (e - center) ** 2 for b, e in zip(batches, others, strict=True)) / total
        error = 2.0 * math.sqrt((workers - 1) * scatter) / (workers - 2)
        inner = total * scatter * (workers - 1) / (workers - 2) ** 2
        average = math.fsum(distances) / workers
        spread = math.fsum((distance - average) ** 2 for distance in distances) / (workers - 1)
        variance_error = math.sqrt(workers * spread) / (workers - 2)
    return SampleEstimate(
        examples=total,
        pairs=pairs,
        squared_norm=squared_norm,
        squared_norm_error=error,
        variance=variance,
        variance_error=variance_error,
        inner_product_variance=inner,
        overlap=0.0 if workers > 2 else math.nan,
    )


def across_devices_estimate(
    micro_batches: Sequence[tuple[Sequence[GradientMoments], Sequence[int]]], squared_norm: float
) -> SampleEstimate:
    """Statistics of one step of a shard group from the gradients of its devices (FSDP-Norm, arXiv 2412.21124).

    A sample is what a device had of a micro-batch: there are S of them, of b_s examples, B together. Squared norm and
    variance are those of `across_workers_estimate` over all S, for which no product of two samples has to be known:
    sum b_s ||g_s - g||^2 = sum b_s ||g_s||^2 - B ||g||^2. With equal b_s, squared norm + V / B is ||g||^2.

    Errors are those of a mean over the micro-batches, each by itself. They are upper bounds: samples of different
    micro-batches are compared as well. P is not known.

    Args:
        micro_batches: of each the moments of the devices that had examples, beside their mean, and how many these were.
        squared_norm: ||B g||^2, of the sum of the gradients of all examples.
    """
    sizes = [b for _, batches in micro_batches for b in batches]
    norms = [each.squared_norm for moments, _ in micro_batches for each in moments]
    samples, total = len(sizes), sum(sizes)
    if samples < 2:
        raise ValueError(f"across_devices statistics need at least 2 samples, got {samples}")
    pairs = total**2 - sum(b * b for b in sizes)
    variance = math.fsum(norm / b for norm, b in zip(norms, sizes, strict=True)) - squared_norm / total
    parts = [across_workers_estimate(moments, batches) for moments, batches in micro_batches if len(batches) > 1]

    def error(weights: Sequence[float], errors: Sequence[float]) -> float:
        products = [(weight * each) ** 2 for weight, each in zip(weights, errors, strict=True)]
        return math.sqrt(math.fsum(products)) / math.fsum(weights) if weights else math.inf

    freedom = [len(batches) - 1 for _, batches in micro_batches if len(batches) > 1]
    return SampleEstimate(
        examples=total,
        pairs=pairs,
        squared_norm=(squared_norm - math.fsum(norms)) / pairs,
        squared_norm_error=error([part.pairs for part in parts], [part.squared_norm_error for part in parts]),
        variance=max(variance / (samples - 1), 0.0) if math.isfinite(variance) else variance,
        variance_error=error(freedom, [part.variance_error for part in parts]),
    )
