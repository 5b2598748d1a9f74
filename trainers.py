"""A trainer: one model instance with its workers, its data and its requested batch.

Every process has every trainer and takes the same decisions; a trainer's tensors are only where its workers are. A
round therefore has three parts. All processes divide the work (`split_work`), those with workers do it (`train_round`),
and all take the decisions from the reports of all workers (`conclude_round`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.nodes.traffic import Event, Exchange
from algorithms.schedule.limits import RoundSchedule
from fabrics.data.examples import Examples, TaskData
from fabrics.data.sampler import DataCursor
from fabrics.models.initialisation import initial_cursors, initial_parameters
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import base_learning_rate, learning_rate_schedule
from fabrics.training.outer_round import OuterRound
from fabrics.training.statistics import Measurement, batch_control, compare_workers, measurement_of, samples_for_test
from fabrics.training.work_split import WorkSplit, draw_participants
from fabrics.training.worker import Assignment, Node, RoundKey, TrainingError, Worker, WorkerRound
from fabrics.training.worker_group import WorkerGroup
from training_logs.recording.records import RoundReport
from utils.config.schema import Config
from utils.distributed.processes import Processes


@dataclass(frozen=True)
class TrainedPart:
    """One process's part of a trainer's round; events and values are the same in every process."""

    records: dict[int, WorkerRound]  # the participants of the process, by number
    events: tuple[Event, ...]
    values: dict[str, float]  # of the method
    seconds: float


class Trainer:
    """One model instance.

    Args:
        parameters: flat initial parameters, which become the trainer's own; None in a process without a worker.
        model: the flat model of this process, whose device keeps the trainer's tensors.
    """

    def __init__(
        self,
        trainer_id: int,
        config: Config,
        parameters: torch.Tensor | None,
        cursor: DataCursor,
        examples: Examples,
        model: FlatModel,
        processes: Processes,
    ):
        self.id = trainer_id
        self.cursor = cursor
        self.batch_control = batch_control(config)
        self.worker_group = WorkerGroup(config, parameters, model, processes)
        self.inner_steps_done = 0
        self.tokens_done = 0  # over all workers
        self.rounds = 0
        self._config = config
        self._examples = examples

    @property
    def requested_batch(self) -> int:
        """The requested batch, in examples over all workers."""
        return self.batch_control.requested_batch

    @property
    def largest_request(self) -> int:
        """The largest batch that may be requested, in examples over all workers."""
        return self._config.max_requested_batch or len(self.cursor)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The node of each worker, in order."""
        return self.worker_group.nodes

    @property
    def local_workers(self) -> dict[int, Worker]:
        """The workers of this process, by number."""
        return self.worker_group.local

    @property
    def shared(self) -> dict[str, torch.Tensor] | None:
        """The trainer's tensors by name, flat; None in a process without a worker."""
        return self.worker_group.shared

    @property
    def parameters(self) -> torch.Tensor | None:
        """Flat parameters, as of the last `worker_group.refresh`; None in a process without a worker."""
        return None if self.shared is None else self.shared["parameters"]

    @property
    def state_bytes(self) -> int:
        """Bytes of the trainer's and its workers' tensors in this process."""
        groups = [self.shared or {}, *(worker.state_dict() for worker in self.local_workers.values())]
        return sum(tensor.nbytes for group in groups for tensor in group.values())

    # A round

    def assign_nodes(self, nodes: tuple[Node, ...]) -> tuple[Exchange, Exchange]:
        """Let these nodes work from now on; return what workers had to send before, and what arrives at nodes."""
        return self.worker_group.assign(nodes, self._participants(len(nodes)))

    def split_work(self) -> WorkSplit:
        """Divide the next round over the workers; valid for this round and these nodes."""
        return WorkSplit(
            self._config,
            self.requested_batch,
            self.nodes,
            self._participants(len(self.nodes)),
            self.cursor.readings(len(self.nodes)),
            self._examples,
            self.worker_group.active_steps if self.worker_group.fewer_steps else None,
        )

    def train_round(self, split: WorkSplit, schedule: RoundSchedule, on_step: Callable[[], None]) -> TrainedPart | None:
        """Run the inner steps of this process's workers and the outer step (AdLoCo, section 3, steps 1 to 5).

        Workers whose parameters are no longer finite are left out of the mean. If all are, the parameters stay, and
        `conclude_round` raises. A process without a worker returns None.
        """
        worker_group = self.worker_group
        worker_group.note_weights(split.examples_each(schedule.inner_steps))
        if not self.local_workers:
            return None
        started = time.perf_counter()
        measurement = self._measurement(split)
        assignments = self.assignments(split, schedule)
        outer_round = OuterRound(self._config, worker_group, split, self._round_key, assignments, on_step)
        outer_round.run()
        records = outer_round.records()
        # For this round's evaluation, those of this process; `end_round` sets those of all processes.
        worker_group.to_restart = frozenset(index for index, record in records.items() if record.left_out)
        vectors = {index: loop.compared for index, loop in outer_round.loops.items()}
        records = compare_workers(worker_group, measurement, records, vectors)
        worker_count = len(split.participants)
        sent = measurement.sent_bytes(worker_count, worker_group.model)
        if sent:
            sent_each = sent / worker_count
            outer_round.events.append(Event("statistics", schedule.inner_steps, sent_each, sent_each))
        return TrainedPart(records, tuple(outer_round.events), outer_round.group.values, time.perf_counter() - started)

    def conclude_round(self, split: WorkSplit, schedule: RoundSchedule, parts: Sequence[TrainedPart]) -> RoundReport:
        """Turn the statistics into the next requested batch, and move on in the data (AdLoCo, section 3, step 6).

        parts: of all processes that have a worker of the trainer; those of a shard group have the same worker.
        """
        by_worker = {index: record for part in parts for index, record in part.records.items()}
        records = dict(sorted(by_worker.items()))
        requested = self.requested_batch
        warnings = self._warnings(records)
        if not self.rounds and self._config.sampling_method == "none" and split.effective_batch < requested:
            warnings.append(
                f"switch_mode: {self._config.switch_mode} runs {split.effective_batch} of the {requested} requested "
                f"examples; only_gradient_accumulation runs all"
            )
        if all(record.left_out for record in records.values()):
            raise TrainingError(
                f"trainer {self.id}: the loss or the parameters of every worker became NaN or infinite in round "
                f"{self.rounds + 1}; lower learning_rate_for_inner_opt or set gradient_clipping"
            )
        if self.batch_control.measures(self.rounds + 1):
            samples, between, problem = samples_for_test(self._config, records)
        else:
            samples, between, problem = [], None, None
        statistics, doubt = self.batch_control.conclude(
            samples, between, split.effective_batch, schedule.progress_after, self.largest_request
        )
        examples = split.examples_each(schedule.inner_steps)
        tokens = split.tokens(schedule.inner_steps)
        self.cursor.advance(examples)
        self.inner_steps_done += schedule.inner_steps
        self.tokens_done += tokens
        self.rounds += 1
        self.worker_group.end_round(records, parts[0].values)
        return RoundReport(
            trainer=self.id,
            requested_batch=requested,
            next_requested_batch=self.requested_batch,
            workers=records,
            statistics=statistics,
            inner_steps=schedule.inner_steps,
            examples=sum(examples),
            tokens=tokens,
            events=parts[0].events,
            seconds=max(part.seconds for part in parts),
            warnings=(*warnings, *filter(None, (problem, doubt))),
        )

    def assignments(self, split: WorkSplit, schedule: RoundSchedule) -> dict[int, Assignment]:
        """Return the work of each participant in the round, by number."""
        tokens = split.tokens(schedule.inner_steps) if self._config.warmup_tokens else 0
        factors = learning_rate_schedule(self._config).factors(
            schedule, self.inner_steps_done, self.tokens_done, tokens
        )
        base = base_learning_rate(self._config)
        base *= self.batch_control.learning_rate_factor(split.effective_batch)
        learning_rates = [base * factor for factor in factors]
        return split.assignments(learning_rates, self._round_key, self._measurement(split))

    def _measurement(self, split: WorkSplit) -> Measurement:
        return measurement_of(self._config, len(split.participants), self.batch_control.measures(self.rounds + 1))

    @property
    def _round_key(self) -> RoundKey:
        return RoundKey(self._config.training_seed, trainer=self.id, worker=0, round=self.rounds)

    def _participants(self, worker_count: int) -> tuple[int, ...]:
        return draw_participants(self._config.participants, self._round_key, worker_count)

    def _warnings(self, records: Mapping[int, WorkerRound]) -> list[str]:
        place = f"round {self.rounds + 1}"
        warnings = []
        for index, record in records.items():
            if record.left_out:
                warnings.append(f"{place}: worker {index} is left out of the average: {record.left_out}")
            if record.max_batch < self.nodes[index].max_batch:
                warnings.append(
                    f"{place}: node {record.node} ran out of memory; its max batch is {record.max_batch} from now on, "
                    f"and worker {index} ran the same examples in smaller parts"
                )
        return warnings

    # Merging and state

    def absorb(self, others: list["Trainer"], weights: Mapping[int, float]) -> Exchange:
        """Merge other trainers into this one, the representative, and return what is sent for it.

        Parameters and outer momentum become averages with these weights, which sum to 1; data subsets are united. The
        requested batch, statistics and workers stay the representative's (AdLoCo, section 3, step 7). The others'
        optimizer states and counters end.
        """
        groups = [other.worker_group for other in others]
        exchange = self.worker_group.absorb(groups, [weights[trainer.id] for trainer in (self, *others)])
        self.cursor.unite([other.cursor for other in others])
        return exchange

    def state_dict(self) -> dict:
        """Return the plain values on which the trainer's future depends; its tensors are in `tensors`."""
        return {
            "batch": self.batch_control.state_dict(),
            "cursor": self.cursor.state_dict(),
            "workers": self.worker_group.state_dict(),
            "inner_steps": self.inner_steps_done,
            "tokens": self.tokens_done,
            "rounds": self.rounds,
        }

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of this process by reference, in groups named by trainer and worker.

        The process of worker 0 gives the trainer's own tensors. All processes call this together.
        """
        self.worker_group.refresh()
        groups = {
            f"trainer_{self.id}_worker_{index}": worker.state_dict() for index, worker in self.local_workers.items()
        }
        if 0 in self.local_workers:
            groups[f"trainer_{self.id}"] = dict(self.shared)
        return groups

    def load_state_dict(self, state: Mapping, read: Callable[[str, str], torch.Tensor]) -> None:
        """Restore a state on the nodes that the trainer has now; read: from a group and a name to the tensor."""
        self.batch_control.load_state_dict(state["batch"])
        self.cursor.load_state_dict(state["cursor"])
        self.inner_steps_done = state["inner_steps"]
        self.tokens_done = state["tokens"]
        self.rounds = state["rounds"]
        group = f"trainer_{self.id}"
        self.worker_group.load_state_dict(
            state["workers"],
            lambda name: read(group, name),
            lambda index, name: read(f"{group}_worker_{index}", name),
        )


def first_trainers(
    config: Config,
    data: TaskData,
    nodes_of: Mapping[int, tuple[int, ...]],
    model: FlatModel,
    processes: Processes,
) -> dict[int, Trainer]:
    """Return the trainers at the start of a run; nodes_of: the nodes that each will get."""
    sizes = data.shares and [share["examples"] for share in data.shares]
    cursors = initial_cursors(config, len(data.train), sizes)
    trainers = {}
    for number, cursor in enumerate(cursors):
        parameters = None
        if any(processes.owns(node) for node in nodes_of[number]):
            parameters = initial_parameters(config, data, number, model)
        trainers[number] = Trainer(number, config, parameters, cursor, data.train, model, processes)
    return trainers
