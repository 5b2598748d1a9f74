"""Keys without effect: their warnings are compared with runs of every method in which all of them have other values."""

import json

import pytest

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.method import OUTER_KEYS
from cluster import Cluster
from fabrics.config_checks import CHECKS, idle_keys
from fabrics.training.optimizers import INNER_OPTIMIZERS
from tests.support import matrix
from tests.support.helpers import Recorder
from utils.config.reading import parse_config

pytestmark = pytest.mark.usefixtures("matrix_ready")

# Another value for each key that only some methods or inner optimizers read.
OTHER = {
    "learning_rate_for_outer_opt": 0.02,
    "outer_momentum": 0.4,
    "lr_sgd": 0.2,
    "weight_decay": 0.0,
}
# Every method, also with parameters or inner optimizers that change what it reads.
VARIANTS = [
    *((name, {}) for name in METHODS if name != "StreamingDiLoCo"),
    ("StreamingDiLoCo", {"number_of_inner_steps_between_outers": 4}),
    ("SPARTA", {"synchronisation": {"share": 0.5, "with_diloco": True}}),
    ("DiLoCo", {"inner_optimizer": "sgd"}),
    ("DiLoCo", {"inner_optimizer": "muon"}),
    ("LocalSGD", {"inner_optimizer": "adamw"}),
    ("Synchronous", {"inner_optimizer": "sgd"}),
]
# Two trainers of one worker each, which merge into one with two workers.
RUN = {
    "number_of_outer_steps": 2, "merge_frequency": 1, "number_of_initial_trainers": 2, "nodes_per_gpu": 2,
    "identical_initialisation": False, "number_of_inner_steps_between_outers": 2, "eval_every": 2,
}  # fmt: skip


def outcome(name: str, values: dict) -> dict:
    """Return all results of a run, except times."""
    cluster = Cluster(matrix.config_of(name, **RUN | values), matrix.data())
    cluster.train(Recorder())
    state, totals = matrix.state_of(cluster), cluster.counters
    left = {
        "trainers": json.loads(state["values"])["trainers"],
        "bytes": (totals.bytes_merged, totals.bytes_redistributed),
    }
    return left | {key: tensor.numpy().tobytes() for key, tensor in state["tensors"].items()}


def idle(name: str, values: dict) -> set[str]:
    """Return the keys of OTHER with a warning, if all have other values."""
    return {line.split(":")[0] for line in idle_keys(matrix.config_of(name, **RUN | values | OTHER))} & OTHER.keys()


def test_every_declared_key_is_tried():
    assert set(OTHER) == {*OUTER_KEYS, *(key for kind in INNER_OPTIMIZERS.values() for key in kind.keys)}


@pytest.mark.parametrize(("name", "values"), VARIANTS, ids=str)
def test_exactly_the_keys_that_change_nothing_have_a_warning(name, values):
    without, plain = idle(name, values), outcome(name, values)
    assert outcome(name, values | {key: OTHER[key] for key in without}) == plain
    for key in OTHER.keys() - without:
        assert outcome(name, values | {key: OTHER[key]}) != plain, key


def test_defaults_have_no_warning():
    assert all(idle_keys(matrix.config_of(name)) == [] for name in METHODS)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"c4_language": "de"}, ["c4_language"]),
        ({"project_name": "x", "clearml": False}, ["project_name"]),
        ({"trackers": [], "clearml": "online", "project_name": "x"}, ["clearml", "project_name"]),
        ({"tokenizer": "x", "vocab_size": 999}, ["vocab_size"]),
        (
            {"dataset": "c4", "c4_tokenized_path": "set", "c4_language": "de", "vocab_size": 999},
            ["c4_language", "vocab_size"],
        ),
        ({"switch_mode": "only_data_loader", "switch_multiplier": 3}, ["switch_multiplier"]),
        ({"minimum_learning_rate_ratio": 0.2}, ["minimum_learning_rate_ratio"]),
        ({"single_seed": True}, ["single_seed"]),
        (
            {"lr_sgd": 0.1, "inner_optimizer": "sgd", "learning_rate_for_inner_opt": 0.1},
            ["learning_rate_for_inner_opt"],
        ),
        ({"link": "1Gb/s"}, ["link"]),
        ({"link": "1Gb/s", "node_speeds": [1, 1, 1, 1]}, []),
    ],
)
def test_each_key_without_effect_has_one_warning(values, expected):
    warnings = parse_config({"number_of_outer_steps": 1} | values, (), CHECKS)[1]
    assert [line.split(":")[0] for line in warnings] == expected
    assert all(": has no effect with " in line for line in warnings)


@pytest.mark.parametrize(("batch", "warned"), [(31, ["communication_budget"]), (32, [])])
def test_a_budget_that_a_lone_worker_may_not_spend_is_warned_of(batch, warned):
    values = {"max_tokens": 10**6, "communication_budget": 9, "smallest_worker_batch": 16, "INITIAL_BATCH_SIZE": batch}
    _, warnings = parse_config(values, (), CHECKS)
    assert [line.split(":")[0] for line in warnings] == warned
