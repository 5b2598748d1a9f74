"""Trainers' state and idle workers' moments in host memory: the same run."""

from types import SimpleNamespace

import pytest
import torch

from fabrics.config_checks import CHECKS
from fabrics.training.offload import OptimizerSlot, StateMemory
from tests.support.helpers import CPU, Recorder, light_cluster, tiny_cluster
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

GPU = torch.device("cuda", 1)


def test_a_home_takes_in_what_is_elsewhere_and_keeps_what_is_there():
    tensor = torch.arange(3.0)
    assert StateMemory(CPU).adopt(tensor) is tensor
    elsewhere = StateMemory(torch.device("meta")).adopt(tensor)
    assert (elsewhere.device.type, elsewhere.shape, elsewhere.dtype) == ("meta", tensor.shape, tensor.dtype)
    assert torch.equal(StateMemory(CPU).zeros(tensor.double()), torch.zeros(3, dtype=torch.float64))


def test_a_seat_holds_the_state_of_one_worker_at_a_time():
    state = {"moment": torch.zeros(2)}
    slot = OptimizerSlot(SimpleNamespace(state_dict=lambda: state))
    first, second = {"moment": torch.tensor([1.0, 2.0])}, {"moment": torch.tensor([5.0, 6.0])}
    slot.swap_in(first)
    state["moment"] += 10
    slot.swap_in(first)  # goes on where it was
    assert state["moment"].tolist() == [11.0, 12.0]
    slot.swap_out(second)  # is not there
    slot.swap_in(second)
    assert (state["moment"].tolist(), first["moment"].tolist()) == ([5.0, 6.0], [11.0, 12.0])
    slot.swap_out(second)
    second["moment"].fill_(7.0)  # a state that is loaded
    slot.swap_in(second)
    assert state["moment"].tolist() == [7.0, 7.0]


def state_of(cluster) -> dict[tuple[str, str], torch.Tensor]:
    return {(group, name): t.clone() for group, part in cluster.tensors().items() for name, t in part.items()}


def assert_same_state(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    assert [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)] == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"inner_optimizer": "muon"},
        {"distributed_algo": "StreamingDiLoCo", "synchronisation": {"fragments": 1}},
        {"distributed_algo": "EagerDiLoCo", "communication_dtype": "int8"},
    ],
    ids=["DiLoCo", "Muon", "several turns in a round", "copies and errors"],
)
def test_a_run_whose_state_waits_in_host_memory_has_the_same_bits(values):
    """Two trainers of two workers each, a merge, and a node that changes hands."""
    states = []
    make = tiny_cluster if "inner_optimizer" in values else light_cluster
    values = {"number_of_inner_steps_between_outers": 2, "eval_every": 99} | values
    for offload in ([], ["outer_state", "idle_moments"]):
        cluster = make(number_of_initial_trainers=2, offload=offload, **values)
        cluster.train(Recorder())
        states.append(state_of(cluster))
        optimizers = {
            id(worker.optimizer) for trainer in cluster.trainers.values() for worker in trainer.workers.values()
        }
        assert len(optimizers) == (1 if offload else 4)
    assert_same_state(*states)
    assert any(name == "exp_avg" for _, name in states[0])


def test_a_state_that_is_loaded_is_gone_on_with_wherever_moments_wait():
    """Moments on the device are of another time then."""
    cluster = light_cluster(offload=["idle_moments"], number_of_initial_trainers=2, merge_frequency=9)
    recorder = Recorder()
    cluster.run_round(recorder)
    plain, tensors = cluster.state_dict(), state_of(cluster)
    cluster.run_round(recorder)
    expected = state_of(cluster)
    cluster.load_state_dict(plain, lambda group, name: tensors[group, name])
    cluster.run_round(recorder)
    assert_same_state(state_of(cluster), expected)


def test_synchronous_training_cannot_offload_its_parameters():
    values = {"number_of_outer_steps": 1, "distributed_algo": "Synchronous", "offload": ["outer_state"]}
    with pytest.raises(ConfigError, match="offload: outer_state"):
        parse_config(values, checks=CHECKS)
