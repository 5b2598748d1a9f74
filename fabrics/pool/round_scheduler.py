"""The length of every round, and of the run: its limits and its budget."""

import copy
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from algorithms.nodes.traffic import Event, Exchange, even_exchange, rounds_ahead
from algorithms.nodes.virtual_clock import Computing, RunClock
from algorithms.schedule.budget import (
    LONGEST_ROUND,
    Budget,
    Remaining,
    affordable_rounds,
    growth_exponent,
    remaining_steps,
)
from algorithms.schedule.limits import Limits, RoundSchedule, RunCounters
from fabrics.pool.node_pool import NodePool
from fabrics.training.method_config import exchange_sizes, round_bytes
from fabrics.training.optimizers import learning_rate_schedule
from fabrics.training.statistics import batch_schedule
from utils.config.schema import BUDGETS, Config

if TYPE_CHECKING:
    from fabrics.training.work_split import WorkSplit
    from trainers import Trainer
    from training_logs.recording.records import RoundReport

# Less than this share of a budget of seconds, which is an estimate, is not reported as missing.
_ESTIMATION_ERROR = 0.05


def budget_of(config: Config) -> Budget | None:
    if config.budget is None:
        return None
    return Budget(BUDGETS[config.budget], getattr(config, config.budget), config.simulated_link)


