"""A run in which nobody computes: its rounds, who works in them, and what is sent, as the run itself would count it.

Trainers, methods and decisions are those of a run, on tensors without numbers and with no worker in this process, as if
all were in others: every exchange is asked for and counted, and nothing arrives. What only training tells stays as
it is at first: requested batches, which a batch test would move, and encodings that follow the loss.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.nodes.communication_rounds import Exchange, synchronised
from algorithms.schedule.limits import Limits, RoundSchedule
from algorithms.synchronisation.method import Event
from fabrics.data.examples import Examples
from fabrics.models.initialisation import initial_cursors
from fabrics.models.meta_model import META
from fabrics.pool.node_assignment import Distributing, requests_of
from fabrics.pool.node_pool import NodePool, check_statistics
from fabrics.pool.round_scheduler import Spending, next_round
from fabrics.pool.run_counters import Totals
from fabrics.training.flat_model import WorkingModel
from fabrics.training.method_config import check_method
from fabrics.training.outer_round import Gathering
from fabrics.training.work_split import Shares
from fabrics.training.worker import WorkerRound
from trainers import Trained, Trainer
from utils.config.schema import Config
from utils.distributed.processes import LocalProcesses
from utils.distributed.reductions import LocalWorkers


class Absent(LocalProcesses):
    """Processes of a run as one sees them that owns no node: who has tensors keeps them, and nothing comes."""

    def owns(self, node: int) -> bool:
        return False

    def workers(self, nodes: Sequence[int]) -> LocalWorkers:
        return LocalWorkers(0)


class UnreadExamples:
    """So many examples of one length that nobody reads."""

    def __init__(self, examples: int, length: int):
        self._examples, self.tokens_per_example = examples, length

    def __len__(self) -> int:
        return self._examples

    def tokens(self, indices: Sequence[int]) -> int:
        return len(indices) * self.tokens_per_example


class _Counted(Gathering):
    """A round that nobody computes; `drew`: whether random numbers decided what is sent."""

    drew = False

    def generator(self) -> torch.Generator:
        self.drew = True
        return super().generator()


@dataclass(frozen=True)
class TrainerRound:
    """A trainer's part of a round, of those of its workers that take part.

    all_nodes: of all its workers, also those that rest. nodes, speeds, plans, steps: of each its node, its speed, its
    plan, and its inner steps. events: what they send; tested: whether a batch test follows.
    """

    trainer: int
    all_nodes: tuple[int, ...]
    nodes: tuple[int, ...]
    speeds: tuple[float, ...]
    plans: tuple[ExecutionPlan, ...]
    steps: tuple[int, ...]
    events: tuple[Event, ...]
    tested: bool

    @property
    def batch(self) -> int:
        """Examples of an inner step over all workers."""
        return sum(plan.effective_batch for plan in self.plans)


@dataclass(frozen=True)
class Round:
    """A round. redistributed: before it; merge: after it; synchronised: in it."""

    number: int
    inner_steps: int
    trainers: tuple[TrainerRound, ...]
    synchronised: Exchange
    redistributed: Exchange
    merge: Exchange | None
    totals: Totals


class Rehearsal:
    """A run of a configuration on so many devices.

    Args:
        working: its model on the meta device.
        examples: to train on.
        devices: of the run, or islands, each with `nodes_per_gpu` nodes.
        max_batch: of every node.
        seconds: that a round of all trainers, with so many inner steps, computes; None: not known. Only budgets in
            seconds ask for it.
        shares: examples of each share, where the data are shared out by what they are.

    Attributes:
        totals: so far. warnings: what a run would warn of before it trains.

    Raises:
        ConfigError: a run would refuse the configuration.
    """

    def __init__(
        self,
        config: Config,
        working: WorkingModel,
        examples: Examples,
        devices: int,
        max_batch: int,
        seconds: Callable[[Sequence[TrainerRound], int], float] | None = None,
        shares: Sequence[int] | None = None,
    ):
        # Where tensors live changes nothing of what is sent, and those of the meta device live nowhere.
        config = dataclasses.replace(config, outer_state="device", idle_moments="device")
        self.totals, self._config, self._examples = Totals(), config, len(examples)
        self.warnings, self._seconds = [], seconds
        processes = Absent([META] * devices, config.nodes_per_gpu)
        self._pool = NodePool(processes.devices, config)
        self._pool.limit({node.id: max_batch for node in self._pool.nodes})
        self._spending = Spending(config, len(self._pool.nodes))
        self._distributing = Distributing(config, self._pool, processes.groups, self._spending)
        epochs = config.number_of_training_epochs
        self._limits = Limits(config.number_of_outer_steps, epochs and epochs * len(examples), config.max_tokens)
        cursors, self._trainers = initial_cursors(config, len(examples), shares), {}
        requests = dict.fromkeys(range(len(cursors)), config.INITIAL_BATCH_SIZE)
        first = self._distributing.assignment(requests, {}, 0.0)
        for trainer, nodes in first.items():
            check_method(config, len(nodes))
            own = working.parameters.detach().clone(), cursors[trainer]
            self._trainers[trainer] = Trainer(trainer, config, *own, examples, {META: working}, processes)
        check_statistics(config, self._pool.working(0.0), min(cursor.smallest for cursor in cursors))
        self._known: dict[tuple, tuple[tuple[Event, ...], dict[str, float]]] = {}

    @property
    def nodes(self) -> int:
        """Of the run."""
        return len(self._pool.nodes)

    @property
    def largest_request(self) -> int:
        """Of a trainer, in examples, at the beginning."""
        return min(trainer.largest_request for trainer in self._trainers.values())

    @property
    def unforeseen(self) -> str:
        """What of the method's exchanges follows from the training itself."""
        return next(iter(self._trainers.values())).workforce.method.unforeseen

    def _distribute(self) -> Exchange:
        done, trainers = self._limits.progress(self.totals.done), self._trainers
        assignment = self._distributing.assignment(requests_of(trainers), trainers, done)
        return self._distributing.assign(assignment, trainers, self.totals)

    def rounds(self) -> Iterator[Round]:
        """All rounds of the run."""
        self._distribute()  # as at the start of a run: nothing is sent
        while self._limits.progress(self.totals.done) < 1.0:
            yield self._round()

    def _round(self) -> Round:
        config, totals, trainers = self._config, self.totals, self._trainers
        arrived = self._distribute()
        ahead = self._spending.ahead(totals, trainers.values(), self._pool, self._examples, self.warnings.append)
        schedule = next_round(config, self._limits, totals, trainers.values(), ahead)
        examples = sum(trainer.shares.examples(schedule.inner_steps) for trainer in trainers.values())
        totals.outer_steps, totals.examples = totals.outer_steps + 1, totals.examples + examples
        parts, shares = [], []
        for trainer in trainers.values():
            part, report = self._trained(trainer, schedule)
            parts.append(part)
            shares.append((len(report.workers), report.bytes_synchronised))
            totals.tokens += report.tokens
            totals.count(report.communications, report.bytes_synchronised, report.left_out, report.lost_messages)
        if self._seconds is not None:
            totals.took(self._seconds(parts, schedule.inner_steps), examples)
        sent, merge = synchronised(shares), None
        self._spending.count(totals, sent)
        if len(trainers) > 1 and totals.outer_steps % config.merge_frequency == 0:
            _, merge = self._distributing.merge(trainers, totals)
        now = Totals(**vars(totals))
        return Round(totals.outer_steps, schedule.inner_steps, tuple(parts), sent, arrived, merge, now)

    def _trained(self, trainer: Trainer, schedule: RoundSchedule):
        """A trainer's round, and what it reports."""
        shares, tokens = trainer.shares, trainer.tokens_ahead(schedule.inner_steps)
        steps = shares.steps(schedule.inner_steps)
        tested = trainer.batch.tests_after(trainer.rounds + 1)
        trainer.train_round(schedule, lambda: None)  # nobody works here; copies of workers go on without the run
        events, values = self._exchanges(trainer, schedule, shares)
        workforce, count = trainer.workforce, len(steps)
        if each := workforce.statistics_bytes(workforce.measures(count, tested), count) / count:
            events = (*events, Event("statistics", schedule.inner_steps, each, each))
        nodes = {worker: trainer.nodes[worker] for worker in steps}
        workers = {
            worker: WorkerRound(node.id, shares.plans[worker], [], [0.0] * steps[worker], (), 0.0, node.max_batch)
            for worker, node in nodes.items()
        }
        report = trainer.conclude_round(schedule, Trained(workers, events, values), tokens, 0.0)
        part = TrainerRound(
            trainer=trainer.id,
            all_nodes=tuple(node.id for node in trainer.nodes),
            nodes=tuple(node.id for node in nodes.values()),
            speeds=tuple(shares.speeds.values()),
            plans=tuple(shares.plans.values()),
            steps=tuple(steps.values()),
            events=events,
            tested=tested,
        )
        return part, report

    def _exchanges(
        self, trainer: Trainer, schedule: RoundSchedule, shares: Shares
    ) -> tuple[tuple[Event, ...], dict[str, float]]:
        """What the method sends in a round, and remembers; rounds alike, in which nothing is drawn, are asked once."""
        values = trainer.state_dict()["synchronisation"]
        of_workers = (shares.plans, shares.speeds, shares.steps(schedule.inner_steps), values)
        place = (schedule.inner_steps, *(tuple(sorted(each.items())) for each in of_workers))
        if (known := self._known.get(place)) is not None:
            return known
        gathering = _Counted(
            self._config, trainer.workforce, trainer.shared, dict(values), trainer.assignments(schedule), lambda: None
        )
        gathering.run()
        found = tuple(gathering.events), gathering.values
        if not gathering.drew:
            self._known[place] = found
        return found
