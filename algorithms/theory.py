"""How many communications a run needs: the three laws of the batch, and fitting them (docs/theory.md derives them).

With the norm test in force the batch of round t is b_t = V / (eta^2 ||grad F(x_t)||^2), so the law of the gradient is
the law of the batch. A round uses H * b_t examples and makes a fixed number of communications (one of each living
trainer with several workers), so that the examples after C rounds are N(C) = H * (b_1 + ... + b_C):

    constant    b_t = b                      N = H b C                        C ~ N
    linear      b_t = b + g (t - 1)          N = H (b C + g C (C - 1) / 2)    C ~ sqrt(N)    ||grad F||^2 ~ 1 / t
    geometric   b_t = b q^(t - 1)            N = H b (q^C - 1) / (q - 1)      C ~ log(N)     ||grad F||^2 ~ q^-t

Rounds are counted from 1; C may be a fraction, as a part of a round.
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchLaw:
    """A law of b_t with its parameters.

    Attributes:
        regime: constant, linear or geometric.
        first: b_1, examples per inner step over all workers.
        growth: g examples per round (linear), ln q per round (geometric), 0 (constant).
        largest: the batch at which it stops to grow (max_requested_batch).
    """

    regime: str
    first: float
    growth: float = 0.0
    largest: float = math.inf

    def batch(self, round_number: float) -> float:
        """b_t of round t >= 1."""
        if self.growth > 0.0 and round_number - 1.0 >= self.rounds_until_largest:
            return self.largest  # what it would be without may be more than a float holds
        return min(REGIMES[self.regime].batch(self.first, self.growth, round_number - 1.0), self.largest)

    @property
    def rounds_until_largest(self) -> float:
        """How many whole rounds have less than the largest batch."""
        if not math.isfinite(self.largest):
            return math.inf
        if self.first >= self.largest:
            return 0.0
        if self.growth <= 0.0:
            return math.inf
        if self.regime == "linear":
            return math.ceil((self.largest - self.first) / self.growth)
        return math.ceil(math.log(self.largest / self.first) / self.growth)

    def after(self, rounds: int) -> "BatchLaw":
        """The law from a later round on."""
        return replace(self, first=REGIMES[self.regime].batch(self.first, self.growth, rounds))

    def examples(self, rounds: float, inner_steps: int) -> float:
        """N(C): what so many rounds use."""
        growing = min(rounds, self.rounds_until_largest)
        used = REGIMES[self.regime].total(self.first, self.growth, growing) if growing > 0 else 0.0
        return inner_steps * (used + (rounds - growing) * (self.largest if rounds > growing else 0.0))

    def rounds(self, examples: float, inner_steps: int) -> float:
        """C(N): how many rounds use so many examples."""
        batches = examples / inner_steps
        if batches <= 0.0:
            return 0.0
        until = self.rounds_until_largest
        if math.isfinite(until):
            growing = self.examples(until, 1)
            if batches > growing:
                return until + (batches - growing) / self.largest
        return REGIMES[self.regime].rounds(self.first, self.growth, batches)


@dataclass(frozen=True)
class Regime:
    """The mathematics of a law; `since` is t - 1. total and rounds are inverse to each other."""

    batch: Callable[[float, float, float], float]
    total: Callable[[float, float, float], float]
    rounds: Callable[[float, float, float], float]
    parameters: int


def _linear_rounds(first: float, growth: float, batches: float) -> float:
    if growth == 0.0:
        return batches / first
    # g/2 C^2 + (b - g/2) C - N = 0; this form of the root does not cancel for small g.
    half, linear = growth / 2.0, first - growth / 2.0
    discriminant = max(linear * linear + 4.0 * half * batches, 0.0)
    return 2.0 * batches / (linear + math.sqrt(discriminant))


def _geometric_total(first: float, growth: float, rounds: float) -> float:
    if growth == 0.0:
        return first * rounds
    return first * math.expm1(growth * rounds) / math.expm1(growth)


def _geometric_rounds(first: float, growth: float, batches: float) -> float:
    if growth == 0.0:
        return batches / first
    return math.log1p(max(batches * math.expm1(growth) / first, -1.0 + 1e-12)) / growth


REGIMES = {
    "constant": Regime(
        batch=lambda first, growth, since: first,
        total=lambda first, growth, rounds: first * rounds,
        rounds=lambda first, growth, batches: batches / first,
        parameters=1,
    ),
    "linear": Regime(
        batch=lambda first, growth, since: first + growth * since,
        total=lambda first, growth, rounds: first * rounds + growth * rounds * (rounds - 1.0) / 2.0,
        rounds=_linear_rounds,
        parameters=2,
    ),
    "geometric": Regime(
        batch=lambda first, growth, since: first * math.exp(growth * since),
        total=_geometric_total,
        rounds=_geometric_rounds,
        parameters=2,
    ),
}

GROWING = ("linear", "geometric")

# What methods need until ||grad F||^2 <= target: docs/theory.md, section 3.


@dataclass(frozen=True)
class Problem:
    """What the bounds need to know of a problem.

    Attributes:
        smoothness: L, the Lipschitz constant of grad F.
        variance: V, the trace of the covariance of one example's gradient.
        gap: F(x_1) - min F.
        curvature: mu of the Polyak-Lojasiewicz inequality ||grad F||^2 >= 2 mu (F - min F); 0: not assumed.
    """

    smoothness: float
    variance: float
    gap: float
    curvature: float = 0.0


@dataclass(frozen=True)
class Need:
    """Upper bounds: inner steps of a worker, communications, and examples over all workers."""

    inner_steps: float
    communications: float
    examples: float


def fixed_batch_need(problem: Problem, target: float, batch: float, inner_steps: int) -> Need:
    """SGD with a constant batch and the step size that suits the target, over rounds of H inner steps.

    The smallest expected ||grad F||^2 over K steps with step size gamma <= 1 / L is at most
    2 gap / (gamma K) + gamma L V / batch. gamma = min(1 / L, target batch / (2 L V)) makes each half the target.

    Args:
        batch: examples per inner step over all workers.
        inner_steps: H; 1 is synchronous training, more is LocalSGD, or DiLoCo with a plain outer step.
    """
    gamma = min(1.0 / problem.smoothness, target * batch / (2.0 * problem.smoothness * problem.variance))
    steps = 4.0 * problem.gap / (gamma * target)
    return Need(steps, steps / inner_steps, steps * batch)


def norm_test_need(problem: Problem, target: float, eta: float, inner_steps: int) -> Need:
    """SGD whose batch passes the norm test, V / b <= eta^2 ||grad F||^2, at every step; gamma = 1 / (L (1 + eta^2)).

    Every step then lowers F by ||grad F||^2 / (2 L (1 + eta^2)) in expectation. So the smallest ||grad F||^2 of K steps
    is at most 2 L (1 + eta^2) gap / K (linear regime); with curvature mu the gap shrinks by
    1 - mu / (L (1 + eta^2)) in every step (geometric regime), and ||grad F||^2 <= 2 L gap.

    Examples are the sum of V / (eta^2 g_k) over the bounds g_k of the steps, down to the target.
    """
    scaled = problem.smoothness * (1.0 + eta**2)
    linear = max(2.0 * scaled * problem.gap / target, 1.0)
    # Bound g_k = 2 scaled gap / k: the batches V k / (eta^2 2 scaled gap) add up to an arithmetic series.
    linear_examples = problem.variance / (2.0 * eta**2 * scaled * problem.gap) * linear * (linear + 1.0) / 2.0
    if problem.curvature == 0.0:
        return Need(linear, linear / inner_steps, linear_examples)
    shrink = -math.log1p(-problem.curvature / scaled)
    steps = max(math.log(2.0 * problem.smoothness * problem.gap / target) / shrink, 1.0)
    first = problem.variance / (eta**2 * 2.0 * problem.smoothness * problem.gap)
    return Need(steps, steps / inner_steps, _geometric_total(first, shrink, steps))


# Fitting


@dataclass(frozen=True)
class LawFit:
    """One law fitted to the batches of a run.

    Attributes:
        law: with the best parameters.
        error: standard deviation of ln b_t about the law.
        weight: Akaike weight among the laws that were fitted; they add up to 1.
        draws: laws drawn from the distribution of the parameters, for intervals.
    """

    law: BatchLaw
    error: float
    weight: float
    draws: tuple[BatchLaw, ...]


@dataclass(frozen=True)
class Prediction:
    """Rounds, or communications, for a number of examples: the best law's, and an interval over laws and parameters."""

    value: float
    low: float
    high: float

    def within(self, least: float, most: float) -> "Prediction":
        """The same with nothing outside of what is possible."""
        return Prediction(*(min(max(number, least), most) for number in (self.value, self.low, self.high)))


