"""A budget: how many rounds are left of it, and how long they or how large their batches should be.

With as many tokens and as many rounds as there are, the mean batch is given; what is left to choose is its shape over
the run. Two things shape it. Noise that an inner step injects reaches the end of the run the less the more learning
rate is still to come: minimising the sum of eta^2 V / (A B) over the steps, with eta the learning rate of a step and A
what it and all later ones have together, gives B ~ eta sqrt(V) / sqrt(A) for given tokens (arXiv 2607.27731). And the
larger the noise scale V / ||G||^2, the less is lost with a large batch: B ~ its square root (arXiv 1812.06162). The
batch is planned anew for all rounds that are left after every round, so an error in what was measured moves the shape
and not the number of rounds.

Progress is counted in rounds here: the round r of R lasts from r / R to (r + 1) / R.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from algorithms.nodes.communication_rounds import Exchange, Link
from algorithms.schedule.learning_rate import LearningRateSchedule

# Places at which the learning rates that are left are summed, about; at least one per round.
_PLACES = 2000
# From this share of the run on the noise scale no longer counts: a falling learning rate makes it rise.
FREEZE = 0.8
# What a slope over the examples, both in logarithms, is taken to be before it is measured, and
# how much of a measurement that is worth.
_PRIOR_SLOPE, _PRIOR_WEIGHT = 0.4, 0.5
# What share of a budget of seconds is taken to be left for communications before any computing has been measured.
FIRST_SHARE = 0.5
# With a budget of seconds, how many times as long as the mean of those before it a round may be.
LONGER = 4
# By how much the logarithm of the noise scale wanders in a round.
_WANDERING = 0.05


@dataclass(frozen=True)
class Trend:
    """A logarithm over a run, filtered (Kalman), and its slope over the logarithm of the examples.

    level: the filtered logarithm; None before anything was measured. variance: of its error. count and the other four:
    the sums of a linear regression of level on the logarithm of the examples.
    """

    level: float | None = None
    variance: float = 1.0
    count: int = 0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def after(self, position: float, measured: float, error: float) -> "Trend":
        """The trend with one more measurement.

        Args:
            position: logarithm of the examples by then.
            measured: the logarithm. error: its standard error.
        """
        if self.level is None:
            level, variance = measured, error**2
        else:
            before = self.variance + _WANDERING**2
            gain = before / (before + error**2)
            level, variance = self.level + gain * (measured - self.level), before * (1.0 - gain)
        return Trend(
            level,
            variance,
            self.count + 1,
            self.sum_x + position,
            self.sum_y + level,
            self.sum_xx + position**2,
            self.sum_xy + position * level,
        )

    @property
    def slope(self) -> float:
        """Of what is followed over the logarithm of the examples, between 0 and 1."""
        spread = self.sum_xx - self.sum_x**2 / self.count if self.count else 0.0
        together = self.sum_xy - self.sum_x * self.sum_y / self.count if self.count else 0.0
        slope = (together + _PRIOR_WEIGHT * _PRIOR_SLOPE) / (max(spread, 0.0) + _PRIOR_WEIGHT)
        return min(max(slope, 0.0), 1.0)

    @property
    def trust(self) -> float:
        """How far the slope is used, between 0 and 1: less where the level is not known well."""
        return 1.0 / (1.0 + self.variance / 0.25)


@dataclass(frozen=True)
class Ahead:
    """What a run has done, and what is left of it, all trainers together.

    rounds_done, rounds_left: the second counts the next one. examples_done, examples_left. inner_steps: of a round.
    schedule: of the learning rate. trainers: who share the examples of a round.
    """

    rounds_done: int
    rounds_left: int
    examples_done: int
    examples_left: float
    inner_steps: int
    schedule: LearningRateSchedule
    trainers: int = 1

    @property
    def progress(self) -> float:
        """How much of the run is done, in rounds."""
        return self.rounds_done / (self.rounds_done + self.rounds_left)

    def position(self, share: float) -> float:
        """Logarithm of the examples when a share of the rounds is done, later ones taken to be equal."""
        done = self.examples_left * (share - self.progress) / (1.0 - self.progress) + self.examples_done
        return math.log(done + 0.01 * (self.examples_done + self.examples_left))


def steps_left(ahead: Ahead, batch: float, growth: float, grows_until: float, largest: float) -> float:
    """Inner steps that the examples left make, all trainers together, with a batch that grows like a power of them.

    In the last round it stays: another round would have to be paid for the steps that a growing batch leaves.

    Args:
        batch: of an inner step now. growth: the power.
        grows_until: share of the run from which on the batch stays. largest: batch ever.
    """
    if ahead.rounds_left == 1:
        return ahead.examples_left / batch
    total, places = ahead.examples_done + ahead.examples_left, 200
    steps, floor = 0.0, 0.01 * total
    for place in range(places):
        there = ahead.examples_done + (place + 0.5) / places * ahead.examples_left
        there = min(there, max(grows_until * total, ahead.examples_done))
        grown = ((there + floor) / (ahead.examples_done + floor)) ** growth
        steps += ahead.examples_left / places / min(batch * grown, max(batch, largest))
    return steps


@functools.lru_cache(maxsize=16)
def time_to_go(schedule: LearningRateSchedule, rounds: int) -> tuple[float, ...]:
    """eta / sqrt(A) in the middle of every round of a run, never falling: the shape for noise that stays the same."""
    places = 2 * max(1, _PLACES // (2 * rounds)) + 1
    rates = [schedule.without_warmup((place + 0.5) / (rounds * places)) for place in range(rounds * places)]
    left, lefts = 0.0, []
    for rate in reversed(rates):
        lefts.append((left + rate / 2) / places)
        left += rate
    lefts.reverse()
    shape, most = [], 0.0
    for middle in range(places // 2, rounds * places, places):
        if lefts[middle] > 0.0:
            most = max(most, rates[middle] / math.sqrt(lefts[middle]))
        shape.append(most)
    return tuple(shape)


def planned_batch(ahead: Ahead, trend: Trend, growth: float, noise: float, smallest: float, largest: float) -> float:
    """The batch of the next round, all trainers together, with which the rounds left use up the examples left.

    Args:
        growth, noise: exponents of the two shapes; 0: that one does not count.
        smallest, largest: bounds of every batch; where they leave no way, there will be more rounds, or fewer.
    """
    here, total, weights = ahead.progress, ahead.rounds_done + ahead.rounds_left, []
    for number in range(ahead.rounds_done, total):
        share = min(number / total, max(FREEZE, here))
        grown = noise * trend.slope * trend.trust * (ahead.position(share) - ahead.position(here))
        weights.append(time_to_go(ahead.schedule, total)[number] ** growth * math.exp(grown))
    factor = _scale(weights, ahead.examples_left / ahead.inner_steps, smallest, largest)
    return min(max(factor * weights[0], smallest), largest)


def _scale(weights: list[float], total: float, smallest: float, largest: float) -> float:
    """The factor with which the weights, kept within bounds, have a sum, as far as the bounds allow."""

    def summed(factor: float) -> float:
        return math.fsum(min(max(factor * weight, smallest), largest) for weight in weights)

    low, high = 0.0, max(min(largest, total), smallest) / min(weights)
    for _ in range(100):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if summed(middle) < total else (low, middle)
    return high


def largest_planned(largest_request: int, workers: int) -> int:
    """The largest request of a trainer whose batches are multiples of its workers: within the bound if one can be."""
    return max(workers, largest_request - largest_request % workers)


@dataclass(frozen=True)
class Budget:
    """What a run may use. unit: communications, bytes or seconds. link: what connects nodes, where seconds count."""

    unit: str
    amount: float
    link: Link = Link(math.inf, 0.0)

    def cost(self, exchange: Exchange) -> float:
        """What an exchange takes of it."""
        if self.unit == "seconds":
            return self.link.seconds(exchange.link) if exchange.communications or exchange.sent else 0.0
        return exchange.communications if self.unit == "communications" else exchange.sent


@dataclass(frozen=True)
class Outlook:
    """How many rounds are left, the next one included, and what of the budget is missing for them."""

    rounds: int
    missing: float


def rounds_ahead(
    budget: Budget,
    used: float,
    computing: float | None,
    to_come: Iterable[tuple[Sequence[int], Sequence[Exchange]]],
    examples: float,
    inner_steps: int,
    largest_step: Callable[[Sequence[int]], float] | None,
) -> Outlook:
    """As many rounds as can be paid, at least 1; more where the largest batches need more, fewer where the smallest do.

    Args:
        used: of the budget.
        computing: seconds that the examples left will take; None: nothing has been measured.
        to_come: workers of each trainer and exchanges of every round, from `rounds_to_come`.
        examples: that are left. inner_steps: of a round.
        largest_step: from the workers of each trainer to the most examples of an inner step; None: rounds may have any
            length.
    """
    left = payable = budget.amount - used
    if budget.unit == "seconds":
        left -= computing or 0.0
        payable = FIRST_SHARE * left if computing is None else left
    rounds, spent, most, least, last = 0, 0, 0.0, 0.0, 0.0
    for shares, exchanges in to_come:
        price = sum(map(budget.cost, exchanges))
        if largest_step is None and rounds:
            if len(shares) == 1 and price == last > 0.0:  # and so it stays
                more = max(0, math.floor((payable - spent) / price + 1e-9))
                rounds, spent = rounds + more, spent + more * price
                break
            if rounds >= examples:
                break
        last = price
        if rounds and (largest_step is None or most >= examples):
            free_for_ever = not price and len(shares) == 1  # one worker: nothing is ever communicated
            if free_for_ever or spent + price > payable or (largest_step is not None and least >= examples):
                break
        rounds, spent = rounds + 1, spent + price
        if largest_step is not None:
            most += inner_steps * largest_step(shares)
            least += inner_steps * sum(shares)
    return Outlook(rounds, max(0, spent - left))
