"""Methods whose workers keep parameters of their own: what is evaluated, counted, merged and resumed."""

import pytest
import torch

from algorithms.synchronisation import METHODS
from cluster import Cluster
from fabrics.training.worker import COPY
from tests.support.helpers import Recorder, light_cluster, resumed, train
from tests.support.synchronising import trainer_of


def cluster_of(**more) -> Cluster:
    """Return a cluster whose workers never exchange parameters."""
    values = {"distributed_algo": "FDA", "synchronisation": {"threshold": 1e9}, "number_of_initial_trainers": 1}
    values |= {"sampling_method": "none", "INITIAL_BATCH_SIZE": 8, "eval_every": 99}
    return light_cluster(**values | more)


def rounds(cluster, count: int) -> None:
    for _ in range(count):
        cluster.run_round(Recorder())


def copies(cluster) -> torch.Tensor:
    """Return the copies of the only trainer's workers, one row each."""
    (trainer,) = cluster.trainers.values()
    return torch.stack([worker.state[COPY] for worker in trainer.local_workers.values()])


def test_looking_at_a_run_neither_counts_nor_changes_it():
    """A worker that joins needs the mean of the others, and that is sent whether somebody has looked at it or not."""
    found = []
    for every in (1, 99):
        cluster = cluster_of(eval_every=every, smallest_worker_batch=4, INITIAL_BATCH_SIZE=8)
        rounds(cluster, 1)
        trainer = cluster.trainers[0]
        assert len(trainer.nodes) == 2
        if every == 99:
            cluster.tensors()  # as for a checkpoint
        mean = copies(cluster).mean(0)
        trainer.batch_control.requested_batch = 16
        cluster.assign_nodes()
        assert len(trainer.nodes) == 4
        for index in (2, 3):
            torch.testing.assert_close(trainer.local_workers[index].state[COPY], mean, rtol=1e-6, atol=1e-7)
        rounds(cluster, 1)
        found.append((copies(cluster), cluster.counters.bytes_redistributed))
        # The mean over the two; to each new worker parameters, where they met, xi, two moments and a step count.
        model = trainer.worker_group.parameter_bytes
        assert found[-1][1] == 2 * model + 2 * (5 * model + 4)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("method", ["SparseLoCo", "EagerDiLoCo"])
def test_workers_settle_over_a_ring(method):
    """Two rings of four before a merge, and a ring of eight before four workers leave."""
    values = {"distributed_algo": method, "nodes_per_gpu": 8, "sampling_method": "none", "INITIAL_BATCH_SIZE": 8}
    cluster = light_cluster(number_of_initial_trainers=2, merge_frequency=1, merge_count=2, **values)
    rounds(cluster, 1)
    group = cluster.trainers[0].worker_group
    model = group.parameter_bytes
    merged = len(group.merged_tensors) * model
    assert cluster.counters.link_bytes_merged == 2 * 3 / 4 * model + 2 * merged
    assert cluster.counters.bytes_merged == 2 * (2 * 3 * model) + 4 * merged

    schedule = [[0.0, 8], [0.5, 4]]
    cluster = light_cluster(number_of_initial_trainers=1, node_schedule=schedule, number_of_outer_steps=2, **values)
    rounds(cluster, 2)
    assert len(cluster.trainers[0].nodes) == 4
    assert cluster.counters.bytes_redistributed == 2 * 7 * model
    assert cluster.counters.link_bytes_redistributed == 2 * 7 / 8 * model


def test_a_worker_that_is_lost_does_not_settle():
    values = {"distributed_algo": "SparseLoCo", "sampling_method": "none", "number_of_initial_trainers": 1}
    cluster = light_cluster(**values)
    rounds(cluster, 1)
    group = cluster.trainers[0].worker_group
    group.to_restart = frozenset({3})
    settling = group._settle(some_end=True)
    assert settling.sent > 0
    assert settling.link == settling.sent / 3


def test_a_node_that_changes_its_trainer_settles_and_receives():
    """One of three workers of SparseLoCo leaves for another trainer: its link carries both exchanges."""
    values = {"distributed_algo": "SparseLoCo", "nodes_per_gpu": 4, "sampling_method": "none", "INITIAL_BATCH_SIZE": 12}
    cluster = light_cluster(number_of_initial_trainers=2, merge_frequency=9, **values)
    request = cluster.trainers[0].batch_control
    request.requested_batch = 36
    rounds(cluster, 1)
    assert [len(trainer.nodes) for trainer in cluster.trainers.values()] == [3, 1]
    before = cluster.counters.link_bytes_redistributed
    request.requested_batch = 12
    cluster.assign_nodes()
    assert [len(trainer.nodes) for trainer in cluster.trainers.values()] == [2, 2]
    group = cluster.trainers[0].worker_group
    joining = group.sizes.trainer + group.sizes.worker
    assert cluster.counters.link_bytes_redistributed - before == 2 * 2 / 3 * group.parameter_bytes + joining


def test_what_workers_learned_that_a_resumed_run_has_no_more_stays_in_the_mean():
    first = cluster_of()
    rounds(first, 2)
    again = resumed(first, cluster_of(nodes_per_gpu=2))
    mean = copies(first).mean(0)
    assert len(copies(again)) == 2
    for copy in copies(again):
        torch.testing.assert_close(copy, mean, rtol=1e-6, atol=1e-7)
    assert first.trainers[0].worker_group.values["since"] > 0
    assert again.trainers[0].worker_group.values["since"] == 0  # all begin at the mean


# Workers that are lost or go


@pytest.mark.parametrize("looked", [True, False])
def test_workers_that_go_leave_what_they_learned_in_the_mean(looked):
    trainer = trainer_of(4, distributed_algo="SPARTA", learning_rate_for_inner_opt=0.05)
    train(trainer, 2, 4)
    mean = torch.stack([worker.state[COPY] for worker in trainer.local_workers.values()]).mean(0)
    if looked:
        trainer.worker_group.refresh()
    trainer.assign_nodes(trainer.nodes[:2])
    trainer.worker_group.refresh()
    torch.testing.assert_close(trainer.parameters, mean, rtol=0, atol=1e-12)
    for worker in trainer.local_workers.values():
        torch.testing.assert_close(worker.state[COPY], mean, rtol=0, atol=1e-12)


def test_a_method_whose_stops_leave_steps_out_is_told_so(monkeypatch):
    monkeypatch.setattr(METHODS["DiLoCo"], "stops", lambda self, group: (group.clock.inner_steps - 2,))
    with pytest.raises(ValueError, match="DiLoCo: the last stop must be the round's last inner step"):
        train(trainer_of(2), 1, 4)
