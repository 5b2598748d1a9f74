"""The max batch: the search on synthetic devices, its measurement on a CPU, and the memory that is set aside."""

import dataclasses

import numpy as np
import pytest
import torch

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.group import WorkerMessages
from cluster import Cluster
from fabrics.data.examples import PackedSequences
from fabrics.pool import max_batch
from fabrics.pool.max_batch import calculate_max_batch, find_max_batch
from fabrics.pool.run_checks import check_statistics
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import backward
from fabrics.training.worker import Node, TrainingError
from tests.support.helpers import (
    CPU,
    TINY_ARCHITECTURE,
    LocalProcesses,
    make_config,
    padded,
    random_sequences,
    resumed,
    tiny_bert,
    tiny_cluster,
    tiny_data,
    tiny_llama,
    train,
)
from tests.support.synchronising import trainer_of
from utils.config.schema import ConfigError

ACROSS_WORKERS = {"statistics_estimator": "across_workers"}
INNER_PRODUCTS = {"sampling_method": "inner_product_test", "nodes_per_gpu": 8}


@pytest.mark.parametrize(
    ("fixed", "per_example", "budget", "expected"),
    [(100, 30, 1000, 30), (0, 10, 1000, 100), (100, 30, 130, 1), (100, 30, 199, 3), (50, 7, 10**6, 142850)],
)
def test_the_largest_batch_of_a_linear_device(fixed, per_example, budget, expected):
    measured = []

    def measure(batch):
        measured.append(batch)
        return fixed + per_example * batch

    assert find_max_batch(measure, budget) == expected
    assert len(measured) <= 6


def test_a_prediction_that_does_not_fit_is_shrunk_until_it_does():
    def measure(batch):  # steeper beyond 40 examples than the probes can tell
        return 10 * batch if batch <= 40 else 10 * 40 + 30 * (batch - 40)

    batch = find_max_batch(measure, 700)
    assert batch >= 40
    assert measure(batch) <= 700


def test_a_probe_may_run_out_of_memory():
    assert find_max_batch(lambda batch: None if batch > 2 else 100 * batch, 10_000) == 2
    assert find_max_batch(lambda batch: None if batch > 3 else 100 * batch, 10_000) == 3
    assert find_max_batch(lambda batch: 100 * batch, 99) == 0


def test_a_batch_may_be_bounded():
    assert find_max_batch(lambda batch: 100 * batch, 10_000, largest=50) == 50
    assert find_max_batch(lambda batch: 100 * batch, 10_000, largest=500) == 100


def test_a_measurement_on_the_cpu_leaves_nothing_behind():
    working = FlatModel(tiny_bert(dtype=torch.float32, dropout=0.1).train(), CPU)
    ids = random_sequences(20)

    class Examples(PackedSequences):
        def batch(self, indices, device):
            batch = super().batch(indices, device)
            return {"input_ids": batch["input_ids"], "labels": batch["input_ids"][:, 0] % 2}

    examples = Examples(ids)
    parameters, state = working.parameters.detach().clone(), torch.get_rng_state()
    sizes = []

    def step(count):
        sizes.append(count)
        backward(working, examples, np.arange(count) % len(examples))

    batch = calculate_max_batch(step, working, 0.9, sharing=4, reserved_bytes=0)
    assert batch > 100
    assert sizes == [2, 1, 2]  # what is compiled is compiled first
    assert torch.equal(working.parameters, parameters)
    assert working.gradient.abs().sum() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert working.module.training


def test_a_model_that_does_not_fit_names_the_keys():
    working = FlatModel(tiny_llama(dtype=torch.float32), CPU)
    with pytest.raises(MemoryError, match=r"no example fits on cpu.*padding_percentage 0\.9.*nodes_per_gpu"):
        calculate_max_batch(lambda count: None, working, 0.9, 4, reserved_bytes=10**15)


