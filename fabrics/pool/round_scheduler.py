"""How long a run is: the inner steps of the next round, its limits, and what becomes of its budget."""

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from algorithms.nodes.traffic import Exchange, ExchangeSizes, Link, redistribution_exchange, rounds_ahead
from algorithms.schedule.budget import LONGER, Budget, Outlook, Remaining, rounds_left, steps_left
from algorithms.schedule.limits import Limits, RoundSchedule
from fabrics.pool.run_counters import RunCounters
from fabrics.training.optimizers import learning_rate_schedule
from utils.config.schema import BUDGETS, Config, ConfigError

if TYPE_CHECKING:
    from fabrics.pool.node_pool import NodePool
    from trainers import Trainer

# A budget of seconds is only estimated: less than this share of it is not reported as missing.
_ESTIMATED = 0.05


def budget_of(config: Config) -> Budget | None:
    """Return the budget of a run; None where it has none."""
    if config.budget is None:
        return None
    unit = BUDGETS[config.budget]
    amount = getattr(config, config.budget)
    if unit != "seconds":
        return Budget(unit, amount)
    return Budget(unit, amount, Link.parse(config.link))


def check_budget(config: Config, nodes: int) -> None:
    """Raise ConfigError where a run with a budget never communicates."""
    if config.budget is not None and nodes == 1:
        raise ConfigError(
            f"{config.budget}: a run on one node never communicates; raise nodes_per_gpu, or use more devices"
        )


