"""The cluster: devices, nodes and trainers, and the outer loop over rounds.

A round redistributes the nodes, trains every living trainer, evaluates and merges (AdLoCo, section 3). The
cluster decides nothing about batches or parameters itself: decisions are in `algorithms`, the work is in
`trainers`. What happens is told to an observer, which writes it down.

Every process of a run has a cluster and takes the same decisions: what workers and evaluations say is gathered once per
round. Only tensors, and the work on them, are shared out.
"""

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from algorithms.calc_batch import BATCH_TESTS
from algorithms.gradient_statistics import PerExampleProbe, UnsupportedModuleError
from algorithms.learning_rate import LEARNING_RATE_SCALINGS, SCHEDULES
from algorithms.outer_step import DISTRIBUTED_ALGORITHMS
from algorithms.policies import MERGE_POLICIES, MergePlan, distribute_nodes, slow_nodes
from algorithms.switch_mode import SWITCH_MODES
from fabrics.data_order import DataCursor, draw_subset
from fabrics.dataset_loader import DATASETS, FALLBACKS, TEXT_DOCUMENTS
from fabrics.eval_tool import METRICS, Evaluation, EvaluationPart, batch_count, combined, evaluate_batches
from fabrics.examples import TaskData
from fabrics.models import (
    MODELS,
    build_model,
    is_pretrained,
    reinitialise_output_layer,
    save_model,
    settings_problems,
)
from fabrics.worker import Node, backward, probed_backward
from fabrics.working_model import WorkingModel
from trainers import ESTIMATORS, RoundSchedule, Trainer, TrainingError
from training_logs.clearml_modes import MODES
from training_logs.recording.memory_monitor import Use, memory_use
from training_logs.recording.records import ClusterRound, Merge, Observer, Totals, WorkerRound
from utils.checkpoint import Checkpoint, CheckpointError, Checkpoints
from utils.compression import COMMUNICATION_DTYPES
from utils.config import Config, ConfigError
from utils.config_reading import dump_config
from utils.devices import resolve_devices
from utils.distributed import Processes, connect
from utils.launch import Launch
from utils.max_batch_calculator import calculate_max_batch
from utils.signals import StopRequest
from utils.utils import checkpoints_of, write_folder_atomically

# Config key -> the words that the registries know.
CHOICES = {
    "dataset": tuple(DATASETS),
    "dataset_fallback": FALLBACKS,
    "clearml": MODES,
    "communication_dtype": tuple(COMMUNICATION_DTYPES),
    "text_documents": tuple(TEXT_DOCUMENTS),
    "model_type": tuple(MODELS),
    "distributed_algo": tuple(DISTRIBUTED_ALGORITHMS),
    "learning_rate_schedule": tuple(SCHEDULES),
    "learning_rate_scaling": tuple(LEARNING_RATE_SCALINGS),
    "sampling_method": tuple(BATCH_TESTS),
    "statistics_estimator": ESTIMATORS,
    "switch_mode": tuple(SWITCH_MODES),
    "merging_policy": tuple(MERGE_POLICIES),
}


def _model_problems(config: Config) -> list[str]:
    return settings_problems(config.model_type, config.model_config) if config.model_type in MODELS else []


def _task_problems(config: Config) -> list[str]:
    if config.model_type not in MODELS or config.dataset not in DATASETS:
        return []
    task, needed = DATASETS[config.dataset].task, MODELS[config.model_type].task
    if task == needed:
        return []
    return [f"model_type: {config.model_type} is for {needed}, dataset {config.dataset} for {task}"]


# What is wrong with a config that only the parts know, for load_config.
CHECKS = (_model_problems, _task_problems)


