"""The budget of a run: how many rounds it still pays for, and how many inner steps these have.

A budget counts communications, bytes or seconds. With as many examples and as many rounds as are left, the mean length
of a round is given. It is planned anew before every round, so that an error in what was measured is made good later.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from algorithms.nodes.traffic import Exchange, Link

# The slope of the logarithm of the batch over that of the examples before it is measured, and the prior's weight.
_PRIOR_SLOPE = 0.4
_PRIOR_WEIGHT = 0.5
# Standard deviation of the logarithm of a request (which moves in jumps), and by how much it wanders in a round.
_REQUEST_ERROR = 0.1
_WANDERING = 0.05
# What share of a budget of seconds is taken to be left for communications before any computing has been measured.
FIRST_SHARE = 0.5
# With a budget of seconds, how many times as long as the mean of those before it a round may be.
LONGER = 4


@dataclass(frozen=True)
class BatchGrowth:
    """How a requested batch grows with the examples of the run: a filtered level and a linear regression of it.

    Attributes:
        level: the filtered logarithm of the request; None before the first round.
        variance: of its error.
        count: rounds so far.
        sum_x, sum_y, sum_xx, sum_xy: sums of the regression of `level` on the logarithm of the examples.
    """

    level: float | None = None
    variance: float = 1.0
    count: int = 0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def after(self, position: float, request: int) -> "BatchGrowth":
        """Return the growth with one more request; position: logarithm of the examples by then."""
        level = math.log(request)
        variance = _REQUEST_ERROR**2
        if self.level is not None:
            before = self.variance + _WANDERING**2
            gain = before / (before + _REQUEST_ERROR**2)
            level = self.level + gain * (level - self.level)
            variance = before * (1.0 - gain)
        return BatchGrowth(
            level,
            variance,
            self.count + 1,
            self.sum_x + position,
            self.sum_y + level,
            self.sum_xx + position**2,
            self.sum_xy + position * level,
        )

    @property
    def exponent(self) -> float:
        """The power of the examples with which the request grows, between 0 and 1."""
        spread = self.sum_xx - self.sum_x**2 / self.count if self.count else 0.0
        together = self.sum_xy - self.sum_x * self.sum_y / self.count if self.count else 0.0
        slope = (together + _PRIOR_WEIGHT * _PRIOR_SLOPE) / (max(spread, 0.0) + _PRIOR_WEIGHT)
        return min(max(slope, 0.0), 1.0)


@dataclass(frozen=True)
class Remaining:
    """What a run with a budget has done, and what is left of it, all trainers together.

    Attributes:
        rounds_done: rounds so far.
        rounds_left: rounds to come, the next one included.
        examples_done: examples so far.
        examples_left: examples to come.
    """

    rounds_done: int
    rounds_left: int
    examples_done: int
    examples_left: float

    @property
    def position(self) -> float:
        """Logarithm of the examples done, to which a hundredth of all is added."""
        return math.log(self.examples_done + 0.01 * (self.examples_done + self.examples_left))


def steps_left(remaining: Remaining, batch: float, growth: float, grows_until: float, largest: float) -> float:
    """Inner steps that the examples left make, all trainers together, with a batch that grows like a power of them.

    In the last round the batch stays: another round would have to be paid for the steps that a growing batch leaves.

    Args:
        batch: examples of an inner step now.
        growth: the power.
        grows_until: share of the run from which on the batch stays.
        largest: bound of the batch.
    """
    if remaining.rounds_left == 1:
        return remaining.examples_left / batch
    done = remaining.examples_done
    total = done + remaining.examples_left
    floor = 0.01 * total
    places = 200
    steps = 0.0
    for place in range(places):
        there = done + (place + 0.5) / places * remaining.examples_left
        there = min(there, max(grows_until * total, done))
        grown = ((there + floor) / (done + floor)) ** growth
        steps += remaining.examples_left / places / min(batch * grown, max(batch, largest))
    return steps


@dataclass(frozen=True)
class Budget:
    """What a run may use.

    Attributes:
        unit: communications, bytes or seconds.
        amount: how many.
        link: what connects nodes, where seconds count.
    """

    unit: str
    amount: float
    link: Link = Link(math.inf, 0.0)

    def cost(self, exchange: Exchange) -> float:
        """Return what an exchange takes of the budget."""
        if self.unit == "seconds":
            return self.link.seconds(exchange.link) if exchange.communications or exchange.sent else 0.0
        return exchange.communications if self.unit == "communications" else exchange.sent


@dataclass(frozen=True)
class Outlook:
    """How many rounds are left, the next one included, and what of the budget is missing for them."""

    rounds: int
    missing: float


def rounds_left(
    budget: Budget,
    used: float,
    computing: float | None,
    to_come: Iterable[tuple[Sequence[int], Sequence[Exchange]]],
    examples: float,
) -> Outlook:
    """Count the rounds that the rest of a budget pays for, at least 1.

    Args:
        used: of the budget.
        computing: seconds that the examples left will take; None: nothing has been measured.
        to_come: workers of each trainer and exchanges of every round, from `rounds_to_come`.
        examples: examples left; a round has one at least.
    """
    left = budget.amount - used
    payable = left
    if budget.unit == "seconds":
        left -= computing or 0.0
        payable = FIRST_SHARE * left if computing is None else left
    rounds = 0
    spent = 0.0
    last = 0.0
    for workers, exchanges in to_come:
        price = sum(map(budget.cost, exchanges))
        if rounds:
            if len(workers) == 1 and price == last > 0.0:  # all later rounds cost the same
                more = max(0, math.floor((payable - spent) / price + 1e-9))
                rounds += more
                spent += more * price
                break
            free_for_ever = not price and len(workers) == 1  # one worker: nothing is ever communicated
            if rounds >= examples or free_for_ever or spent + price > payable:
                break
        last = price
        rounds += 1
        spent += price
    return Outlook(rounds, max(0, spent - left))
