"""Checks of a configuration that need the registries: known names, and values that do not go together.

utils/config/schema.py has the checks that need nothing but the keys.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from algorithms.batch.calc_batch import BATCH_TESTS, ESTIMATORS, NEED_INNER_PRODUCTS
from algorithms.batch.switch_mode import SWITCH_MODES
from algorithms.nodes.policies import MERGE_POLICIES
from algorithms.schedule.controller import METHOD_APART
from algorithms.schedule.schedules import SCHEDULES
from algorithms.synchronisation import METHODS
from algorithms.synchronisation.encodings import COMMUNICATION_DTYPES
from algorithms.synchronisation.method import OUTER_KEYS
from fabrics.data.dataset_loader import DATASETS, TEXT_DOCUMENTS
from fabrics.data.partition import SPLITS, split_problems
from fabrics.models.lora import lora_problems
from fabrics.models.model_family import MODELS, is_pretrained
from fabrics.training.method_config import method_of, method_problems
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name, inner_optimizer_of
from utils.config.reading import Checks
from utils.config.schema import CLEARML_MODES, Config, ConfigError

# The names that a key may have. Plugins add to the registries.
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


# Values that do not go together: one line per problem


def _model_problems(config: Config) -> list[str]:
    model = MODELS[config.model_type]
    found = model.problems(config.model_config)
    found += lora_problems(config)
    task = DATASETS[config.dataset].task
    if task != model.task:
        found.append(f"model_type: {config.model_type} is for {model.task}, dataset {config.dataset} for {task}")
    if config.splits_data and config.dataset in ("imdb", "messages"):
        found.append(f"data_split: dataset {config.dataset} has no documents to divide; iid over trainers works")
    return found


# With `objective: time` one trainer of equally loaded workers may exchange gradients, and have any number of workers.
_PLANNED_WITH = {
    "distributed_algo": METHOD_APART,
    "number_of_initial_trainers": 1,
    "statistics_estimator": "per_example",
    "batch_schedule": None,
    "balance": "equal",
    "node_schedule": None,
    "participants": 1.0,
    "message_loss": 0.0,
    "data_split_over": "trainers",
    "offload_outer_state": False,
    "offload_moments": False,
}


def _objective_problems(config: Config) -> list[str]:
    if config.objective != "time":
        return []
    found = []
    if not config.simulates_time_budget:
        found.append("objective: time needs time_budget and node_speeds, by which it plans")
    for name, value in _PLANNED_WITH.items():
        if (getattr(config, name) or value) != value:  # an unset key will have this value
            found.append(f"{name}: must be {_shown(value)} with objective time, got {_shown(getattr(config, name))}")
    return found


def _optimizer_problems(config: Config) -> list[str]:
    try:
        inner_optimizer_of(config)
    except ConfigError as error:
        return error.problems
    return []


def _sharding_problems(config: Config) -> list[str]:
    size = config.devices_per_node
    found = []
    if config.compares_devices and size == 1:
        found.append(
            "statistics_estimator: must not be across_devices with devices_per_node 1, as one device has one gradient"
        )
    if config.compares_devices and config.sampling_method in NEED_INNER_PRODUCTS:
        found.append(
            f"statistics_estimator: must not be across_devices with {config.sampling_method}, as gradients of "
            f"micro-batches do not say how inner products of the whole batch vary"
        )
    if size == 1:
        return found
    if config.processes != "auto" and config.processes % size:
        found.append(f"processes: must be a multiple of devices_per_node, {size}, got {config.processes}")
    if config.compile_model:
        found.append(f"compile_model: must be false with devices_per_node {size}")
    if config.loss_chunk_tokens:
        found.append(f"loss_chunk_tokens: must be null with devices_per_node {size}, got {config.loss_chunk_tokens}")
    if not METHODS[config.distributed_algo]().capabilities.shards:
        able = ", ".join(name for name in METHODS if METHODS[name]().capabilities.shards)
        found.append(
            f"distributed_algo: {config.distributed_algo} does not support parts of flat tensors; with "
            f"devices_per_node {size} use {able}"
        )
    optimizer = inner_optimizer_name(config)
    if optimizer is not None and not INNER_OPTIMIZERS[optimizer].shards:
        found.append(f"inner_optimizer: {optimizer} needs whole matrices; with devices_per_node {size} use adamw")
    return found


# Keys without effect

# Key -> other keys, and their values with which the key is not read. Values that are not listed may read it.
NOT_READ_WITH: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "data_shares": {"data_split": ("iid",), "data_split_over": ("trainers",)},
    "single_seed": {"need_to_reinit_output_layers": (False,)},
    "link": {"time_budget": (None,), "node_speeds": (None,)},
    "switch_multiplier": {"switch_mode": ("only_gradient_accumulation", "only_data_loader")},
    "minimum_learning_rate_ratio": {"learning_rate_schedule": ("constant",)},
}


def idle_keys(config: Config) -> list[str]:
    """Return one warning for each changed key that nothing in this run reads.

    Parameters of the batch test and of merging are left out: `sampling_method: none`, `objective: time` and one trainer
    over the demo's file turn them off on purpose. A warning is not an error, as comparisons give the same keys to many
    methods. Synchronisation methods declare the `outer_keys` that they read, inner optimizers and datasets their
    `keys`.
    """
    default = Config()
    return [
        f"{key}: has no effect with {reason}"
        for key, reason in sorted(_without_effect(config).items())
        if getattr(config, key) != getattr(default, key)
    ]


def _without_effect(config: Config) -> dict[str, str]:
    reasons = {}
    for key, others in NOT_READ_WITH.items():
        if all(getattr(config, other) in values for other, values in others.items()):
            reasons[key] = " and ".join(f"{other} {_shown(getattr(config, other))}" for other in others)
    if "clearml" not in config.trackers and config.clearml != "off":
        reasons["clearml"] = f"trackers {_shown(config.trackers)}"
    if not config.trackers:
        reasons["project_name"] = "trackers []"
    elif config.trackers == ["clearml"] and config.clearml == "off":
        reasons["project_name"] = "clearml off and trackers ['clearml']"
    dataset = DATASETS[config.dataset]
    if dataset.keys is not None:
        dataset_keys = set().union(*(each.keys or () for each in DATASETS.values()))
        reasons |= dict.fromkeys(dataset_keys - set(dataset.keys), f"dataset {config.dataset}")
    of_set = config.dataset == "c4" and config.c4_tokenized_path is not None
    if of_set:
        reasons["c4_language"] = "c4_tokenized_path"
    if of_set or config.tokenizer is not None or is_pretrained(config.model_config):
        reasons["vocab_size"] = "a tokenizer that is not trained here"
    if is_pretrained(config.model_config):
        reasons["identical_initialisation"] = "a pretrained model"
    method = f"distributed_algo {config.distributed_algo}"
    reasons |= dict.fromkeys(set(OUTER_KEYS) - set(method_of(config).capabilities.outer_keys), method)
    optimizer = inner_optimizer_name(config)
    optimizer_keys = set().union(*(each.keys for each in INNER_OPTIMIZERS.values()))
    if optimizer is None:  # the method updates the parameters itself
        reasons |= dict.fromkeys(optimizer_keys - {"weight_decay"}, method)
    else:
        unread = optimizer_keys - set(INNER_OPTIMIZERS[optimizer].keys)
        reasons |= dict.fromkeys(unread, f"inner_optimizer {optimizer}")
        if optimizer == "sgd" and config.lr_sgd is not None:
            reasons["learning_rate_for_inner_opt"] = "lr_sgd"
    return reasons


# Keys that the published configurations do not give, although results depend on them.
_LEFT_OPEN = (
    "sequence_length",
    "identical_initialisation",
    "inner_optimizer",
    "inner_optimizer_config",
    "outer_momentum",
    "weight_decay",
    "gradient_clipping",
    "switch_mode",
    "switch_multiplier",
    "merging_policy",
    "merge_frequency",
    "merge_count",
)


def left_open(given: Collection[str], config: Config) -> list[str]:
    """Return a line with the defaults that a published configuration with these keys takes from this project."""
    idle = _without_effect(config)
    optimizer = inner_optimizer_name(config)  # null: the method's own
    parameters = {} if optimizer is None else dataclasses.asdict(INNER_OPTIMIZERS[optimizer]())
    used = dataclasses.replace(config, inner_optimizer=optimizer, inner_optimizer_config=parameters)
    idle |= {} if parameters else {"inner_optimizer_config": "none"}
    keys = [key for key in _LEFT_OPEN if key not in given and key not in idle]
    values = ", ".join(f"{key} {_shown(getattr(used, key))}" for key in keys)
    return [f"published configuration: it does not give {values}: defaults of this project"] if keys else []


def _warnings(config: Config) -> list[str]:
    found = idle_keys(config)
    joined = 2 * (config.smallest_worker_batch or 0)
    if config.budget in ("communication_budget", "byte_budget") and config.INITIAL_BATCH_SIZE < joined:
        found.append(
            f"{config.budget}: one worker alone sends nothing, and a second one joins at a batch of {joined} "
            f"(smallest_worker_batch); the first batch is {config.INITIAL_BATCH_SIZE}. smallest_worker_batch=null: all "
            f"workers train from the first round"
        )
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return json.dumps(value) if isinstance(value, bool | dict) else value


CHECKS = Checks(
    choices=CHOICES,
    problems=(
        _model_problems,
        method_problems,
        _objective_problems,
        _optimizer_problems,
        split_problems,
        _sharding_problems,
    ),
    warnings=_warnings,
    left_open=left_open,
)
