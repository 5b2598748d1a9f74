"""What the gradients of examples say about the gradient that they estimate, with standard errors.

An example's gradient g_i has mean G = grad F and covariance C. The batch tests need

    squared norm             ||G||^2
    variance                 V = tr C
    inner-product variance   P = G' C G, the variance of <g_i, G>
    overlap                  R = tr C^2, so that a mean g of b other examples has E Var <g_i, g> = P + R / b

All of them are estimated by sums over different examples alone (U-statistics), which no noise biases: of a sample of b
examples, with mean gradient g, n_i = ||g_i||^2 and e_i = <g_i, mean of the others> = (b <g_i, g> - n_i) / (b - 1),

    squared norm   U = mean of the e_i = ||g||^2 - V / b             V = (sum n_i - b ||g||^2) / (b - 1)
    its error^2    4 (b - 1) / (b - 2)^2 * mean (e_i - U)^2          (the jackknife; at least Var U, see below)
    V's error^2    sample variance of the n_i / (b - 1)

The e_i of some examples are enough for the error, as all have one distribution: they are those of the last micro-batch,
which alone meets the gradient of the whole sample. The expected value of the jackknife is 4 P / b + 4 R / (b (b - 2)),
where Var U = 4 P / b + 2 R / (b (b - 1)): where noise dominates the error is too large by a factor of 1.4, never too
small. P and R come from two sizes of sample: with X_b = b (b - 1) / (b - 2) * mean (e_i - U)^2,

    E X_b = (b - 2) P + R,   so   P = (X_b - X_a) / (b - a)   and   R = X_a - (a - 2) P

for the first a of the b examples, held against their own mean; the same step gives both where it accumulates.

Why not more of a round: where gradients are clipped every step's ||g||^2 is known anyway, but only the V of that very
step takes its noise V/b away, and a V that drifts by a share of ||G||^2 b / V would pass for gradient. Products of
gradients of different steps hold - lr <g_t, H g_t+1>, as large as ||G||^2 itself where noise limits progress.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientStatistics:
    """Estimates and their standard errors, in squared units of the gradient (P and R in fourth powers).

    examples: behind them, over all workers, in the latest round. squared_norm: of the true gradient; unbiased, so that
    it may be negative. inner_product_variance P and overlap R are NaN where only one size of sample was seen; their
    errors are infinite where too few samples were, and inner_product_covariance is the covariance of the two estimates.
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
        """P + R / batch, the variance of inner products with the mean gradient of so many examples, and its error."""
        error = self.inner_product_variance_error**2 + (self.overlap_error / batch if batch < math.inf else 0.0) ** 2
        error += 2.0 * self.inner_product_covariance / batch if math.isfinite(error) else 0.0
        return self.inner_product_variance + self.overlap / batch, math.sqrt(max(error, 0.0))

    @property
    def decisive(self) -> bool:
        """Whether squared norm and variance are finite and not both zero, so that a test can say something."""
        numbers = (self.squared_norm, self.variance, self.squared_norm_error, self.variance_error)
        finite = all(map(math.isfinite, numbers))
        return finite and (self.squared_norm != 0.0 or self.variance > 0.0)

    @property
    def orthogonal_variance(self) -> float:
        """The part of the variance that is orthogonal to the gradient, V - P / ||G||^2; NaN without a gradient."""
        if self.squared_norm <= 0.0:
            return math.nan
        return self.variance - self.inner_product_variance / self.squared_norm


@dataclass(frozen=True)
class SampleEstimate:
    """What one sample says: scalars, so that a worker can send them.

    pairs: products of two different examples in squared_norm, which is its weight among samples. Other fields as in
    GradientStatistics.
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
    """Some examples of a sample, held against the mean gradient of its first ones, themselves among these.

    examples: n, behind the mean. squared_norm: of the mean. total: sum of ||g_i||^2 over the n. squared_norms and
    inner_products: ||g_i||^2 and <g_i, mean> of the examples that are held against it, [any number].
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
        """Mean (e_i - U)^2 over the examples that are held against the mean; its expectation is that over all n."""
        n, center = self.examples, self.squared_true_norm
        products = zip(self.squared_norms, self.inner_products, strict=True)
        deviations = [(n * product - square) / (n - 1) - center for square, product in products]
        return math.fsum(deviation**2 for deviation in deviations) / len(deviations)

    @property
    def spread(self) -> float:
        """X_n of the module docstring; NaN with fewer than three examples."""
        n = self.examples
        return n * (n - 1) / (n - 2) * self.scatter if n > 2 else math.nan


