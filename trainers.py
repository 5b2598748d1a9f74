"""A trainer: one model instance: its round, its decisions, its merge.

State (everything else is computed): the flat parameters x and what the synchronisation method keeps beside them, the
requested batch with the smoothed statistics (`BatchControl`), the data cursor, counters, and per worker the state of
its inner optimiser, which survives from round to round (arXiv 2311.08105, Algorithm 1). Workers pass one after the
other through the working model of their device: no other copy of a model exists, but where the method needs one.

Every process has every trainer, for its decisions; its tensors are only where its workers are. A round is cut in two
there: `train_round` is work and needs the workers, `conclude_round` is decisions and needs what all of them report.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.nodes.traffic import Transfer, averaging_transfers
from algorithms.schedule.limits import RoundSchedule
from algorithms.synchronisation.group import Event
from fabrics.data.examples import Examples, TaskData
from fabrics.data.partition_sampler import ShareCursor
from fabrics.data.sampler import DataCursor, share_sizes, tokens_ahead
from fabrics.models.initialisation import initial_cursors, initial_parameters
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import check_method
from fabrics.training.optimizers import base_learning_rate, learning_rate_schedule
from fabrics.training.outer_round import OuterRound
from fabrics.training.statistics import (
    StatisticsPlan,
    batch_control,
    compare_workers,
    plan_statistics,
    samples_for_test,
)
from fabrics.training.work_split import Shares, assignments, participants
from fabrics.training.worker import COPY, Assignment, Node, Place, TrainingError, Worker, WorkerRound
from fabrics.training.worker_group import WorkerGroup, merge
from training_logs.recording.records import RoundReport
from utils.config.schema import Config
from utils.distributed.processes import Processes

# The inner learning rate is halved at most this often, each time after all workers of a trainer diverged.
MAX_HALVINGS = 3

# A trainer's plain state besides its parts'.
_COUNTERS = ("inner_steps", "tokens", "rounds", "halvings")


@dataclass(frozen=True)
class Trained:
    """What a process says of a trainer's round: its workers, what all of them sent, and what the method remembers.

    The latter two are the same wherever the trainer has a worker.
    """

    workers: dict[int, WorkerRound]
    events: tuple[Event, ...]
    values: dict[str, float]

    @classmethod
    def joined(cls, parts: Sequence["Trained"]) -> "Trained":
        """What all processes with a worker say together."""
        workers = {index: worker for part in parts for index, worker in part.workers.items()}
        return cls(dict(sorted(workers.items())), parts[0].events, parts[0].values)


def _copy_weights(trainer: "Trainer") -> list[float]:
    """Of what workers keep of the round at hand: its examples. None of them where all have the shared parameters."""
    if not trainer.worker_group.method.capabilities.averages_copies:
        return []
    weights = trainer.shares.examples_each(trainer._config.number_of_inner_steps_between_outers)
    return list(
        share_sizes(trainer.cursor.readings(len(weights)), weights) if trainer._config.weigh_shares else weights
    )


def _weights_in(state: Mapping, workers: int) -> list[float]:
    """Those of a trainer's state; equal ones for other workers, and from a version that did not write them down."""
    weights = state.get("stale") or []
    return [1.0] * workers if weights is True or (weights and len(weights) != workers) else list(weights)