class RoundScheduler:
    """The length of every round. All processes decide alike, from counters that are equal in all of them.

    Args:
        config: the run's configuration.
        examples: training examples of one epoch.
        nodes: nodes of the run.

    Raises:
        ConfigError: the run has a budget and never communicates.
    """

    def __init__(self, config: Config, examples: int, nodes: int):
        check_budget(config, nodes)
        self.budget = budget_of(config)
        self._config = config
        self._examples = examples
        self._limits = Limits(
            config.number_of_outer_steps,
            config.number_of_training_epochs and config.number_of_training_epochs * examples,
            config.max_tokens,
        )
        self._warned = False

    def progress(self, counters: RunCounters) -> float:
        """Return the share of the run that is done, 0 to 1."""
        return self._limits.progress(counters.done)

    def next_round(
        self, counters: RunCounters, trainers: Collection["Trainer"], pool: "NodePool", warn: Callable[[str], None]
    ) -> RoundSchedule:
        """Return the inner steps of the next round: those of the configuration, or what the budget allows."""
        steps = self._config.number_of_inner_steps_between_outers
        remaining = self.remaining(counters, trainers, pool, warn)
        if remaining is not None:
            for trainer in trainers:
                trainer.batch.observe_growth(remaining.position)
            steps = self._planned_steps(trainers, remaining)
        return self._limits.next_round(
            counters.done,
            steps,
            lambda steps: sum(trainer.shares.examples(steps) for trainer in trainers),
            lambda steps: sum(trainer.tokens_ahead(steps) for trainer in trainers),
        )

    def _planned_steps(self, trainers: Collection["Trainer"], remaining: Remaining) -> int:
        """Inner steps of a round, if all rounds left have as many and use up the examples left."""
        whole_round = self._config.number_of_inner_steps_between_outers
        if all(len(trainer.nodes) == 1 for trainer in trainers):
            return whole_round  # nothing is communicated, and the round costs nothing
        batch = sum(trainer.shares.examples(whole_round) for trainer in trainers) / whole_round
        largest = sum(trainer.largest_request for trainer in trainers)
        growth = max(trainer.batch.growth for trainer in trainers)
        decay_begins = learning_rate_schedule(self._config).decay_begins
        steps = steps_left(remaining, batch, growth, decay_begins, largest)
        last = remaining.rounds_left == 1
        planned = max(1, math.ceil(steps) if last else round(steps / remaining.rounds_left))
        if self._config.time_budget is None:
            # The last examples may be shorter than those before: the limit ends the last round, not one more round.
            return 2 * planned if last else planned
        if not remaining.rounds_done:
            return planned
        # Seconds are estimates: one slow round is no reason to make the rest of the run a single round.
        return min(planned, LONGER * math.ceil(max(trainer.inner_steps / trainer.rounds for trainer in trainers)))

    # The budget

    def count(self, counters: RunCounters, exchange: Exchange) -> None:
        """Add the seconds of an exchange to the counters, where a budget counts them."""
        if self._config.time_budget is not None:
            counters.link_seconds += self.budget.cost(exchange)

    def remaining(
        self, counters: RunCounters, trainers: Collection["Trainer"], pool: "NodePool", warn: Callable[[str], None]
    ) -> Remaining | None:
        """Return what is left of a run with a budget, None without one; `warn` is told once if it cannot be kept."""
        if self.budget is None:
            return None
        config = self._config
        examples = self._examples_left(counters, trainers)
        able = sum(node.id not in pool.failed for node in pool.nodes)
        working = able
        if config.smallest_worker_batch is not None:  # the other nodes are idle
            working = min(able, sum(len(trainer.nodes) for trainer in trainers))
        sizes = exchange_sizes(next(iter(trainers)))
        to_come = rounds_ahead(
            len(trainers), working, counters.outer_steps + 1, config.merge_frequency, config.merge_count, sizes
        )
        used = counters.used(self.budget.unit)
        grows = counters.examples / (counters.examples + examples) < learning_rate_schedule(config).decay_begins
        if joining := self._joining(trainers, able, working, grows):
            used += self.budget.cost(redistribution_exchange(joining, joining * sizes.joining))
        each = counters.seconds_per_example
        outlook = rounds_left(self.budget, used, None if each is None else each * examples, to_come, examples)
        if not self._warned and (warning := self._shortfall(outlook)) is not None:
            self._warned = True
            warn(warning)
        return Remaining(counters.outer_steps, outlook.rounds, counters.examples, examples)

    def _examples_left(self, counters: RunCounters, trainers: Collection["Trainer"]) -> float:
        """Examples until the first limit in tokens or epochs."""
        config = self._config
        limits = []
        if config.max_tokens:
            examples = counters.examples
            tokens = counters.tokens
            if not examples:
                examples = sum(trainer.shares.batch for trainer in trainers)
                tokens = sum(trainer.tokens_ahead(1) for trainer in trainers)
            limits.append((config.max_tokens - counters.tokens) / (tokens / examples))
        if config.number_of_training_epochs:
            limits.append(config.number_of_training_epochs * self._examples - counters.examples)
        return min(limits)

    def _joining(self, trainers: Collection["Trainer"], nodes: int, working: int, grows: bool) -> int:
        """Workers that will join as batches grow, as far as the largest batch that may come has work for them.

        grows: whether a batch test may still ask for more, which it may not once the learning rate decays.
        """
        config = self._config
        scheduled = bool(config.batch_schedule)
        if config.smallest_worker_batch is None:
            return 0
        if not (scheduled or (grows and any(trainer.batch.growth for trainer in trainers))):
            return 0
        largest = sum(trainer.largest_request for trainer in trainers)
        if scheduled:
            largest = min(largest, len(trainers) * max(int(batch) for _, batch in config.batch_schedule))
        return max(0, min(nodes, largest // config.smallest_worker_batch) - working)

    def _shortfall(self, outlook: Outlook) -> str | None:
        budget = self.budget
        if outlook.missing <= (budget.amount * _ESTIMATED if budget.unit == "seconds" else 0.0):
            return None
        rounds = "one more round" if outlook.rounds == 1 else f"{outlook.rounds} more rounds"
        return (
            f"{self._config.budget}: {budget.amount:,.10g} {budget.unit} cannot be kept: the rest of the run takes "
            f"{rounds} at least, for which {outlook.missing:,.10g} {budget.unit} are missing"
        )

    def unspent(self, counters: RunCounters) -> str | None:
        """Return a warning where a run that is over has left more than a twentieth of its budget."""
        if self.budget is None or (used := counters.used(self.budget.unit)) >= 0.95 * self.budget.amount:
            return None
        amounts = f"{used:,.10g} of {self.budget.amount:,.10g} {self.budget.unit}"
        return f"{self._config.budget}: {amounts} were used: what was left was less than a round's, or had no use"


def exchange_sizes(trainer: "Trainer") -> ExchangeSizes:
    """The bytes of the exchanges of such a trainer in future rounds."""
    group = trainer.worker_group
    return ExchangeSizes(
        round=lambda workers, number: group.round_bytes(workers, trainer.batch.tests_after(number)),
        merge=len(group.given_tensors) * group.parameter_bytes,
        joining=group.sizes.trainer + group.sizes.worker,
    )
