"""Runs that every synchronisation method must survive, in one process and in several (test_method_matrix.py, spmd.py).

Every registered method is in the matrix; PARAMETERS has the values that differ from its defaults.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import nn

from algorithms.synchronisation import METHODS
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.examples import PackedSequences
from fabrics.models import initialisation
from fabrics.training.inner_loop import InnerLoop
from fabrics.training.worker import RoundKey
from fabrics.training.worker_group import WorkerGroup
from tests.support.helpers import (
    NAMES_ONLY,
    TINY_ARCHITECTURE,
    Recorder,
    Stack,
    make_trainer,
    random_sequences,
    tiny_data,
)
from trainers import Trainer
from utils.checkpoint.checkpoint import FilePart
from utils.config.reading import parse_config
from utils.config.schema import Config

# RepeatedArrivals is DelayedNesterov with parameters that make it another method.
OWN = {"RepeatedArrivals": METHODS["DelayedNesterov"]}
NAMES = (*METHODS, *OWN)
# For methods whose defaults do not suit rounds of four inner steps, or small tensors.
PARAMETERS: dict[str, dict] = {
    "LocalSGD": {"learning_rate_for_inner_opt": 0.3},
    "FedOpt": {"learning_rate_for_outer_opt": 0.03},
    "SparseLoCo": {"synchronisation": {"density": 0.5, "chunk": 64}},
    "SPARTA": {"synchronisation": {"share": 0.5}},
    "LoCoDL": {"learning_rate_for_inner_opt": 0.3, "synchronisation": {"probability": 0.5, "density": 0.5}},
    "Decoupled": {"synchronisation": {"steps": 3, "quorum": 2}},
    "RepeatedArrivals": {"synchronisation": {"steps": 3}},
}
# Of runs with four nodes, besides: what happens between workers that are not equally fast. An answer takes 3.3 inner
# steps of the first ones, three examples long; 1.3 where workers wait for it, which make two steps of a round then.
_SPEEDS = {"node_speeds": [1, 0.6, 0.3, 1]}
_CLOCKS = {
    "Decoupled": _SPEEDS | {"link": "10s"},
    "RepeatedArrivals": _SPEEDS | {"link": "4s"},
}
INNER_STEPS = 4


def _build_model(_type, _settings, _tokenizer, _length, seed, *_names) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Stack()


@contextlib.contextmanager
def ready() -> Iterator[None]:
    """Register OWN for the length of the context, and build the smallest models."""
    build_model, initialisation.build_model = initialisation.build_model, _build_model
    added = {name: method for name, method in OWN.items() if name not in METHODS}  # a fork has them already
    METHODS.update(added)
    try:
        yield
    finally:
        initialisation.build_model = build_model
        for name in added:
            del METHODS[name]


def config_of(name: str, **values) -> Config:
    """Return a configuration of a small run with this method."""
    checks = dataclasses.replace(NAMES_ONLY, choices=CHECKS.choices | {"distributed_algo": NAMES})
    common = {
        "number_of_outer_steps": 5,
        "sampling_method": "none",
        "INITIAL_BATCH_SIZE": 12,
        "max_requested_batch": 12,
        "model_config": TINY_ARCHITECTURE,
        "distributed_algo": name,
        "number_of_inner_steps_between_outers": INNER_STEPS,
        "deterministic": True,
        "sequence_length": 9,
        "learning_rate_for_inner_opt": 0.01,
        "max_batch_size": 64,
        "cpu_threads": 1,
        "plot_at_end": False,
    }
    return parse_config(common | PARAMETERS.get(name, {}) | values, checks=checks)[0]


# Seven of the tokens, so that there is something to learn.
EXAMPLES = PackedSequences(random_sequences(64) % 7)


def trainer_of(name: str = "DiLoCo", workers: int = 3, **values) -> Trainer:
    """Return a trainer without a cluster."""
    torch.default_generator.manual_seed(0)
    return make_trainer(Stack(), config_of(name, **values), EXAMPLES, workers)


# Four trainers with a node each, then two, then one with all four; what is under way at the end of round 3 arrives, and
# is evaluated, later. In the round after it, counted from 0, a worker of the one is lost.
STOPPED_AFTER = 3
LOST = (3, 3)
_MERGING = {
    "number_of_initial_trainers": 4,
    "merge_count": 3,
    "merge_frequency": 1,
    "identical_initialisation": False,
    "INITIAL_BATCH_SIZE": 2,
    "sampling_method": "norm_test",
    "ETA": 0.5,
    "ETA_at_end": None,
    "debias": False,
    "statistics_smoothing": 0.0,
    "batch_test_confidence": 0.0,
    "batch_test_start": 1,
    "statistics_batch_size": 2,
    "eval_every": 5,
}


# Two trainers on two nodes, then on four until they merge; then one with three, four and two.
_POOL = _MERGING | {
    "number_of_initial_trainers": 2,
    "number_of_outer_steps": 6,
    "merge_count": 2,
    "merge_frequency": 2,
    "node_schedule": [[0.0, 2], [0.15, 4], [0.3, 3], [0.6, 4], [0.8, 2]],
    "participants": 0.75,
    "message_loss": 0.4,
    "batch_test_start": 5,
}
# In two processes of all methods; in four of some that come together in a mean, by messages, with starts of their own,
# with replicas, and by a clock.
POOL_OF_FOUR = ("DiLoCo", "SparseLoCo", "NoLoCo", "StreamingDiLoCo", "Decoupled", "RepeatedArrivals")


@functools.cache
def data():
    return tiny_data(train=96, validation=4)


def state_of(cluster: Cluster) -> dict:
    """Return the full state of a checkpoint without times; the same in every process."""
    tensors: dict[str, torch.Tensor] = {}
    for groups in cluster.processes.gather(cluster.tensors()):
        for name, group in groups.items():
            for key, tensor in group.items():
                if isinstance(tensor, FilePart):
                    _put(tensor, tensors, f"{name} {key}")
                else:
                    tensors[f"{name} {key}"] = tensor.clone()
    return {"values": json.dumps(cluster.state_dict()), "tensors": tensors}


def _put(part: FilePart, tensors: dict[str, torch.Tensor], key: str) -> None:
    """Write a part of a tensor into the full one, which is created with the first part."""
    values = part.values.detach().flatten()
    whole = tensors.setdefault(key, values.new_zeros(part.shape)).view(-1)
    for start, own in part.pieces:
        whole[start : start + len(values[own])] = values[own]


class Following(Recorder):
    """Remembers the state after a round."""

    def __init__(self, stopped_after: int | None = STOPPED_AFTER):
        super().__init__()
        self.stopped_after = stopped_after
        self.state: dict = {}

    def on_round(self, cluster, result):
        super().on_round(cluster, result)
        if result.outer_step == self.stopped_after:
            self.state = state_of(cluster)


def merging(name: str, **values) -> Config:
    """Return the configuration of a run in which trainers merge."""
    return config_of(name, **_MERGING | _CLOCKS.get(name, {}) | values)


def pool(name: str) -> Config:
    """Return the configuration of a run with a node schedule and, if supported, resting workers and lost messages."""
    config = config_of(name, **_POOL, **_CLOCKS.get(name, {}))
    for key in ("participants", "message_loss"):
        problems = (problem for check in CHECKS.problems for problem in check(config))
        if any(problem.startswith(f"{key}: ") for problem in problems):
            config = dataclasses.replace(config, **{key: getattr(Config(), key)})
    return config


def run(config: Config, processes=None, recorder: Following | None = None, resumes: bool = False) -> dict:
    """Run, and return the states on the way, at the end, and at the end of the run resumed on the way."""
    recorder = recorder or Following()
    settle, refreshed = WorkerGroup._settle, []

    def noting(worker_group, some_end):
        refreshed.append(settle(worker_group, some_end))
        return refreshed[-1]

    with patch.object(WorkerGroup, "_settle", noting):
        cluster = Cluster(config, data(), processes)
        final = cluster.train(recorder)
    states = {"stopped": recorder.state, "final": state_of(cluster)}
    if resumes:
        resumed = Cluster(config, data(), processes)
        resume(resumed, recorder.state)
        resumed.train(Recorder())
        states["resumed"] = state_of(resumed)
    reports = [report for result in recorder.rounds for report in result.reports.values()]
    return {
        "states": states,
        "losses": [evaluation.loss for evaluation in final.values()],
        "train_losses": [report.train_loss for report in reports],
        "events": [[(e.kind, e.step, e.sent, e.received, e.behind, e.through) for e in r.events] for r in reports],
        "requests": [report.requested_batch for report in reports],
        "workers": [len(report.workers) for report in reports],
        "moved": cluster.counters.bytes_merged + cluster.counters.bytes_redistributed,
        "refreshed": sum(exchange.sent for exchange in refreshed),
        "left_out": cluster.counters.left_out,
    }


@contextlib.contextmanager
def losing(lost: Callable[[RoundKey], bool] = lambda key: (key.round, key.worker) == LOST):
    """Let workers diverge in the second inner step of a round."""
    accumulate = InnerLoop._accumulate

    def failing(self, *arguments, **named):
        plan, loss, probes = accumulate(self, *arguments, **named)
        if self.done == 1 and lost(self._assignment.key):
            loss = loss * float("nan")
            self._model.gradient.fill_(float("nan"))
        return plan, loss, probes

    with patch.object(InnerLoop, "_accumulate", failing):
        yield


@functools.cache
def alone(name: str) -> dict:
    """Return the run in which trainers merge and a worker is lost; all tests of a method share it."""
    with losing():
        return run(merging(name))


@functools.cache
def pool_alone(name: str) -> dict:
    """Return the run in which nodes come and go."""
    return run(pool(name))


def resume(cluster: Cluster, state: dict) -> None:
    """Let a cluster continue from the `state_of` another one."""
    cluster.load_state_dict(json.loads(state["values"]), lambda group, key: state["tensors"][f"{group} {key}"])


def assert_same_state(found: dict, expected: dict) -> None:
    """Two states have the same bits, and the same values of every trainer."""
    assert json.loads(found["values"])["trainers"] == json.loads(expected["values"])["trainers"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name
