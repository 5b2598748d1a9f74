"""StreamingDiLoCo, EagerDiLoCo, NoLoCo and DelayedNesterov against independent implementations of their papers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algorithms.synchronisation import noloco
from algorithms.synchronisation.flat import layer_fragments
from algorithms.synchronisation.streaming import StreamingDiLoCo
from fabrics.config_checks import CHECKS
from fabrics.training.worker import COPY, ERROR, Node
from tests.support import oracles
from tests.support.helpers import CPU, make_config, make_trainer, tiny_cluster, tiny_llama, train, use_torch_norms
from tests.support.synchronising import EXAMPLES, assert_equals_oracle, history_of, problem_of, trainer_of
from trainers import Trainer
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

UNEVEN = (64, 1, 64)  # one of three workers has half the examples of the others


def assert_equals_diloco(nodes: int, method: str, settings: dict, rounds: int = 3, inner_steps: int = 4) -> None:
    """Every bit, after so many rounds."""
    trainers = [
        trainer_of(nodes),
        trainer_of(nodes, distributed_algo=method, synchronisation=settings),
    ]
    for trainer in trainers:
        train(trainer, rounds, inner_steps)
        trainer.refresh()
    assert torch.equal(trainers[0].parameters, trainers[1].parameters)


def refusals(method: str, settings: dict, **values) -> list[str]:
    """What a configuration with these parameters is refused with, before work starts."""
    values = {"max_tokens": 1, "number_of_inner_steps_between_outers": 12, "distributed_algo": method} | values
    with pytest.raises(ConfigError) as caught:
        parse_config(values | {"synchronisation": settings}, (), CHECKS)
    return caught.value.problems


def parameter_count(trainer: Trainer) -> int:
    return trainer.worker_group.parameter_count


def merging(**values) -> list[Trainer]:
    """Two trainers of two workers each, after a round of four inner steps."""
    config = make_config(INITIAL_BATCH_SIZE=4, sampling_method="none", **values)
    trainers = [make_trainer(use_torch_norms(tiny_llama(seed=i)), config, EXAMPLES, 2, trainer_id=i) for i in range(2)]
    for trainer in trainers:
        train(trainer, 1, 4)
    return trainers


# StreamingDiLoCo


@pytest.mark.parametrize(
    ("nodes", "inner_steps", "settings"),
    [
        (3, 4, {"fragments": 2, "delay": 1, "mixing": 0.25}),
        (2, 6, {"fragments": 3, "delay": 1, "order": "sequential"}),
        (2, 6, {"fragments": 2, "delay": 2, "merge": "progress"}),
        (2, 2, {"fragments": 1, "delay": 0, "merge": "progress"}),
        (1, 3, {"fragments": 1, "delay": 2, "mixing": 0.0}),
    ],
)
def test_streaming_diloco(nodes, inner_steps, settings):
    oracle = {"delay": 1, "mixing": 0.5, "merge": "mix", "order": "strided"} | settings
    assert_equals_oracle(
        lambda problem: oracles.streaming_diloco(problem, lr=0.7, momentum=0.9, **oracle),
        nodes,
        inner_steps,
        max_batches=UNEVEN if nodes == 3 else (),
        distributed_algo="StreamingDiLoCo",
        synchronisation=settings,
    )


def test_streaming_everything_at_once_is_diloco():
    assert_equals_diloco(3, "StreamingDiLoCo", {"fragments": 1, "delay": 0, "mixing": 0.0})


@pytest.mark.parametrize(
    ("inner_steps", "pending", "expected"),
    [
        (4, {}, [2, 3, 4]),  # sent after 2 and 4, and the first one applied after 3
        (4, {"fragment_1": 1}, [1, 2, 3, 4]),
        (5, {}, [3, 4, 5]),
        (1, {"fragment_1": 1}, [1]),
        (1, {"fragment_1": 3}, [1]),
    ],
)
def test_streaming_stops_in_rounds_of_any_length(inner_steps, pending, expected):
    group = SimpleNamespace(clock=SimpleNamespace(inner_steps=inner_steps), values=pending)
    assert list(StreamingDiLoCo(fragments=2, delay=1).stops(group)) == expected


def test_a_fragment_that_is_under_way_arrives_in_the_next_round_however_long_that_is():
    """With mixing 0 workers have the same fragment when it has arrived, and their own before and later."""
    settings = {"fragments": 2, "delay": 2, "mixing": 0.0}
    trainer = trainer_of(2, distributed_algo="StreamingDiLoCo", synchronisation=settings)

    parts = layer_fragments(trainer.worker_group.first_model.blocks, 2)

    def agree() -> list[bool]:
        one, other = (worker.state[COPY] for worker in trainer.workers.values())
        return [all(torch.equal(one[p], other[p]) for p in part) for part in parts]

    states = []
    for inner_steps in (6, 1, 1, 2, 5):
        train(trainer, 1, inner_steps)
        states.append((agree(), trainer.state_dict()["synchronisation"]))
    assert states == [
        ([False, False], {"fragment_1": 2}),
        ([False, True], {"fragment_0": 2, "fragment_1": 2}),  # at the latest when it is sent again
        ([True, True], {"fragment_0": 2, "fragment_1": 2}),
        ([False, True], {"fragment_0": 1, "fragment_1": 2}),
        ([True, False], {"fragment_1": 2}),
    ]
    assert all(torch.equal(trainer.workers[1].state[COPY][p], trainer.parameters[p]) for p in parts[0])


def test_a_new_worker_goes_on_from_the_shared_parameters_while_a_fragment_is_under_way():
    settings = {"fragments": 2, "delay": 1, "merge": "progress"}
    trainer = trainer_of(2, distributed_algo="StreamingDiLoCo", synchronisation=settings)
    train(trainer, 1, 4)
    assert trainer.workers[0].state["offset"].abs().max() > 1e-3
    trainer.assign_nodes(tuple(Node(index, CPU, 64) for index in range(3)))
    assert torch.equal(trainer.workers[2].state[COPY], trainer.parameters)
    train(trainer, 1, 4)
    shared, apart = trainer.parameters, []
    for worker in trainer.workers.values():
        apart.append((torch.linalg.vector_norm(worker.state[COPY] - shared) / torch.linalg.vector_norm(shared)).item())
    assert apart[2] < 2 * max(apart[:2]) < 0.5


def test_a_worker_that_a_checkpoint_does_not_know_begins_with_its_parameters():
    saved, resumed = (trainer_of(nodes, distributed_algo="StreamingDiLoCo") for nodes in (2, 3))
    train(saved, 1, 4)
    groups = saved.tensors()
    resumed.load_state_dict(saved.state_dict(), lambda group, name: groups[group][name])
    copies = [worker.state[COPY] for worker in resumed.workers.values()]
    assert torch.equal(copies[2], saved.parameters)
    assert all(torch.equal(copies[index], saved.workers[index].state[COPY]) for index in range(2))


def test_what_is_under_way_while_trainers_merge_is_forgotten():
    settings = {"fragments": 2, "delay": 1, "merge": "progress"}
    trainers = merging(distributed_algo="StreamingDiLoCo", synchronisation=settings)
    assert trainers[0].state_dict()["synchronisation"] == {"fragment_1": 1}
    expected = 0.25 * trainers[0].parameters + 0.75 * trainers[1].parameters
    trainers[0].absorb(trainers[1:], {0: 0.25, 1: 0.75})
    assert trainers[0].state_dict()["synchronisation"] == {}
    for worker in trainers[0].workers.values():
        torch.testing.assert_close(worker.state[COPY], expected, rtol=0, atol=1e-15)


def test_streaming_sends_as_many_bytes_as_diloco_in_pieces_that_hide_behind_the_delay():
    settings = {"fragments": 2, "delay": 1}
    trainer = trainer_of(2, distributed_algo="StreamingDiLoCo", synchronisation=settings)
    diloco = trainer_of(2)
    events, whole = (train(each, 1, 4)[0].events for each in (trainer, diloco))
    assert [(event.kind, event.step, event.behind) for event in events] == [
        ("synchronisation", 2, 1),
        ("synchronisation", 4, 1),
    ]
    assert sum(event.sent for event in events) == whole[0].sent == 8 * parameter_count(trainer)
    assert min(event.sent for event in events) > 0.2 * whole[0].sent


def test_streaming_keeps_the_error_of_every_fragment():
    """What int8 lost of one fragment is still there after another was sent."""
    settings = {"fragments": 2, "delay": 0, "mixing": 0.0}
    values = {"synchronisation": settings, "communication_dtype": "int8"}
    trainer, exact = (
        trainer_of(2, distributed_algo="StreamingDiLoCo", **each) for each in (values, {"synchronisation": settings})
    )
    for each in (trainer, exact):
        train(each, 1, 4)
    parts, error = layer_fragments(trainer.worker_group.first_model.blocks, 2), trainer.workers[0].state[ERROR]
    assert all(error[place].abs().max() > 0 for part in parts for place in part[:1])
    assert 0 < (trainer.parameters - exact.parameters).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"fragments": 0}, "fragments: must be a positive integer, got 0"),
        ({"fragments": 5}, "fragments: must divide number_of_inner_steps_between_outers, 12, got 5"),
        ({"delay": -1}, "delay: must not be negative, got -1"),
        ({"delay": 6}, "delay: must be less than number_of_inner_steps_between_outers / fragments, 6, got 6"),
        ({"mixing": 1.0}, "mixing: must be at least 0 and less than 1, got 1.0"),
        ({"merge": "progress", "mixing": 0.5}, "mixing: must be null where merge is progress, got 0.5"),
        ({"order": "random"}, "order: should be 'strided' or 'sequential', got 'random'"),
    ],
)
def test_parameters_of_streaming_that_make_no_sense(settings, problem):
    assert refusals("StreamingDiLoCo", settings) == [f"synchronisation.{problem}"]


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(
        ConfigError, match=r"^synchronisation.fragments: must be at most 3, one more than layers, got 4$"
    ):
        trainer_of(2, distributed_algo="StreamingDiLoCo", synchronisation={"fragments": 4})


# EagerDiLoCo


@pytest.mark.parametrize("max_batches", [(64, 64), UNEVEN])
def test_eager_diloco(max_batches):
    assert_equals_oracle(
        lambda problem: oracles.eager_diloco(problem, lr=0.7, momentum=0.9),
        len(max_batches),
        2,
        max_batches=max_batches,
        distributed_algo="EagerDiLoCo",
    )


@pytest.mark.parametrize("method", ["EagerDiLoCo", "DelayedNesterov"])
def test_one_worker_alone_is_diloco(method):
    assert_equals_diloco(1, method, {})


def test_a_worker_that_is_new_is_taken_to_have_moved_as_the_mean():
    trainer = trainer_of(2, distributed_algo="EagerDiLoCo")
    train(trainer, 2, 2)
    mean = trainer.shared["mean"].clone()
    trainer.assign_nodes(tuple(Node(index, CPU, 64) for index in range(3)))
    began = trainer.workers[2].state[COPY].clone()
    assert torch.equal(began, trainer.parameters)
    report = train(trainer, 1, 2)[0]
    new = trainer.workers[2].state
    own = new["deviation"] + trainer.shared["mean"]  # D_m of the round
    eager = mean + (own - mean) / 3
    torch.testing.assert_close(new["velocity"], eager, rtol=0, atol=1e-12)
    torch.testing.assert_close(began - new[COPY], 0.7 * 1.9 * eager, rtol=0, atol=1e-12)
    assert [(event.kind, event.behind) for event in report.events] == [("synchronisation", 2)]


# NoLoCo


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The groups of all rounds, as they are drawn."""
    found, draw = [], noloco.draw_groups

    def recorded(*arguments):
        found.append(draw(*arguments))
        return found[-1]

    monkeypatch.setattr(noloco, "draw_groups", recorded)
    return found


