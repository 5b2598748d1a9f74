"""The division of a round over workers: speeds, changing nodes, resting workers and lost messages."""

from collections import Counter

import numpy as np
import pytest

from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.synchronisation.method import evenly_spread
from fabrics.data.sampler import DataCursor, Reading, Subsets
from fabrics.training.statistics import Measurement
from fabrics.training.work_split import WorkSplit
from fabrics.training.worker import Node, RoundKey
from tests.support.helpers import CPU, Recorder, light_cluster, make_config
from training_logs.recording.node_log import NodeLog

SPEEDS = [1.0, 1.0, 0.5, 0.25]
NODES = [Node(number, CPU, 64, speed) for number, speed in enumerate(SPEEDS)]


def split_of(present, nodes=NODES, readings=(), **values) -> WorkSplit:
    config = make_config(**values)

    def step_times(own_steps, inner_steps, step_seconds):
        return evenly_spread(own_steps, inner_steps, {}, 0)

    steps = step_times if config.balance == "steps" else None
    return WorkSplit(config, 12, nodes, present, readings, None, steps)


def steps_of(split: WorkSplit, inner_steps: int) -> dict[int, int]:
    return {worker: len(active) for worker, active in split.active_steps(inner_steps).items()}


def test_participants_divide_the_batch_by_speed():
    """12 examples at 1, 0.5 and 0.25 a second: 8, 3 and 1 are done after 8 seconds, as none of 12 can be sooner."""
    split = split_of((1, 2, 3), balance="batch", node_speeds=SPEEDS)
    assert split.plans == {1: ExecutionPlan((8,)), 2: ExecutionPlan((3,)), 3: ExecutionPlan((1,))}
    assert steps_of(split, 5) == {1: 5, 2: 5, 3: 5}
    assert split.examples_each(5) == [0, 40, 15, 5]
    assert (split.effective_batch, split.examples(5)) == (12, 60)


def test_the_fastest_participant_makes_every_inner_step():
    assert steps_of(split_of((1, 2, 3), balance="steps", node_speeds=SPEEDS), 8) == {1: 8, 2: 4, 3: 2}
    split = split_of((2, 3), balance="steps", node_speeds=SPEEDS)
    assert steps_of(split, 8) == {2: 8, 3: 4}
    assert split.examples_each(8) == [0, 0, 48, 24]


def test_one_unknown_speed_makes_all_nodes_equal():
    """A node that joins where others have been measured at 100 a second has no speed of 1."""
    nodes = [Node(0, CPU, 64, 100.0), Node(1, CPU, 64, 25.0), Node(2, CPU, 64)]
    assert split_of((0, 1, 2), nodes, balance="batch").examples_each(1) == [4, 4, 4]
    assert split_of((0, 1), nodes, balance="batch").examples_each(1) == [10, 2, 0]
    nodes[2] = Node(2, CPU, 64, 25.0)
    assert split_of((0, 1, 2), nodes, balance="batch").examples_each(1) == [8, 2, 2]


@pytest.mark.parametrize("balance", ["equal", "batch", "steps"])
@pytest.mark.parametrize("present", [(0, 1, 2, 3), (1, 3), (2,)])
def test_workers_read_consecutive_examples_without_gaps(balance, present):
    readings = [Reading(lambda first, count: first + np.arange(count), (0, 1, 2, 3), 1000)]
    split = split_of(present, readings=readings, balance=balance, node_speeds=SPEEDS)
    found = split.assignments([0.1] * 6, RoundKey(1, 2, 0, 3), Measurement())
    assert tuple(found) == present
    seen = Counter()
    for worker, own in found.items():
        assert own.key == RoundKey(1, 2, worker, 3)
        assert len(own.offsets) * own.plan.effective_batch == split.examples_each(6)[worker]
        for first in own.offsets:
            seen.update(range(first, first + own.plan.effective_batch))
    assert sorted(seen.elements()) == list(range(split.examples(6)))
    # Each worker's probe batch comes after the round's examples.
    for worker, own in found.items():
        first_probe = split.examples(6)
        assert own.probe_indices().tolist() == list(range(first_probe + 8 * worker, first_probe + 8 * worker + 8))


@pytest.mark.parametrize(("examples", "each"), [(12, 3), (40, 8), (35, 8)])
def test_probes_of_several_workers_have_no_example_in_common(examples, each):
    """After one round of 24 examples the next 32 reach into another epoch, which has another order."""
    cursor = DataCursor(Subsets(1, examples), [0])
    split = split_of((0, 1, 2, 3), readings=cursor.readings(4), statistics_batch_size=8)
    assignments = split.assignments([0.1] * 2, RoundKey(1, 0, 0, 0), Measurement())
    probes = [own.probe_indices().tolist() for own in assignments.values()]
    assert [len(set(probe)) for probe in probes] == [each] * 4
    assert len(set().union(*probes)) == 4 * each


def test_the_node_log_leaves_out_resting_nodes(tmp_path):
    """Node 3 rests in the first round, node 1 in the second. An exchange, and the state of node 3, take 2 s each."""
    cluster = light_cluster(
        number_of_outer_steps=2, number_of_inner_steps_between_outers=4, INITIAL_BATCH_SIZE=12,
        sampling_method="none", number_of_initial_trainers=1, training_seed=1,
        nodes_per_gpu=4, node_speeds=SPEEDS, participants=0.75, link="2s",
    )  # fmt: skip
    cluster.train(recorder := Recorder())
    log = NodeLog(tmp_path, cluster.config)
    for result in recorder.rounds:
        log.log(4, result)
    rows = np.genfromtxt(tmp_path / "node_log.csv", delimiter=",", names=True)
    assert rows["node"].tolist() == [0, 1, 2, 0, 2, 3]
    assert rows["begins"].tolist() == [0, 0, 0, 34, 34, 34]
    assert rows["busy"].tolist() == [16, 16, 32, 16, 32, 64]
    assert rows["waiting"].tolist() == [16, 16, 0, 48, 32, 0]
    assert rows["exchanging"].tolist() == [2, 2, 2, 4, 4, 4]
    assert log.summary()["waiting_share"] == pytest.approx((16 + 16 + 48 + 32) / (3 * 102))
