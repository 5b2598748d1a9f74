"""The cluster: devices, nodes and trainers, and the outer loop over rounds.

A round trains every living trainer, evaluates, merges, and redistributes the nodes (AdLoCo, section 3). The
cluster decides nothing about batches or parameters itself: decisions are in `algorithms`, the work is in
`trainers`. What happens is told to an observer, which writes it down.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch

from algorithms.calc_batch import BATCH_TESTS
from algorithms.gradient_statistics import PerExampleProbe, UnsupportedModuleError
from algorithms.learning_rate import LEARNING_RATE_SCALINGS, SCHEDULES
from algorithms.outer_step import DISTRIBUTED_ALGORITHMS
from algorithms.policies import MERGE_POLICIES, distribute_nodes
from algorithms.switch_mode import SWITCH_MODES
from fabrics.data_order import DataCursor, draw_subset
from fabrics.dataset_loader import DATASETS, FALLBACKS, TEXT_DOCUMENTS
from fabrics.eval_tool import METRICS, Evaluation, evaluate
from fabrics.examples import TaskData
from fabrics.models import (
    MODELS,
    build_model,
    is_pretrained,
    reinitialise_output_layer,
    save_model,
    settings_problems,
)
from fabrics.working_model import WorkingModel
from trainers import ESTIMATORS, Node, RoundSchedule, Trainer, backward, probed_backward
from training_logs.log_processor import MODES
from training_logs.records import ClusterRound, Merge, Observer, Totals
from utils.config import Config, ConfigError
from utils.devices import resolve_devices
from utils.max_batch_calculator import calculate_max_batch
from utils.utils import write_folder_atomically

# Config key -> the words that the registries know.
CHOICES = {
    "dataset": tuple(DATASETS),
    "dataset_fallback": FALLBACKS,
    "clearml": MODES,
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


class Cluster:
    """All devices, nodes and trainers of a run.

    Args:
        config: the run's configuration.
        data: what to train and evaluate on.

    Raises:
        ConfigError: the config does not fit the data, the model or the machine.
    """

    def __init__(self, config: Config, data: TaskData):
        self.config = config
        self.data = data
        self.metric = METRICS[data.task]
        self.totals = Totals()
        self.merges: list[Merge] = []
        try:
            self.devices, self.warnings = resolve_devices(config.devices)
        except ValueError as error:
            raise ConfigError(f"devices: {error}") from None
        if config.real_device_ids and len(config.real_device_ids) != len(self.devices):
            self.warnings.append(
                f"real_device_ids: {len(config.real_device_ids)} labels for {len(self.devices)} devices, none is used"
            )
        if data.fallback_reason:
            self.warnings.append(
                f"DATASET FALLBACK: trained on {data.dataset} because {config.dataset} could not be loaded: "
                f"{data.fallback_reason}"
            )
        subsets = self._subsets()
        self.working = {device: WorkingModel(self._initial_model(0), device) for device in self.devices}
        self.trainers = {trainer: self._initial_trainer(trainer, subset) for trainer, subset in enumerate(subsets)}
        self._check_modules()
        self.nodes = self._build_nodes()
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

    def _initial_trainer(self, trainer: int, subset: np.ndarray) -> Trainer:
        config, home = self.config, self.devices[0]
        same_body = config.identical_initialisation or is_pretrained(config.model_config)
        same_head = config.single_seed or not config.need_to_reinit_output_layers
        if trainer == 0 or (same_body and same_head):
            parameters = self.working[home].parameters.detach().clone()
        else:
            parameters = WorkingModel(self._initial_model(trainer), home).parameters.detach()
        cursor = DataCursor(config.training_seed, trainer, subset)
        return Trainer(trainer, config, parameters, cursor, self.data.train, self.working)

    def _build_nodes(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for device in self.devices:
            max_batch = self.config.max_batch_size or self._measured_max_batch(device)
            for _ in range(self.config.nodes_per_gpu):
                nodes.append(Node(len(nodes), device, max_batch))
        return tuple(nodes)

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

    def distribute(self) -> None:
        """Give every living trainer its nodes, in proportion to the requested batches."""
        assignment = distribute_nodes(self._requests(), len(self.nodes))
        for trainer, indices in assignment.items():
            self.trainers[trainer].assign_nodes(tuple(self.nodes[index] for index in indices))

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
        tokens = sum(trainer.tokens_per_inner_step() for trainer in self.trainers.values())
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

    def evaluate(self) -> dict[int, Evaluation]:
        """Every living trainer on the validation examples."""
        working, result = self.working[self.devices[0]], {}
        for trainer in self.trainers.values():
            with working.evaluating(trainer.parameters) as module:
                result[trainer.id] = evaluate(
                    module, self.data.validation, self.data.task, self.config.eval_batch_size, working.device
                )
        return result

    def best(self, evaluations: dict[int, Evaluation]) -> int:
        """The trainer with the best metric; ties go to the smaller id."""
        sign = -1.0 if self.metric.higher_is_better else 1.0
        return min(evaluations, key=lambda trainer: (sign * evaluations[trainer].metric, trainer))

    def run_round(self, observer: Observer) -> ClusterRound:
        """Train every living trainer for one round, evaluate, merge, redistribute."""
        totals, schedule = self.totals, self._schedule()
        workers = sum(len(trainer.workers) for trainer in self.trainers.values())
        planned = self.config.number_of_outer_steps
        observer.on_round_start(totals.outer_steps + 1, planned, workers * schedule.inner_steps)
        reports = {trainer.id: trainer.train_round(schedule, observer.on_step) for trainer in self.trainers.values()}
        totals.outer_steps += 1
        for report in reports.values():
            totals.examples += report.examples
            totals.tokens += report.tokens
            totals.communications += report.communications
            totals.bytes_communicated += report.bytes_communicated
            totals.training_seconds += report.seconds
            for warning in report.warnings:
                observer.warn(f"trainer {report.trainer}: {warning}")
        due = totals.outer_steps % self.config.eval_every == 0 or self.finished
        evaluations = self.evaluate() if due else {}
        merge = None
        if len(self.trainers) > 1 and totals.outer_steps % self.config.merge_frequency == 0:
            merge = self._merge()
        self.distribute()
        return ClusterRound(totals.outer_steps, planned, reports, evaluations, merge, dataclasses.replace(totals))

    def train(self, observer: Observer) -> dict[int, Evaluation]:
        """Train until a limit is reached; the final evaluations of the living trainers."""
        for warning in self.warnings:
            observer.warn(warning)
        observer.on_start(self, self.evaluate())
        result = None
        while not self.finished:
            result = self.run_round(observer)
            observer.on_round(self, result)
        if result is None or result.merge is not None:
            return self.evaluate()
        return result.evaluations

    # Models and state

    def save_models(self, folder: Path) -> dict[int, Path]:
        """Every living trainer as a Hugging Face folder `trainer_<id>`; where each was written."""
        working, paths = self.working[self.devices[0]], {}
        for trainer in self.trainers.values():
            working.load(trainer.parameters)
            paths[trainer.id] = folder / f"trainer_{trainer.id}"
            write_folder_atomically(
                paths[trainer.id], lambda temporary: save_model(working.module, self.data.tokenizer, temporary)
            )
        return paths

    def state_dict(self) -> dict:
        """Everything that the run's future depends on, by trainer and worker, never by process.

        Tensors are references, so that a checkpoint needs no second copy: write or copy them before going on.
        """
        return {
            "totals": dataclasses.asdict(self.totals),
            "merges": list(self.merges),
            "trainers": {trainer.id: trainer.state_dict() for trainer in self.trainers.values()},
            "nodes": {
                trainer.id: tuple(worker.node.id for worker in trainer.workers.values())
                for trainer in self.trainers.values()
            },
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from a copy of `state`, in a cluster of the same configuration and data."""
        self.totals = Totals(**state["totals"])
        self.merges = list(state["merges"])
        self.trainers = {trainer: self.trainers[trainer] for trainer in state["trainers"]}
        for trainer, trainer_state in state["trainers"].items():
            nodes = tuple(self.nodes[index] for index in state["nodes"][trainer])
            self.trainers[trainer].load_state_dict(trainer_state, nodes)