def join_processes(config: Config, launch: Launch | None = None) -> tuple[Processes, list[str]]:
    """The processes of the run, as the environment says, and warnings about the devices.

    Raises:
        ConfigError: devices or processes are not to be had.
    """
    try:
        devices, warnings = resolve_devices(config.devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from None
    on_cpu = all(device.type == "cpu" for device in devices)
    in_order = on_cpu if config.deterministic is None else config.deterministic
    if in_order and not on_cpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    if config.real_device_ids and len(config.real_device_ids) != len(devices):
        warnings.append(
            f"real_device_ids: {len(config.real_device_ids)} labels for {len(devices)} devices, none is used"
        )
    try:
        return connect(devices, config.nodes_per_gpu, in_order, launch), warnings
    except ValueError as error:
        raise ConfigError(f"processes: {error}") from None


class NoNodeLeftError(TrainingError):
    """All nodes failed; trainers are as they were after their last round."""


@dataclass(frozen=True)
class _Share:
    """What one process tells all others, once per round."""

    workers: dict[int, dict[int, WorkerRound]]  # by trainer
    seconds: dict[int, float]  # by trainer
    evaluations: dict[int, EvaluationPart]  # by trainer
    memory: list[Use]
    stop: bool


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
        processes = processes or join_processes(config)[0]
        self.processes = processes
        self.metric = METRICS[data.task]
        self.totals = Totals()
        self.merges: list[Merge] = []
        self.stopped = False
        self.warnings: list[str] = []
        if data.fallback_reason:
            self.warnings.append(
                f"DATASET FALLBACK: trained on {data.dataset} because {config.dataset} could not be loaded: "
                f"{data.fallback_reason}"
            )
        subsets = self._subsets()
        self.devices = list(dict.fromkeys(d for node, d in enumerate(processes.devices) if processes.owns(node)))
        autocast = None if config.autocast is None else getattr(torch, config.autocast)
        self.working = {
            device: WorkingModel(self._initial_model(0), device, autocast, config.compile_model)
            for device in self.devices
        }
        self._check_modules()
        self.nodes = self._build_nodes()
        self.failed_nodes: set[int] = set()
        assignment = self._assignment(dict.fromkeys(range(len(subsets)), config.INITIAL_BATCH_SIZE))
        self.trainers = {
            trainer: Trainer(
                trainer,
                config,
                self._initial_parameters(trainer) if any(map(processes.owns, assignment[trainer])) else None,
                DataCursor(config.training_seed, trainer, subset),
                data.train,
                self.working,
                processes,
            )
            for trainer, subset in enumerate(subsets)
        }
        self._check_statistics()
        self.distribute()

    # Construction

    def _subsets(self) -> list[np.ndarray]:
        config, examples = self.config, len(self.data.train)
        trainers = config.number_of_initial_trainers
        subsets = [
            draw_subset(config.training_seed, trainer, trainers, examples, config.trainer_data_fraction)
            for trainer in range(trainers)
        ]
        smallest = min(len(subset) for subset in subsets)
        if config.INITIAL_BATCH_SIZE > smallest:
            raise ConfigError(
                f"INITIAL_BATCH_SIZE: must be at most the {smallest} examples of a trainer's subset "
                f"({examples} in all, {trainers} trainers), got {config.INITIAL_BATCH_SIZE}"
            )
        return subsets

    def _initial_model(self, trainer: int) -> torch.nn.Module:
        config, seed = self.config, self.config.training_seed
        model = build_model(
            config.model_type,
            config.model_config,
            self.data.tokenizer,
            config.sequence_length,
            seed if config.identical_initialisation else seed + trainer,
            self.data.class_names,
        )
        if config.need_to_reinit_output_layers:
            reinitialise_output_layer(config.model_type, model, seed if config.single_seed else seed + trainer)
        return model

    def _initial_parameters(self, trainer: int) -> torch.Tensor:
        config, home = self.config, self.devices[0]
        same_body = config.identical_initialisation or is_pretrained(config.model_config)
        same_head = config.single_seed or not config.need_to_reinit_output_layers
        if trainer == 0 or (same_body and same_head):
            return self.working[home].parameters.detach().clone()
        return WorkingModel(self._initial_model(trainer), home).parameters.detach()

    def _build_nodes(self) -> tuple[Node, ...]:
        devices, per_device = self.processes.devices, self.config.nodes_per_gpu
        largest = dict.fromkeys(range(0, len(devices), per_device), self.config.max_batch_size)
        if self.config.max_batch_size is None:
            # Whoever owns the first node of a device measures it, alone.
            own = {first: self._measured_max_batch(devices[first]) for first in largest if self.processes.owns(first)}
            for measured in self.processes.gather(own):
                largest.update(measured)
        return tuple(Node(node, device, largest[node - node % per_device]) for node, device in enumerate(devices))

    def _measured_max_batch(self, device: torch.device) -> int:
        config, working, examples = self.config, self.working[device], self.data.train
        # Still to come: two moments per worker, and the round's pseudo-gradient.
        workers = max(config.nodes_per_gpu, config.number_of_initial_trainers)
        reserved = (2 * workers + 1) * working.parameters.numel() * working.parameters.element_size()
        # The most that a step can need: the last of a round is also probed.
        step = probed_backward if self._probes_examples else backward

        def run(count: int) -> None:
            working.gradient.zero_()
            step(working, examples, np.full(count, examples.largest))

        try:
            return calculate_max_batch(
                run,
                working.gradient,
                device,
                config.padding_percentage,
                config.nodes_per_gpu,
                reserved,
            )
        except MemoryError as error:
            raise ConfigError(f"max_batch_size: {error}") from None

    @property
    def _probes_examples(self) -> bool:
        adapts = BATCH_TESTS[self.config.sampling_method] is not None
        return adapts and self.config.statistics_estimator == "per_example"

    def _check_modules(self) -> None:
        if self._probes_examples:
            try:
                PerExampleProbe(self.working[self.devices[0]].module, batch_size=1)
            except UnsupportedModuleError as error:
                raise ConfigError(f"statistics_estimator: {error}") from None

    def _check_statistics(self) -> None:
        config = self.config
        if BATCH_TESTS[config.sampling_method] is None:
            return
        if config.statistics_estimator == "across_workers":
            if len(self.nodes) < 2 * len(self.trainers):
                raise ConfigError(
                    f"statistics_estimator: across_workers needs two nodes per trainer, got {len(self.nodes)} nodes "
                    f"for {len(self.trainers)} trainers; use per_example, or more nodes_per_gpu"
                )
            return
        if min(node.max_batch for node in self.nodes) < 2:
            raise ConfigError(
                "max_batch_size: statistics_estimator per_example needs at least 2 examples at a time, got 1; "
                "use across_workers, or sampling_method: none"
            )
        smallest = min(len(trainer.cursor.subset) for trainer in self.trainers.values())
        if config.statistics_batch_size > smallest:
            raise ConfigError(
                f"statistics_batch_size: must be at most the {smallest} examples of a trainer's subset, "
                f"got {config.statistics_batch_size}"
            )

    @property
    def parameter_count(self) -> int:
        """Trainable parameters of one model."""
        return self.working[self.devices[0]].parameter_count

    # Decisions carried out

    def _assignment(self, requests: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        groups = {node.id: self.processes.groups[node.id] for node in self.nodes if node.id not in self.failed_nodes}
        if not groups:
            raise NoNodeLeftError("no node is left to train on: all of them failed, or were dropped as too slow")
        return distribute_nodes(requests, groups)

    def distribute(self) -> None:
        """Give every living trainer its nodes, in proportion to the requested batches.

        Raises:
            NoNodeLeftError: as it says.
        """
        for trainer, nodes in self._assignment(self._requests()).items():
            self.trainers[trainer].assign_nodes(tuple(self.nodes[node] for node in nodes))

    def _requests(self) -> dict[int, int]:
        return {trainer.id: trainer.requested_batch for trainer in self.trainers.values()}

    def _merge(self) -> Merge:
        """Merge the trainers that the policy picks; communications and bytes are counted."""
        plan = MERGE_POLICIES[self.config.merging_policy](self._requests(), self.config.merge_count)
        others = [self.trainers.pop(trainer) for trainer in plan.weights if trainer != plan.representative]
        representative = self.trainers[plan.representative]
        representative.absorb(others, plan.weights)
        self.totals.communications += 1
        self.totals.bytes_communicated += len(others) * representative.parameter_bytes
        merge = Merge(self.totals.outer_steps, plan)
        self.merges.append(merge)
        return merge

    def _look_after_nodes(self, workers: list[WorkerRound], observer: Observer) -> None:
        """Take over what became of the nodes: smaller max batches, nodes that failed, nodes that are too slow."""
        nodes = list(self.nodes)
        for worker in workers:
            if worker.max_batch < nodes[worker.node].max_batch:
                nodes[worker.node] = dataclasses.replace(nodes[worker.node], max_batch=worker.max_batch)
        self.nodes = tuple(nodes)
        gone = {worker.node for worker in workers if worker.failed} - self.failed_nodes
        if self.config.drop_slow_nodes is not None:
            seconds: dict[int, float] = {}
            examples: dict[int, int] = {}
            for worker in workers:
                if not worker.failed:
                    seconds[worker.node] = seconds.get(worker.node, 0.0) + worker.seconds
                    count = worker.plan.effective_batch * len(worker.losses)
                    examples[worker.node] = examples.get(worker.node, 0) + count
            if len(seconds) > 1:
                slow = slow_nodes({n: s / examples[n] for n, s in seconds.items()}, self.config.drop_slow_nodes)
                for node in sorted(slow):
                    observer.warn(
                        f"round {self.totals.outer_steps}: node {node} took {seconds[node] / examples[node]:.3g} s per "
                        f"example, more than drop_slow_nodes allows; it works no more"
                    )
                gone |= slow
        self.failed_nodes |= gone

    # The outer loop

    def _progress(self, outer_steps: float, examples: float, tokens: float) -> float:
        """How much of the run is done, 0 to 1: the largest share of any limit."""
        config = self.config
        shares = [0.0]
        if config.number_of_outer_steps:
            shares.append(outer_steps / config.number_of_outer_steps)
        if config.number_of_training_epochs:
            shares.append(examples / (config.number_of_training_epochs * len(self.data.train)))
        if config.max_tokens:
            shares.append(tokens / config.max_tokens)
        return min(max(shares), 1.0)

    def _schedule(self) -> RoundSchedule:
        """The next round; the last one is cut short so that a limit is exceeded by less than one inner step."""
        config, totals = self.config, self.totals
        examples = sum(trainer.examples_per_inner_step() for trainer in self.trainers.values())
        tokens = sum(trainer.tokens_ahead(1) for trainer in self.trainers.values())
        steps = float(config.number_of_inner_steps_between_outers)
        if config.number_of_training_epochs:
            limit = config.number_of_training_epochs * len(self.data.train)
            steps = min(steps, math.ceil((limit - totals.examples) / examples))
        if config.max_tokens:
            steps = min(steps, math.ceil((config.max_tokens - totals.tokens) / tokens))
        steps = max(1, int(steps))
        return RoundSchedule(
            inner_steps=steps,
            progress_before=self._progress(totals.outer_steps, totals.examples, totals.tokens),
            progress_after=self._progress(
                totals.outer_steps + 1, totals.examples + steps * examples, totals.tokens + steps * tokens
            ),
        )

    @property
    def finished(self) -> bool:
        """Whether a limit of the run has been reached."""
        return self._progress(self.totals.outer_steps, self.totals.examples, self.totals.tokens) >= 1.0

    def _evaluation_parts(self) -> dict[int, EvaluationPart]:
        """What this process evaluates: of each trainer every worker its share of the batches."""
        working, size, parts = self.working[self.devices[0]], self.config.eval_batch_size, {}
        count = batch_count(self.data.validation, size)
        for trainer in self.trainers.values():
            batches = [batch for batch in range(count) if batch % len(trainer.nodes) in trainer.workers]
            if batches:
                with working.evaluating(trainer.parameters) as module:
                    parts[trainer.id] = evaluate_batches(module, self.data.validation, size, working.device, batches)
        return parts

    def _combined(self, everybody: list[dict[int, EvaluationPart]]) -> dict[int, Evaluation]:
        return {
            trainer: combined((parts[trainer] for parts in everybody if trainer in parts), self.data.task)
            for trainer in self.trainers
        }

    def evaluate(self) -> dict[int, Evaluation]:
        """Every living trainer on the validation examples, shared out over the processes."""
        return self._combined(self.processes.gather(self._evaluation_parts()))

    def best(self, evaluations: dict[int, Evaluation]) -> int:
        """The trainer with the best metric; ties go to the smaller id."""
        sign = -1.0 if self.metric.higher_is_better else 1.0
        return min(evaluations, key=lambda trainer: (sign * evaluations[trainer].metric, trainer))

    def run_round(self, observer: Observer, stop: StopRequest | None = None) -> ClusterRound:
        """Redistribute the nodes, train every living trainer for one round, evaluate, merge.

        Raises:
            TrainingError: training cannot go on.
        """
        self.distribute()
        schedule, trainers, planned = self._schedule(), self.trainers, self.config.number_of_outer_steps
        own_steps = schedule.inner_steps * sum(len(trainer.workers) for trainer in trainers.values())
        observer.on_round_start(self.totals.outer_steps + 1, planned, own_steps)
        tokens = {trainer.id: trainer.tokens_ahead(schedule.inner_steps) for trainer in trainers.values()}
        examples = {
            trainer.id: schedule.inner_steps * trainer.examples_per_inner_step() for trainer in trainers.values()
        }

        def on_step() -> None:
            observer.on_step()
            if stop is not None:
                stop.check()

        local: dict[int, dict[int, WorkerRound]] = {}
        seconds: dict[int, float] = {}
        for trainer in trainers.values():
            if trainer.workers:
                started = time.perf_counter()
                local[trainer.id] = trainer.train_round(schedule, on_step)
                seconds[trainer.id] = time.perf_counter() - started
        totals = dataclasses.replace(
            self.totals,
            outer_steps=self.totals.outer_steps + 1,
            examples=self.totals.examples + sum(examples.values()),
            tokens=self.totals.tokens + sum(tokens.values()),
        )
        finished = self._progress(totals.outer_steps, totals.examples, totals.tokens) >= 1.0
        due = finished or totals.outer_steps % self.config.eval_every == 0
        parts = self._evaluation_parts() if due else {}
        stopping = stop is not None and stop.requested
        shares = self.processes.gather(_Share(local, seconds, parts, memory_use(self.devices), stopping))
        self.stopped = any(share.stop for share in shares)
        reports = {}
        for trainer in trainers.values():
            workers = {w: run for share in shares for w, run in share.workers.get(trainer.id, {}).items()}
            took = max(share.seconds.get(trainer.id, 0.0) for share in shares)
            reports[trainer.id] = trainer.conclude_round(schedule, workers, tokens[trainer.id], took)
        for report in reports.values():
            totals.communications += report.communications
            totals.bytes_communicated += report.bytes_communicated
            totals.left_out += report.left_out
            for warning in report.warnings:
                observer.warn(f"trainer {report.trainer}: {warning}")
        totals.training_seconds += max(sum(share.seconds.values()) for share in shares)
        self.totals = totals
        self._look_after_nodes([run for report in reports.values() for run in report.workers.values()], observer)
        evaluations = self._combined([share.evaluations for share in shares]) if due else {}
        merge = None
        if len(trainers) > 1 and totals.outer_steps % self.config.merge_frequency == 0:
            merge = self._merge()
        memory = [share.memory for share in shares]
        return ClusterRound(
            totals.outer_steps, planned, reports, evaluations, merge, dataclasses.replace(totals), memory
        )

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
        for warning in self.warnings:
            observer.warn(warning)
        observer.on_start(self, self.evaluate() if self.totals.outer_steps == 0 else {})
        result = None
        while not self.finished:
            try:
                result = self.run_round(observer, stop)
            except NoNodeLeftError:
                self.save_checkpoint(folder, observer)
                raise
            observer.on_round(self, result)
            every, step = self.config.save_weights_every, self.totals.outer_steps
            due = every is not None and step % every == 0
            # The models first: a run that is killed in between makes the round again, and them.
            if due and folder is not None:
                self.save_models(folder / self.config.model_weights_dir / f"round_{step:05d}", observer)
            if due or self.finished or self.stopped:
                self.save_checkpoint(folder, observer)
            if self.stopped:
                return {}
        if result is None or result.merge is not None:
            return self.evaluate()
        return result.evaluations

    # Models and state

    def save_models(self, folder: Path, observer: Observer) -> dict[int, Path]:
        """Every living trainer as a Hugging Face folder `trainer_<id>`; where each was written.

        What cannot be written is a warning.
        """
        working, problem = self.working[self.devices[0]], None
        if self.processes.is_main:
            for left_by_a_kill in folder.glob(".trainer_*"):
                shutil.rmtree(left_by_a_kill, ignore_errors=True)
        for trainer in self.trainers.values():
            parameters = trainer.parameters_for(self.nodes[0])  # the main process's
            if self.processes.is_main:
                working.load(parameters)
                try:
                    write_folder_atomically(
                        folder / f"trainer_{trainer.id}",
                        lambda temporary: save_model(working.module, self.data.tokenizer, temporary),
                    )
                except (OSError, SafetensorError) as error:
                    problem = f"the models could not be written to {folder}: {error}"
        problem = self.processes.gather(problem)[0]
        if problem is not None:
            observer.warn(problem)
            return {}
        return {trainer: folder / f"trainer_{trainer}" for trainer in self.trainers}

    def save_checkpoint(self, folder: Path | None, observer: Observer) -> None:
        """Write a checkpoint into a run folder; what cannot be written is a warning, and training goes on."""
        if folder is None:
            return
        state = {"cluster": self.state_dict(), "observer": observer.state_dict()}
        groups = {name: group for trainer in self.trainers.values() for name, group in trainer.tensors().items()}
        checkpoints = Checkpoints(checkpoints_of(folder), self.config.keep_checkpoints)
        try:
            checkpoints.save(
                self.processes, self.totals.outer_steps, groups, state, {"config.yaml": dump_config(self.config)}
            )
        except OSError as error:
            observer.warn(
                f"no checkpoint after round {self.totals.outer_steps}: {error}; training goes on, and what was written "
                f"before is as it was"
            )

    def state_dict(self) -> dict:
        """What the run's future depends on, besides the trainers' tensors, as JSON values; the same in every process.

        Random numbers need no state: they are functions of the seed and of the place in the run.
        """
        return {
            "totals": dataclasses.asdict(self.totals),
            "merges": [dataclasses.asdict(merge) for merge in self.merges],
            "trainers": {str(trainer.id): trainer.state_dict() for trainer in self.trainers.values()},
            "max_batches": [node.max_batch for node in self.nodes],
            "threads": torch.get_num_threads(),
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
        if state["data"] != self.data.fingerprint():
            raise CheckpointError("the checkpoint is of a run on other data: dataset, tokenizer or documents differ")
        if state["parameters"] != self.parameter_count:
            raise CheckpointError(
                f"the checkpoint is of a model with {state['parameters']:,} parameters, this one has "
                f"{self.parameter_count:,}"
            )
        self.totals = Totals(**state["totals"])
        self.merges = [
            Merge(
                merge["outer_step"],
                MergePlan(
                    merge["plan"]["representative"],
                    {int(trainer): weight for trainer, weight in merge["plan"]["weights"].items()},
                ),
            )
            for merge in state["merges"]
        ]
        if len(state["max_batches"]) == len(self.nodes):
            self.nodes = tuple(
                dataclasses.replace(node, max_batch=max_batch)
                for node, max_batch in zip(self.nodes, state["max_batches"], strict=True)
            )
        living = {int(trainer): values for trainer, values in state["trainers"].items()}
        self.trainers = {trainer: self.trainers[trainer] for trainer in living}
        for trainer, values in living.items():
            self.trainers[trainer].requested_batch = values["requested_batch"]
        self.distribute()
        for trainer, values in living.items():
            self.trainers[trainer].load_state_dict(values, read)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; see load_state_dict. What is wrong with newer ones becomes a warning."""
        self.load_state_dict(checkpoint.state["cluster"], checkpoint.read)
        self.warnings += [f"a checkpoint was passed over: {problem}" for problem in checkpoint.problems]