@pytest.mark.parametrize(
    ("max_batches", "settings"),
    [
        ((64,) * 4, {}),
        (UNEVEN, {"momentum": 0.3, "consensus": 0.3}),
        ((64,), {}),
        ((64, 64, 64), {"group": 3, "momentum": 0.0}),
    ],
)
def test_noloco(drawn, max_batches, settings):
    nodes = len(max_batches)
    values = {"distributed_algo": "NoLoCo", "synchronisation": settings, "outer_momentum": 0.5}

    def oracle(problem):
        return oracles.noloco(problem, groups, 0.7, settings.get("momentum", 0.5), settings.get("consensus", 0.7))

    train(trainer_of(nodes, max_batches, **values), 3, 2)
    groups = drawn[::2]  # a round draws them twice: to send, and to apply
    assert len(groups) == 3
    assert_equals_oracle(oracle, nodes, 2, max_batches=max_batches, **values)
    assert drawn[::2] == drawn[1::2] == 2 * groups  # whoever draws


def test_groups_are_all_workers_once_and_others_every_round():
    generator = torch.Generator().manual_seed(0)
    draws = [noloco.draw_groups(7, 3, generator) for _ in range(20)]
    for groups in draws:
        assert [len(group) for group in groups] == [3, 3, 1]
        assert sorted(worker for group in groups for worker in group) == list(range(7))
    assert len({str(groups) for groups in draws}) > 10


