"""The checkpoint policy: when checkpoints are written, and when a run stops."""

import contextlib
from types import SimpleNamespace

import pytest

from fabrics.pool.checkpoint_policy import CheckpointPolicy, Vote
from fabrics.training.worker import TrainingError
from tests.support.helpers import Recorder, light_cluster, make_config
from tests.support.threads import together

ALONE = {"number_of_initial_trainers": 1, "nodes_per_gpu": 1, "number_of_inner_steps_between_outers": 1}
ALONE |= {"sampling_method": "none"}


@pytest.fixture(autouse=True)
def _all_checkpoints_are_kept(monkeypatch):
    monkeypatch.setattr("utils.checkpoint.checkpoint.KEPT", 99)


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("values", "rounds"),
    [
        ({}, [4]),  # the default of ten minutes does not pass
        ({"checkpoint_every_minutes": 1e-9}, [1, 2, 3, 4]),
        ({"checkpoint_every_minutes": None, "save_weights_every": 2}, [2, 4]),
        ({"checkpoint_every_minutes": 1e9, "save_weights_every": 3}, [3, 4]),
    ],
)
def test_checkpoints_are_due_by_rounds_by_minutes_and_at_the_end(tmp_path, values, rounds):
    cluster, recorder = light_cluster(number_of_outer_steps=4, **ALONE, **values), Recorder()
    cluster.train(recorder, tmp_path)
    assert checkpoints(tmp_path) == [f"round_{number:05d}" for number in rounds]
    assert recorder.warnings == []


def test_minutes_count_from_the_last_checkpoint(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("utils.checkpoint.checkpoint.time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster = light_cluster(number_of_outer_steps=8, **ALONE)

    class FourMinutes(Recorder):
        def on_round_start(self, *arguments):
            super().on_round_start(*arguments)
            now[0] += 240.0

    cluster.train(FourMinutes(), tmp_path)
    # At 12 and 24 minutes, and at the end, 32.
    assert checkpoints(tmp_path) == ["round_00003", "round_00006", "round_00008"]


@pytest.mark.parametrize("vote", [Vote(stop=True), Vote(save=True)])
def test_all_processes_do_what_one_votes_for(vote):
    policy = CheckpointPolicy(None, Recorder())
    policy.decide([Vote(), vote, Vote()])
    assert policy.decision == vote
    policy.decide([Vote(), Vote()])
    assert policy.decision == Vote()


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_that_is_asked_to_stop_in_its_last_round_is_complete(tmp_path, rounds):
    cluster = light_cluster(number_of_outer_steps=rounds, **ALONE)
    evaluations = cluster.train(Recorder(), tmp_path, SimpleNamespace(requested=True, overdue=False))
    assert cluster.counters.outer_steps == 1
    assert (cluster.interrupted, list(evaluations)) == ((False, [0]) if rounds == 1 else (True, []))
    assert checkpoints(tmp_path) == ["round_00001"]


@pytest.mark.parametrize("shared", [True, False])
def test_machines_must_share_the_folder_of_checkpoints(tmp_path, shared):
    """Ranks 0 and 1 are on one machine, rank 2 on another one."""

    def check(process):
        folder = tmp_path / ("all" if shared or process.rank < 2 else "other")
        refusal = pytest.raises(TrainingError, match=r"^log_dir: the machine of rank 2 has another folder")
        with contextlib.nullcontext() if shared else refusal:
            CheckpointPolicy(SimpleNamespace(config=make_config(), processes=process), Recorder(), folder)
        return True

    assert together(3, check, machines=(0, 0, 1)) == [True] * 3
    assert not [file for folder in tmp_path.iterdir() for file in folder.iterdir()]