def test_a_pass_of_a_shard_group_that_does_not_fit_asks_for_the_key(monkeypatch):
    def attempt(model, work):
        raise TrainingError("max_batch_size: cuda:0, device 0 of a node of 2, ran out of memory; lower max_batch_size")

    monkeypatch.setattr(FlatModel, "attempt", attempt)
    with pytest.raises(ConfigError, match=r"^max_batch_size: measuring it takes .* give it instead of null"):
        Cluster(make_config(max_batch_size=None), tiny_data())


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (ACROSS_WORKERS, "statistics_estimator: .* got 4"),
        (INNER_PRODUCTS | {"batch_test_confidence": 2.0}, "batch_test_confidence: .* 0 "),
        (INNER_PRODUCTS | {"batch_test_confidence": 2.0, "statistics_smoothing": 0.2}, "batch_test_confidence: .* 0 "),
        (INNER_PRODUCTS | {"statistics_batch_size": 4}, "statistics_batch_size: .* 5 "),
        (INNER_PRODUCTS | ACROSS_WORKERS | {"debias": True}, "debias: .* false"),
        (INNER_PRODUCTS | ACROSS_WORKERS, "statistics_estimator: .* got 2"),
    ],
)
def test_statistics_that_could_never_be_taken_are_refused(settings, key):
    config = make_config(**settings)
    nodes = [Node(number, CPU, 64) for number in range(config.nodes_per_gpu)]
    with pytest.raises(ConfigError, match=f"^{key}"):
        check_statistics(config, nodes, 24)


def test_a_cluster_refuses_a_probe_of_more_examples_than_a_trainer_has():
    with pytest.raises(ConfigError, match=r"^statistics_batch_size: .* 24 .* got 25"):
        tiny_cluster(statistics_batch_size=25)


def test_samples_of_several_workers_need_less_smoothing():
    """Two workers with a smoothing of 0.25 count as 2 (1.25 / 0.75) > 3 samples."""
    cluster = tiny_cluster(**INNER_PRODUCTS, batch_test_confidence=2.0, statistics_smoothing=0.25)
    assert [len(trainer.nodes) for trainer in cluster.trainers.values()] == [2] * 4


@pytest.mark.parametrize(
    ("nodes", "trainers", "values", "most_workers"),
    [
        (4, 1, {}, 4),
        (3, 2, {}, 2),
        (1, 2, {}, 1),
        (4, 1, {"participants": 0.5}, 2),
        (4, 1, {"smallest_worker_batch": 1}, 4),
        (4, 1, {"smallest_worker_batch": 2}, 1),
    ],
)
def test_devices_are_compared_if_every_worker_begins_with_two_examples(nodes, trainers, values, most_workers):
    values |= {"number_of_initial_trainers": trainers, "statistics_estimator": "across_devices"}
    pool = [Node(number, CPU, 64) for number in range(nodes)]
    check_statistics(make_config(**values, INITIAL_BATCH_SIZE=most_workers + 1), pool, 64)
    with pytest.raises(ConfigError, match=f"^statistics_estimator: .* INITIAL_BATCH_SIZE {most_workers} "):
        check_statistics(make_config(**values, INITIAL_BATCH_SIZE=most_workers), pool, 64)


def test_memory_is_measured_with_the_longest_example():
    examples, widths = padded([[1, 2, 3]] * 50 + [[1] * 70] + [[1, 2]] * 49), set()

    class Recorded:
        largest = examples.largest

        def __len__(self):
            return len(examples)

        def batch(self, indices, device):
            batch = examples.batch(indices, device)
            widths.add(batch["input_ids"].shape[1])
            return batch

    data = dataclasses.replace(tiny_data(), train=Recorded())
    Cluster(make_config(max_batch_size=None, number_of_initial_trainers=1), data)
    assert widths == {128}  # all other batches have 64 tokens


class _Sharing(LocalProcesses):
    """A process claims that the four nodes of its device belong to several."""

    def __init__(self, owners):
        super().__init__([CPU], 4)
        self.owners = owners

    def sharing(self, node):
        return len(set(self.owners))


