"""Every synchronisation method through resumes, merges, moving nodes and faults; see tests/support/matrix.py."""

import json

import pytest
import torch

from algorithms.nodes.traffic import Exchange
from cluster import Cluster
from fabrics.training.worker import COPY, ERROR, Node
from tests.support import matrix
from tests.support.helpers import CPU, Recorder, train
from trainers import Trainer
from utils.distributed.reductions import Workers

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("matrix_ready")]

every_method = pytest.mark.parametrize("name", matrix.NAMES)


def nodes(count: int) -> tuple[Node, ...]:
    return tuple(Node(index, CPU, 64) for index in range(count))


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{group} {name}": tensor.clone() for group, own in trainer.tensors().items() for name, tensor in own.items()
    }


def resumed(trainer: Trainer, name: str, workers: int = 3) -> Trainer:
    """Return a trainer that continues from the state of another one, perhaps with more workers."""
    again = matrix.trainer_of(name, workers)
    state, tensors = json.loads(json.dumps(trainer.state_dict())), tensors_of(trainer)
    again.load_state_dict(state, lambda group, key: tensors[f"{group} {key}"])
    return again


def assert_same_tensors(found: Trainer, expected: Trainer) -> None:
    ours, theirs = tensors_of(found), tensors_of(expected)
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


def all_finite(trainer: Trainer) -> bool:
    return all(torch.isfinite(tensor).all() for tensor in tensors_of(trainer).values())


def assert_restarted(trainer: Trainer, worker: int, like: int) -> None:
    """A worker has the shared parameters, another worker's moments, and zeros."""
    fresh, method = trainer.local_workers[worker], trainer.worker_group.method
    for name, moment in fresh.moments.items():
        copied = trainer.local_workers[like].moments[name]
        assert torch.equal(moment, copied)
        assert moment.data_ptr() != copied.data_ptr()
    for name in fresh.state.keys() - {COPY}:
        assert not fresh.state[name].any()
    assert set(fresh.state) - {ERROR} == {*method.worker_state, *([COPY] if method.keeps != "shared" else [])}
    assert method.keeps == "shared" or torch.equal(fresh.state[COPY], trainer.parameters)


# Runs


def test_a_run_is_stopped_while_a_fragment_is_under_way():
    stopped = matrix.alone("StreamingDiLoCo")["states"]["stopped"]
    assert json.loads(stopped["values"])["trainers"]["0"]["workers"]["values"] == {"fragment_1": 1}


def test_copies_keep_the_weights_of_the_round_that_made_them():
    """The next round has another batch and so other weights: the evaluated parameters are those that are saved."""
    config = matrix.config_of(
        "FDA", synchronisation={"threshold": 1e9}, node_speeds=[1, 0.3], nodes_per_gpu=2, balance="batch",
        sampling_method="none", INITIAL_BATCH_SIZE=4, max_batch_size=64, batch_schedule=[[0.4, 40]],
        number_of_initial_trainers=1, number_of_outer_steps=4, eval_every=1,
    )  # fmt: skip
    shares, found = [], []

    class Looking(Recorder):
        def on_round(self, cluster, result):
            super().on_round(cluster, result)
            shares.append(cluster.trainers[0].split_work().examples_each(1))
            other = Cluster(config, matrix.data())
            matrix.resume(other, matrix.state_of(cluster))
            found.extend(each.evaluate()[0].loss for each in (cluster, other))

    recorder = Looking()
    Cluster(config, matrix.data()).train(recorder)
    assert shares[0][0] * shares[-1][1] != shares[0][1] * shares[-1][0]
    assert found == [result.evaluations[0].loss for result in recorder.rounds for _ in range(2)]


@every_method
def test_four_trainers_become_one_whose_batch_grows(name):
    found = matrix.alone(name)
    assert found["workers"] == [1] * 4 + [2] * 2 + [4] * 3
    assert found["requests"][0] < found["requests"][-1]
    assert found["left_out"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in found["states"]["final"]["tensors"].values())
    assert all(events == [] for events in found["events"][:4])
    assert all(event[0] for events in found["events"][4:] for event in events)


