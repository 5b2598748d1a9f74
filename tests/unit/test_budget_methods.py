"""Budgets with every method whose rounds can be planned: small runs end with what they were given."""

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest

from algorithms.synchronisation import METHODS
from cluster import Cluster
from tests.support import matrix
from tests.support.helpers import (
    TINY_ARCHITECTURE,
    VOCABULARY,
    Recorder,
    build_light,
    light_cluster,
    make_config,
    padded,
    tiny_cluster,
    tiny_data,
)

PLANNABLE = [name for name, method in METHODS.items() if method().capabilities.one_exchange]


def spent(name: str, **values):
    cluster = light_cluster(
        **{
            "distributed_algo": name,
            "number_of_outer_steps": None,
            "max_tokens": 1_800,
            "number_of_inner_steps_between_outers": 2,
            "number_of_initial_trainers": 1,
            "sampling_method": "none",
            "INITIAL_BATCH_SIZE": 8,
            "eval_every": 99,
        }
        | matrix.PARAMETERS.get(name, {})
        | values
    )
    cluster.train(Recorder())
    return cluster.counters


@pytest.mark.parametrize("name", PLANNABLE)
def test_a_run_ends_within_five_percent_of_its_budget(name):
    communications = spent(name, communication_budget=12, nodes_per_gpu=2)
    assert communications.communications == 12
    budget = round(communications.bytes_communicated * 0.77)
    used = spent(name, byte_budget=budget, nodes_per_gpu=2).bytes_communicated
    assert 0.95 * budget <= used <= budget


@pytest.mark.parametrize("name", PLANNABLE)
def test_what_is_planned_of_a_round_is_what_it_sends(name):
    cluster = tiny_cluster(distributed_algo=name, number_of_initial_trainers=1, sampling_method="none")
    (trainer,) = cluster.trainers.values()
    (report,) = cluster.run_round(Recorder()).reports.values()
    assert report.bytes_synchronised == trainer.worker_group.round_bytes(4, tested=False)
    assert report.communications == 1


@pytest.mark.parametrize("name", PLANNABLE)
def test_trainers_that_merge_end_within_their_budget_of_bytes(name):
    values = {"number_of_initial_trainers": 2, "merge_frequency": 2}
    budget = round(spent(name, communication_budget=12, **values).bytes_communicated)
    assert 0.95 * budget <= spent(name, byte_budget=budget, **values).bytes_communicated <= 1.05 * budget


@pytest.mark.parametrize("schedule", ["linear", "warmup_stable_decay"])
def test_with_examples_of_unlike_lengths_a_run_has_no_round_too_many(schedule):
    """The last ones may be short, and more of them needed than was thought; the learning rate falls to its end."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(2.0, 0.8, 400).astype(int), 3, 64)
    texts = padded([generator.integers(1, VOCABULARY, length).tolist() for length in lengths], None, 64)
    data = dataclasses.replace(tiny_data(), train=texts)
    for seed in range(3):
        config = make_config(
            model_config=TINY_ARCHITECTURE, number_of_outer_steps=None, max_tokens=3000, number_of_initial_trainers=1,
            sampling_method="none", number_of_inner_steps_between_outers=2, communication_budget=8,
            learning_rate_schedule=schedule, minimum_learning_rate_ratio=0.0, eval_every=99, training_seed=seed,
            nodes_per_gpu=2,
        )  # fmt: skip
        with patch("fabrics.models.initialisation.build_model", build_light):
            cluster = Cluster(config, data)
        recorder = Recorder()
        cluster.train(recorder)
        assert (cluster.counters.communications, recorder.warnings) == (8, [])
        rates = [rate for result in recorder.rounds for rate in result.reports[0].workers[0].learning_rates]
        falling = rates[len(rates) // 10 :] if schedule == "linear" else rates[-len(rates) // 5 :]
        assert falling == sorted(falling, reverse=True)
        assert rates[-1] < 0.6 * rates[-len(rates) // 5]


MODEL_BYTES = 27_072


@pytest.mark.parametrize(
    ("models", "workers", "values"),
    [
        # Two of four nodes have work for the largest batch of a schedule, and of what a test may ask for.
        (84, 2, {"nodes_per_gpu": 4, "sampling_method": "none", "batch_schedule": [[0.3, 8]]}),
        (100, 2, {"nodes_per_gpu": 4, "sampling_method": "norm_test", "max_requested_batch": 8}),
        # Four of eight have joined when the learning rate begins to decay, from where on the batch stays.
        (84, 4, {"nodes_per_gpu": 8, "learning_rate_schedule": "warmup_stable_decay", "max_batch_growth": 1.02}),
    ],
)
def test_nothing_is_kept_for_workers_that_will_not_join(models, workers, values):
    cluster = light_cluster(
        number_of_outer_steps=None, max_tokens=9000, number_of_initial_trainers=1, INITIAL_BATCH_SIZE=4,
        smallest_worker_batch=4, byte_budget=models * MODEL_BYTES, eval_every=99, **values,
    )  # fmt: skip
    cluster.train(Recorder())
    assert max(len(trainer.nodes) for trainer in cluster.trainers.values()) == workers
    assert 0.95 * models * MODEL_BYTES <= cluster.counters.bytes_communicated <= models * MODEL_BYTES


def test_what_is_left_of_a_budget_is_told():
    """Four trainers of two workers spend four in a round."""
    values = {"number_of_initial_trainers": 4, "nodes_per_gpu": 8, "merge_frequency": 99, "sampling_method": "none"}
    cluster, recorder = (
        light_cluster(number_of_outer_steps=None, max_tokens=3000, communication_budget=15, **values),
        Recorder(),
    )
    cluster.train(recorder)
    assert cluster.counters.communications == 12
    (warning,) = recorder.warnings
    assert warning.startswith("communication_budget: 12 of 15 communications were used")
