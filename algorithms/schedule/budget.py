"""The budget of a run: how many more rounds it pays for, and how many inner steps they have.

A budget counts communications, bytes or seconds. The examples and the rounds that are left give the mean length of a
round. The plan is made again before every round, which corrects the errors of its estimates.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from algorithms.nodes.traffic import Exchange, Link

# The prior of the slope of ln batch over ln examples, and its weight in the regression.
_PRIOR_SLOPE = 0.4
_PRIOR_WEIGHT = 0.5
# Standard deviations of the logarithm of a request: its error, as requests jump, and its drift in a round.
_REQUEST_ERROR = 0.1
_REQUEST_DRIFT = 0.05
# The share of a budget of seconds that is planned for communication before computing has been measured.
UNMEASURED_SHARE = 0.5
# With a budget of seconds no round is longer than this multiple of the mean before it.
LONGEST_ROUND = 4


@dataclass(frozen=True)
class BatchGrowth:
    """The growth of a requested batch with the examples of the run: batch ~ examples^exponent.

    The logarithm of the request passes a Kalman filter for a random walk; the exponent is the slope of a linear
    regression of the filtered values on the logarithm of the examples.

    Attributes:
        level: filtered logarithm of the request; None before the first round.
        variance: of the level's error.
        count: observed rounds.
        sum_x: of the logarithms of the examples.
        sum_y: of the levels.
        sum_xx: of the squares of x.
        sum_xy: of the products.
    """

    level: float | None = None
    variance: float = 1.0
    count: int = 0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def observe(self, log_examples: float, request: int) -> "BatchGrowth":
        """Return the growth after one more round."""
        level = math.log(request)
        variance = _REQUEST_ERROR**2
        if self.level is not None:
            predicted = self.variance + _REQUEST_DRIFT**2
            gain = predicted / (predicted + _REQUEST_ERROR**2)
            level = self.level + gain * (level - self.level)
            variance = predicted * (1.0 - gain)
        return BatchGrowth(
            level=level,
            variance=variance,
            count=self.count + 1,
            sum_x=self.sum_x + log_examples,
            sum_y=self.sum_y + level,
            sum_xx=self.sum_xx + log_examples**2,
            sum_xy=self.sum_xy + log_examples * level,
        )

    @property
    def exponent(self) -> float:
        """The exponent, between 0 and 1."""
        spread = 0.0
        covariance = 0.0
        if self.count:
            spread = max(self.sum_xx - self.sum_x**2 / self.count, 0.0)
            covariance = self.sum_xy - self.sum_x * self.sum_y / self.count
        slope = (covariance + _PRIOR_WEIGHT * _PRIOR_SLOPE) / (spread + _PRIOR_WEIGHT)
        return min(max(slope, 0.0), 1.0)


@dataclass(frozen=True)
class Budget:
    """The resources that a run may use.

    Attributes:
        unit: communications, bytes or seconds.
        amount: in this unit.
        link: between the nodes, if seconds count.
    """

    unit: str
    amount: float
    link: Link = Link()

    def cost(self, exchange: Exchange) -> float:
        """The part of the budget that an exchange uses."""
        if self.unit == "communications":
            return exchange.communications
        if self.unit == "bytes":
            return exchange.sent
        return self.link.seconds(exchange.link) if exchange.communications or exchange.sent else 0.0


def affordable_rounds(
    budget: Budget,
    used: float,
    computing: float | None,
    ahead: Iterable[tuple[Sequence[int], Sequence[Exchange]]],
    examples: float,
) -> tuple[int, float]:
    """Return the rounds that the rest of a budget pays for, at least one, and the part that is missing for them.

    Args:
        used: part of the budget.
        computing: seconds that the examples left will take; None: not measured yet.
        ahead: workers of each trainer and exchanges of every future round, from `rounds_ahead`.
        examples: examples left; every round has at least one.
    """
    left = budget.amount - used
    payable = left
    if budget.unit == "seconds":
        left -= computing or 0.0
        payable = UNMEASURED_SHARE * left if computing is None else left
    rounds = 0
    spent = 0.0
    last_price = 0.0
    for workers, exchanges in ahead:
        price = sum(budget.cost(exchange) for exchange in exchanges)
        one_trainer = len(workers) == 1
        if rounds and one_trainer and price == last_price > 0.0:  # all later rounds cost the same
            more = max(0, math.floor((payable - spent) / price + 1e-9))
            rounds += more
            spent += more * price
            break
        free_forever = one_trainer and price == 0.0
        if rounds and (rounds >= examples or free_forever or spent + price > payable):
            break
        last_price = price
        rounds += 1
        spent += price
    return rounds, max(0, spent - left)


@dataclass(frozen=True)
class Remaining:
    """The past and the rest of a run with a budget, over all trainers.

    Attributes:
        rounds_done: rounds so far.
        rounds_left: future rounds, including the next one.
        examples_done: examples so far.
        examples_left: future examples.
    """

    rounds_done: int
    rounds_left: int
    examples_done: int
    examples_left: float

    @property
    def log_examples(self) -> float:
        """Logarithm of the examples done plus a hundredth of all, which the growth of batches is measured over."""
        return math.log(self.examples_done + 0.01 * (self.examples_done + self.examples_left))


def remaining_steps(remaining: Remaining, batch: float, exponent: float, grows_until: float, largest: float) -> float:
    """Inner steps that the examples left make if the batch grows with this exponent of the examples.

    In the last round the batch stays, because steps that a growing batch leaves would need another round.

    Args:
        batch: examples of an inner step now, over all trainers.
        exponent: of the growth, see `BatchGrowth`.
        grows_until: share of the run after which the batch stays.
        largest: limit of the batch.
    """
    if remaining.rounds_left == 1:
        return remaining.examples_left / batch
    done = remaining.examples_done
    total = done + remaining.examples_left
    offset = 0.01 * total
    points = 200
    steps = 0.0
    for point in range(points):  # the integral of 1 / batch over the examples, by the midpoint rule
        position = done + (point + 0.5) / points * remaining.examples_left
        position = min(position, max(grows_until * total, done))
        growth = ((position + offset) / (done + offset)) ** exponent
        steps += remaining.examples_left / points / min(batch * growth, max(batch, largest))
    return steps