def test_noloco_with_everybody_in_one_group_is_heavy_ball():
    trainer = trainer_of(
        2, distributed_algo="NoLoCo", synchronisation={"group": 2, "consensus": 0.2}, outer_momentum=0.5
    )
    problem = problem_of(trainer, 3, 2)
    workers, phi, velocity = oracles.Workers(problem), problem.start.copy(), 0.0
    found = history_of(trainer, 3, 2)
    for number in range(3):
        velocity = 0.5 * velocity + problem.mean([phi - workers.round(i, number, phi.copy()) for i in range(2)])
        phi = phi - 0.7 * velocity
        np.testing.assert_allclose(found.shared[number], phi, rtol=0, atol=1e-10)
        assert np.array_equal(*found.workers[number])


@pytest.mark.parametrize(("dtype", "size"), [("float32", 8), ("bfloat16", 2)])
def test_noloco_sends_two_models_to_every_peer(dtype, size):
    trainer = trainer_of(4, distributed_algo="NoLoCo", communication_dtype=dtype)
    for report in train(trainer, 2, 1):
        (event,) = report.events
        assert event.sent == event.received == 2 * size * parameter_count(trainer)
        assert (event.kind, event.through) == ("synchronisation", "groups")
    exact = trainer_of(4, distributed_algo="NoLoCo")
    train(exact, 2, 1)
    apart = [
        (ours.state[COPY] - theirs.state[COPY]).abs().max()
        for ours, theirs in zip(trainer.workers.values(), exact.workers.values(), strict=True)
    ]
    assert all(value == 0 if dtype == "float32" else 0 < value < 0.01 for value in apart)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"group": 1}, "synchronisation.group: must be at least 2, got 1"),
        ({"consensus": -0.1}, "synchronisation.consensus: must be a number that is not negative, got -0.1"),
        ({"momentum": 1.0}, "synchronisation.momentum: must be at least 0 and less than 1, got 1.0"),
        ({"momentum": float("nan")}, "synchronisation.momentum: must be at least 0 and less than 1, got nan"),
        ({"pairs": 2}, "synchronisation.pairs: NoLoCo has no such parameter; it has group, momentum, consensus"),
    ],
)
def test_parameters_of_noloco_that_make_no_sense(settings, problem):
    assert refusals("NoLoCo", settings) == [problem]


