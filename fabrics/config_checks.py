"""The words that configuration keys may have, from the registries, and what only the parts know to be wrong."""

import itertools
from collections.abc import Collection, Mapping

from algorithms.batch.batch_control import ESTIMATORS
from algorithms.batch.calc_batch import BATCH_TESTS
from algorithms.batch.switch_mode import SWITCH_MODES
from algorithms.nodes.policies import MERGE_POLICIES
from algorithms.schedule.learning_rate import SCHEDULES
from algorithms.synchronisation import METHODS
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from fabrics.data.dataset_loader import DATASETS, TEXT_DOCUMENTS
from fabrics.data.partition import SPLITS, split_problems
from fabrics.idle_keys import idle_keys
from fabrics.models.registry import MODELS
from fabrics.sharding.checks import sharding_problems
from fabrics.training.method_config import method_problems
from fabrics.training.optimizers import INNER_OPTIMIZERS
from utils.config.reading import Checks
from utils.config.schema import CLEARML_MODES, Config

# Config key -> the words that there are: the registries themselves, so that those of plugins are among them.
CHOICES: Mapping[str, Collection[str]] = {
    "dataset": DATASETS,
    "clearml": CLEARML_MODES,
    "communication_dtype": COMMUNICATION_DTYPES,
    "text_documents": TEXT_DOCUMENTS,
    "data_split": SPLITS,
    "model_type": MODELS,
    "distributed_algo": METHODS,
    "inner_optimizer": INNER_OPTIMIZERS,
    "learning_rate_schedule": SCHEDULES,
    "sampling_method": BATCH_TESTS,
    "statistics_estimator": ESTIMATORS,
    "switch_mode": SWITCH_MODES,
    "merging_policy": MERGE_POLICIES,
}


def _model_problems(config: Config) -> list[str]:
    return MODELS[config.model_type].problems(config.model_config) if config.model_type in MODELS else []


def _task_problems(config: Config) -> list[str]:
    if config.model_type not in MODELS or config.dataset not in DATASETS:
        return []
    task, needed = DATASETS[config.dataset].task, MODELS[config.model_type].task
    if task == needed:
        return []
    return [f"model_type: {config.model_type} is for {needed}, dataset {config.dataset} for {task}"]


def _schedule_warnings(config: Config) -> list[str]:
    schedule, initial = config.batch_schedule, config.INITIAL_BATCH_SIZE
    if not schedule or schedule[0][0] != 0 or schedule[0][1] == initial:
        return []
    return [f"batch_schedule: the first round has INITIAL_BATCH_SIZE {initial}, and not {schedule[0][1]:g}"]


def participation_problems(config: Config) -> list[str]:
    """Return what is wrong with the keys that decide which workers take part in a round, one line each."""
    found = []
    schedule = config.node_schedule
    name = config.distributed_algo
    if schedule is not None:
        shares, nodes = zip(*schedule, strict=True)
        grows = all(before < after for before, after in itertools.pairwise(shares))
        whole = all(float(count).is_integer() and count >= 1 for count in nodes)
        if not (shares[0] == 0.0 and grows and shares[-1] < 1.0 and whole):
            found.append(
                f"node_schedule: shares of the run must begin with 0 and grow, all below 1, and nodes be positive "
                f"integers, got {schedule}"
            )
    if config.budget is not None:
        found += [
            f"{key}: must be {neutral} with {config.budget}, which reckons with the same workers in every round to "
            f"come, got {value}"
            for key, neutral in (("node_schedule", None), ("participants", 1.0))
            if (value := getattr(config, key)) != neutral
        ]
    method = METHODS.get(name)
    if method is not None and config.participants < 1.0 and method.keeps != "shared":
        found.append(
            f"participants: must be 1 with {name}, whose workers go on from parameters of their own, which grow stale "
            f"while they rest, got {config.participants}"
        )
    if config.message_loss and method is not None:
        if method.capabilities.exchanges_gradients:
            found.append(
                f"message_loss: must be 0 with {name}, whose workers exchange gradients of the same parameters in "
                f"every inner step, got {config.message_loss}"
            )
        elif method.keeps != "shared":
            found.append(
                f"message_loss: must be 0 with {name}, which says itself from where its workers go on, "
                f"got {config.message_loss}"
            )
        if config.compares_workers:
            found.append(
                f"statistics_estimator: must be per_example with message_loss, after which workers are not at the same "
                f"parameters, got {config.statistics_estimator}"
            )
    return found


# What only the parts know of a config, for load_config.
CHECKS = Checks(
    (_model_problems, _task_problems, method_problems, split_problems, participation_problems, sharding_problems),
    (idle_keys, _schedule_warnings),
)