class Trainer:
    """One model instance.

    Args:
        trainer_id: its identity, kept through merges in which it is the representative.
        config: the run's configuration.
        parameters: flat initial parameters x, which become the trainer's own; None in a process without a worker.
        cursor: its walk through its own data, or through its shares of them.
        examples: all training examples.
        working: the working model of each device of this process, the first of which keeps the trainer's tensors.
        processes: those of the run.
    """

    def __init__(
        self,
        trainer_id: int,
        config: Config,
        parameters: torch.Tensor | None,
        cursor: DataCursor | ShareCursor,
        examples: Examples,
        working: Mapping[torch.device, FlatModel],
        processes: Processes,
    ):
        self.id = trainer_id
        self.cursor = cursor
        self.batch = batch_control(config)
        self.worker_group = WorkerGroup(config, working, processes)
        self.inner_steps = self.tokens = self.rounds = self.halvings = 0
        self._config = config
        self._examples = examples
        self._values: dict[str, float] = {}
        self._rested: frozenset[int] = frozenset()  # nodes that did not hear of the last round
        self._weights: list[float] = []  # of workers' copies, where they have gone on since `refresh`
        self.shared = None if parameters is None else self.worker_group.first_tensors(parameters)

    @property
    def requested_batch(self) -> int:
        """In examples over all its workers."""
        return self.batch.requested_batch

    # Workers

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Of all its workers, in order."""
        return self.worker_group.nodes

    @property
    def workers(self) -> dict[int, Worker]:
        """Those of this process, by number."""
        return self.worker_group.local

    @property
    def participants(self) -> tuple[int, ...]:
        """The numbers of those, of all processes, that take part in the round at hand."""
        place = Place(self._config.training_seed, self.id, 0, self.rounds)
        return participants(self._config.participants, place, len(self.nodes))

    @property
    def parameters(self) -> torch.Tensor | None:
        """Flat, as of when `refresh` was last called; None in a process without a worker."""
        return None if self.shared is None else self.shared["parameters"]

    def refresh(self) -> None:
        """Bring the parameters up to date where workers have copies of their own.

        Every process that owns a worker takes part. Looking at a run is no part of it: nothing is counted.
        """
        if self._weights and self.workers:
            self.worker_group.average_copies(self.parameters, self._weights)

    def _settle(self) -> list[Transfer]:
        """Go on with the parameters up to date; what is sent for it, by all workers."""
        self.refresh()
        stale, self._weights = bool(self._weights), []
        return averaging_transfers([node.id for node in self.nodes], self.worker_group.plain_bytes * stale)

    def assign_nodes(self, nodes: tuple[Node, ...]) -> list[Transfer]:
        """Let these nodes work for the trainer from now on; what arrives at them. See WorkerGroup.assign.

        A node whose worker has rested and takes part again gets what a new one does, but for the worker's own state.
        """
        sent = self._settle() if self.worker_group.changes(nodes) else []
        self.shared, arrived = self.worker_group.assign(nodes, self.shared)
        back = self._rested & {nodes[worker].id for worker in self.participants}
        up_to_date = [node.id for node in nodes if node.id not in self._rested]
        self._rested -= back
        holder = (up_to_date or [node.id for node in nodes])[:1]
        woken = [Transfer(tuple(holder), tuple(sorted(back)), self.worker_group.sizes.trainer)] if back else []
        return sent + arrived + woken

    def parameters_for(self, node: Node) -> torch.Tensor | None:
        """The parameters in the process that owns the node, None elsewhere; all processes ask together."""
        self.refresh()
        provided = self.worker_group.provide(self.shared, self.nodes, (node,), ("parameters",))
        return None if provided is None else provided["parameters"]

    @property
    def shares(self) -> Shares:
        """Who does how much in the round at hand."""
        fewer_steps, turns = self.worker_group.fewer_steps, self.worker_group.turns(self._values)
        return Shares(self._config, self.requested_batch, self.nodes, self.participants, fewer_steps, turns=turns)

    @property
    def largest_request(self) -> int:
        """In examples over all its workers."""
        return self._config.max_requested_batch or len(self.cursor)

    def tokens_ahead(self, inner_steps: int) -> int:
        """Tokens of a round of so many inner steps over all workers."""
        each = self.shares.examples_each(inner_steps)
        return tokens_ahead(self.cursor.readings(len(each)), each, self._examples)

    # A round

    def train_round(self, schedule: RoundSchedule, on_step: Callable[[], None]) -> Trained | None:
        """Inner steps on every worker of this process, and what they send each other (AdLoCo, section 3, steps 1 to 5).

        None in a process without a worker. Workers whose parameters became NaN or infinite, and those whose
        node failed, are left out of means; with nobody left the trainer keeps its parameters.

        Args:
            on_step: called after every inner step of every worker.

        Raises:
            TrainingError: not even one example fits into a device's memory.
        """
        self._weights = _copy_weights(self)
        if not self.workers:
            return None
        outer_round = OuterRound(
            self._config, self.worker_group, self.shared, dict(self._values), self.assignments(schedule), on_step
        )
        outer_round.run()
        vectors = {index: loop.vector for index, loop in outer_round.loops.items()}
        records = {index: loop.record() for index, loop in outer_round.loops.items()}
        local = {i: dataclasses.replace(record, unheard=i in outer_round.unheard) for i, record in records.items()}
        self.worker_group.lost = frozenset(index for index, worker in local.items() if worker.left_out)
        plan = self._statistics_plan
        local = compare_workers(self.worker_group, plan, local, vectors, self.parameters)
        workers = len(self.participants)
        sent = plan.sent_bytes(workers, self.worker_group.parameter_count, self.worker_group.dtype)
        if sent:
            outer_round.events.append(Event("statistics", schedule.inner_steps, sent / workers, sent / workers))
        return Trained(local, tuple(outer_round.events), outer_round.group.values)

    def assignments(self, schedule: RoundSchedule) -> dict[int, Assignment]:
        """What each worker that takes part is to do in the round."""
        config = self._config
        tokens = self.tokens_ahead(schedule.inner_steps) if config.warmup_tokens else 0
        factors = learning_rate_schedule(config).factors(schedule, self.inner_steps, self.tokens, tokens)
        base = base_learning_rate(config) * 0.5**self.halvings
        rates = [base * factor for factor in factors]
        place = Place(config.training_seed, self.id, 0, self.rounds)
        readings = self.cursor.readings(len(self.nodes))
        return assignments(config, self.shares, rates, self._examples, readings, place, self._statistics_plan)

    @property
    def _statistics_plan(self) -> StatisticsPlan:
        """The statistics of the next round."""
        return plan_statistics(self._config, len(self.participants), self.batch.tests_after(self.rounds + 1))

    # Decisions, the same in every process

    def conclude_round(self, schedule: RoundSchedule, trained: Trained, tokens: int, seconds: float) -> RoundReport:
        """Advance, and turn the statistics into the next requested batch (AdLoCo, section 3, step 6).

        Args:
            trained: what all processes say of it.
            tokens: of the round, over all workers.
            seconds: that the round took.

        Raises:
            TrainingError: all workers diverged once more than the learning rate may be halved.
        """
        workers, self._values = trained.workers, trained.values
        step_examples = sum(worker.plan.effective_batch for worker in workers.values())
        warnings = self._look_after(workers)
        if self.worker_group.lost:
            self.worker_group.method.restarted(self._values, self.worker_group.lost)
        requested = self.requested_batch
        adapts = self.batch.tests_after(self.rounds + 1)
        samples, between, problem = samples_for_test(self._config, workers) if adapts else ([], None, None)
        progress = schedule.progress_after
        statistics, warning = self.batch.conclude(samples, between, step_examples, progress, self.largest_request)
        each = [workers[index].examples if index in workers else 0 for index in range(len(self.nodes))]
        self.cursor.advance(each)
        self.inner_steps += schedule.inner_steps
        self.tokens += tokens
        self.rounds += 1
        report = RoundReport(
            trainer=self.id,
            requested_batch=requested,
            next_requested_batch=self.requested_batch,
            workers=workers,
            statistics=statistics,
            inner_steps=schedule.inner_steps,
            examples=sum(each),
            tokens=tokens,
            events=trained.events,
            seconds=seconds,
            warnings=(*warnings, *filter(None, (problem, warning))),
        )
        self._rested = frozenset(node.id for worker, node in enumerate(self.nodes) if worker not in workers)
        return report

    def _look_after(self, workers: Mapping[int, WorkerRound]) -> list[str]:
        """Remember whose state is lost, and halve the learning rate if nobody's is not; what to warn of."""
        place = f"round {self.rounds + 1}"
        lost = frozenset(index for index, worker in workers.items() if worker.left_out)
        self.worker_group.lost = lost
        warnings = [
            f"worker {index} is left out of the average: {worker.left_out}"
            for index, worker in workers.items()
            if worker.left_out
        ]
        warnings += [
            f"node {worker.node} ran out of memory; its max batch is {worker.max_batch} from now on, "
            f"and worker {index} ran the same examples in smaller parts"
            for index, worker in workers.items()
            if worker.max_batch < self.nodes[index].max_batch
        ]
        if len(lost) == len(workers) and not all(worker.failed for worker in workers.values()):
            warnings.append(self._halve_learning_rate(place))
        return [f"{place}: {warning}" for warning in warnings]

    def _halve_learning_rate(self, place: str) -> str:
        if self.halvings == MAX_HALVINGS:
            raise TrainingError(
                f"trainer {self.id}: the loss or the parameters of every worker became NaN or infinite in {place}, "
                f"after its inner learning rate was halved {MAX_HALVINGS} times; "
                f"lower learning_rate_for_inner_opt or set gradient_clipping"
            )
        self.halvings += 1
        return (
            f"all workers diverged; the parameters stay as they were before, and the inner learning rate is "
            f"{0.5**self.halvings} of what it was at first"
        )

    # Merging and state

    def absorb(self, others: list["Trainer"], weights: Mapping[int, float]) -> list[Transfer]:
        """Become the merge of this trainer, the representative, with others (AdLoCo, section 3, step 7).

        Parameters and outer velocity become the weighted averages, data subsets are united; requested batch,
        statistics and workers stay the representative's.

        Returns what arrives at nodes.
        """
        together = (self, *others)
        sent = [transfer for trainer in together for transfer in trainer._settle()]
        given = [(trainer.worker_group, trainer.shared) for trainer in together]
        arrived = merge(given, [weights[trainer.id] for trainer in together])
        self.worker_group.begin_merged(self.shared, self._values)
        self._rested = frozenset()
        self.cursor.unite([other.cursor for other in others])
        return sent + arrived

    def state_dict(self) -> dict:
        """What the trainer's future depends on, besides its tensors, as plain values."""
        return {
            **self.batch.state_dict(),
            **{name: getattr(self, name) for name in _COUNTERS},
            "cursor": self.cursor.state_dict(),
            "synchronisation": self._values,
            "stale": self._weights,
            "rested": sorted(self._rested),
            **self.worker_group.state_dict(),
        }

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Its tensors, by reference, in groups named by trainer and worker; each group in one process only.

        All processes ask together, as in `refresh`.
        """
        self.refresh()
        groups = {f"trainer_{self.id}_worker_{index}": worker.state_dict() for index, worker in self.workers.items()}
        if 0 in self.workers:
            groups[f"trainer_{self.id}"] = dict(self.shared)
        return groups

    def load_state_dict(self, state: Mapping, read: Callable[[str, str], torch.Tensor]) -> None:
        """Continue from a state on the nodes that the trainer has; see WorkerGroup.load_state_dict for its workers.

        Args:
            read: from the name of a group and of a tensor to that tensor.
        """
        self.batch.load_state_dict(state)
        for name in _COUNTERS:
            setattr(self, name, state.get(name, 0))  # tokens were not counted from the beginning
        group = f"trainer_{self.id}"
        self.cursor.load_state_dict(state["cursor"])
        self._values = dict(state.get("synchronisation", {}))
        self._weights = _weights_in(state, len(self.nodes))
        self._rested = frozenset(state.get("rested", ()))
        if self.workers:
            for name, tensor in self.shared.items():
                tensor.copy_(read(group, name))
            for worker in self.workers.values():  # those that are new have no copy of their own
                worker.load_state_dict({COPY: self.parameters})
        self.worker_group.load_state_dict(state, lambda index, name: read(f"{group}_worker_{index}", name))


def first_trainers(
    config: Config,
    data: TaskData,
    assignment: Mapping[int, tuple[int, ...]],
    working: Mapping[torch.device, FlatModel],
    processes: Processes,
) -> dict[int, Trainer]:
    """The trainers that a run begins with; assignment: the nodes of each, which are not given to them yet."""
    trainers, first = {}, next(iter(working.values()))
    cursors = initial_cursors(config, len(data.train), data.shares and data.shares.sizes)
    if len(cursors) == 1 and config.smallest_worker_batch is None:  # it has all nodes, whenever they come
        for _, nodes in config.node_schedule or ():
            check_method(config, int(nodes))
    for trainer, cursor in enumerate(cursors):
        check_method(config, len(assignment[trainer]))
        here = any(map(processes.owns, assignment[trainer]))
        start = initial_parameters(config, data, trainer, first) if here else None
        trainers[trainer] = Trainer(trainer, config, start, cursor, data.train, working, processes)
    return trainers
