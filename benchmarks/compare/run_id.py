"""What a run is known by: those values of its resolved configuration that have an effect on what it finds.

So comparisons share runs, and published ones are found again. A new key is one line here, or none where it is marked
as not changing training; tests/integration/test_compare.py fails where a published run that still holds is no longer
found.
"""

import hashlib
import json
from collections.abc import Callable

from algorithms.batch.calc_batch import NEED_INNER_PRODUCTS
from fabrics.training.optimizers import inner_optimizer_name
from utils.config.plugins import import_plugins
from utils.config.schema import FIELDS, Config

# They do not change how a run that goes on is trained, but where it ends and what is evaluated.
_OF_RESULTS = ("number_of_outer_steps", "number_of_training_epochs", "max_tokens", "eval_every", "eval_batch_size")
# Names in the run folder, and threads, of which every run of a comparison has one.
_PLACES = ("log_file", "memory_report_dir", "model_training_report_dir", "model_weights_dir", "cpu_threads")
_OF_TESTS = ("ETA", "ETA_at_end", "vartheta", "nu", "batch_test_confidence")
_OF_STATISTICS = ("debias", "statistics_estimator", "statistics_within_island", "statistics_batch_size",
                  "statistics_smoothing", "batch_test_start")  # fmt: skip
_OF_SEVERAL_TRAINERS = ("identical_initialisation", "merging_policy", "merge_frequency", "merge_count",
                        "outer_momentum_at_merge", "inner_state_at_merge")  # fmt: skip
_OF_BUDGETS = ("budget_sets", "budget_growth", "budget_noise")
_OF_LINKS = ("link_bits_per_second", "link_latency_seconds")
_OF_OUTER_STEPS = ("learning_rate_for_outer_opt", "outer_momentum")
_OF_ADAMW = ("weight_decay", "adam_betas", "adam_epsilon")

# When -> which keys have no effect.
_WITHOUT_EFFECT: tuple[tuple[Callable[[Config], bool], tuple[str, ...]], ...] = (
    (lambda c: c.sampling_method == "none", _OF_TESTS + _OF_STATISTICS),
    (lambda c: c.sampling_method == "none" and not c.plans_batches, ("max_batch_growth",)),
    (lambda c: c.sampling_method != "norm_test", ("ETA", "ETA_at_end")),
    (lambda c: c.sampling_method not in NEED_INNER_PRODUCTS, ("vartheta",)),
    (lambda c: c.sampling_method != "augmented_inner_product_test", ("nu",)),
    (lambda c: c.budget is None, _OF_BUDGETS),
    (lambda c: not c.plans_batches, ("budget_growth", "budget_noise")),
    (lambda c: c.plans_batches, _OF_TESTS),
    (lambda c: c.number_of_initial_trainers == 1, ("redistribute_horizon",)),
    (lambda c: c.time_budget is c.node_speeds is c.redistribute_horizon is None, _OF_LINKS),
    (lambda c: c.balance == "equal" or c.node_speeds is not None, ("balance_hysteresis",)),
    (lambda c: c.inner_steps_rule == "fixed", ("inner_steps_alpha",)),
    (lambda c: c.learning_rate_schedule == "constant", ("minimum_learning_rate_ratio",)),
    (lambda c: c.learning_rate_schedule != "warmup_stable_decay", ("decay_share", "decay_shape")),
    (lambda c: c.number_of_initial_trainers == 1, _OF_SEVERAL_TRAINERS),
    (lambda c: c.number_of_initial_trainers == 1 and c.smallest_worker_batch is None, ("redistribution_hysteresis",)),
    (lambda c: c.number_of_initial_trainers == 1 or not c.need_to_reinit_output_layers, ("single_seed",)),
    (lambda c: c.distributed_algo in ("LocalSGD", "Synchronous"), _OF_OUTER_STEPS),
    (lambda c: inner_optimizer_name(c) != "sgd", ("lr_sgd",)),
    (lambda c: inner_optimizer_name(c) != "muon", ("muon_momentum",)),
    (lambda c: inner_optimizer_name(c) == "sgd", _OF_ADAMW),
    (lambda c: inner_optimizer_name(c) == "sgd" and c.lr_sgd is not None, ("learning_rate_for_inner_opt",)),
    (lambda c: c.switch_mode != "threshold_switch_mode", ("switch_multiplier",)),
    (lambda c: c.max_batch_size is not None, ("padding_percentage",)),
    (lambda c: c.tokenizer is not None or c.model_config.get("pretrained") is True, ("vocab_size",)),
)  # fmt: skip
# Keys that came later, and the value that stands for what was before: with it a run is known as it was known then.
_AS_BEFORE = {
    "communication_budget": None,
    "byte_budget": None,
    "time_budget": None,
    "inner_steps_rule": "fixed",
    "smallest_worker_batch": None,
    "warmup_tokens": 0,
    "val_sequences": 10_000,
    "joining_moments": "copy",
    "synchronisation": {},
    "inner_optimizer": None,
    "parameter_dtype": "float32",
    "node_speeds": None,
    "balance": "equal",
    "balance_hysteresis": 0.1,
    "redistribute_horizon": None,
    "node_schedule": None,
    "participants": 1.0,
    "message_loss": 0.0,
    "devices_per_node": 1,
    "statistics_within_island": False,
    "data_split": "iid",
    "data_split_over": "trainers",
    "data_shares": None,
    "data_clusters": None,
    "dirichlet_alpha": 0.5,
    "weigh_shares": False,
}

# Keys that have another name now, by which runs are not known.
_NAMED_BEFORE = {"joining_moments": "new_worker_moments"}

# Parameters of methods that are null by default now, and what was the default before.
_NULL_NOW = {"Decoupled": {"quorum": 1}}


def effective_values(config: Config) -> dict:
    """The keys of a configuration that have an effect, and their values."""
    values = {name: getattr(config, name) for name in FIELDS}
    idle = set(_PLACES) | {name for when, names in _WITHOUT_EFFECT if when(config) for name in names}
    for name, entry in FIELDS.items():
        datasets = entry.metadata["datasets"]
        if (
            name in idle
            or (not entry.metadata["changes_training"] and name not in _OF_RESULTS)
            or (datasets and config.dataset not in datasets)
            or (name in _AS_BEFORE and values[name] == _AS_BEFORE[name])
        ):
            del values[name]
    if config.compile_model == "auto":
        values["compile_model"] = False  # what it was; compiled, a run finds the same but for rounding
    if before := _NULL_NOW.get(config.distributed_algo):
        given = dict.fromkeys(before) | config.synchronisation
        values["synchronisation"] = {key: value for key, value in given.items() if (key, value) not in before.items()}
        if not values["synchronisation"]:
            del values["synchronisation"]
    if config.plugins:
        values["plugins"] = sorted(plugin.sha256 for plugin in import_plugins(config.plugins))
    return {_NAMED_BEFORE.get(name, name): value for name, value in values.items()}


def run_id(config: Config) -> str:
    """The name of a run: equal for configurations that train and evaluate the same."""
    text = json.dumps(effective_values(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