@every_method
def test_a_trainer_that_absorbs_another_continues_from_the_weighted_average(name):
    first, second = matrix.trainer_of(name, workers=2), matrix.trainer_of(name, workers=2)
    second.id = 1
    for trainer, rounds in ((first, 1), (second, 2)):
        train(trainer, rounds, matrix.INNER_STEPS)
        settle(trainer)
    expected = {key: 0.25 * first.shared[key] + 0.75 * second.shared[key] for key in first.worker_group.merged_tensors}
    assert "parameters" in expected
    first.absorb([second], {0: 0.25, 1: 0.75})
    for key, tensor in expected.items():
        torch.testing.assert_close(first.shared[key], tensor)
    for worker in first.local_workers.values():
        assert COPY not in worker.state or torch.equal(worker.state[COPY], first.parameters)
    train(first, 1, matrix.INNER_STEPS)
    assert all_finite(first)


@every_method
def test_joining_workers_have_the_shared_parameters_and_their_bytes_are_counted(name):
    """Whether they join during a run or at a resume."""
    trainer = matrix.trainer_of(name, workers=2)
    train(trainer, 2, matrix.INNER_STEPS)
    worker_group = trainer.worker_group
    before = [worker.state_dict() for worker in trainer.local_workers.values()]
    before = [{key: tensor.clone() for key, tensor in state.items()} for state in before]
    again = resumed(trainer, name, workers=4)
    settling, arrived = trainer.assign_nodes(nodes(4))
    assert_same_tensors(again, trainer)
    for worker in (2, 3):
        assert_restarted(trainer, worker, like=0)
    for worker, state in enumerate(before):
        for key, tensor in trainer.local_workers[worker].state_dict().items():
            assert torch.equal(tensor, state[key])
    model = worker_group.parameter_bytes
    # The mean of two workers' copies: each sends the other one half of it, and receives half.
    refreshed = 2 * model if worker_group.method.capabilities.averages_copies else 0
    step_count = 4 if trainer.local_workers[0].moments.keys() >= {"step"} else 0
    moments = len(trainer.local_workers[0].moments.keys() - {"step"}) * model + step_count
    shared = sum(model if len(tensor.shape) else 4 for tensor in trainer.shared.values())
    assert settling == Exchange(0, refreshed, refreshed / 2)
    assert arrived == Exchange(0, 2 * (shared + moments), shared + moments)
    train(trainer, 1, matrix.INNER_STEPS)
    trainer.assign_nodes(nodes(1))
    train(trainer, 1, matrix.INNER_STEPS)
    assert all_finite(trainer)


# What holds for every method


def settle(trainer: Trainer) -> float:
    return trainer.worker_group._settle(some_end=True).sent


@every_method
def test_one_worker_sends_nothing(name):
    trainer = matrix.trainer_of(name, workers=1)
    before = trainer.parameters.clone()
    for report in train(trainer, 3, matrix.INNER_STEPS):
        assert (report.events, report.communications, report.bytes_synchronised) == ((), 0, 0)
    assert settle(trainer) == 0
    assert all_finite(trainer)
    assert not torch.equal(trainer.parameters, before)


# Parameters with which a worker exchanges everything after its first inner step.
AT_ONCE = {
    "StreamingDiLoCo": {"fragments": 1, "delay": 0},
    "LoCoDL": {"probability": 1, "density": 0.1},
    "Decoupled": {"fragments": 1, "steps": 1},
    "SparseLoCo": {},  # its defaults: 1 of 64 elements, with 2 bits
    "SPARTA": {},
}


@pytest.mark.parametrize("name", matrix.METHODS)
def test_the_update_of_a_lone_worker_is_neither_sparse_nor_rounded(name):
    """The update of a first round of one inner step is a multiple of the worker's step, or has its signs."""
    parameters = {"synchronisation": AT_ONCE[name]} if name in AT_ONCE else {}
    able = matrix.METHODS[name]().capabilities
    dtypes = able.encodings or ("float32", "bfloat16", "int8", "int4")
    moved = []
    for dtype in dtypes:
        trainer = matrix.trainer_of(name, workers=1, communication_dtype=dtype, **parameters)
        start = trainer.parameters.clone()
        train(trainer, 1, 1)
        trainer.worker_group.refresh()
        moved.append(trainer.parameters - start)
    assert all(torch.equal(each, moved[0]) for each in moved)
    optimizer = {"inner_optimizer": able.inner_optimizer or "sgd", "gradient_clipping": None}
    rate = matrix.PARAMETERS.get(name, {}).get("learning_rate_for_inner_opt", 0.01)
    averaging = matrix.trainer_of("LocalSGD", workers=1, learning_rate_for_inner_opt=rate, **optimizer)
    train(averaging, 1, 1)
    own = averaging.parameters - start
    clear = own.abs() > 1e-3 * own.abs().max()
    assert clear.float().mean() > 0.1
    assert torch.equal(moved[0][clear].sign(), own[clear].sign())
    if name not in ("DeMo", "FedOpt"):  # divide by magnitudes
        ratios = moved[0][clear] / own[clear]
        assert ratios.min() > 0.99 * ratios.max()


