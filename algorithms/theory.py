"""The number of communications of a run: three laws of the batch, and their fit to a run (derived in docs/theory.md).

With the norm test in force the batch of round t is b_t = V / (eta^2 ||grad F(x_t)||^2), so the law of the gradient is
the law of the batch. A round uses H * b_t examples and makes a fixed number of communications (one per living trainer
with several workers), so that the examples after C rounds are N(C) = H * (b_1 + ... + b_C):

    constant    b_t = b                      N = H b C                        C ~ N
    linear      b_t = b + g (t - 1)          N = H (b C + g C (C - 1) / 2)    C ~ sqrt(N)    ||grad F||^2 ~ 1 / t
    geometric   b_t = b q^(t - 1)            N = H b (q^C - 1) / (q - 1)      C ~ log(N)     ||grad F||^2 ~ q^-t

Rounds are counted from 1; C may be fractional, for a part of a round.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True)
class BatchLaw:
    """The constant law of the batch, and the interface of all laws.

    Attributes:
        first: b_1, examples per inner step over all workers.
        growth: per round: g examples (linear), ln q (geometric).
        largest: the batch at which growth stops (max_requested_batch).
    """

    regime: ClassVar[str] = "constant"

    first: float
    growth: float = 0.0
    largest: float = math.inf

    def batch(self, round_number: float) -> float:
        """b_t of round t >= 1."""
        if self.growth > 0.0 and round_number - 1.0 >= self.rounds_until_largest:
            return self.largest
        return min(self._batch(round_number - 1.0), self.largest)

    def after(self, rounds: int) -> "BatchLaw":
        """The law from a later round on."""
        return replace(self, first=self._batch(rounds))

    def examples(self, rounds: float, inner_steps: int) -> float:
        """N(C): the examples of this number of rounds."""
        growing = min(rounds, self.rounds_until_largest)
        total = self._total(growing) if growing > 0.0 else 0.0
        if rounds > growing:
            total += (rounds - growing) * self.largest
        return inner_steps * total

    def rounds(self, examples: float, inner_steps: int) -> float:
        """C(N): the rounds that use this number of examples."""
        total = examples / inner_steps
        if total <= 0.0:
            return 0.0
        growing = self.rounds_until_largest
        if math.isfinite(growing):
            growing_total = self.examples(growing, 1)
            if total > growing_total:
                return growing + (total - growing_total) / self.largest
        return self._rounds(total)

    @property
    def rounds_until_largest(self) -> float:
        """The whole rounds with a batch below the largest."""
        if not math.isfinite(self.largest):
            return math.inf
        if self.first >= self.largest:
            return 0.0
        return math.ceil(self._growing_rounds()) if self.growth > 0.0 else math.inf

    # Without the largest batch; t - 1 rounds have passed

    def _batch(self, passed: float) -> float:
        return self.first

    def _total(self, rounds: float) -> float:
        return self.first * rounds

    def _rounds(self, total: float) -> float:
        return total / self.first

    def _growing_rounds(self) -> float:
        return math.inf


class LinearLaw(BatchLaw):
    """b_t = b_1 + g (t - 1)."""

    regime: ClassVar[str] = "linear"

    def _batch(self, passed: float) -> float:
        return self.first + self.growth * passed

    def _total(self, rounds: float) -> float:
        return self.first * rounds + self.growth * rounds * (rounds - 1.0) / 2.0

    def _rounds(self, total: float) -> float:
        # g/2 C^2 + (b - g/2) C - total = 0; this form of the root does not cancel for small g.
        slope = self.first - self.growth / 2.0
        discriminant = max(slope * slope + 2.0 * self.growth * total, 0.0)
        return 2.0 * total / (slope + math.sqrt(discriminant))

    def _growing_rounds(self) -> float:
        return (self.largest - self.first) / self.growth


class GeometricLaw(BatchLaw):
    """b_t = b_1 q^(t - 1)."""

    regime: ClassVar[str] = "geometric"

    def _batch(self, passed: float) -> float:
        return self.first * math.exp(self.growth * passed)

    def _total(self, rounds: float) -> float:
        if self.growth == 0.0:
            return super()._total(rounds)
        return self.first * math.expm1(self.growth * rounds) / math.expm1(self.growth)

    def _rounds(self, total: float) -> float:
        if self.growth == 0.0:
            return super()._rounds(total)
        return math.log1p(total * math.expm1(self.growth) / self.first) / self.growth

    def _growing_rounds(self) -> float:
        return math.log(self.largest / self.first) / self.growth


LAWS: dict[str, type[BatchLaw]] = {law.regime: law for law in (BatchLaw, LinearLaw, GeometricLaw)}
GROWING = ("linear", "geometric")

# Fitting a run (docs/theory.md, section 4)

MINIMUM_ROUNDS = 4
# Standard deviation of the logarithm of the future rounds about a law, if batches grow: no regime lasts.
DRIFT = 0.25


class TooFewRoundsError(ValueError):
    """There are too few rounds to fit a law."""


@dataclass(frozen=True)
class LawFit:
    """A law fitted to the batches of a run.

    Attributes:
        law: with the best parameters.
        weight: Akaike weight among the fitted laws; the weights sum to 1.
        slower: the law with its growth lowered by one standard error.
        faster: the law with its growth raised by one standard error.
        level_error: standard error of the mean of ln b_t.
    """

    law: BatchLaw
    weight: float
    slower: BatchLaw
    faster: BatchLaw
    level_error: float


@dataclass(frozen=True)
class Prediction:
    """A predicted number with its interval."""

    value: float
    low: float
    high: float


def fit_laws(
    batches: Sequence[float], largest: float = math.inf, regimes: Sequence[str] = tuple(LAWS)
) -> dict[str, LawFit]:
    """Fit laws to the batches of consecutive rounds, by least squares of ln b_t with a growth of at least 0.

    Rounds at `largest` say nothing about growth and are left out. Standard errors allow for the autocorrelation of the
    residuals.

    Args:
        regimes: the laws to fit. If a test moves the batch these are GROWING, which may have no growth: few rounds
            cannot show growth, and Akaike's criterion would be sure that there is none.

    Raises:
        TooFewRoundsError: fewer than MINIMUM_ROUNDS rounds are below `largest`.
    """
    logs = [math.log(batch) for batch in batches if batch < largest]
    count = len(logs)
    if count < MINIMUM_ROUNDS:
        raise TooFewRoundsError(f"a law needs at least {MINIMUM_ROUNDS} rounds below the largest batch, got {count}")
    # Batches are integers: none is known better than to a third of an example.
    rounding = math.fsum((0.3 / math.exp(log)) ** 2 for log in logs) / count
    criteria = {}
    fits = {}
    for regime in regimes:
        growth = _best_growth(regime, logs)
        residuals = _residuals(regime, growth, logs)
        variance = max(math.fsum(residual**2 for residual in residuals) / count, rounding)
        parameters = 2 if regime == "constant" else 3  # the variance is one
        criteria[regime] = count * math.log(variance) + 2.0 * parameters * (
            1.0 + (parameters + 1) / max(count - parameters - 1, 1)
        )
        variance *= _inflation(residuals)
        slopes = [_slope(regime, growth, passed) for passed in range(count)]
        spread = math.fsum(slope**2 for slope in slopes) - math.fsum(slopes) ** 2 / count
        error = math.sqrt(variance / spread) if spread else 0.0
        fits[regime] = LawFit(
            law=_law(regime, growth, logs, largest),
            weight=0.0,
            slower=_law(regime, max(growth - error, 0.0), logs, largest),
            faster=_law(regime, growth + error, logs, largest),
            level_error=math.sqrt(variance / count),
        )
    best = min(criteria.values())
    likelihoods = {regime: math.exp(-0.5 * (criterion - best)) for regime, criterion in criteria.items()}
    total = math.fsum(likelihoods.values())
    return {regime: replace(fit, weight=likelihoods[regime] / total) for regime, fit in fits.items()}


def best_fit(fits: dict[str, LawFit]) -> LawFit:
    """The law with the largest weight."""
    return max(fits.values(), key=lambda fit: fit.weight)


def predict_rounds(fits: dict[str, LawFit], rounds: Callable[[BatchLaw], float], drift: float = 0.0) -> Prediction:
    """Predict a number of rounds: that of the best law, with a 90% interval.

    The interval is normal in the logarithm. Its variance is that of Burnham and Anderson's model averaging: within each
    law (from its parameters) and between the laws, by their weights, and drift^2.
    """
    logs = {regime: math.log(rounds(fit.law)) for regime, fit in fits.items()}
    mean = math.fsum(fit.weight * logs[regime] for regime, fit in fits.items())
    variance = drift**2
    for regime, fit in fits.items():
        growth_error = 0.5 * math.log(rounds(fit.slower) / rounds(fit.faster))
        variance += fit.weight * (growth_error**2 + fit.level_error**2 + (logs[regime] - mean) ** 2)
    half_width = statistics.NormalDist().inv_cdf(0.95) * math.sqrt(variance)
    value = rounds(best_fit(fits).law)
    return Prediction(value, min(value, math.exp(mean - half_width)), max(value, math.exp(mean + half_width)))


# In fits, the growth of the linear law is relative to b_1, so that ln b_t - ln b_1 = ln(1 + growth (t - 1)).


def _grown(regime: str, growth: float, passed: float) -> float:
    return math.log1p(growth * passed) if regime == "linear" else growth * passed


def _slope(regime: str, growth: float, passed: float) -> float:
    """Derivative of `_grown` by the growth."""
    if regime == "constant":
        return 0.0
    return passed / (1.0 + growth * passed) if regime == "linear" else passed


def _residuals(regime: str, growth: float, logs: Sequence[float]) -> list[float]:
    """The residuals with the best level for this growth."""
    rest = [log - _grown(regime, growth, passed) for passed, log in enumerate(logs)]
    level = math.fsum(rest) / len(rest)
    return [value - level for value in rest]


def _law(regime: str, growth: float, logs: Sequence[float], largest: float) -> BatchLaw:
    level = math.fsum(log - _grown(regime, growth, passed) for passed, log in enumerate(logs)) / len(logs)
    first = math.exp(level)
    return LAWS[regime](first, growth * first if regime == "linear" else growth, largest)


def _best_growth(regime: str, logs: Sequence[float]) -> float:
    """The growth of at least 0 with the smallest sum of squares."""
    if regime == "constant":
        return 0.0
    count = len(logs)
    middle = (count - 1) / 2.0
    if regime == "geometric":
        spread = math.fsum((passed - middle) ** 2 for passed in range(count))
        return max(math.fsum((passed - middle) * log for passed, log in enumerate(logs)) / spread, 0.0)

    def squares(log_growth: float) -> float:
        return math.fsum(residual**2 for residual in _residuals("linear", math.exp(log_growth), logs))

    # Golden-section search over the logarithm of the growth.
    low = -20.0
    high = 10.0
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    while high - low > 1e-9:
        left = high - ratio * (high - low)
        right = low + ratio * (high - low)
        if squares(left) < squares(right):
            high = right
        else:
            low = left
    growth = math.exp(0.5 * (low + high))
    flat = math.fsum(residual**2 for residual in _residuals("linear", 0.0, logs))
    return growth if squares(math.log(growth)) < flat else 0.0


def _inflation(residuals: Sequence[float]) -> float:
    """The rounds that are worth one independent round: (1 + r) / (1 - r) for an autocorrelation r of neighbours."""
    energy = math.fsum(residual**2 for residual in residuals)
    products = math.fsum(a * b for a, b in itertools.pairwise(residuals))
    correlation = min(max(products / energy, 0.0), 0.95) if energy else 0.0
    return (1.0 + correlation) / (1.0 - correlation)
