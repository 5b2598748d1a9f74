"""What a run keeps while it goes on: checkpoints when they are due, and a state to go back to after a signal."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from fabrics.pool.checkpoint_policy import Keeper, Wishes
from tests.support.helpers import Recorder, make_config, tiny_cluster
from utils.checkpoint.checkpoint import newest_checkpoint
from utils.distributed.kv_store import Notices
from utils.distributed.processes import LocalProcesses
from utils.distributed.signals import StopRequest

# What is quick to train.
ALONE = {"number_of_initial_trainers": 1, "nodes_per_gpu": 1, "number_of_inner_steps_between_outers": 1}
ALONE |= {"sampling_method": "none", "keep_checkpoints": 9}


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("values", "rounds"),
    [
        ({}, [4]),  # ten minutes are never over, so only at the end
        ({"checkpoint_every_minutes": 1e-9}, [1, 2, 3, 4]),
        ({"checkpoint_every_minutes": None, "save_weights_every": 2}, [2, 4]),
        ({"checkpoint_every_minutes": 1e9, "save_weights_every": 3}, [3, 4]),
    ],
)
def test_a_checkpoint_is_written_when_rounds_or_minutes_say_so_and_at_the_end(tmp_path, values, rounds):
    cluster, recorder = tiny_cluster(number_of_outer_steps=4, **ALONE, **values), Recorder()
    cluster.train(recorder, tmp_path)
    assert checkpoints(tmp_path) == [f"round_{number:05d}" for number in rounds]
    assert recorder.warnings == []


def test_minutes_count_from_the_state_that_was_written_last(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("utils.checkpoint.checkpoint.time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster, due = tiny_cluster(number_of_outer_steps=8, **ALONE), []
    run_round = cluster.run_round

    def four_minutes(observer, keeper):
        now[0] += 240.0
        due.append(keeper._checkpoints.due)
        return run_round(observer, keeper)

    cluster.run_round = four_minutes
    cluster.train(Recorder(), tmp_path)
    # At 12 and 24 minutes, and at the end, 32.
    assert checkpoints(tmp_path) == ["round_00003", "round_00006", "round_00008"]
    assert due == [False, False, True, False, False, True, False, False]


@pytest.mark.parametrize("what", ["stop", "save", "hold"])
def test_what_one_process_wishes_all_do(what):
    keeper = Keeper(make_config(), LocalProcesses(), Recorder())
    keeper.grant([Wishes(), Wishes(**{what: True}), Wishes()])
    assert keeper._granted == Wishes(**{what: True})
    keeper.grant([Wishes(), Wishes()])
    assert keeper._granted == Wishes()


def test_a_copy_is_kept_only_where_the_next_round_may_take_longer_than_a_signal_waits(tmp_path):
    stop = StopRequest(lambda text: None, Notices(HashStore()), True, patience_seconds=10.0)
    keeper = Keeper(make_config(), LocalProcesses(), Recorder(), tmp_path, stop)
    assert not keeper.wishes(2.4).hold
    assert keeper.wishes(2.6).hold


def test_the_state_that_is_kept_is_that_before_the_round(tmp_path):
    """And is what a run goes on with that was interrupted in the middle of the third."""
    values = ALONE | {"number_of_inner_steps_between_outers": 3}
    cluster, states = tiny_cluster(number_of_outer_steps=4, **values), []
    stop = StopRequest(lambda text: None, cluster.processes.notices, decides=True, patience_seconds=0.0)

    class Interrupting(Recorder):
        def on_round(self, run, result):
            super().on_round(run, result)
            states.append({name: tensor.clone() for name, tensor in cluster.tensors()["trainer_0_worker_0"].items()})

        def on_step(self):
            super().on_step()
            if len(self.rounds) == 2 and self.steps % 3 == 2:
                # As a thread does it when the patience is over.
                stop._state.write_held(stop._state.held)
                stop.given_up = True

    with pytest.raises(KeyboardInterrupt):
        cluster.train(Interrupting(), tmp_path, stop)
    found = newest_checkpoint(tmp_path / "checkpoints", cluster.processes)
    assert found.folder.name == "round_00002"
    for name, tensor in states[1].items():
        assert torch.equal(found.read("trainer_0_worker_0", name), tensor)
        assert not torch.equal(cluster.tensors()["trainer_0_worker_0"][name], tensor)