class RoundScheduler:
    """Sets the inner steps of every round. All processes decide alike, from counters that are equal in all of them.

    examples: training examples of one epoch. clock: the virtual clock, in a run whose `time_budget` counts on it.
    """

    def __init__(self, config: Config, examples: int, pool: NodePool):
        self._config = config
        self._pool = pool
        self.clock = None
        if config.simulates_time_budget:
            self.clock = RunClock(len(pool.nodes), config.node_speeds, config.simulated_link)
        # The virtual clock is no estimate: it is a limit, and sets no length of rounds.
        self._budget = budget_of(config) if self.clock is None else None
        epochs = config.number_of_training_epochs
        self._epoch_examples = epochs * examples if epochs else None
        seconds = None if self.clock is None else config.time_budget
        self._limits = Limits(config.number_of_outer_steps, self._epoch_examples, config.max_tokens, seconds)
        self._warned = False

    def progress(self, counters: RunCounters) -> float:
        return self._limits.progress(counters)

    def next_round(
        self,
        counters: RunCounters,
        trainers: Collection["Trainer"],
        splits: Collection["WorkSplit"],
        warn: Callable[[str], None],
        planned: int | None = None,
    ) -> RoundSchedule:
        """Return the next round, with the planned or configured inner steps, or those that the budget allows."""
        steps = planned or self._config.number_of_inner_steps_between_outers
        remaining = self.remaining(counters, trainers, splits, warn)
        if remaining is not None:
            steps = self._budgeted_steps(trainers, splits, remaining)
        return self._limits.next_round(
            counters,
            steps,
            lambda steps: sum(split.examples(steps) for split in splits),
            lambda steps: sum(split.tokens(steps) for split in splits),
            lambda steps: self._simulated_seconds(counters, trainers, splits, steps),
        )

    # The virtual clock

    def count_round(self, counters: RunCounters, reports: Collection["RoundReport"]) -> None:
        """Advance the virtual clock of a run that has one by a round."""
        if self.clock is not None:
            computing = {report.trainer: report.computing for report in reports}
            self.clock.begin_round(computing, counters.link_bytes_redistributed)
            for report in reports:
                self.clock.run(report.trainer, report.inner_steps, report.events)
            self.clock.end_round()
            counters.simulated_seconds = self.clock.elapsed

    def count_merge(self, counters: RunCounters, exchange: Exchange) -> None:
        """Advance the virtual clock of a run that has one by a merge."""
        if self.clock is not None:
            self.clock.merge(exchange.link)
            counters.simulated_seconds = self.clock.elapsed

    def _simulated_seconds(
        self, counters: RunCounters, trainers: Collection["Trainer"], splits: Collection["WorkSplit"], steps: int
    ) -> float:
        """Seconds of a round of this many inner steps, on a copy of the virtual clock."""
        clock = copy.deepcopy(self.clock)
        computing = {}
        for trainer, split in zip(trainers, splits, strict=True):
            examples = split.examples_each(steps)
            computing[trainer.id] = {
                worker: Computing(trainer.nodes[worker].id, examples[worker]) for worker in split.participants
            }
        clock.begin_round(computing, counters.link_bytes_redistributed)
        for trainer, split in zip(trainers, splits, strict=True):
            clock.run(trainer.id, steps, self._expected_events(trainer, split, counters, steps))
        clock.end_round()
        return clock.elapsed - counters.simulated_seconds

    def _expected_events(
        self, trainer: "Trainer", split: "WorkSplit", counters: RunCounters, steps: int
    ) -> list[Event]:
        workers = len(split.participants)
        if workers == 1:
            return []
        method = trainer.worker_group.method
        model = trainer.worker_group.model
        measures = trainer.batch_control.measures(counters.outer_steps + 1)
        sent = round_bytes(self._config, method, model, workers, measures=False) / workers
        statistics = round_bytes(self._config, method, model, workers, measures) / workers - sent
        stops = range(1, steps + 1) if method.capabilities.exchanges_gradients else (steps,)
        recipients = method.capabilities.recipients
        through = "all" if recipients is None else f"groups of {recipients + 1}"
        behind = steps if method.capabilities.overlaps else 0
        events = [Event("synchronisation", step, sent, sent, behind, through) for step in stops]
        if statistics:
            events.append(Event("statistics", steps, statistics, statistics))
        return events

    def _budgeted_steps(
        self, trainers: Collection["Trainer"], splits: Collection["WorkSplit"], remaining: Remaining
    ) -> int:
        """Inner steps of a round if all rounds left have as many and use up the examples left."""
        whole_round = self._config.number_of_inner_steps_between_outers
        if all(len(trainer.nodes) == 1 for trainer in trainers):
            return whole_round  # nothing is communicated, and the round costs nothing
        batch = sum(split.examples(whole_round) for split in splits) / whole_round
        exponent = 0.0
        if any(trainer.batch_control.grows for trainer in trainers):
            largest = max(trainer.requested_batch for trainer in trainers)
            exponent = growth_exponent(largest / self._config.INITIAL_BATCH_SIZE, remaining)
        decay_begins = learning_rate_schedule(self._config).decay_begins
        steps = remaining_steps(remaining, batch, exponent, decay_begins, _largest_request(trainers))
        last = remaining.rounds_left == 1
        planned = max(1, math.ceil(steps) if last else round(steps / remaining.rounds_left))
        if self._config.time_budget is None:
            # The last examples may be shorter than the estimate: the limits end this round, so that none follows it.
            return 2 * planned if last else planned
        if not remaining.rounds_done:
            return planned
        # Seconds are estimates: one slow round must not turn the rest of the run into a single round.
        mean_steps = max(trainer.inner_steps_done / trainer.rounds for trainer in trainers)
        return min(planned, LONGEST_ROUND * math.ceil(mean_steps))

    # The budget

    def count_link_seconds(self, counters: RunCounters, exchange: Exchange) -> None:
        """Add the simulated seconds of an exchange to the counters of a run with a budget of measured seconds."""
        if self._config.time_budget is not None and self.clock is None:
            counters.link_seconds += self._budget.cost(exchange)

    def remaining(
        self,
        counters: RunCounters,
        trainers: Collection["Trainer"],
        splits: Collection["WorkSplit"],
        warn: Callable[[str], None],
    ) -> Remaining | None:
        """Return the rest of a run with a budget, None without one; `warn` is told once if the budget is too small."""
        if self._budget is None:
            return None
        config = self._config
        examples_left = self._examples_left(counters, splits)
        nodes = len(self._pool.nodes)
        working = nodes
        if config.smallest_worker_batch is not None:  # the other nodes are idle
            working = min(nodes, sum(len(trainer.nodes) for trainer in trainers))
        group = next(iter(trainers)).worker_group
        sizes = exchange_sizes(config, group.method, group.model)
        computing = None
        if counters.seconds_per_example is not None:
            computing = counters.seconds_per_example * examples_left

        def affordable(used: float) -> tuple[int, float]:
            ahead = rounds_ahead(
                len(trainers), working, counters.outer_steps + 1, config.merge_frequency, config.merge_count, sizes
            )
            # Before the first batch test no statistics are sent.
            settled = max(0, config.batch_test_start - counters.outer_steps - 1)
            return affordable_rounds(self._budget, used, computing, ahead, examples_left, settled)

        used = counters.used(self._budget.unit)
        rounds, missing = affordable(used)
        if not self._warned:
            warning = self._shortfall(rounds, missing)
            if warning is not None:
                self._warned = True
                warn(warning)
        progress = counters.examples / (counters.examples + examples_left)
        joining = self._joining_workers(trainers, nodes, working, progress)
        if joining:
            settling = even_exchange(working, sizes.settling(working))
            reserve = self._budget.cost(settling + even_exchange(joining, joining * sizes.joining))
            # Without rounds no batch would grow, and no worker would join.
            rounds, _ = affordable(used + min(reserve, max(0.0, self._budget.amount - used) / 2))
        return Remaining(counters.outer_steps, rounds, counters.examples, examples_left)

    def _examples_left(self, counters: RunCounters, splits: Collection["WorkSplit"]) -> float:
        limits = []
        if self._config.max_tokens:
            examples = counters.examples
            tokens = counters.tokens
            if not examples:
                examples = sum(split.effective_batch for split in splits)
                tokens = sum(split.tokens(1) for split in splits)
            limits.append((self._config.max_tokens - counters.tokens) / (tokens / examples))
        if self._epoch_examples:
            limits.append(self._epoch_examples - counters.examples)
        return min(limits)

    def _joining_workers(self, trainers: Collection["Trainer"], nodes: int, working: int, progress: float) -> int:
        """Workers that will join as batches grow: as many as the largest possible batch has work for."""
        config = self._config
        if config.smallest_worker_batch is None:
            return 0
        scheduled = batch_schedule(config)
        # A batch test asks for no more once the learning rate decays.
        tested = progress < learning_rate_schedule(config).decay_begins and any(t.batch_control.grows for t in trainers)
        if not scheduled and not tested:
            return 0
        largest = _largest_request(trainers)
        if scheduled:
            largest = min(largest, len(trainers) * max(int(batch) for _, batch in scheduled.pairs))
        return max(0, min(nodes, largest // config.smallest_worker_batch) - working)

    def _shortfall(self, rounds: int, missing: float) -> str | None:
        budget = self._budget
        tolerated = budget.amount * _ESTIMATION_ERROR if budget.unit == "seconds" else 0.0
        if missing <= tolerated:
            return None
        more = "one more round" if rounds == 1 else f"{rounds} more rounds"
        return (
            f"{self._config.budget}: {budget.amount:,.10g} {budget.unit} are too few: the rest of the run takes at "
            f"least {more}, for which {missing:,.10g} {budget.unit} are missing"
        )


def _largest_request(trainers: Collection["Trainer"]) -> int:
    return sum(trainer.largest_request for trainer in trainers)