_PLASTIC_NUMBER = 1.324717957244746
# Of a normal distribution in the plane, which they fill evenly (the R2 sequence).
_POINTS = [
    tuple(statistics.NormalDist().inv_cdf((0.5 + index / _PLASTIC_NUMBER**power) % 1.0 or 0.5) for power in (1, 2))
    for index in range(1, 401)
]
_PLACES = 32
MINIMUM_ROUNDS = 4


class TooFewRoundsError(ValueError):
    """There are not enough rounds to fit a law to."""


Theta = tuple[float, float]  # (ln b_1, growth); the growth of the linear law relative to b_1, so that both are about 1


def _grown(regime: str, growth: float, places: Iterable[float]) -> list[float]:
    """The law's ln b_t - ln b_1 where t - 1 is at these places."""
    if regime == "linear":
        return [math.log1p(growth * since) for since in places]
    return [growth * since for since in places]  # the constant law has no growth


def _slope(regime: str, theta: Theta, since: float) -> float:
    """Derivative of the law's ln b_t by the growth."""
    return since / (1.0 + theta[1] * since) if regime == "linear" else since


def _residuals(regime: str, theta: Theta, logs: Sequence[float]) -> list[float]:
    return [value - (theta[0] + by) for value, by in zip(logs, _grown(regime, theta[1], range(len(logs))), strict=True)]


