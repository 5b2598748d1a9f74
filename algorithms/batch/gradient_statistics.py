"""Unbiased estimates of the true gradient's norm and noise, with standard errors.

An example's gradient g_i has mean G = grad F and covariance C. The batch tests need

    squared norm             ||G||^2
    variance                 V = tr C
    inner-product variance   P = G' C G, the variance of <g_i, G>
    overlap                  R = tr C^2; a mean g of b other examples has E Var <g_i, g> = P + R / b

All estimates are sums over pairs of different examples (U-statistics), which no noise biases. Of a sample of b
examples with mean gradient g, n_i = ||g_i||^2 and e_i = <g_i, mean of the others> = (b <g_i, g> - n_i) / (b - 1),

    squared norm   U = mean of the e_i = ||g||^2 - V / b             V = (sum n_i - b ||g||^2) / (b - 1)
    its error^2    4 (b - 1) / (b - 2)^2 * mean (e_i - U)^2          (the jackknife; at least Var U, see below)
    V's error^2    sample variance of the n_i / (b - 1)

The e_i of some examples are enough for the error, as all have one distribution: they are those of the last micro-batch,
the only one that meets the gradient of the whole sample. The jackknife's expected value is 4 P / b + 4 R / (b (b - 2)),
where Var U = 4 P / b + 2 R / (b (b - 1)): where noise dominates the error is too large by a factor of 1.4, never too
small. P and R come from two sizes of sample: with X_b = b (b - 1) / (b - 2) * mean (e_i - U)^2,

    E X_b = (b - 2) P + R,   so   P = (X_b - X_a) / (b - a)   and   R = X_a - (a - 2) P

for the first a of the b examples, compared with their own mean; an accumulated step gives both.

Products of gradients of different workers are free of noise in expectation as well, and there are M - 1 times as many.
With 16 workers the error of ||G||^2 is four times smaller. Sending gradients (DDP-Norm, arXiv 2412.21124) costs as much
as a synchronisation. A sketch of SKETCH_SIZE elements does nearly as well: the scatter that it adds, ||g||^2 /
SKETCH_SIZE^(1/2), is small beside that of noise in d dimensions, ||g||^2 / d^(1/2).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from algorithms.flat import inner_product

# With fewer workers there are too few products between sketches to know their error.
MINIMUM_WORKERS = 4


def sum_or_nan(values: Iterable[float]) -> float:
    """Return math.fsum of the values; NaN if they have infinities of both signs, for which it raises ValueError."""
    try:
        return math.fsum(values)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class GradientStatistics:
    """Estimates and their standard errors, in squared units of the gradient (P and R in fourth powers).

    Attributes:
        examples: behind the estimates, over all workers, in the latest round.
        squared_norm: of the true gradient; unbiased, so that it may be negative.
        variance: V.
        inner_product_variance: P; NaN if only one size of sample was seen.
        overlap: R; likewise.
        inner_product_variance_error: standard error; infinite if too few samples were seen.
        inner_product_covariance: covariance of the estimates of P and R.
    """

    examples: int
    squared_norm: float
    variance: float
    inner_product_variance: float = math.nan
    overlap: float = math.nan
    squared_norm_error: float = 0.0
    variance_error: float = 0.0
    inner_product_variance_error: float = 0.0
    overlap_error: float = 0.0
    inner_product_covariance: float = 0.0

    def inner_product_variance_at(self, batch: float) -> tuple[float, float]:
        """Return P + R / batch, the variance of inner products with the mean gradient of a batch, and its error."""
        error = self.inner_product_variance_error**2 + (self.overlap_error / batch if batch < math.inf else 0.0) ** 2
        if math.isfinite(error):
            error += 2.0 * self.inner_product_covariance / batch
        return self.inner_product_variance + self.overlap / batch, math.sqrt(max(error, 0.0))

    @property
    def decisive(self) -> bool:
        """True if squared norm and variance are finite and not both zero, so that a test can decide something."""
        numbers = (self.squared_norm, self.variance, self.squared_norm_error, self.variance_error)
        return all(map(math.isfinite, numbers)) and (self.squared_norm != 0.0 or self.variance > 0.0)

    @property
    def orthogonal_variance(self) -> float:
        """The part of the variance that is orthogonal to the gradient, V - P / ||G||^2; NaN without a gradient."""
        if self.squared_norm <= 0.0:
            return math.nan
        return self.variance - self.inner_product_variance / self.squared_norm


@dataclass(frozen=True)
class SampleEstimate:
    """The estimates of one sample, as scalars that a worker can send; fields as in GradientStatistics.

    pairs: products of two different examples in squared_norm, the sample's weight in means of it.
    """

    examples: int
    pairs: float
    squared_norm: float
    squared_norm_error: float
    variance: float
    variance_error: float
    inner_product_variance: float = math.nan
    overlap: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """Some examples of a sample compared with the mean gradient of its first n, to which they belong.

    Attributes:
        examples: n.
        squared_norm: ||g||^2 of the mean.
        total: sum of n_i over the n examples.
        squared_norms: n_i of the compared examples, any number.
        inner_products: <g_i, g> of the compared examples.
    """

    examples: int
    squared_norm: float
    total: float
    squared_norms: Sequence[float]
    inner_products: Sequence[float]

    @property
    def variance(self) -> float:
        """V of the n examples."""
        n = self.examples
        return (self.total - n * self.squared_norm) / (n - 1)

    @property
    def squared_true_norm(self) -> float:
        """U of the n examples."""
        return self.squared_norm - self.variance / self.examples

    @property
    def scatter(self) -> float:
        """Mean (e_i - U)^2 of the compared examples; its expectation is that over all n."""
        n = self.examples
        center = self.squared_true_norm
        products = zip(self.squared_norms, self.inner_products, strict=True)
        deviations = [(n * product - square) / (n - 1) - center for square, product in products]
        return math.fsum(deviation**2 for deviation in deviations) / len(deviations)

    @property
    def spread(self) -> float:
        """X_n of the module docstring; NaN with fewer than three examples."""
        n = self.examples
        return n * (n - 1) / (n - 2) * self.scatter if n > 2 else math.nan


def sample_estimate(whole: Comparison, sum_of_squares: float, part: Comparison | None = None) -> SampleEstimate:
    """Return the estimates of a sample of at least two examples.

    Args:
        whole: examples of the sample compared with its mean gradient.
        sum_of_squares: sum of n_i^2 over the sample.
        part: some of its first examples, but not all, compared with the mean gradient of these, for P and R.
    """
    b = whole.examples
    squared_norm = whole.squared_true_norm
    variance_of_norms = max(sum_of_squares - whole.total**2 / b, 0.0) / (b - 1)
    # With two examples there is one product, whose square is at least its variance in expectation.
    error = 2.0 * math.sqrt((b - 1) * whole.scatter) / (b - 2) if b > 2 else abs(squared_norm)
    inner_product_variance = math.nan
    overlap = math.nan
    if part is not None:
        inner_product_variance = (whole.spread - part.spread) / (b - part.examples)
        overlap = part.spread - (part.examples - 2) * inner_product_variance
    return SampleEstimate(
        examples=b,
        pairs=b * (b - 1),
        squared_norm=squared_norm,
        squared_norm_error=error,
        variance=max(whole.variance, 0.0) if math.isfinite(whole.variance) else whole.variance,
        variance_error=math.sqrt(variance_of_norms / (b - 1)),
        inner_product_variance=inner_product_variance,
        overlap=overlap,
    )


# Sums of squared weights, which decay twice as fast.
_OF_SQUARED_WEIGHTS = ("squared_norm_error", "variance_error", "compared_squared")


@dataclass(frozen=True)
class StatisticsSums:
    """Weighted sums of all rounds' statistics: the memory of an exponential moving average.

    The weight of a sample is its pairs for the squared norm, and its examples for the rest. All weights shrink by the
    decay with every later round, squared weights by its square. So every estimate is unbiased from the first round on,
    and its error is that of a weighted mean: from the samples' own errors, or, for P and R, from their scatter.

    Attributes:
        examples: of the latest round.
        pairs, weight, compared: sums of the weights of squared norms, of variances, and of samples that know P and R.
        compared_squared: sum of the squared weights of the latter.
        squared_norm_error, variance_error: sums of squared weights times squared errors.
        product: weighted sum of P R; the others are weighted sums of what they are called, or of its square.
    """

    examples: int = 0
    pairs: float = 0.0
    squared_norm: float = 0.0
    squared_norm_error: float = 0.0
    weight: float = 0.0
    variance: float = 0.0
    variance_error: float = 0.0
    compared: float = 0.0
    compared_squared: float = 0.0
    inner_product_variance: float = 0.0
    overlap: float = 0.0
    inner_product_variance_squared: float = 0.0
    overlap_squared: float = 0.0
    product: float = 0.0

    def after(
        self, samples: Sequence[SampleEstimate], decay: float, between: SampleEstimate | None = None
    ) -> "StatisticsSums":
        """Return the sums after one more round.

        Args:
            decay: weight of the past, 0 (none) to below 1.
            between: an estimate from products between the workers, for the squared norm alone.
        """
        examples = sum(s.examples for s in samples)
        pairs = math.fsum(s.pairs for s in samples)
        squared_norm = sum_or_nan(s.pairs * s.squared_norm for s in samples)
        error = math.sqrt(math.fsum((s.pairs * s.squared_norm_error) ** 2 for s in samples))
        if between is not None:
            pairs += between.pairs
            squared_norm += between.pairs * between.squared_norm
            error += between.pairs * between.squared_norm_error  # of the same examples, so that errors may add up
        known = [s for s in samples if math.isfinite(s.inner_product_variance) and math.isfinite(s.overlap)]

        new = {
            "pairs": pairs,
            "squared_norm": squared_norm,
            "squared_norm_error": error**2,
            "weight": examples,
            "variance": sum_or_nan(s.examples * s.variance for s in samples),
            "variance_error": math.fsum((s.examples * s.variance_error) ** 2 for s in samples),
            "compared": sum_or_nan(s.examples for s in known),
            "compared_squared": sum(s.examples**2 for s in known),
            "inner_product_variance": sum_or_nan(s.examples * s.inner_product_variance for s in known),
            "overlap": sum_or_nan(s.examples * s.overlap for s in known),
            "inner_product_variance_squared": sum_or_nan(s.examples * s.inner_product_variance**2 for s in known),
            "overlap_squared": sum_or_nan(s.examples * s.overlap**2 for s in known),
            "product": sum_or_nan(s.examples * s.inner_product_variance * s.overlap for s in known),
        }
        decays = {name: decay**2 if name in _OF_SQUARED_WEIGHTS else decay for name in new}
        sums = {name: decays[name] * getattr(self, name) + value for name, value in new.items()}
        return StatisticsSums(examples, **sums)

    @property
    def statistics(self) -> GradientStatistics:
        """The estimates; at least one round must be in the sums."""
        inner = overlap = inner_error = overlap_error = covariance = math.nan
        if self.compared > 0.0:
            inner = self.inner_product_variance / self.compared
            overlap = self.overlap / self.compared
            # (k - 1 degrees of freedom) / (k - 3) widens the errors to those of Student's t.
            freedom = self.compared**2 / self.compared_squared - 3.0

            def covariance_of_means(product: float, a: float, b: float) -> float:
                return (product / self.compared - a * b) / freedom if freedom > 0.0 else math.inf

            inner_error = math.sqrt(max(covariance_of_means(self.inner_product_variance_squared, inner, inner), 0.0))
            overlap_error = math.sqrt(max(covariance_of_means(self.overlap_squared, overlap, overlap), 0.0))
            covariance = covariance_of_means(self.product, inner, overlap)
        return GradientStatistics(
            examples=self.examples,
            squared_norm=self.squared_norm / self.pairs,
            variance=self.variance / self.weight,
            inner_product_variance=inner,
            overlap=overlap,
            squared_norm_error=math.sqrt(self.squared_norm_error) / self.pairs,
            variance_error=math.sqrt(self.variance_error) / self.weight,
            inner_product_variance_error=inner_error,
            overlap_error=overlap_error,
            inner_product_covariance=covariance,
        )


# Gradients of whole workers, or of the devices of a node


@dataclass(frozen=True)
class GradientMoments:
    """Inner products of one worker's y_m = b_m g_m, the sum of its b_m examples' gradients, or of a sketch of it.

    Attributes:
        squared_norm: ||y_m||^2.
        inner_product: <y_m, h>, with h the mean of y over the workers.
        mean_squared_norm: ||h||^2.
    """

    squared_norm: float
    inner_product: float
    mean_squared_norm: float


@torch.no_grad()
def gradient_moments(
    vector: torch.Tensor, mean: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> GradientMoments:
    """Return the moments of a worker's flat vector and the mean over all workers.

    total: adds up what the devices that share a model know of their parts.
    """
    pairs = ((vector, vector), (vector, mean), (mean, mean))
    products = torch.stack([inner_product(a, b) for a, b in pairs])
    return GradientMoments(*(products if total is None else total(products)).tolist())


def across_workers_estimate(moments: Sequence[GradientMoments], batches: Sequence[int]) -> SampleEstimate:
    """Return the estimates from the workers' gradients.

    With B the sum of the batches b_m and g = sum b_m g_m / B the mean gradient of all examples,
    V = sum b_m ||g_m - g||^2 / (M - 1), in the unit of one example whatever the batches. The squared norm is the mean
    of the products of two examples of different workers, (||B g||^2 - sum ||b_m g_m||^2) / (B^2 - sum b_m^2). One size
    of sample cannot tell P and R apart: with equal batches P is P + (R / B) M / (M - 2), as a worker is compared with
    the others.
    """
    workers = len(moments)
    total = sum(batches)
    pairs = total**2 - sum(b * b for b in batches)
    whole = moments[0].mean_squared_norm * workers**2  # ||B g||^2
    both = [(b, m.squared_norm, m.inner_product * workers) for b, m in zip(batches, moments, strict=True)]
    squared_norm = (whole - math.fsum(own for _, own, _ in both)) / pairs
    # b_m ||g_m - g||^2
    distances = [max(own / b - 2.0 * product / total + b * whole / total**2, 0.0) for b, own, product in both]
    variance = math.fsum(distances) / (workers - 1)
    if workers == 2:
        # One product, whose square is at least its variance; and the two distances are one number.
        error = abs(squared_norm)
        variance_error = math.sqrt(2.0) * variance
        inner_product_variance = math.nan
    else:
        # The jackknife of the module docstring, with workers for examples.
        others = [(product - own) / (b * (total - b)) for b, own, product in both]
        center = sum_or_nan(b * e for b, e in zip(batches, others, strict=True)) / total
        scatter = math.fsum(b * (e - center) ** 2 for b, e in zip(batches, others, strict=True)) / total
        error = 2.0 * math.sqrt((workers - 1) * scatter) / (workers - 2)
        inner_product_variance = total * scatter * (workers - 1) / (workers - 2) ** 2
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
        inner_product_variance=inner_product_variance,
        overlap=0.0 if workers > 2 else math.nan,
    )


def across_devices_estimate(
    micro_batches: Sequence[tuple[Sequence[GradientMoments], Sequence[int]]], squared_norm: float
) -> SampleEstimate:
    """Return the estimates of one step from the gradients of the devices of a node (FSDP-Norm, arXiv 2412.21124).

    A sample is a device's part of a micro-batch: there are S of them, of b_s examples, B together. Squared norm and
    variance are those of `across_workers_estimate` over all S, for which no product of two samples has to be known:
    sum b_s ||g_s - g||^2 = sum b_s ||g_s||^2 - B ||g||^2. With equal b_s, squared norm + V / B is ||g||^2.

    Errors are those of a mean over the micro-batches, each by itself: upper bounds, as samples of different
    micro-batches are compared as well. P is not known.

    Args:
        micro_batches: with two samples or more in all; of each, the moments of the devices that had examples, and
            their numbers of examples.
        squared_norm: ||B g||^2, of the sum of the gradients of all examples.
    """
    sizes = [b for _, batches in micro_batches for b in batches]
    norms = [each.squared_norm for moments, _ in micro_batches for each in moments]
    samples = len(sizes)
    total = sum(sizes)
    pairs = total**2 - sum(b * b for b in sizes)
    variance = math.fsum(norm / b for norm, b in zip(norms, sizes, strict=True)) - squared_norm / total
    shared = [(moments, batches) for moments, batches in micro_batches if len(batches) > 1]
    parts = [across_workers_estimate(moments, batches) for moments, batches in shared]

    def error_of_mean(weights: Sequence[float], errors: Sequence[float]) -> float:
        products = [(weight * each) ** 2 for weight, each in zip(weights, errors, strict=True)]
        return math.sqrt(math.fsum(products)) / math.fsum(weights) if weights else math.inf

    freedom = [len(batches) - 1 for _, batches in shared]
    return SampleEstimate(
        examples=total,
        pairs=pairs,
        squared_norm=(squared_norm - math.fsum(norms)) / pairs,
        squared_norm_error=error_of_mean([part.pairs for part in parts], [part.squared_norm_error for part in parts]),
        variance=max(variance / (samples - 1), 0.0) if math.isfinite(variance) else variance,
        variance_error=error_of_mean(freedom, [part.variance_error for part in parts]),
    )
