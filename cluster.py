"""The cluster: devices, nodes and trainers, and the outer loop over rounds.

A round redistributes the nodes, trains every living trainer, evaluates and merges (AdLoCo, section 3). The
cluster decides nothing about batches or parameters itself: decisions are in `algorithms`, the work is in
`trainers`. What happens is told to an observer, which writes it down.

Every process of a run has a cluster and takes the same decisions: what workers and evaluations say is gathered once per
round. Only tensors, and the work on them, are shared out.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from algorithms.nodes.traffic import synchronisation_exchange
from fabrics.data.examples import TaskData
from fabrics.models.export import save_models
from fabrics.pool.checkpoint_policy import CheckpointPolicy, Vote
from fabrics.pool.device_errors import explained
from fabrics.pool.eval_tool import Evaluation, EvaluationPart, Validation
from fabrics.pool.max_batch import measured_max_batches
from fabrics.pool.node_assignment import NodeAssigner, NoNodeLeftError, requested_batches
from fabrics.pool.node_pool import NodePool
from fabrics.pool.round_scheduler import RoundScheduler
from fabrics.pool.run_checks import check_model, check_statistics
from fabrics.pool.run_counters import RunCounters
from fabrics.training.device_models import FlatModels
from fabrics.training.worker import Node
from trainers import Trained, Trainer, first_trainers
from training_logs.recording.memory_monitor import Use, memory_use
from training_logs.recording.records import ClusterRound, Merge, Observer
from utils.checkpoint.checkpoint import Checkpoint, check_state
from utils.checkpoint.tensor_file import FilePart
from utils.config.schema import Config
from utils.distributed.processes import Processes, join_processes
from utils.distributed.signals import StopRequest


@dataclass(frozen=True)
class _Share:
    """What one process tells all others, once per round."""

    trained: dict[int, Trained]  # by trainer
    seconds: dict[int, float]  # by trainer
    evaluations: dict[int, EvaluationPart]  # by trainer
    memory: list[Use]
    vote: Vote


class Cluster:
    """All devices, nodes and trainers of a run.

    Args:
        config: the run's configuration.
        data: what to train and evaluate on.
        processes: those of the run; None: as the environment says, which is one where nobody started more.

    Raises:
        ConfigError: the config does not fit the data, the model or the machine.
    """

    def __init__(self, config: Config, data: TaskData, processes: Processes | None = None):
        self.config = config
        self.data = data
        processes = processes or join_processes(config)
        self.processes = processes
        self.pool = NodePool(processes.devices, config)
        self.counters = RunCounters()
        self.merges: list[Merge] = []
        self.stopped = False
        self.warnings: list[str] = []
        self.models = FlatModels(config, data, processes)
        self.devices = list(self.models)
        self.validation = Validation(data, self.models, config.eval_batch_size)
        self.metric = self.validation.metric
        check_model(config, self.models.first)
        self.scheduler = RoundScheduler(config, len(data.train), len(self.nodes))
        self._assigner = NodeAssigner(config, self.pool, processes.groups, self.scheduler)
        first_requests = dict.fromkeys(range(config.number_of_initial_trainers), config.INITIAL_BATCH_SIZE)
        self.trainers: dict[int, Trainer] = {}
        self.trainers = first_trainers(config, data, self._assignment(first_requests), self.models, processes)
        self.distribute()
        if config.max_batch_size is None:
            # Now that everything is there which lives between rounds.
            groups = (group for trainer in self.trainers.values() for group in trainer.tensors().values())
            size = sum(tensor.nbytes for group in groups for tensor in group.values())
            self.pool.set_max_batches(measured_max_batches(config, self.models, data.train, processes, size))
            self.distribute()
        smallest = min(trainer.cursor.smallest for trainer in self.trainers.values())
        check_statistics(config, self.pool.working(0.0), smallest)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of the run."""
        return self.pool.nodes

    @property
    def failed_nodes(self) -> set[int]:
        """Those that work no more."""
        return self.pool.failed

    @property
    def parameter_count(self) -> int:
        """Trainable parameters of one model."""
        return self.models.first.parameter_count

    # Decisions carried out

    def _assignment(self, requests: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        return self._assigner.assignment(requests, self.trainers, self.scheduler.progress(self.counters))

    def distribute(self) -> None:
        """Give every living trainer its nodes, in proportion to the requested batches; bytes are counted.

        Raises:
            NoNodeLeftError: as it says.
        """
        self._assign(self._assignment(requested_batches(self.trainers)))

    def _assign(self, assignment: Mapping[int, Sequence[int]]) -> None:
        self._assigner.assign(assignment, self.trainers, self.counters)

    def _merge(self) -> Merge:
        """Merge the trainers that the policy picks; communications and bytes are counted."""
        plan = self._assigner.merge(self.trainers, self.counters)
        merge = Merge(self.counters.outer_steps, plan)
        self.merges.append(merge)
        return merge

    # The outer loop

    @property
    def finished(self) -> bool:
        """Whether a limit of the run has been reached."""
        return self.scheduler.progress(self.counters) >= 1.0

    def _evaluation_parts(self) -> dict[int, EvaluationPart]:
        """What the workers of this process evaluate, by trainer."""
        for trainer in self.trainers.values():
            trainer.refresh()
        parts = {t.id: self.validation.part(t.worker_group, t.parameters) for t in self.trainers.values()}
        return {trainer: part for trainer, part in parts.items() if part is not None}

    def evaluate(self) -> dict[int, Evaluation]:
        """Every living trainer on the validation examples, shared out over the processes."""
        return self.validation.combine(self.processes.gather(self._evaluation_parts()), list(self.trainers))

    def best(self, evaluations: dict[int, Evaluation]) -> int:
        """The trainer with the best metric; ties go to the smaller id."""
        return self.validation.best(evaluations)

    def run_round(self, observer: Observer, checkpoint_policy: CheckpointPolicy | None = None) -> ClusterRound:
        """Redistribute the nodes, train every living trainer for one round, evaluate, merge.

        Raises:
            TrainingError: training cannot go on.
        """
        checkpoint_policy = checkpoint_policy or CheckpointPolicy(self.config, self.processes, observer)
        self.distribute()
        trainers = self.trainers
        schedule = self.scheduler.next_round(self.counters, trainers.values(), self.pool, observer.warn)
        own_steps = sum(
            steps
            for trainer in trainers.values()
            for worker, steps in trainer.shares.steps(schedule.inner_steps).items()
            if worker in trainer.workers
        )
        observer.on_round_start(self.counters.outer_steps + 1, self.scheduler.progress(self.counters), own_steps)
        tokens = {trainer.id: trainer.tokens_ahead(schedule.inner_steps) for trainer in trainers.values()}
        examples = sum(trainer.shares.examples(schedule.inner_steps) for trainer in trainers.values())

        local: dict[int, Trained] = {}
        seconds: dict[int, float] = {}
        for trainer in trainers.values():
            started = time.perf_counter()
            if (trained := trainer.train_round(schedule, observer.on_step)) is not None:
                local[trainer.id], seconds[trainer.id] = trained, time.perf_counter() - started
        counters = dataclasses.replace(
            self.counters,
            outer_steps=self.counters.outer_steps + 1,
            examples=self.counters.examples + examples,
            tokens=self.counters.tokens + sum(tokens.values()),
        )
        progress = self.scheduler.progress(counters)
        due = progress >= 1.0 or counters.outer_steps % self.config.eval_every == 0
        parts = self._evaluation_parts() if due else {}
        shares = self.processes.gather(
            _Share(local, seconds, parts, memory_use(self.devices), checkpoint_policy.vote())
        )
        checkpoint_policy.decide([share.vote for share in shares])
        reports = {}
        for trainer in trainers.values():
            trained = Trained.joined([share.trained[trainer.id] for share in shares if trainer.id in share.trained])
            took = max(share.seconds.get(trainer.id, 0.0) for share in shares)
            reports[trainer.id] = trainer.conclude_round(schedule, trained, tokens[trainer.id], took)
        for report in reports.values():
            counters.count(report.communications, report.bytes_synchronised, report.left_out, report.lost_messages)
            for warning in report.warnings:
                observer.warn(f"trainer {report.trainer}: {warning}")
        counters.took(max(sum(share.seconds.values()) for share in shares), examples)
        self.counters = counters
        self.scheduler.count(
            self.counters, synchronisation_exchange((len(r.workers), r.bytes_synchronised) for r in reports.values())
        )
        self.pool.update([run for report in reports.values() for run in report.workers.values()])
        evaluations = self.validation.combine([share.evaluations for share in shares], list(trainers)) if due else {}
        merge = None
        if len(trainers) > 1 and counters.outer_steps % self.config.merge_frequency == 0:
            merge = self._merge()
        now, memory = dataclasses.replace(counters), [share.memory for share in shares]
        moves = self._assigner.take_moves()
        return ClusterRound(counters.outer_steps, progress, reports, evaluations, merge, now, memory, moves)

    def train(
        self, observer: Observer, folder: Path | None = None, stop: StopRequest | None = None
    ) -> dict[int, Evaluation]:
        """Train until a limit is reached; the final evaluations of the living trainers.

        Args:
            folder: the run folder, for checkpoints and models on the way; None: nothing is written.
            stop: where it asks to stop, the run ends after the round with a checkpoint; `stopped` is true then, and
                nothing is evaluated.

        Raises:
            TrainingError: training cannot go on. Where no node is left, a checkpoint is written before.
        """
        checkpoint_policy = CheckpointPolicy(self.config, self.processes, observer, folder, stop)
        with explained():
            result = self._rounds(observer, checkpoint_policy)
            evaluations = {}
            if not self.stopped:
                evaluations = self.evaluate() if result is None or result.merge is not None else result.evaluations
        return evaluations

    def _rounds(self, observer: Observer, checkpoint_policy: CheckpointPolicy) -> ClusterRound | None:
        """All rounds that are left; the last one."""
        for warning in self.warnings:
            observer.warn(warning)
        if not self.finished:
            # Warn of a budget that cannot be kept before work starts.
            self.scheduler.remaining(self.counters, self.trainers.values(), self.pool, observer.warn)
        observer.on_start(self, self.evaluate() if self.counters.outer_steps == 0 else {})
        result = None
        while not self.finished and not self.stopped:
            try:
                result = self.run_round(observer, checkpoint_policy)
            except NoNodeLeftError:
                checkpoint_policy.save_checkpoint(self)
                raise
            observer.on_round(self, result)
            self.stopped = checkpoint_policy.stopping
            checkpoint_policy.after_round(self)
        if self.finished and (warning := self.scheduler.unspent(self.counters)) is not None:
            observer.warn(warning)
        return result

    # Models and state

    def save_models(self, folder: Path, observer: Observer) -> dict[int, Path]:
        """Every living trainer as a Hugging Face folder `trainer_<id>`; where each was written.

        What cannot be written is a warning.
        """
        first = self.nodes[0]  # the main process's
        folders, problem = save_models(
            folder,
            self.trainers,
            lambda trainer: self.trainers[trainer].parameters_for(first),
            self.models.first,
            self.data.tokenizer,
            self.processes,
        )
        if problem is not None:
            observer.warn(problem)
        return folders

    def tensors(self) -> dict[str, dict[str, torch.Tensor | FilePart]]:
        """The trainers' tensors that are in this process, by reference, in groups named by trainer and worker.

        Where a shard group's devices have parts of them, each has a part in all groups of the shard group.
        """
        groups = {name: group for trainer in self.trainers.values() for name, group in trainer.tensors().items()}
        return self.models.first.checkpoint_tensors(groups)

    def state_dict(self) -> dict:
        """What the run's future depends on, besides the trainers' tensors, as JSON values; the same in every process.

        Random numbers need no state: they are functions of the seed and of the place in the run.
        """
        return {
            "counters": dataclasses.asdict(self.counters),
            "merges": [dataclasses.asdict(merge) for merge in self.merges],
            "trainers": {str(trainer.id): trainer.state_dict() for trainer in self.trainers.values()},
            "nodes": self.pool.state_dict(),
            "threads": torch.get_num_threads(),
            "compiled": self.models.compiled,
            "parameters": self.parameter_count,
            "data": self.data.fingerprint(),
        }

    def load_state_dict(self, state: Mapping, read: Callable[[str, str], torch.Tensor]) -> None:
        """Continue from a state of a cluster of the same data and model, on any number of processes.

        Nodes that had failed work again.

        Args:
            read: from the name of a group of tensors and of a tensor to that tensor.

        Raises:
            CheckpointError: the state is of another model or of other data.
        """
        check_state(state, self.data.fingerprint(), self.parameter_count)
        self.models.resume(state.get("compiled", False))
        part = self.models.first.local_part
        self.merges = [Merge.from_values(merge) for merge in state["merges"]]
        self.pool.load_state_dict(state["nodes"])
        counters = RunCounters(**state["counters"])
        living = {int(trainer): values for trainer, values in state["trainers"].items()}
        self.trainers = {trainer: self.trainers[trainer] for trainer in living}
        assignment = {trainer: values["nodes"] for trainer, values in living.items()}
        if len(state["nodes"]["max_batches"]) != len(self.nodes):  # other nodes than those of the checkpoint
            requests = {trainer: values["requested_batch"] for trainer, values in living.items()}
            assignment = self._assigner.assignment(requests, {}, self.scheduler.progress(counters))
        self._assign(assignment)
        self._assigner.take_moves()  # nodes begin here, and nothing is sent
        self.counters = counters
        for trainer, values in living.items():
            self.trainers[trainer].load_state_dict(values, lambda group, name: part(name, read(group, name)))

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; see load_state_dict. What is wrong with newer ones becomes a warning."""
        self.load_state_dict(checkpoint.state["cluster"], checkpoint.read)
        self.warnings += [f"a checkpoint was passed over: {problem}" for problem in checkpoint.problems]