def _squares(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)


def _to_law(regime: str, theta: Theta, largest: float) -> BatchLaw:
    first = math.exp(theta[0])
    return BatchLaw(regime, first, theta[1] * first if regime == "linear" else theta[1], largest)


def _normal_matrix(regime: str, theta: Theta, count: int) -> tuple[float, float, float]:
    """n, sum of slopes, sum of their squares: the entries of the 2 x 2 normal equations."""
    slopes = [_slope(regime, theta, since) for since in range(count)]
    return float(count), math.fsum(slopes), _squares(slopes)


def _least_squares(regime: str, logs: Sequence[float]) -> Theta:
    """theta of the smallest sum of squares with growth >= 0, by Gauss-Newton; one step if the law is linear in it."""
    theta = (math.fsum(logs) / len(logs), 0.0)
    if regime == "constant":
        return theta
    for _ in range(200):
        residuals = _residuals(regime, theta, logs)
        n, s, q = _normal_matrix(regime, theta, len(logs))
        right = math.fsum(residuals)
        left = math.fsum(r * _slope(regime, theta, since) for since, r in enumerate(residuals))
        determinant = n * q - s * s
        step = ((q * right - s * left) / determinant, (n * left - s * right) / determinant)
        scale, before = 1.0, _squares(residuals)
        while scale > 1e-9:
            growth = max(theta[1] + scale * step[1], 0.0)
            at_growth = (0.0, growth)  # the best ln b_1 for a growth is known in closed form
            trial = (math.fsum(_residuals(regime, at_growth, logs)) / len(logs), growth)
            if _squares(_residuals(regime, trial, logs)) <= before:
                break
            scale /= 2.0
        else:
            return theta
        moved, theta = abs(trial[0] - theta[0]) + abs(trial[1] - theta[1]), trial
        if moved < 1e-13:
            return theta
    return theta


def _inflation(residuals: Sequence[float], smoothing: float) -> float:
    """How many rounds say as much as one independent round: (1 + r) / (1 - r), r the autocorrelation of neighbours."""
    energy = _squares(residuals)
    alike = math.fsum(a * b for a, b in itertools.pairwise(residuals)) / energy if energy else 0.0
    alike = min(max(alike, smoothing, 0.0), 0.95)
    return (1.0 + alike) / (1.0 - alike)


def _draws(regime: str, theta: Theta, count: int, variance: float) -> list[Theta]:
    """Parameters from their normal approximation, at points that fill the plane evenly."""
    n, s, q = _normal_matrix(regime, theta, count)
    if regime == "constant":
        return [(theta[0] + math.sqrt(variance / n) * first, 0.0) for first, _ in _POINTS]
    # ln b_1 about the best one for a growth, which a few rounds tell, so that laws without growth fit the batches, too.
    spread = math.sqrt(variance * n / (n * q - s * s))
    places = [index * (count - 1) / (_PLACES - 1) for index in range(_PLACES)]
    level = math.fsum(theta[0] + by for by in _grown(regime, theta[1], places))
    laws = []
    for first, second in _POINTS:
        growth = max(theta[1] + spread * second, 0.0)
        moved = level - math.fsum(_grown(regime, growth, places))
        laws.append((moved / _PLACES + math.sqrt(variance / n) * first, growth))
    return laws


