"""What comes next: the length of the next round, and what becomes of a run's budget."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from algorithms.batch.batch_control import BatchControl
from algorithms.batch.budget import LONGER, Ahead, rounds_ahead, steps_left
from algorithms.nodes.communication_rounds import Exchange, Traffic, redistributed, rounds_to_come
from algorithms.schedule.limits import Limits, RoundSchedule
from fabrics.data.sampler import DataCursor
from fabrics.pool.budgets import budget_of, check_budget, examples_left, largest_step, shortfall
from fabrics.pool.node_pool import NodePool
from fabrics.pool.run_counters import Totals
from fabrics.training.learning_rates import inner_steps_ahead, learning_rate_schedule
from fabrics.training.work_split import Shares
from fabrics.training.worker import Node
from fabrics.training.worker_group import WorkerGroup
from utils.config.schema import Config


class Spender(Protocol):
    """What is asked of a trainer here."""

    batch: BatchControl
    workforce: WorkerGroup
    cursor: DataCursor
    inner_steps: int
    rounds: int

    @property
    def nodes(self) -> Sequence[Node]:
        """Of all its workers."""

    @property
    def largest_request(self) -> int:
        """In examples over all its workers."""

    @property
    def shares(self) -> Shares:
        """Who does how much in the round at hand."""

    def tokens_ahead(self, inner_steps: int) -> int:
        """Tokens of the next inner steps over all its workers."""

    def plan(self, ahead: Ahead) -> None:
        """Set the requested batch of the next round where a budget moves it."""


def traffic_of(workforce: WorkerGroup, config: Config, tested: Callable[[int], bool]) -> Traffic:
    """Bytes of the exchanges of a trainer with such workers; tested: whether a batch test follows the round of that
    number."""
    copied = workforce.sizes.worker if config.joining_moments == "copy" else 0
    return Traffic(
        synchronised=lambda workers, number: workforce.round_bytes(workers, tested(number)),
        merged=len(workforce.given_tensors) * workforce.parameter_bytes,
        redistributed=workforce.sizes.trainer + copied,
    )


class Spending:
    """What becomes of the budget of a run; every process decides alike, from what it knows as all others do.

    Raises:
        ConfigError: there is nothing to spend it on.
    """

    def __init__(self, config: Config, nodes: int):
        check_budget(config, nodes)
        self.budget = budget_of(config)
        self._config, self._told = config, False

    def count(self, totals: Totals, exchange: Exchange) -> None:
        """Add the seconds of an exchange to the totals, where they count."""
        if self._config.time_budget is not None:
            totals.link_seconds += self.budget.cost(exchange)

    def ahead(
        self, totals: Totals, trainers: Collection[Spender], pool: NodePool, examples: int, warn: Callable[[str], None]
    ) -> Ahead | None:
        """What is left of a run with a budget, None without one; where it cannot be kept, `warn` is told once."""
        config, first = self._config, next(iter(trainers))
        if self.budget is None:
            return None
        steps, step = config.number_of_inner_steps_between_outers, (totals.examples, totals.tokens)
        if not totals.examples:
            step = sum(t.shares.batch for t in trainers), sum(t.tokens_ahead(1) for t in trainers)
        left = examples_left(config, totals.examples, totals.tokens, step[1] / step[0], examples)
        max_batches = [node.max_batch for node in pool.nodes if node.id not in pool.failed]
        working = len(max_batches)
        if config.smallest_worker_batch is not None:  # the others are idle
            working = min(working, sum(len(trainer.nodes) for trainer in trainers))
        merging = totals.outer_steps + 1, config.merge_frequency, config.merge_count
        traffic = traffic_of(first.workforce, config, first.batch.tests_after)
        to_come = rounds_to_come(len(trainers), working, *merging, traffic)
        computing = None if totals.seconds_per_example is None else totals.seconds_per_example * left
        together = sum(len(trainer.cursor) for trainer in trainers)
        largest = None
        if config.plans_batches:
            largest = functools.cache(largest_step(config, max_batches, together, math.ceil(left / steps)))
        used, schedule = totals.used(self.budget.unit), learning_rate_schedule(config)
        grows = config.plans_batches or totals.examples / (totals.examples + left) < schedule.decay_begins
        if joining := self._joining(trainers, len(max_batches), working, grows):
            used += self.budget.cost(redistributed(joining, joining * traffic.redistributed))
        outlook = rounds_ahead(self.budget, used, computing, to_come, left, steps, largest)
        warning = shortfall(config, self.budget, outlook)
        if warning is not None and not self._told:
            self._told = True
            warn(warning)
        return Ahead(totals.outer_steps, outlook.rounds, totals.examples, left, steps, schedule, len(trainers))

    def unspent(self, totals: Totals) -> str | None:
        """What to warn of where a run that is over has left more than a twentieth of its budget."""
        if self.budget is None or (used := totals.used(self.budget.unit)) >= 0.95 * self.budget.amount:
            return None
        amounts = f"{used:,.10g} of {self.budget.amount:,.10g} {self.budget.unit}"
        return f"{self._config.budget}: {amounts} were used: what was left was less than a round's, or had no use"

    def _joining(self, trainers: Collection[Spender], nodes: int, working: int, grows: bool) -> int:
        """Workers that will join as batches grow, as far as the largest batch that may come has work for them.

        grows: whether a batch test may still ask for more, which it may not once the learning rate decays.
        """
        smallest, scheduled = self._config.smallest_worker_batch, bool(self._config.batch_schedule)
        if smallest is None or not (scheduled or (grows and any(trainer.batch.growth for trainer in trainers))):
            return 0
        largest = sum(trainer.largest_request for trainer in trainers)
        if scheduled:
            largest = min(largest, len(trainers) * max(int(batch) for _, batch in self._config.batch_schedule))
        return max(0, min(nodes, largest // smallest) - working)


def planned_inner_steps(config: Config, trainers: Collection[Spender], ahead: Ahead) -> int:
    """Inner steps of the next round, so that with as many in all later ones the rounds left use up the examples left.

    Rounds in which nobody communicates cost nothing, and are as long as without a budget.
    """
    if all(len(trainer.nodes) == 1 for trainer in trainers):
        return ahead.inner_steps
    batch = sum(trainer.shares.examples(ahead.inner_steps) for trainer in trainers) / ahead.inner_steps
    largest, growth = sum(t.largest_request for t in trainers), max(t.batch.growth for t in trainers)
    steps = steps_left(ahead, batch, growth, ahead.schedule.decay_begins, largest)
    planned = max(1, math.ceil(steps) if ahead.rounds_left == 1 else round(steps / ahead.rounds_left))
    if config.time_budget is None:
        return _to_the_end(planned, ahead)
    if not ahead.rounds_done:
        return planned
    # Of time all is estimated: one slow round is no reason to make the rest of the run a single one.
    return min(planned, LONGER * math.ceil(max(trainer.inner_steps / trainer.rounds for trainer in trainers)))


def _to_the_end(inner_steps: int, ahead: Ahead) -> int:
    """So many for a round; for the last one room for more, as its examples may be shorter than those before: the limit
    ends it, and not one more round."""
    return 2 * inner_steps if ahead.rounds_left == 1 else inner_steps


def next_round(
    config: Config, limits: Limits, totals: Totals, trainers: Collection[Spender], ahead: Ahead | None
) -> RoundSchedule:
    """The round that comes next; with a budget that sets batches these are planned, and progress is in rounds."""
    steps = inner_steps_ahead(config, limits.progress(totals.done))
    if ahead is not None:
        for trainer in trainers:
            trainer.plan(ahead)
        if not config.plans_batches:
            steps = planned_inner_steps(config, trainers, ahead)
        elif config.time_budget is None:
            steps = _to_the_end(steps, ahead)
    schedule = limits.next_round(
        totals.done,
        steps,
        lambda steps: sum(trainer.shares.examples(steps) for trainer in trainers),
        lambda steps: sum(trainer.tokens_ahead(steps) for trainer in trainers),
    )
    return schedule.in_rounds(ahead.rounds_done, ahead.rounds_left) if config.plans_batches else schedule
