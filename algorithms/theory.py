"""The number of communications of a run: laws of the batch, and their fit to a run (derived in docs/theory.md).

With the norm test in force the batch of round t is b_t = V / (eta^2 ||grad F(x_t)||^2), so the law of the gradient is
the law of the batch. A round uses H b_t examples, and C rounds use N = H (b_1 + ... + b_C):

    linear      b_t = b_1 + g (t - 1)    N = H (b_1 C + g C (C - 1) / 2)    C ~ sqrt(N)    ||grad F||^2 ~ 1 / t
    geometric   b_t = b_1 q^(t - 1)      N = H b_1 (q^C - 1) / (q - 1)      C ~ log(N)     ||grad F||^2 ~ q^-t

A constant batch is the linear law with g = 0: C ~ N. C may be a fraction, for a part of a round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

REGIMES = ("linear", "geometric")
MINIMUM_ROUNDS = 4
# Standard deviation of the logarithm of future rounds about a law of growth: no regime lasts.
DRIFT = 0.25


class TooFewRoundsError(ValueError):
    """There are too few rounds to fit a law."""


@dataclass(frozen=True)
class BatchLaw:
    """The batch of every round.

    Attributes:
        first: b_1, examples of an inner step over all workers.
        growth: g in examples per round (linear), ln q (geometric).
        largest: the batch at which growth stops.
    """

    regime: str
    first: float
    growth: float = 0.0
    largest: float = math.inf

    def batch(self, round_number: float) -> float:
        """b_t of round t >= 1."""
        if self.growth > 0.0 and round_number > self.growing_rounds:
            return self.largest
        if self.regime == "geometric":
            return self.first * math.exp(self.growth * (round_number - 1.0))
        return self.first + self.growth * (round_number - 1.0)

    @property
    def growing_rounds(self) -> float:
        """The number of whole rounds with a batch below the largest."""
        if self.first >= self.largest:
            return 0.0
        if self.growth == 0.0 or math.isinf(self.largest):
            return math.inf
        if self.regime == "geometric":
            return math.ceil(math.log(self.largest / self.first) / self.growth)
        return math.ceil((self.largest - self.first) / self.growth)

    def examples(self, rounds: float, inner_steps: int) -> float:
        """N(C): the examples of this number of rounds."""
        growing = min(rounds, self.growing_rounds)
        total = self.first * growing
        if self.growth > 0.0 and self.regime == "geometric":
            total = self.first * math.expm1(self.growth * growing) / math.expm1(self.growth)
        elif self.growth > 0.0:
            total += self.growth * growing * (growing - 1.0) / 2.0
        if rounds > growing:
            total += (rounds - growing) * self.largest
        return inner_steps * total

    def rounds(self, examples: float, inner_steps: int) -> float:
        """C(N): the rounds that use this number of examples."""
        total = examples / inner_steps
        growing = self.growing_rounds
        if math.isfinite(growing) and total > self.examples(growing, 1):
            return growing + (total - self.examples(growing, 1)) / self.largest
        if self.growth > 0.0 and self.regime == "geometric":
            return math.log1p(total * math.expm1(self.growth) / self.first) / self.growth
        # The root of g/2 C^2 + (b_1 - g/2) C - total = 0, in the form that does not cancel for small g.
        slope = self.first - self.growth / 2.0
        return 2.0 * total / (slope + math.sqrt(slope**2 + 2.0 * self.growth * total))


def fit_laws(batches: Sequence[float], largest: float = math.inf, grows: bool = True) -> list[BatchLaw]:
    """Fit laws to the batches of rounds 1, 2, ... by least squares of ln b_t; the best law comes first.

    Args:
        batches: at least MINIMUM_ROUNDS below `largest`; rounds at `largest` say nothing about growth.
        grows: False: the batch is constant by configuration, and only the constant law is fitted.

    Raises:
        TooFewRoundsError: there are too few rounds.
    """
    logs = [math.log(batch) for batch in batches if batch < largest]
    if len(logs) < MINIMUM_ROUNDS:
        raise TooFewRoundsError(
            f"a law needs at least {MINIMUM_ROUNDS} rounds below the largest batch, got {len(logs)}"
        )
    if not grows:
        level, _ = _level_and_squares("linear", 0.0, logs)
        return [BatchLaw("linear", math.exp(level), 0.0, largest)]
    found = []
    for regime in REGIMES:
        growth = _best_growth(regime, logs)
        level, squares = _level_and_squares(regime, growth, logs)
        first = math.exp(level)
        law = BatchLaw(regime, first, growth * first if regime == "linear" else growth, largest)
        found.append((squares, law))
    return [law for _, law in sorted(found, key=lambda each: each[0])]


@dataclass(frozen=True)
class Prediction:
    """A predicted number with its 90% interval."""

    value: float
    low: float
    high: float


def predict_rounds(laws: Sequence[BatchLaw], fitted: int, examples: float, inner_steps: int) -> Prediction:
    """Predict the rounds in which a run uses more examples: by the best law, with an interval.

    The interval is normal in the logarithm. Its deviation joins DRIFT and half the difference between the laws.

    Args:
        fitted: rounds so far.
        examples: after these rounds.
    """
    counts = [law.rounds(law.examples(fitted, inner_steps) + examples, inner_steps) - fitted for law in laws]
    if all(law.growth == 0.0 for law in laws):
        return Prediction(counts[0], counts[0], counts[0])
    deviation = math.hypot(DRIFT, 0.5 * math.log(max(counts) / min(counts)))
    factor = math.exp(NormalDist().inv_cdf(0.95) * deviation)
    return Prediction(counts[0], counts[0] / factor, counts[0] * factor)


# In fits, the growth of the linear law is relative to b_1, so that ln b_t - ln b_1 = ln(1 + growth (t - 1)).


def _level_and_squares(regime: str, growth: float, logs: Sequence[float]) -> tuple[float, float]:
    """Return the best ln b_1 for this growth, and the sum of squared residuals."""
    rest = []
    for passed, log in enumerate(logs):
        rest.append(log - (math.log1p(growth * passed) if regime == "linear" else growth * passed))
    level = math.fsum(rest) / len(rest)
    return level, math.fsum((value - level) ** 2 for value in rest)


def _best_growth(regime: str, logs: Sequence[float]) -> float:
    """Return the growth with the smallest sum of squares: a golden-section search over its logarithm, or 0."""

    def squares(log_growth: float) -> float:
        return _level_and_squares(regime, math.exp(log_growth), logs)[1]

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
    middle = 0.5 * (low + high)
    flat = _level_and_squares(regime, 0.0, logs)[1]
    return math.exp(middle) if squares(middle) < flat else 0.0