@pytest.mark.parametrize(
    ("values", "owners", "sums"),
    [
        ({}, (0, 0, 0, 0), 1),  # the sum of the pseudo-gradients
        ({"communication_dtype": "int8"}, (0, 0, 0, 0), 4),  # and temporaries of the encoding
        ({"statistics_estimator": "across_workers", "number_of_initial_trainers": 1}, (0, 0, 0, 0), 5),
        ({}, (0, 0, 1, 1), 1),
    ],
)
def test_the_memory_of_state_and_rounds_is_set_aside(monkeypatch, values, owners, sums):
    """The state of all trainers is reserved on a CPU, because it has not been written yet."""
    asked = []

    def calculate(step, model, share, sharing, reserved):
        asked.append((sharing, reserved))
        return 64

    monkeypatch.setattr(max_batch, "calculate_max_batch", calculate)
    config = make_config(model_config=TINY_ARCHITECTURE, max_batch_size=None, **values)
    cluster = Cluster(config, tiny_data(), _Sharing(owners))
    size = cluster.model.parameters.nbytes
    state = sum(tensor.nbytes for group in cluster.tensors().values() for tensor in group.values())
    per_worker = 3 if values.get("communication_dtype") == "int8" else 2
    assert state >= size * (2 * len(cluster.trainers) + per_worker * 4)
    sharing = len(set(owners))
    assert asked == [(sharing, sharing * (sums * size + state))]
    assert {node.max_batch for trainer in cluster.trainers.values() for node in trainer.nodes} == {64}


@pytest.mark.parametrize(
    ("held", "held_by_first", "found", "warns"),
    [(64, 64, 32, False), (16, 16, 32, False), (16, 16, 8, True), (16, 4, 16, False), (16, 4, 8, True)],
)
def test_a_resumed_run_says_that_a_nodes_max_batch_is_smaller(monkeypatch, held, held_by_first, found, warns):
    """A trainer never requests more than its 24 examples. One node may have held fewer, since it ran out of memory."""
    config = make_config(model_config=TINY_ARCHITECTURE, max_batch_size=None)
    monkeypatch.setattr(max_batch, "calculate_max_batch", lambda *arguments: held)
    before = Cluster(config, tiny_data())
    before.pool.set_max_batches({node.id: held if node.id else held_by_first for node in before.nodes})
    monkeypatch.setattr(max_batch, "calculate_max_batch", lambda *arguments: found)
    again = resumed(before, Cluster(config, tiny_data()))
    assert ["holds 8 examples, and held 16" in line for line in again.warnings] == [True] * warns


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method().capabilities.message_tensors])
def test_a_process_holds_the_messages_of_its_workers(monkeypatch, name, dtype):
    """The method declares the model-sized tensors per worker, for any encoding."""
    held, result = [], WorkerMessages.result

    def noting(self):
        arrived = result(self)
        storages = [tensor.untyped_storage() for message in arrived.values() for tensor in message]
        held.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        return arrived

    monkeypatch.setattr(WorkerMessages, "result", noting)
    trainer = trainer_of(4, distributed_algo=name, communication_dtype=dtype)
    train(trainer, 1)
    tensors = METHODS[name]().capabilities.message_tensors * 4
    assert held == [tensors * trainer.parameters.nbytes]
    assert max_batch.round_tensors(trainer._config, workers=4, several_processes=False) > tensors


def test_messages_to_and_from_other_processes_are_counted():
    """A worker receives one message in pairs, and all through a server; without messages, pseudo-gradients count."""
    assert max_batch.round_tensors(make_config(), workers=4, several_processes=True) == 5
    pairs, server = make_config(distributed_algo="NoLoCo"), make_config(distributed_algo="DelayedNesterov")
    assert max_batch.round_tensors(pairs, 2, False) == 1 + 2 * (2 + 1)
    assert max_batch.round_tensors(pairs, 2, True, elsewhere=6) == 1 + 2 * (2 + 1 + 2 + 2)
    assert max_batch.round_tensors(pairs, 2, True, elsewhere=1) == 1 + 2 * (2 + 1 + 2 + 1)
    assert max_batch.round_tensors(server, 2, True, elsewhere=6) == 1 + 1 * (2 + 1 + 2 + 6)
