"""The cluster: all devices, nodes and trainers of a run, and the outer loop over rounds.

`Cluster.run_round` is one round. Most decisions are pure functions in `algorithms`; the work on a model is in
`trainers`; an observer records what happens. Every process of a run has a cluster. All take the same decisions, because
they gather the same reports once per round: the next batches follow from these, and from them the next round. Tensors,
and the work on them, are divided over the processes.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from algorithms.nodes.distribution import distribute_nodes
from algorithms.nodes.policies import MERGE_POLICIES, Merge, merge_of
from algorithms.nodes.traffic import Exchange, simultaneous, synchronisation_exchange
from algorithms.schedule.controller import RoundPlan
from algorithms.schedule.limits import RoundSchedule, RunCounters
from fabrics.data.examples import TaskData
from fabrics.models.export import save_models
from fabrics.models.initialisation import flat_model
from fabrics.pool.checkpoint_policy import CheckpointPolicy, Vote
from fabrics.pool.device_errors import explain_training_errors
from fabrics.pool.eval_tool import Evaluation, EvaluationPart, Validation
from fabrics.pool.max_batch import measured_max_batches
from fabrics.pool.node_pool import NodePool
from fabrics.pool.round_scheduler import RoundScheduler
from fabrics.pool.run_checks import check_model, check_statistics, sharding_warning, turns_warning
from fabrics.pool.time_controller import plan_round, with_best_method
from fabrics.training.method_config import method_of
from fabrics.training.work_split import WorkSplit
from fabrics.training.worker import Node, TrainingError
from trainers import TrainedPart, Trainer, first_trainers
from training_logs.recording.memory_monitor import Use, memory_use
from training_logs.recording.records import ClusterRound, Observer, RoundReport
from utils.checkpoint.checkpoint import Checkpoint, FilePart, check_state
from utils.config.schema import Config
from utils.distributed.processes import Processes, join_processes
from utils.distributed.signals import StopRequest
from utils.text import counted


class LocalEvaluation(NamedTuple):
    """A process's parts of evaluations, by trainer, and the seconds that they took."""

    parts: dict[int, EvaluationPart]
    seconds: float


class ProcessReport(NamedTuple):
    """What a process tells all others, once per round."""

    trained: dict[int, TrainedPart]  # by trainer
    evaluated: LocalEvaluation
    memory: list[Use]
    vote: Vote