def sample_estimate(whole: Comparison, sum_of_squares: float, part: Comparison | None = None) -> SampleEstimate:
    """Estimates of a sample of at least two examples.

    Args:
        whole: some of its examples held against its mean gradient.
        sum_of_squares: sum of ||g_i||^4 over the sample.
        part: some of its first examples held against the mean gradient of these, for P and R.
    """
    b = whole.examples
    if b < 2:
        raise ValueError(f"a sample needs at least 2 examples, got {b}")
    squared_norm = whole.squared_true_norm
    scatter = max(sum_of_squares - whole.total**2 / b, 0.0) / (b - 1)  # of the n_i
    # With two examples there is one product, whose square is at least its variance in expectation.
    error = 2.0 * math.sqrt((b - 1) * whole.scatter) / (b - 2) if b > 2 else abs(squared_norm)
    inner_product_variance = overlap = math.nan
    if part is not None and part.examples < b:
        inner_product_variance = (whole.spread - part.spread) / (b - part.examples)
        overlap = part.spread - (part.examples - 2) * inner_product_variance
    return SampleEstimate(
        examples=b,
        pairs=b * (b - 1),
        squared_norm=squared_norm,
        squared_norm_error=error,
        variance=max(whole.variance, 0.0) if math.isfinite(whole.variance) else whole.variance,
        variance_error=math.sqrt(scatter / (b - 1)),
        inner_product_variance=inner_product_variance,
        overlap=overlap,
    )


@dataclass(frozen=True)
class StatisticsSums:
    """The statistics of all rounds so far as weighted sums: the memory of an exponential moving average.

    A sample's squared norm has its pairs for a weight, other quantities its examples; a round's weights shrink by the
    decay with every round after it, and squared weights by its square. So every estimate is unbiased from the first
    round on, and its error is that of a weighted mean: of the samples' own errors, or of their scatter about it for P.
    """

    examples: int = 0
    pairs: float = 0.0
    squared_norm: float = 0.0
    squared_norm_error: float = 0.0  # squared weights times squared errors
    weight: float = 0.0
    variance: float = 0.0
    variance_error: float = 0.0
    compared: float = 0.0  # weight of the samples that know P and R
    compared_squared: float = 0.0
    inner_product_variance: float = 0.0
    overlap: float = 0.0
    inner_product_variance_squared: float = 0.0
    overlap_squared: float = 0.0
    product: float = 0.0  # of P and R

    def after(
        self, samples: Sequence[SampleEstimate], decay: float, between: SampleEstimate | None = None
    ) -> "StatisticsSums":
        """These sums after one more round.

        Args:
            samples: of the round, at least one, from all workers.
            decay: weight of the past, 0 (none) to below 1.
            between: products between the workers, for the squared norm alone.
        """
        known = [s for s in samples if math.isfinite(s.inner_product_variance) and math.isfinite(s.overlap)]
        once, twice = decay, decay**2
        sums = math.fsum
        pairs, products = sums(s.pairs for s in samples), sums(s.pairs * s.squared_norm for s in samples)
        error = math.sqrt(sums((s.pairs * s.squared_norm_error) ** 2 for s in samples))
        if between is not None:
            pairs, products = pairs + between.pairs, products + between.pairs * between.squared_norm
            error += between.pairs * between.squared_norm_error  # of the same examples, so that errors may add up
        return StatisticsSums(
            examples=sum(s.examples for s in samples),
            pairs=once * self.pairs + pairs,
            squared_norm=once * self.squared_norm + products,
            squared_norm_error=twice * self.squared_norm_error + error**2,
            weight=once * self.weight + sum(s.examples for s in samples),
            variance=once * self.variance + sums(s.examples * s.variance for s in samples),
            variance_error=twice * self.variance_error + sums((s.examples * s.variance_error) ** 2 for s in samples),
            compared=once * self.compared + sum(s.examples for s in known),
            compared_squared=twice * self.compared_squared + sum(s.examples**2 for s in known),
            inner_product_variance=once * self.inner_product_variance
            + sums(s.examples * s.inner_product_variance for s in known),
            overlap=once * self.overlap + sums(s.examples * s.overlap for s in known),
            inner_product_variance_squared=once * self.inner_product_variance_squared
            + sums(s.examples * s.inner_product_variance**2 for s in known),
            overlap_squared=once * self.overlap_squared + sums(s.examples * s.overlap**2 for s in known),
            product=once * self.product + sums(s.examples * s.inner_product_variance * s.overlap for s in known),
        )

    @property
    def statistics(self) -> GradientStatistics:
        """The estimates; at least one round must be in the sums."""
        inner = overlap = inner_error = overlap_error = covariance = math.nan
        if self.compared > 0.0:
            inner, overlap = self.inner_product_variance / self.compared, self.overlap / self.compared
            # (k - 1 degrees of freedom) / (k - 3) widens the errors to those of Student's t.
            freedom = self.compared**2 / self.compared_squared - 3.0

            def scatter(product: float, a: float, b: float) -> float:
                return (product / self.compared - a * b) / freedom if freedom > 0.0 else math.inf

            inner_error = math.sqrt(max(scatter(self.inner_product_variance_squared, inner, inner), 0.0))
            overlap_error = math.sqrt(max(scatter(self.overlap_squared, overlap, overlap), 0.0))
            covariance = scatter(self.product, inner, overlap)
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
