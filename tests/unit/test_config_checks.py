"""Keys without effect: every method is run with other values of all of them, and what it warns of is what is idle."""

import json

import pytest

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.method import OUTER_KEYS
from cluster import Cluster
from fabrics.config_checks import CHECKS, idle_keys
from fabrics.training.optimizers import INNER_OPTIMIZERS, InnerOptimizerKind
from tests.support import matrix
from tests.support.helpers import Recorder
from utils.config.reading import parse_config

# Another value of every key that only some methods or inner optimisers look at.
OTHER = {
    "learning_rate_for_outer_opt": 0.02,
    "outer_momentum": 0.4,
    "lr_sgd": 0.2,
    "weight_decay": 0.0,
    "adam_betas": [0.5, 0.6],
}
# Every method, and what its own parameters or another inner optimiser make of it.
VARIANTS = [
    *((name, {}) for name in METHODS if name != "StreamingDiLoCo"),
    ("StreamingDiLoCo", {"number_of_inner_steps_between_outers": 4}),
    ("FedOpt", {"synchronisation": {"server_optimizer": "avg"}}),
    ("SPARTA", {"synchronisation": {"share": 0.5, "every": 3}}),  # counts inner steps over rounds
    ("SPARTA", {"synchronisation": {"share": 0.5, "with_diloco": True}}),
    ("FDA", {"synchronisation": {"outer": "nesterov"}}),
    ("FDA", {"synchronisation": {"outer": "adam"}, "learning_rate_for_outer_opt": 0.03}),
    ("NoLoCo", {"synchronisation": {"momentum": 0.5}}),
    ("DiLoCo", {"inner_optimizer": "sgd"}),
    ("DiLoCo", {"inner_optimizer": "muon"}),
    ("LocalSGD", {"inner_optimizer": "adamw"}),
    ("Synchronous", {"inner_optimizer": "sgd"}),
]
# Two trainers of a worker each that become one of two.
RUN = {
    "number_of_outer_steps": 2, "merge_frequency": 1, "number_of_initial_trainers": 2, "nodes_per_gpu": 2,
    "identical_initialisation": False, "number_of_inner_steps_between_outers": 2, "eval_every": 2,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _ready():
    with matrix.ready():
        yield


def outcome(name: str, values: dict) -> dict:
    """All that a run of a method leaves, but times."""
    cluster = Cluster(matrix.config_of(name, **RUN | values), matrix.data())
    cluster.train(Recorder())
    state, totals = matrix.state_of(cluster), cluster.counters
    left = {
        "trainers": json.loads(state["values"])["trainers"],
        "bytes": (totals.bytes_merged, totals.bytes_redistributed),
    }
    return left | {key: tensor.numpy().tobytes() for key, tensor in state["tensors"].items()}


def idle(name: str, values: dict) -> set[str]:
    """The keys that it is warned of where all have other values."""
    return {line.split(":")[0] for line in idle_keys(matrix.config_of(name, **RUN | values | OTHER))}


def test_all_keys_are_tried():
    assert set(OTHER) == {*OUTER_KEYS, *(key for kind in INNER_OPTIMIZERS.values() for key in kind.keys)}


@pytest.mark.parametrize(("name", "values"), VARIANTS, ids=str)
def test_a_key_is_warned_of_where_it_changes_nothing_and_only_there(name, values):
    without, plain = idle(name, values), outcome(name, values)
    assert outcome(name, values | {key: OTHER[key] for key in without}) == plain
    for key in OTHER.keys() - without:
        assert outcome(name, values | {key: OTHER[key]}) != plain, key


def test_values_of_the_defaults_are_not_warned_of():
    assert all(idle_keys(matrix.config_of(name)) == [] for name in METHODS)


def test_a_run_is_warned_once_of_each_key():
    keys = {"distributed_algo": "LocalSGD", "outer_momentum": 0.5, "adam_betas": [0.9, 0.95]}
    assert parse_config({"number_of_outer_steps": 1} | keys, (), CHECKS)[1] == [
        "adam_betas: has no effect with inner_optimizer sgd",
        "outer_momentum: has no effect with distributed_algo LocalSGD",
    ]


def test_an_optimiser_that_does_not_say_what_it_looks_at_is_believed_to_look_at_everything(monkeypatch):
    sgd = INNER_OPTIMIZERS["sgd"]
    monkeypatch.setitem(INNER_OPTIMIZERS, "own", InnerOptimizerKind(sgd.state, sgd.over, sgd.state_shapes))
    assert idle("DiLoCo", {"inner_optimizer": "sgd"})
    assert not idle("DiLoCo", {"inner_optimizer": "own"})