class Cluster:
    """All devices, nodes and trainers of a run.

    Args:
        processes: None: join those that the environment names, or be the only one.
        resumed_method: of the run that is resumed, which `objective: time` keeps.

    Attributes:
        given_config: `config`, but with the method as it was given; `objective: time` chooses another one.
        interrupted: True if the run was asked to stop, and did so before its end.
        round_plan: of the present round, in a run with `objective: time`.

    Raises:
        ConfigError: the config does not fit the data, the model or the machine.
    """

    def __init__(
        self,
        config: Config,
        data: TaskData,
        processes: Processes | None = None,
        resumed_method: str | None = None,
    ):
        self.data = data
        self.processes = processes or join_processes(config)
        self.counters = RunCounters()
        self.merges = 0
        self.interrupted = False
        self.warnings: list[str] = []
        self.pool = NodePool(self.processes.devices, config)
        self.model = flat_model(config, data, self.processes)
        check_model(config, self.model)
        own_nodes = sum(map(self.processes.owns, range(len(self.nodes))))
        self.warnings += turns_warning(self.model, own_nodes) + sharding_warning(self.model)
        self.given_config = config
        if config.objective == "time":
            nodes = self.pool.fastest(0.0)
            config = with_best_method(config, self.model, nodes, len(data.train), resumed_method)
        self.config = config
        self.round_plan: RoundPlan | None = None
        self.validation = Validation(data, self.model, config.eval_batch_size)
        self.metric = self.validation.metric
        self.scheduler = RoundScheduler(config, len(data.train), self.pool)
        requests = dict.fromkeys(range(config.number_of_initial_trainers), config.INITIAL_BATCH_SIZE)
        first_nodes = self._distribution(requests, {}, 0.0)
        self.trainers = first_trainers(config, data, first_nodes, self.model, self.processes)
        self._assign(first_nodes)
        if config.max_batch_size is None:
            # Measured last, when everything that lives between rounds has its memory.
            state_bytes = sum(trainer.state_bytes for trainer in self.trainers.values())
            max_batches = measured_max_batches(config, self.model, data.train, self.processes, state_bytes)
            self.pool.set_max_batches(max_batches)
            self.assign_nodes()
        smallest = min(trainer.cursor.smallest for trainer in self.trainers.values())
        check_statistics(config, self.pool.working(0.0), smallest)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.pool.nodes

    @property
    def parameter_count(self) -> int:
        return self.model.parameter_count

    @property
    def finished(self) -> bool:
        """True if a limit of the run has been reached."""
        return self.scheduler.progress(self.counters) >= 1.0

    # The outer loop

    def train(
        self, observer: Observer, folder: Path | None = None, stop: StopRequest | None = None
    ) -> dict[int, Evaluation]:
        """Train until a limit is reached, and return the final evaluations of the living trainers.

        Args:
            folder: the run folder, for checkpoints and models on the way; None: nothing is written.
            stop: asks the run to end after the current round with a checkpoint. Unless that is the last one,
                `interrupted` is then true, and no evaluations are returned.

        Raises:
            StoppedInRoundError: the round took too long to end after `stop` was requested; no checkpoint is written.
            TrainingError: training cannot continue.
        """
        checkpoint_policy = CheckpointPolicy(self, observer, folder, stop)
        with explain_training_errors():
            self._start(observer)
            result = None
            while not self.finished and not self.interrupted:
                result = self.run_round(observer, checkpoint_policy)
                observer.on_round(self, result)
                self.interrupted = checkpoint_policy.decision.stop and not self.finished
                checkpoint_policy.after_round()
            if self.interrupted:
                return {}
            if result is None or not result.evaluations:
                return self.evaluate()
            evaluations = {number: result.evaluations[number] for number in self.trainers}
            if result.merge is not None:
                evaluations[result.merge.representative] = result.merged
            return evaluations

    def _start(self, observer: Observer) -> None:
        for warning in self.warnings:
            observer.warn(warning)
        if not self.finished:  # a budget that cannot be kept is reported before the work starts
            splits = self._split_work()
            self.scheduler.remaining(self.counters, self.trainers.values(), splits.values(), observer.warn)
        observer.on_start(self, self.evaluate() if self.counters.outer_steps == 0 else {})

    # One round

    def run_round(self, observer: Observer, checkpoint_policy: CheckpointPolicy | None = None) -> ClusterRound:
        """Run one round of AdLoCo (arXiv 2508.18182, Algorithm 1)."""
        checkpoint_policy = checkpoint_policy or CheckpointPolicy(self, observer)

        # What the round is: nodes, examples and inner steps.
        if self.config.objective == "time":
            self._plan_round(observer)
        self.assign_nodes()
        splits = self._split_work()
        planned = self.round_plan and self.round_plan.inner_steps
        trainers = self.trainers.values()
        schedule = self.scheduler.next_round(self.counters, trainers, splits.values(), observer.warn, planned)
        round_number = self.counters.outer_steps + 1
        evaluates = schedule.progress_after >= 1.0 or round_number % self.config.eval_every == 0

        # The work of this process, and the reports of all processes.
        local_steps = self._local_steps(splits, schedule)
        observer.on_round_start(round_number, schedule.progress_before, local_steps)
        self.processes.stalls.begin_round(round_number, local_steps, self._activity)
        trained = self._train(splits, schedule, partial(self._on_step, observer, checkpoint_policy))
        evaluated = self._evaluate_locally(self.trainers) if evaluates else LocalEvaluation({}, 0.0)
        report = ProcessReport(trained, evaluated, memory_use(self.model.device), checkpoint_policy.vote())
        processes = self.processes.gather_in_round(report)

        # Decisions, the same in every process.
        checkpoint_policy.decide([process.vote for process in processes])
        reports = self._conclude(splits, schedule, processes, observer.warn)
        evaluations = {}
        if evaluates:
            evaluations = self._combine([process.evaluated for process in processes], self.trainers)
        merge = None
        merged = None
        exchange = Exchange()
        if len(self.trainers) > 1 and round_number % self.config.merge_frequency == 0:
            merge, exchange = self._merge()
            if evaluates:
                merged = self.evaluate([merge.representative])[merge.representative]

        return ClusterRound(
            outer_step=round_number,
            progress=schedule.progress_after,
            reports=reports,
            evaluations=evaluations,
            merge=merge,
            counters=dataclasses.replace(self.counters),
            memory=[process.memory for process in processes],
            merge_exchange=exchange,
            merged=merged,
        )

    def _plan_round(self, observer: Observer) -> None:
        """Choose workers, batch and inner steps of the round, for the largest progress in the seconds left."""
        (trainer,) = self.trainers.values()
        progress = self.scheduler.progress(self.counters)
        nodes = self.pool.fastest(progress)
        plan = plan_round(self.config, trainer, nodes, self.counters.simulated_seconds, progress)
        trainer.batch_control.requested_batch = plan.batch
        if plan != self.round_plan:
            observer.note(
                f"objective time: from round {self.counters.outer_steps + 1} on {self.config.distributed_algo}, "
                f"{counted(plan.workers, 'worker')}, a batch of {plan.batch}, "
                f"{counted(plan.inner_steps, 'inner step')}; measured noise "
                f"scale: {trainer.batch_control.noise_scale or 'none yet'}"
            )
        self.round_plan = plan

    def assign_nodes(self) -> None:
        """Give every trainer its nodes, in proportion to the requested batches; the bytes are counted."""
        self._assign(self._distribution(self._requests, self.trainers, self.scheduler.progress(self.counters)))

    @property
    def _requests(self) -> dict[int, int]:
        return {number: trainer.requested_batch for number, trainer in self.trainers.items()}

    def _distribution(
        self, requests: Mapping[int, int], trainers: Mapping[int, Trainer], progress: float
    ) -> dict[int, tuple[int, ...]]:
        """Return the nodes of each trainer, by its requested batch; `trainers` keep theirs as far as they can."""
        nodes = [node.id for node in self.pool.working(progress)]
        smallest_worker_batch = self.config.smallest_worker_batch
        if self.config.objective == "time":  # the plan says how many, and the run begins with all
            most = self.round_plan.workers if self.round_plan else None
            nodes = [node.id for node in self.pool.fastest(progress)[:most]]
            smallest_worker_batch = None
        present = {number: [node.id for node in trainer.nodes] for number, trainer in trainers.items()}
        return distribute_nodes(requests, nodes, present, smallest_worker_batch)

    def _assign(self, nodes_of: Mapping[int, Sequence[int]]) -> None:
        exchanges = [
            self.trainers[number].assign_nodes(tuple(self.nodes[node] for node in nodes))
            for number, nodes in nodes_of.items()
        ]
        # A node that changes its trainer takes part in both.
        exchange = simultaneous(settling for settling, _ in exchanges) + simultaneous(moves for _, moves in exchanges)
        self.counters.bytes_redistributed += exchange.sent
        self.counters.link_bytes_redistributed += exchange.link
        self.scheduler.count_link_seconds(self.counters, exchange)

    def _split_work(self) -> dict[int, WorkSplit]:
        return {trainer.id: trainer.split_work() for trainer in self.trainers.values()}

    def _local_steps(self, splits: Mapping[int, WorkSplit], schedule: RoundSchedule) -> int:
        """Return the inner steps that the workers of this process make in the round, all together."""
        steps = 0
        for trainer in self.trainers.values():
            active = splits[trainer.id].active_steps(schedule.inner_steps)
            steps += sum(len(active[worker]) for worker in trainer.local_workers if worker in active)
        return steps

    def _train(
        self, splits: Mapping[int, WorkSplit], schedule: RoundSchedule, on_step: Callable[[], None]
    ) -> dict[int, TrainedPart]:
        trained = {}
        for trainer in self.trainers.values():
            result = trainer.train_round(splits[trainer.id], schedule, on_step)
            if result is not None:
                trained[trainer.id] = result
        return trained

    def _on_step(self, observer: Observer, checkpoint_policy: CheckpointPolicy) -> None:
        self.processes.stalls.step()
        observer.on_step()
        checkpoint_policy.after_step()

    def _activity(self) -> int:
        """A number that changes with every forward pass of this process, and every piece of a tensor exchanged."""
        return self.model.passes + self.processes.moved

    def _conclude(
        self,
        splits: Mapping[int, WorkSplit],
        schedule: RoundSchedule,
        processes: Sequence[ProcessReport],
        warn: Callable[[str], None],
    ) -> dict[int, RoundReport]:
        reports = {}
        for trainer in self.trainers.values():
            parts = [process.trained[trainer.id] for process in processes if trainer.id in process.trained]
            reports[trainer.id] = trainer.conclude_round(splits[trainer.id], schedule, parts)
        self._count(reports, processes, warn)
        return reports

    def _count(
        self, reports: Mapping[int, RoundReport], processes: Sequence[ProcessReport], warn: Callable[[str], None]
    ) -> None:
        """Add a round to the counters and to the virtual clock, and tell the nodes how fast they were."""
        counters = self.counters
        counters.outer_steps += 1
        if len(self.nodes) > 1 and sum(len(report.workers) for report in reports.values()) == 1:
            counters.rounds_alone += 1
        for report in reports.values():
            counters.examples += report.examples
            counters.tokens += report.tokens
            counters.communications += report.communications
            counters.bytes_synchronised += report.bytes_synchronised
            counters.left_out += report.left_out
            counters.lost_messages += report.lost_messages
            for warning in report.warnings:
                warn(f"trainer {report.trainer}: {warning}")
        seconds = max(sum(part.seconds for part in process.trained.values()) for process in processes)
        counters.add_time(seconds, sum(report.examples for report in reports.values()))
        sent = [(len(report.workers), report.bytes_synchronised) for report in reports.values()]
        recipients = method_of(self.config).capabilities.recipients
        self.scheduler.count_link_seconds(counters, synchronisation_exchange(sent, recipients))
        self.scheduler.count_round(counters, reports.values())
        self.pool.update([record for report in reports.values() for record in report.workers.values()])

    def _merge(self) -> tuple[Merge, Exchange]:
        """Merge the trainers that the policy picks into their representative; communications and bytes are counted."""
        policy = self.config.merging_policy
        chosen = MERGE_POLICIES[policy](self._requests, self.config.merge_count)
        if not isinstance(chosen, Collection) or len(set(chosen)) < 2 or not set(chosen) <= self.trainers.keys():
            raise TrainingError(f"merging_policy: {policy} chooses {chosen}, which must be two or more of the trainers")
        merge = merge_of(self._requests, set(chosen))
        others = [self.trainers.pop(number) for number in merge.weights if number != merge.representative]
        representative = self.trainers[merge.representative]
        exchange = representative.absorb(others, merge.weights)
        self.counters.bytes_merged += exchange.sent
        self.counters.link_bytes_merged += exchange.link
        self.counters.communications += exchange.communications
        self.scheduler.count_link_seconds(self.counters, exchange)
        self.scheduler.count_merge(self.counters, exchange)
        self.merges += 1
        return merge, exchange

    # Evaluation

    def evaluate(self, trainers: Collection[int] | None = None) -> dict[int, Evaluation]:
        """Evaluate living trainers, by default all, on the validation examples, which are divided over the workers."""
        chosen = list(self.trainers if trainers is None else trainers)
        return self._combine(self.processes.gather(self._evaluate_locally(chosen)), chosen)

    def _evaluate_locally(self, trainers: Collection[int]) -> LocalEvaluation:
        started = time.perf_counter()
        for number in trainers:
            self.trainers[number].worker_group.refresh()
        parts = {}
        for number in trainers:
            part = self.validation.part(self.trainers[number].worker_group)
            if part is not None:
                parts[number] = part
        return LocalEvaluation(parts, time.perf_counter() - started)

    def _combine(self, evaluated: Sequence[LocalEvaluation], trainers: Collection[int]) -> dict[int, Evaluation]:
        self.counters.evaluation_seconds += max(process.seconds for process in evaluated)
        return self.validation.combine([process.parts for process in evaluated], trainers)

    # Models and state

    def save_models(self, folder: Path, observer: Observer) -> dict[int, Path]:
        """Write every living trainer to a folder `trainer_<id>`; return the folders. A failure is a warning."""
        main_node = self.nodes[0]
        folders, problem = save_models(
            folder,
            self.trainers,
            lambda number: self.trainers[number].worker_group.parameters_for(main_node),
            self.model,
            self.data.tokenizer,
            self.processes,
        )
        if problem is not None:
            observer.warn(problem)
        return folders

    def tensors(self) -> dict[str, dict[str, torch.Tensor | FilePart]]:
        """Return the trainers' tensors in this process by reference, in groups named by trainer and worker."""
        groups = {name: group for trainer in self.trainers.values() for name, group in trainer.tensors().items()}
        return self.model.checkpoint_tensors(groups)

    def state_dict(self) -> dict:
        """Return the JSON values on which the run's future depends, besides tensors; the same in every process.

        Random numbers need no state: they are functions of the seed and of the place in the run.
        """
        return {
            "counters": dataclasses.asdict(self.counters),
            "merges": self.merges,
            "method": self.config.distributed_algo,
            "trainers": {str(trainer.id): trainer.state_dict() for trainer in self.trainers.values()},
            "nodes": self.pool.state_dict(),
            "clock": self.scheduler.clock and self.scheduler.clock.state_dict(),
            "threads": torch.get_num_threads(),
            "parameters": self.parameter_count,
            "data": self.data.fingerprint(),
        }

    def load_state_dict(self, state: Mapping, read: Callable[[str, str], torch.Tensor]) -> None:
        """Restore the state of a run of the same data and model, on any number of processes."""
        check_state(state, self.data.fingerprint(), self.parameter_count)
        self.merges = state["merges"]
        self.pool.load_state_dict(state["nodes"])
        counters = RunCounters(**state["counters"])
        living = {int(trainer): values for trainer, values in state["trainers"].items()}
        self.trainers = {trainer: self.trainers[trainer] for trainer in living}
        nodes_of = {trainer: values["workers"]["nodes"] for trainer, values in living.items()}
        if len(state["nodes"]["max_batches"]) != len(self.nodes):  # the checkpoint's run had other nodes
            requests = {trainer: values["batch"]["requested_batch"] for trainer, values in living.items()}
            nodes_of = self._distribution(requests, {}, self.scheduler.progress(counters))
        self._assign(nodes_of)
        self.counters = counters  # only now: what the assignment counts was not sent
        if self.scheduler.clock is not None and state["clock"] is not None:
            self.scheduler.clock.load_state_dict(state["clock"])
        local_part = self.model.local_part
        for trainer, values in living.items():
            self.trainers[trainer].load_state_dict(values, lambda group, name: local_part(read(group, name)))
        self._check_max_batches(state["nodes"]["max_batches"])

    def _check_max_batches(self, saved: Sequence[int]) -> None:
        """Warn if nodes hold fewer examples than before a resume, and batches may be larger than that."""
        if len(saved) != len(self.nodes):
            return
        largest_request = max(trainer.largest_request for trainer in self.trainers.values())
        fewer = [(node.max_batch, held) for node, held in zip(self.nodes, saved, strict=True) if node.max_batch < held]
        if fewer and min(fewer)[0] < largest_request:
            smallest, held = min(fewer)
            self.warnings.append(
                f"max_batch_size: a node holds {smallest:,} examples, and held {held:,} before the run was "
                f"resumed: larger steps have other micro-batches than without the interruption, and other bits"
            )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint; problems of newer checkpoints become warnings."""
        with checkpoint.of_this_version():
            self.load_state_dict(checkpoint.state["cluster"], checkpoint.read)
        self.warnings += [f"a checkpoint was passed over: {problem}" for problem in checkpoint.problems]