def fit_laws(
    batches: Sequence[float], largest: float = math.inf, smoothing: float = 0.0, regimes: Sequence[str] = tuple(REGIMES)
) -> dict[str, LawFit]:
    """Fit laws to the batches b_1, b_2, ... of consecutive rounds, by least squares of ln b_t.

    Requests never shrink, so growth is taken to be at least 0. Rounds at `largest` say nothing about growth and are
    left out. Residuals of neighbouring rounds are alike, and standard errors allow for it.

    Args:
        smoothing: weight of the past in an average that the values come from; neighbours are at least so alike.
        regimes: to be fitted. Where a test moves the batch GROWING ones, which may have a growth of 0: few rounds
            cannot show growth, and Akaike's criterion would be sure that there is none.

    Raises:
        TooFewRoundsError: fewer than MINIMUM_ROUNDS rounds below `largest`.
    """
    free = [batch for batch in batches if batch < largest]
    if len(free) < MINIMUM_ROUNDS:
        raise TooFewRoundsError(
            f"a law needs at least {MINIMUM_ROUNDS} rounds below the largest batch, got {len(free)}"
        )
    logs, count = [math.log(batch) for batch in free], len(free)
    # Batches are whole numbers: nothing is known better than to a third of an example.
    rounding = math.fsum((0.3 / batch) ** 2 for batch in free) / count
    found: dict[str, tuple[BatchLaw, float, float, tuple[BatchLaw, ...]]] = {}
    for regime in regimes:
        theta, parameters = _least_squares(regime, logs), REGIMES[regime].parameters + 1  # the variance is one, too
        residuals = _residuals(regime, theta, logs)
        variance = max(_squares(residuals) / count, rounding)
        correction = 2.0 * parameters * (parameters + 1) / max(count - parameters - 1, 1)
        aicc = count * math.log(variance) + 2.0 * parameters + correction
        draws = _draws(regime, theta, count, _inflation(residuals, smoothing) * variance)
        laws = tuple(_to_law(regime, draw, largest) for draw in draws)
        found[regime] = _to_law(regime, theta, largest), math.sqrt(variance), aicc, laws
    best = min(aicc for _, _, aicc, _ in found.values())
    weights = {regime: math.exp(-0.5 * (aicc - best)) for regime, (_, _, aicc, _) in found.items()}
    total = math.fsum(weights.values())
    return {
        regime: LawFit(law, error, weights[regime] / total, draws) for regime, (law, error, _, draws) in found.items()
    }


def best_fit(fits: dict[str, LawFit]) -> LawFit:
    """The law with the largest weight."""
    return max(fits.values(), key=lambda fit: fit.weight)


# Standard deviation of the logarithm of the number of rounds to come about a law, if batches move (docs/theory.md, 4).
DRIFT = 0.25

_DRIFTS = 15


def predict_rounds(
    fits: dict[str, LawFit], rounds: Callable[[BatchLaw], float], drift: float = 0.0, coverage: float = 0.9
) -> Prediction:
    """A number of rounds: the best law's, with an interval over all laws, by weight, and over their parameters.

    Args:
        drift: standard deviation of the logarithm of the number beside that.
    """
    normal = statistics.NormalDist()
    factors = [math.exp(drift * normal.inv_cdf((place + 0.5) / _DRIFTS)) for place in range(_DRIFTS)]
    # What a law says that weighs next to nothing moves no interval.
    values = sorted(
        (rounds(law) * factors[index % _DRIFTS], fit.weight / len(fit.draws))
        for fit in fits.values()
        if fit.weight > 1e-4
        for index, law in enumerate(fit.draws)
    )
    cumulated = list(itertools.accumulate(weight for _, weight in values))
    tail = (1.0 - coverage) / 2.0
    low, high = (values[min(bisect.bisect_left(cumulated, at), len(values) - 1)][0] for at in (tail, 1.0 - tail))
    value = rounds(best_fit(fits).law)
    return Prediction(value, min(low, value), max(high, value))
