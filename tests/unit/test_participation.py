"""Node schedules, workers that rest, and lost messages."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from algorithms.nodes.traffic import Exchange
from algorithms.synchronisation import METHODS
from algorithms.synchronisation.diloco import nesterov_step
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.examples import PackedSequences
from fabrics.training.inner_loop import InnerLoop
from fabrics.training.outer_round import OuterRound
from fabrics.training.work_split import draw_lost_messages, draw_participants, participant_count
from fabrics.training.worker import COPY, RoundKey
from tests.support import matrix
from tests.support.helpers import (
    TINY_ARCHITECTURE,
    Recorder,
    Stack,
    light_cluster,
    make_config,
    random_sequences,
    recorded_pseudo_gradients,
    tiny_data,
    train,
)
from utils.config.schema import Config

pytestmark = pytest.mark.usefixtures("matrix_ready")


def round_key(number: int = 0, trainer: int = 0, seed: int = 42) -> RoundKey:
    return RoundKey(seed, trainer, 0, number)


# Draws


@pytest.mark.parametrize(
    ("share", "workers", "count"),
    [(1.0, 5, 5), (0.5, 4, 2), (0.5, 5, 3), (0.5, 1, 1), (0.1, 4, 1), (0.74, 3, 2), (0.29, 50, 15)],
)
def test_participants_are_the_nearest_number_but_at_least_one(share, workers, count):
    assert participant_count(share, workers) == count
    drawn = draw_participants(share, round_key(), workers)
    assert len(set(drawn)) == count
    assert list(drawn) == sorted(drawn)


def test_all_sets_of_participants_are_equally_likely():
    drawn = [draw_participants(0.5, round_key(number), 4) for number in range(3000)]
    counts = Counter(drawn)
    assert len(counts) == 6
    assert all(abs(count - 500) < 5 * 500**0.5 for count in counts.values())
    for other in ({"trainer": 1}, {"seed": 43}):
        assert drawn[:50] != [draw_participants(0.5, round_key(number, **other), 4) for number in range(50)]


def test_messages_are_lost_independently():
    lost = [draw_lost_messages(0.25, round_key(number), (0, 1, 3)) for number in range(3000)]
    for worker in (0, 1, 3):
        assert abs(sum(worker in each for each in lost) - 750) < 5 * 562**0.5
    both = sum({0, 3} <= each for each in lost)
    assert abs(both - 3000 / 16) < 5 * 176**0.5
    assert not any(draw_lost_messages(0.99, round_key(number), (2,)) for number in range(100))  # a lone worker


def cluster_of(**values) -> Cluster:
    common = {"sampling_method": "none", "INITIAL_BATCH_SIZE": 12, "number_of_inner_steps_between_outers": 2}
    return light_cluster(**common | {"number_of_initial_trainers": 1, "nodes_per_gpu": 4} | values)


def nodes_of(recorder: Recorder) -> list[list[int]]:
    """The nodes of each trainer, round by round."""
    return [[len(report.workers) for report in result.reports.values()] for result in recorder.rounds]


def test_scheduled_nodes_divide_the_batch():
    cluster = cluster_of(number_of_outer_steps=10, node_schedule=[[0.0, 2], [0.3, 4], [0.7, 3], [0.8, 1]])
    cluster.train(recorder := Recorder())
    assert nodes_of(recorder) == [[2]] * 3 + [[4]] * 4 + [[3]] + [[1]] * 2
    reports = [result.reports[0] for result in recorder.rounds]
    batches = [[worker.plan.effective_batch for worker in report.workers.values()] for report in reports]
    assert [batches[0], batches[3], batches[7], batches[9]] == [[6, 6], [3] * 4, [4] * 3, [12]]
    assert recorder.steps == sum(len(worker.losses) for report in reports for worker in report.workers.values())
    # Two nodes join, once: each gets parameters and velocity of the trainer, and moments with their step count.
    model = 4 * cluster.parameter_count
    assert cluster.counters.bytes_redistributed == 2 * (4 * model + 4)
    assert cluster.counters.communications == 8


def test_an_epoch_with_changing_nodes_reads_every_example_once():
    seen = []

    class Noted(PackedSequences):
        def batch(self, indices, device):
            seen.extend(np.asarray(indices).tolist())
            return super().batch(indices, device)

    config = make_config(
        model_config=TINY_ARCHITECTURE, number_of_outer_steps=None, number_of_training_epochs=1,
        number_of_inner_steps_between_outers=2, sampling_method="none", number_of_initial_trainers=2, merge_frequency=3,
        node_schedule=[[0, 3], [0.3, 4], [0.6, 1]], participants=0.5, message_loss=0.5,
    )  # fmt: skip
    cluster = Cluster(config, dataclasses.replace(tiny_data(), train=Noted(random_sequences(96, 9, seed=1))))
    cluster.train(Recorder())
    assert cluster.merges == 1
    assert sorted(seen) == list(range(96))


# Lost messages


def test_a_worker_whose_message_is_lost_continues_from_its_own_parameters(monkeypatch):
    trainer = matrix.trainer_of(message_loss=0.4)
    lost = [draw_lost_messages(0.4, round_key(number), range(3)) for number in range(6)]
    starts, ends = [], []
    run = InnerLoop.run

    def noting(self, until):
        starts.append(self._start.clone())
        run(self, until)
        ends.append(self.worker.model.parameters.clone())

    message = OuterRound._message

    def against_the_shared(self, index):
        assert torch.equal(self._local[index].start, self.group.shared["parameters"])
        return message(self, index)

    monkeypatch.setattr(InnerLoop, "run", noting)
    monkeypatch.setattr(OuterRound, "_message", against_the_shared)
    heard = recorded_pseudo_gradients(monkeypatch)
    shared, velocity = trainer.parameters.clone(), torch.zeros_like(trainer.parameters)
    own = [shared] * 3
    for missing in lost:
        starts.clear()
        ends.clear()
        heard.clear()
        (report,) = train(trainer, 1, matrix.INNER_STEPS)
        assert {worker for worker, run in report.workers.items() if run.message_lost} == missing
        assert report.lost_messages == len(missing)
        for start, expected in zip(starts, own, strict=True):
            assert torch.equal(start, expected)
        assert len(heard) == 3 - len(missing)
        if heard:
            nesterov_step(shared, torch.stack(heard).mean(0), velocity, 0.7, 0.9)
        torch.testing.assert_close(trainer.parameters, shared)
        shared = trainer.parameters.clone()
        copies = [trainer.local_workers[worker].state[COPY] for worker in range(3)]
        for worker, copy in enumerate(copies):
            assert torch.equal(copy, ends[worker] if worker in missing else shared)
        own = [copy.clone() for copy in copies]
    assert {len(missing) for missing in lost} >= {0, 1, 2}


def test_a_lost_message_was_sent():
    plain, lossy = (train(matrix.trainer_of(message_loss=loss), 3, matrix.INNER_STEPS) for loss in (0.0, 0.9))
    assert sum(report.lost_messages for report in lossy) > 4
    for one, other in zip(plain, lossy, strict=True):
        assert one.events == other.events


def test_without_any_message_the_shared_parameters_stay():
    trainer = matrix.trainer_of(message_loss=0.999)
    before = trainer.parameters.clone()
    for report in train(trainer, 2, matrix.INNER_STEPS):
        assert (report.lost_messages, report.left_out) == (3, 0)
        assert report.train_loss > 0
    assert torch.equal(trainer.parameters, before)
    assert not torch.equal(trainer.local_workers[0].state[COPY], before)


def test_lost_messages_are_counted_and_a_budget_is_kept():
    values = {"number_of_outer_steps": None, "number_of_training_epochs": 3, "communication_budget": 6}
    cluster = cluster_of(**values, message_loss=0.5)
    cluster.train(recorder := Recorder())
    assert cluster.counters.communications == 6
    lost = sum(report.lost_messages for result in recorder.rounds for report in result.reports.values())
    assert cluster.counters.lost_messages == lost > 3


# Participants


def test_resting_workers_keep_their_state_and_send_nothing():
    trainer = matrix.trainer_of(workers=4, participants=0.5)
    model = trainer.worker_group.parameter_bytes
    drawn = []
    for number in range(6):
        before = {w: {key: t.clone() for key, t in trainer.local_workers[w].state_dict().items()} for w in range(4)}
        position = trainer.cursor.positions[trainer.id]
        (report,) = train(trainer, 1, matrix.INNER_STEPS)
        drawn.append(tuple(report.workers))
        assert drawn[-1] == draw_participants(0.5, round_key(number), 4)
        for worker in range(4):
            same = [
                torch.equal(before[worker][key], t) for key, t in trainer.local_workers[worker].state_dict().items()
            ]
            assert not any(same) if worker in drawn[-1] else all(same)
        # The participants divide the batch, and in a ring of two each sends one model.
        assert [run.plan.effective_batch for run in report.workers.values()] == [6, 6]
        assert report.bytes_synchronised == 2 * model
        assert trainer.cursor.positions[trainer.id] == position + 12 * matrix.INNER_STEPS


def test_a_returning_worker_receives_the_trainers_tensors():
    trainer, found = matrix.trainer_of(workers=4, participants=0.5), []
    for _ in range(8):
        found.append((set(trainer.split_work().participants), trainer.assign_nodes(trainer.nodes)[1]))
        assert trainer.assign_nodes(trainer.nodes) == (Exchange(), Exchange())
        train(trainer, 1, matrix.INNER_STEPS)
    model = trainer.worker_group.parameter_bytes  # parameters and velocity
    assert found[0][1] == Exchange()
    for (before, _), (now, arrived) in itertools.pairwise(found):
        came = len(now - before)
        assert arrived == Exchange(0, came * 2 * model, 2 * model * (came > 0))
    assert len({arrived for _, arrived in found}) > 1


def test_the_batch_test_uses_the_participants():
    values = {"sampling_method": "norm_test", "batch_test_start": 1, "participants": 0.5, "statistics_batch_size": 2}
    (report,) = train(matrix.trainer_of(workers=4, **values), 1, matrix.INNER_STEPS)
    assert report.statistics.examples == 12
    values |= {"statistics_estimator": "across_workers"}
    (report,) = train(matrix.trainer_of(workers=4, **values), 1, matrix.INNER_STEPS)
    assert report.statistics.variance > 0
    assert report.bytes_synchronised == 2 * 2 * 4 * sum(p.numel() for p in Stack().parameters())


# Every method


def accepted(name: str, **values) -> bool:
    """True if the configuration is accepted; otherwise there is one problem, which names the method."""
    config = matrix.config_of(name, **values)
    (key,) = values
    problems = [problem for check in CHECKS.problems for problem in check(config) if problem.startswith(f"{key}: ")]
    assert all(f"must be {getattr(Config(), key):g} with {name}, " in problem for problem in problems)
    assert len(problems) <= 1
    return not problems


@pytest.mark.parametrize("name", matrix.NAMES)
def test_every_method_supports_resting_workers_and_lost_messages_or_refuses_them(name):
    method = (METHODS | matrix.OWN)[name]()
    starts_together = method.keeps == "shared"
    assert accepted(name, participants=0.5) == starts_together
    assert accepted(name, message_loss=0.4) == (starts_together and not method.capabilities.exchanges_gradients)
    for values in ({"participants": 0.5}, {"message_loss": 0.4}):
        if accepted(name, **values):
            reports = train(matrix.trainer_of(name, workers=4, **values), 6, matrix.INNER_STEPS)
            assert reports[-1].train_loss < 0.97 * reports[0].train_loss