@pytest.mark.parametrize("method", ["NoLoCo", "DelayedNesterov"])
def test_what_keeps_no_error_is_not_sent_as_int8(method):
    assert refusals(method, {}, communication_dtype="int8") == [
        f"communication_dtype: must be float32 or bfloat16 with {method}, got int8"
    ]


def test_workers_that_groups_do_not_divide_are_refused_before_work_starts():
    values = {"number_of_initial_trainers": 1, "devices": ["cpu"], "smallest_worker_batch": None}
    with pytest.raises(ConfigError, match=r"^synchronisation.group: must divide the 3 workers of a trainer, got 2$"):
        tiny_cluster(distributed_algo="NoLoCo", nodes_per_gpu=3, **values)


# DelayedNesterov


@pytest.mark.parametrize(("nodes", "buffer"), [(3, None), (3, 1), (2, 3), (1, 2)])
def test_delayed_nesterov(nodes, buffer):
    assert_equals_oracle(
        lambda problem: oracles.delayed_nesterov(problem, buffer or nodes, lr=0.7, momentum=0.9),
        nodes,
        2,
        distributed_algo="DelayedNesterov",
        synchronisation={"buffer": buffer},
    )


def test_the_server_gets_a_model_from_every_worker_and_sends_one_back():
    for dtype, size in (("float32", 8), ("bfloat16", 2)):
        trainer = trainer_of(3, distributed_algo="DelayedNesterov", communication_dtype=dtype)
        (event,) = train(trainer, 1, 1)[0].events
        numbers = parameter_count(trainer)
        assert (event.sent, event.received, event.through) == (size * numbers, 8 * numbers, "server")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"buffer": 0}, "synchronisation.buffer: must be a positive integer, got 0"),
        (
            {"dynamic_steps": True},
            "synchronisation: DelayedNesterov needs node_speeds to let slower workers make fewer inner steps",
        ),
    ],
)
def test_parameters_of_delayed_nesterov_that_make_no_sense(settings, problem):
    assert refusals("DelayedNesterov", settings) == [problem]