# Tensors of workers that hold no progress, and end with them: momenta, deviations from means, starting points.
NO_PROGRESS = {
    "EagerDiLoCo": {"velocity", "deviation"},
    "NoLoCo": {"velocity"},
    "DeMo": {"momentum"},
    "LoCoDL": {"correction"},
    "DelayedNesterov": {COPY},
}


@pytest.mark.parametrize("how", ["a merge", "its node leaves"])
@every_method
def test_what_a_worker_has_not_sent_reaches_the_parameters_before_it_ends(name, how):
    """Each of its tensors is moved a little after the round; one that holds progress moves the parameters with it."""
    trained = matrix.trainer_of(name, workers=2)
    train(trained, 1, matrix.INNER_STEPS)

    def after(moved: str) -> torch.Tensor:
        trainer, other = resumed(trained, name, workers=2), resumed(trained, name, workers=2)
        other.id = 1
        ending = (other if how == "a merge" else trainer).local_workers[1]
        if moved:
            ending.state[moved].add_(0.01)
        if how == "a merge":
            trainer.absorb([other], {0: 0.5, 1: 0.5})
        else:
            trainer.assign_nodes(nodes(1))
        trainer.worker_group.refresh()
        return trainer.parameters.clone()

    unmoved = after("")
    for tensor in matrix.trainer_of(name, workers=2).local_workers[1].state:
        assert torch.equal(after(tensor), unmoved) == (tensor in NO_PROGRESS.get(name, ())), tensor


# Faults


@pytest.fixture
def losing():
    """Let worker 0 diverge in the second round."""
    with matrix.losing(lambda key: (key.round, key.worker) == (1, 0)):
        yield


@every_method
@pytest.mark.usefixtures("losing")
def test_a_lost_worker_restarts_and_the_others_keep_their_state(name):
    trainer = matrix.trainer_of(name)
    first, second = train(trainer, 2, matrix.INNER_STEPS)
    assert (first.left_out, second.left_out) == (0, 1)
    kept = {w: {key: t.clone() for key, t in trainer.local_workers[w].state_dict().items()} for w in (1, 2)}
    trainer.assign_nodes(trainer.nodes)
    assert_restarted(trainer, 0, like=1)
    for worker, state in kept.items():
        for key, tensor in trainer.local_workers[worker].state_dict().items():
            assert torch.equal(tensor, state[key])
    before = trainer.parameters.clone()
    (third,) = train(trainer, 1, matrix.INNER_STEPS)
    assert third.left_out == 0
    trainer.worker_group.refresh()
    assert all_finite(trainer)
    assert not torch.equal(trainer.parameters, before)


@every_method
@pytest.mark.usefixtures("losing")
def test_a_run_that_is_resumed_after_a_worker_was_lost_has_the_same_bits(name):
    trainer = matrix.trainer_of(name)
    assert [report.left_out for report in train(trainer, 2, matrix.INNER_STEPS)] == [0, 1]
    again = resumed(trainer, name)
    for each in (trainer, again):
        each.assign_nodes(each.nodes)
        (report,) = train(each, 1, matrix.INNER_STEPS)
        assert report.left_out == 0
    assert_same_tensors(again, trainer)


def test_one_process_keeps_messages_that_their_senders_overwrite():
    messages = Workers((0, 0)).messages(1, [(), ()], CPU)
    buffer = torch.zeros(1, dtype=torch.uint8)
    for worker in range(2):
        messages.add(worker, buffer.fill_(worker))
    assert {worker: message.item() for worker, message in messages.result().items()} == {0: 0, 1: 1}
