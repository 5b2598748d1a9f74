"""The budget of a run: how many more rounds it pays for, and how many inner steps they have.

A budget counts communications, bytes or seconds. The examples and the rounds that are left give the mean length of a
round. The plan is made again before every round, which corrects the errors of its estimates.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from algorithms.nodes.traffic import Exchange, Link

# The prior of the exponent of growth, and its weight against what a run has shown.
_PRIOR_EXPONENT = 0.4
_PRIOR_WEIGHT = 0.5
# The share of a budget of seconds that is planned for communication before computing has been measured.
UNMEASURED_SHARE = 0.5
# With a budget of seconds no round is longer than this multiple of the mean before it.
LONGEST_ROUND = 4


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
    ahead: Iterable[tuple[Sequence[Sequence[int]], Sequence[Exchange]]],
    examples: float,
    settled: int = 0,
) -> tuple[int, float]:
    """Return the rounds that the rest of a budget pays for, at least one, and the part that is missing for them.

    Args:
        used: part of the budget.
        computing: seconds that the examples left will take; None: not measured yet.
        ahead: nodes of each trainer and exchanges of every future round, from `rounds_ahead`.
        examples: examples left; every round has at least one.
        settled: the number of rounds after which the bytes of a round no longer change, but for merges.
    """
    left = budget.amount - used
    payable = left
    if budget.unit == "seconds":
        left -= computing or 0.0
        payable = UNMEASURED_SHARE * left if computing is None else left
    rounds = 0
    spent = 0.0
    last_price = price = 0.0
    priced: Sequence[Exchange] = ()
    for nodes_of_trainers, exchanges in ahead:
        if exchanges is not priced:  # rounds that are alike have one list
            price = sum(budget.cost(exchange) for exchange in exchanges)
            priced = exchanges
        one_trainer = len(nodes_of_trainers) == 1
        if rounds > settled and one_trainer and price == last_price > 0.0:  # all later rounds cost the same
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
    def offset(self) -> float:
        """A hundredth of all examples, which is added where growth begins: no batch grows from zero examples."""
        return 0.01 * (self.examples_done + self.examples_left)


def growth_exponent(growth: float, remaining: Remaining) -> float:
    """Return the power of the examples with which a batch grows, 0 to 1, from its growth since the start of the run.

    The slope of ln batch over ln examples, drawn to a prior while the run is young.
    """
    passed = math.log1p(remaining.examples_done / remaining.offset)
    slope = (passed * math.log(growth) + _PRIOR_WEIGHT * _PRIOR_EXPONENT) / (passed**2 + _PRIOR_WEIGHT)
    return min(max(slope, 0.0), 1.0)


def remaining_steps(remaining: Remaining, batch: float, exponent: float, grows_until: float, largest: float) -> float:
    """Inner steps that the examples left make if the batch grows with this exponent of the examples.

    In the last round the batch stays, because steps that a growing batch leaves would need another round.

    Args:
        batch: examples of an inner step now, over all trainers.
        exponent: of the growth, see `growth_exponent`.
        grows_until: share of the run after which the batch stays.
        largest: limit of the batch.
    """
    if remaining.rounds_left == 1:
        return remaining.examples_left / batch
    done = remaining.examples_done
    total = done + remaining.examples_left
    offset = remaining.offset
    points = 200
    steps = 0.0
    for point in range(points):  # the integral of 1 / batch over the examples, by the midpoint rule
        position = done + (point + 0.5) / points * remaining.examples_left
        position = min(position, max(grows_until * total, done))
        growth = ((position + offset) / (done + offset)) ** exponent
        steps += remaining.examples_left / points / min(batch * growth, max(batch, largest))
    return steps
