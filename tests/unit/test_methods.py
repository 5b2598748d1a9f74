"""The synchronisation methods with a barrier, against independent implementations of their papers."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from algorithms.flat import Block, layer_fragments, random_elements, random_positions, sketch
from algorithms.synchronisation import METHODS, noloco
from algorithms.synchronisation.diloco import nesterov_step
from algorithms.synchronisation.fda import variance_estimate
from algorithms.synchronisation.method import Method
from fabrics.config_checks import CHECKS
from fabrics.training import inner_loop
from fabrics.training.method_config import method_of
from fabrics.training.worker import COPY, ERROR, Node
from tests.support import matrix, oracles
from tests.support.helpers import CPU, VOCABULARY, in_one_type, make_config, make_trainer, tiny_llama, train
from tests.support.synchronising import EXAMPLES, assert_equals_oracle, problem_of, trainer_of
from trainers import Trainer
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]


# The interface


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_methods_agrees_with_the_code(name):
    """Model-sized tensors beside parameters and moments, with default parameters; and a valid example."""
    method = METHODS[name]()
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    kept = len(method.state), len(method.worker_state) + (method.keeps != "shared")
    assert re.search(rf"^\| {name} \| {kept[0]}\b[^|]*\| {kept[1]}\b", page, re.M)
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert re.search(r"\bSen(t|ds)\b", section)
    assert re.search(r"\bKe(pt|eps)\b", section)
    (lines,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.M | re.S)
    assert len(lines.splitlines()) == 3
    config, warnings = parse_config({"max_tokens": 1} | yaml.safe_load(lines), (), CHECKS)
    assert (config.distributed_algo, warnings) == (name, [])


class Wrong(Method):
    """A method with one mistake."""

    mistake: str = "none"

    def incoming(self, group):
        return {"tensors": group.messages(tensors=2), "bytes": group.messages(8)}.get(self.mistake) or group.mean()

    def message(self, worker, group):
        if self.mistake == "worker":
            worker.state["new"] = worker.start.clone()
        shorter = worker.parameters[1:]
        messages = {"short": shorter, "tensors": [worker.parameters, shorter], "bytes": torch.zeros(8)}
        return messages.get(self.mistake, worker.parameters)

    def apply(self, group, result):
        group.shared["new"] = result


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        ("short", "must have {n} elements of torch.float64, got {n_1} of torch.float64"),
        ("tensors", "must have {n} elements of torch.float64, got {n_1} of torch.float64"),
        ("bytes", "must have 8 elements of torch.uint8, got 8 of torch.float32"),
        ("worker", "'mappingproxy' object does not support item assignment"),
        ("shared", "'mappingproxy' object does not support item assignment"),
    ],
)
def test_messages_of_another_size_and_tensors_that_are_not_declared_are_errors(monkeypatch, mistake, problem):
    """Other processes would misread the first; no checkpoint would have the second."""
    monkeypatch.setattr(Wrong, "mistake", mistake)
    monkeypatch.setitem(METHODS, "Wrong", Wrong)
    trainer = trainer_of(2, distributed_algo="Wrong")
    n = trainer.worker_group.parameter_count
    with pytest.raises((ValueError, TypeError), match=re.escape(problem.format(n=n, n_1=n - 1))):
        train(trainer, 1)


@pytest.mark.parametrize(("member", "given"), [("message", 2), ("apply", 2), ("exchange", 1)])
def test_what_a_method_lacks_is_named(member, given):
    with pytest.raises(NotImplementedError, match=f"^Method needs `{member}`$"):
        getattr(Method(), member)(*[None] * given)


# The outer step of DiLoCo


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0)])
def test_nesterov_step_equals_torch_sgd_with_nesterov(lr, momentum):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator, dtype=torch.float64)
    expected = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([expected], lr=lr, momentum=momentum, nesterov=momentum > 0.0)
    x, velocity = start.clone(), torch.zeros_like(start)
    for _ in range(5):
        gradient = torch.randn(50, generator=generator, dtype=torch.float64)
        expected.grad = gradient.clone()
        optimizer.step()
        nesterov_step(x, gradient, velocity, lr, momentum)
        torch.testing.assert_close(x, expected.detach(), rtol=1e-13, atol=1e-13)


# Equal to the oracles

UNEVEN = {"max_batches": (64, 1, 64)}  # one of three workers has half the examples of the others
SERVER_RATE = {"learning_rate_for_outer_opt": 0.03}
UNEVEN_3_2_3 = {"INITIAL_BATCH_SIZE": 9, "max_requested_batch": 9, "max_batches": (64, 2, 64)}


def generator_at(step: int, inner_steps: int = 4) -> torch.Generator:
    """Return the generator that a method has after an inner step of the run, counted from 0."""
    place = [make_config().training_seed, 0, step // inner_steps, step % inner_steps + 1]
    seed = np.random.SeedSequence(place, spawn_key=(1,)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))


@pytest.mark.parametrize(
    ("nodes", "parameters", "values"),
    [
        (4, {}, {}),
        (3, {"consensus": 0.3}, UNEVEN | {"outer_momentum": 0.3}),
        (1, {}, {}),
        (3, {"group": 3}, {"outer_momentum": 0.0}),
    ],
)
def test_noloco(monkeypatch, nodes, parameters, values):
    values = {"distributed_algo": "NoLoCo", "synchronisation": parameters, "outer_momentum": 0.5} | values
    momentum = values["outer_momentum"]
    consensus = parameters.get("consensus", 0.7)
    drawn, draw = [], noloco.draw_groups

    def recorded(*arguments):
        drawn.append(draw(*arguments))
        return drawn[-1]

    monkeypatch.setattr(noloco, "draw_groups", recorded)
    train(trainer_of(nodes, **values), 3, 2)
    groups = drawn[::2]  # a round draws them twice: to send, and to apply
    assert len(groups) == 3
    assert drawn[::2] == drawn[1::2]
    assert_equals_oracle(
        lambda problem: oracles.noloco(problem, groups, momentum, consensus), nodes, inner_steps=2, **values
    )


DILOCO = ("DiLoCo", oracles.diloco)
LOCAL_SGD = ("LocalSGD", oracles.local_sgd)
SYNCHRONOUS = ("Synchronous", oracles.synchronous)
FED_OPT = ("FedOpt", oracles.fed_opt)
EAGER = ("EagerDiLoCo", oracles.eager_diloco)
STREAMING = ("StreamingDiLoCo", oracles.streaming_diloco)
FDA = ("FDA", oracles.fda)
SPARSE_LOCO = ("SparseLoCo", oracles.sparse_loco)
# No tile sends all its coefficients: the sign of what is left of a token without a gradient would be noise.
DEMO = ("DeMo", oracles.demo)


@pytest.mark.parametrize(
    ("method", "nodes", "inner_steps", "parameters", "values"),
    [
        (DILOCO, 4, 4, {}, {}),
        (LOCAL_SGD, 4, 4, {}, {}),
        (SYNCHRONOUS, 4, 4, {}, {}),
        (FED_OPT, 2, 2, {"server_optimizer": "adam"}, SERVER_RATE),
        (FED_OPT, 1, 2, {"server_optimizer": "adagrad", "beta1": 0.5, "tau": 0.05}, SERVER_RATE),
        (FED_OPT, 3, 2, {"server_optimizer": "yogi", "beta2": 0.9, "tau": 0.01}, UNEVEN | SERVER_RATE),
        (EAGER, 1, 4, {}, {}),
        (EAGER, 2, 2, {}, {}),
        (EAGER, 3, 2, {}, UNEVEN),
        (STREAMING, 3, 4, {"fragments": 1, "delay": 0}, {}),
        (STREAMING, 3, 4, {"fragments": 2, "delay": 1, "mixing": 0.25}, UNEVEN),
        (STREAMING, 2, 6, {"fragments": 3, "delay": 1, "mixing": 0.5}, {}),
        (STREAMING, 1, 3, {"fragments": 1, "delay": 2, "mixing": 0.0}, {}),
        (SPARSE_LOCO, 2, 2, {"density": 0.1, "chunk": 48, "error_decay": 0.95, "bits": 32}, {}),
        (SPARSE_LOCO, 3, 2, {"density": 0.25, "chunk": 100, "error_decay": 0.5, "bits": 2}, UNEVEN_3_2_3),
        (SPARSE_LOCO, 1, 2, {"density": 0.02, "chunk": 4096, "error_decay": 1.0, "bits": 3}, {}),
        (DEMO, 2, 2, {"chunk": 64, "top_k": 32, "decay": 0.999}, {"gradient_clipping": None}),
        (
            DEMO,
            3,
            2,
            {"chunk": 16, "top_k": 1, "decay": 0.9},
            UNEVEN_3_2_3 | {"gradient_clipping": 0.05, "weight_decay": 0.5},
        ),
        (DEMO, 1, 2, {"chunk": 8, "top_k": 1, "decay": 0.5}, {}),
        (FDA, 4, 4, {"threshold": 0.05}, {}),
        (FDA, 3, 4, {"threshold": 0.6, "check_every": 3, "max_inner_steps": 5}, {}),
        # Its estimate decides nothing here.
        (FDA, 4, 4, {"threshold": 1e9, "check_every": 2, "max_inner_steps": 3, "monitor": "sketch"}, {}),
        (FDA, 1, 4, {"threshold": 0.02, "check_every": 2}, {}),
    ],
)
def test_methods(method, nodes, inner_steps, parameters, values):
    name, oracle = method
    assert_equals_oracle(
        lambda problem: oracle(problem, **parameters),
        nodes,
        inner_steps,
        distributed_algo=name,
        synchronisation=parameters,
        **values,
    )


@pytest.mark.parametrize(
    ("nodes", "share", "with_diloco"), [(4, 0.1, False), (3, 0.3, True), (2, 1.0, False), (1, 0.5, True)]
)
def test_sparta(nodes, share, with_diloco):
    def oracle(problem):
        size = len(problem.start)

        def positions(step):
            return random_positions(size, round(share * size), generator_at(step)).numpy()

        return oracles.sparta(problem, positions, with_diloco)

    parameters = {"share": share, "with_diloco": with_diloco}
    assert_equals_oracle(oracle, nodes, distributed_algo="SPARTA", synchronisation=parameters)


@pytest.mark.parametrize(
    ("nodes", "parameters"),
    [
        (4, {"probability": 0.5, "density": 0.25}),
        (3, {"probability": 0.4, "density": 1}),
        (2, {"probability": 0.7, "density": 0.1}),
        (1, {"probability": 1, "density": 0.5}),
    ],
)
def test_locodl(nodes, parameters):
    probability = parameters["probability"]
    coins = []

    def coin(step):
        coins.append(torch.rand((), generator=generator_at(step), dtype=torch.float64).item() < probability)
        return coins[-1]

    def oracle(problem):
        size = len(problem.start)
        count = size if nodes == 1 else round(parameters["density"] * size)
        omega = size / count - 1

        def compressor(worker, step, vector):
            generator, found = generator_at(step), np.zeros_like(vector)
            torch.rand((), generator=generator, dtype=torch.float64)
            places = [random_positions(size, count, generator) for _ in range(worker + 1)][-1]
            found[places] = vector[places] * size / count
            return vector if nodes == 1 else found

        return oracles.locodl(problem, probability, compressor, coin, omega)

    assert_equals_oracle(
        oracle,
        nodes,
        INITIAL_BATCH_SIZE=2 * nodes - (nodes == 3),
        distributed_algo="LoCoDL",
        synchronisation=parameters,
        gradient_clipping=None,
        learning_rate_for_inner_opt=0.1,
    )
    assert 0 < sum(coins) < 12 or probability == 1


# Fragments under way


def test_a_fragment_under_way_arrives_in_the_next_round_however_long_that_is():
    """Workers with mixing 0 agree on a fragment once it has arrived, and differ before and later."""
    parameters = {"fragments": 2, "delay": 2, "mixing": 0.0}
    trainer = trainer_of(2, distributed_algo="StreamingDiLoCo", synchronisation=parameters)
    parts = layer_fragments(trainer.worker_group.model.blocks, 2)
    states = []
    for inner_steps in (6, 1, 1, 2, 5):
        train(trainer, 1, inner_steps)
        one, other = (worker.state[COPY] for worker in trainer.local_workers.values())
        agree = [all(torch.equal(one[piece], other[piece]) for piece in part) for part in parts]
        states.append((agree, trainer.worker_group.values))
    assert states == [
        ([False, False], {"fragment_1": 2}),
        ([False, True], {"fragment_0": 2, "fragment_1": 2}),  # at the latest when it is sent again
        ([True, True], {"fragment_0": 2, "fragment_1": 2}),
        ([False, True], {"fragment_0": 1, "fragment_1": 2}),
        ([True, False], {"fragment_1": 2}),
    ]
    assert all(torch.equal(other[piece], trainer.parameters[piece]) for piece in parts[0])


# Merges, and workers that leave


def apart(**values) -> tuple[Trainer, Trainer]:
    """Return two trainers of two workers, that have different models, after a round."""
    config = make_config(INITIAL_BATCH_SIZE=4, sampling_method="none", **values)
    models = [in_one_type(tiny_llama(seed)) for seed in range(2)]
    trainers = [make_trainer(model, config, EXAMPLES, 2, trainer_id=i, trainers=2) for i, model in enumerate(models)]
    for trainer in trainers:
        train(trainer, 1, 4)
    return tuple(trainers)


def assert_merged(trainers: tuple[Trainer, Trainer], expected: Sequence[torch.Tensor]) -> Trainer:
    """The trainers become one, from these parameters."""
    first, second = trainers
    first.absorb([second], {0: 0.25, 1: 0.75})
    torch.testing.assert_close(first.parameters, 0.25 * expected[0] + 0.75 * expected[1], rtol=0, atol=1e-12)
    for worker in first.local_workers.values():
        assert COPY not in worker.state or torch.equal(worker.state[COPY], first.parameters)
    return first


def test_streaming_sends_what_is_left_of_every_fragment_before_a_merge():
    """Fragment 0 was sent two inner steps ago; its velocity is mu v + D, and it moves by lr (D + mu (mu v + D))."""
    trainers, expected = apart(distributed_algo="StreamingDiLoCo", synchronisation={"delay": 1}), []
    part, _ = layer_fragments(trainers[0].worker_group.model.blocks, 2)
    for trainer in trainers:
        x, velocity = trainer.parameters.clone(), trainer.shared["velocity"]
        copies = torch.stack([worker.state[COPY] for worker in trainer.local_workers.values()])
        for piece in part:
            delta = x[piece] - copies.mean(0)[piece]
            assert delta.abs().max() > 1e-4
            x[piece] -= 0.7 * (1.9 * delta + 0.81 * velocity[piece])
        expected.append(x)
    assert assert_merged(trainers, expected).worker_group.values == {}


def test_sparse_loco_sends_what_is_left_before_a_merge_and_before_workers_leave():
    values = {"distributed_algo": "SparseLoCo", "synchronisation": {"density": 0.1, "chunk": 48}}
    trainers = apart(**values)
    unsent = [torch.stack([w.state["unsent"] for w in trainer.local_workers.values()]).mean(0) for trainer in trainers]
    expected = [trainer.parameters - 0.7 * left for trainer, left in zip(trainers, unsent, strict=True)]
    sent = 2 * 8 * trainers[0].worker_group.parameter_count  # a mean over two workers
    leaving = apart(**values)[0]
    before = leaving.worker_group.parameter_bytes
    settling, arrived = leaving.assign_nodes(leaving.nodes[:1])
    assert (settling.sent, arrived.sent) == (sent, 0) == (2 * before, 0)
    torch.testing.assert_close(leaving.parameters, expected[0], rtol=0, atol=1e-12)
    merged = assert_merged(trainers, expected)
    assert not any(
        worker.state["unsent"].any() for worker in (*merged.local_workers.values(), *leaving.local_workers.values())
    )


def test_fda_continues_from_the_merged_parameters():
    """All are at the point that was synchronised last, so that inner steps since then count from 0."""
    trainers = apart(distributed_algo="FDA", synchronisation={"threshold": 1e9, "max_inner_steps": 7})
    assert trainers[0].worker_group.values["since"] == 4
    for trainer in trainers:
        trainer.worker_group.refresh()
    merged = assert_merged(trainers, [trainer.parameters.clone() for trainer in trainers])
    assert torch.equal(merged.shared["synchronised"], merged.parameters)
    assert synchronised_after(merged, 2) == [[], [3]]


def test_streaming_keeps_the_error_of_every_fragment():
    """The rounding error of one fragment is still there after another was sent."""
    parameters = {"fragments": 2, "delay": 0, "mixing": 0.0}
    values = {"distributed_algo": "StreamingDiLoCo", "synchronisation": parameters}
    trainer, exact = trainer_of(2, communication_dtype="int8", **values), trainer_of(2, **values)
    for each in (trainer, exact):
        train(each, 1, 4)
    error = trainer.local_workers[0].state[ERROR]
    for part in layer_fragments(trainer.worker_group.model.blocks, 2):
        assert error[part[0]].abs().max() > 0
    assert 0 < (trainer.parameters - exact.parameters).abs().max() < 1e-3


class Tiny(nn.Module):
    """A model whose tensors of one element and of odd sizes leave gaps between them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 1)
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(24))
        self.head = nn.Linear(1, VOCABULARY)

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        for factor in self.factors:
            hidden = hidden * factor
        return SimpleNamespace(logits=self.head(hidden))


def eager_moves(trainer: Trainer) -> list[torch.Tensor]:
    """Train a round, and return each D_m, from the mean and the deviation of w_m D_m from M w_m^2 of the mean."""
    train(trainer, 1, 2)
    share = 1 / len(trainer.nodes)
    mean = trainer.shared["pending"] / (1 - share)
    return [worker.state["deviation"] / share + mean for worker in trainer.local_workers.values()]


def test_a_new_worker_counts_as_one_that_moved_like_the_mean():
    trainer = trainer_of(2, distributed_algo="EagerDiLoCo")
    mean = sum(eager_moves(trainer)) / 2
    trainer.assign_nodes(tuple(Node(index, CPU, 64) for index in range(3)))
    start = trainer.local_workers[2].state[COPY].clone()
    assert torch.equal(start, trainer.parameters)
    own = eager_moves(trainer)[2]
    eager = mean / 2 + own / 3  # the mean of the two has half of D' already
    new = trainer.local_workers[2].state
    torch.testing.assert_close(new["velocity"], eager, rtol=0, atol=1e-12)
    torch.testing.assert_close(start - new[COPY], 0.7 * 1.9 * eager, rtol=0, atol=1e-12)


def test_workers_that_remain_count_as_ones_that_moved_like_the_mean():
    trainer = trainer_of(3, distributed_algo="EagerDiLoCo", outer_momentum=0.0)
    mean = sum(eager_moves(trainer)) / 3
    trainer.assign_nodes(trainer.nodes[:2])
    start = trainer.parameters.clone()
    for own, worker in zip(eager_moves(trainer), trainer.local_workers.values(), strict=True):
        eager = mean * 2 / 3 + own / 2
        torch.testing.assert_close(start - worker.state[COPY], 0.7 * eager, rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [(4, 4, 1), (1, 4, 4, 1), (2, 4, 2, 1)], ids=str)
@pytest.mark.parametrize("merges", [False, True])
def test_eager_updates_apply_every_move_once_whatever_workers_come_and_go(workers, merges, monkeypatch):
    """Every worker moves by the same in every round, and the last round is that of a lone worker."""

    def constant(model, examples, plan, indices, probe):
        model.gradient.add_(1.0)
        return torch.zeros(()), []

    monkeypatch.setattr(inner_loop, "accumulate_gradients", constant)
    own = {
        "inner_optimizer": "sgd",
        "gradient_clipping": None,
        "outer_momentum": 0.0,
        "learning_rate_for_outer_opt": 1.0,
    }
    trainer = trainer_of(workers[0], distributed_algo="EagerDiLoCo", **own)
    start = trainer.parameters.clone()
    for number, count in enumerate(workers):
        trainer.assign_nodes(tuple(Node(index, CPU, 64) for index in range(count)))
        train(trainer, 1, 1)
        if merges and number == 1:
            other = trainer_of(3, distributed_algo="EagerDiLoCo", **own)
            other.id = 1
            train(other, 2, 1)
            trainer.absorb([other], {0: 0.25, 1: 0.75})
    trainer.worker_group.refresh()
    moved = (start - trainer.parameters).mean().item()
    assert moved == pytest.approx(len(workers) * trainer.worker_group._config.learning_rate_for_inner_opt, rel=1e-9)


def test_positions_of_elements_are_never_in_a_gap_between_tensors():
    blocks = [Block("a", 0, (1,)), Block("b", 16, (3, 5)), Block("c", 32, (16,)), Block("d", 48, (2,))]
    own = {place for block in blocks for place in range(block.start, block.start + block.size)}
    generator = torch.Generator().manual_seed(0)
    assert set(random_elements(blocks, len(own), len(own), generator).tolist()) == own
    seen = set()
    for _ in range(200):
        drawn = random_elements(blocks, len(own), 5, generator).tolist()
        assert len(set(drawn)) == 5
        seen |= set(drawn)
    assert seen == own


@pytest.mark.parametrize(
    ("method", "parameters"), [("SPARTA", {"share": 0.5}), ("LoCoDL", {"probability": 1.0, "density": 0.5})]
)
def test_gaps_between_tensors_are_not_sent(method, parameters):
    values = {"sampling_method": "none", "gradient_clipping": None}
    model = Tiny()
    trainer = make_trainer(
        model, make_config(distributed_algo=method, synchronisation=parameters, **values), EXAMPLES, 2
    )
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert len(trainer.parameters) > 2 * elements
    (report,) = train(trainer, 1, 1)
    half = round(0.5 * elements)
    assert report.bytes_synchronised == 2 * half * 4


# Bytes


def test_streaming_sends_as_many_bytes_as_diloco_in_parts_that_hide_behind_the_delay():
    trainer = trainer_of(2, distributed_algo="StreamingDiLoCo", synchronisation={"fragments": 2, "delay": 1})
    events = train(trainer, 1, 4)[0].events
    assert [(event.kind, event.step, event.behind) for event in events] == [
        ("synchronisation", 2, 1),
        ("synchronisation", 4, 1),
    ]
    whole = 8 * trainer.worker_group.parameter_count
    assert sum(event.sent for event in events) == whole == train(trainer_of(2), 1, 4)[0].events[0].sent
    assert min(event.sent for event in events) > 0.2 * whole


def test_the_mean_of_eager_diloco_hides_behind_the_next_round():
    events = train(trainer_of(3, distributed_algo="EagerDiLoCo"), 1, 2)[0].events
    assert [(event.kind, event.behind) for event in events] == [("synchronisation", 2)]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 8), ("bfloat16", 2)])
def test_noloco_sends_two_models_to_every_peer(dtype, size):
    trainer = trainer_of(4, distributed_algo="NoLoCo", communication_dtype=dtype)
    for report in train(trainer, 2, 1):
        (event,) = report.events
        assert event.sent == event.received == 2 * size * trainer.worker_group.parameter_count
        assert (event.kind, event.through) == ("synchronisation", "groups of 2")
    exact = trainer_of(4, distributed_algo="NoLoCo")
    train(exact, 2, 1)
    for ours, theirs in zip(trainer.local_workers.values(), exact.local_workers.values(), strict=True):
        apart = (ours.state[COPY] - theirs.state[COPY]).abs().max()
        assert apart == 0 if dtype == "float32" else 0 < apart < 0.01


def test_the_rounding_error_of_a_coefficient_stays_in_the_momentum():
    values = {"gradient_clipping": None, "communication_dtype": "bfloat16"}
    trainer = trainer_of(2, distributed_algo="DeMo", synchronisation={"chunk": 8, "top_k": 64}, **values)
    problem = problem_of(trainer, 1, 1)
    train(trainer, 1, 1)
    for index, worker in trainer.local_workers.items():
        before = 0.01 * torch.from_numpy(problem.gradient(index, 0, problem.start))
        for each in trainer.worker_group.method.matrices(trainer.worker_group.model.blocks):
            coefficients = each.coefficients(before)
            left = each.coefficients(worker.state["momentum"])
            torch.testing.assert_close(left, coefficients - coefficients.bfloat16(), rtol=0, atol=1e-15)
            assert left.abs().max() > 1e-8


def test_sparta_sends_a_random_part_alone():
    trainer = trainer_of(distributed_algo="SPARTA", synchronisation={"share": 0.1})
    events = train(trainer, 1, 2)[0].events
    assert [(event.step, event.kind) for event in events] == [(1, "parameters"), (2, "parameters")]
    sent = 2 * 3 / 4 * 8 * round(0.1 * len(trainer.parameters))  # there and back, of float64
    assert {event.sent for event in events} == {event.received for event in events} == {sent}


@pytest.mark.parametrize(("monitor", "elements"), [("linear", 2), ("sketch", 1 + 5 * 250)])
def test_a_check_of_fda_sends_a_few_elements(monitor, elements):
    trainer = trainer_of(2, distributed_algo="FDA", synchronisation={"threshold": 1e9, "monitor": monitor})
    events = train(trainer, 1, 2)[0].events
    assert [(event.kind, event.sent) for event in events] == [("monitor", elements * 8)] * 2
    assert not any(event.communicates for event in events)


def test_locodl_sends_values_alone_and_its_corrections_cancel():
    trainer = trainer_of(4, distributed_algo="LoCoDL", synchronisation={"probability": 1, "density": 0.1})
    count = round(0.1 * len(trainer.parameters))
    events = train(trainer, 1)[0].events
    assert [(event.sent, event.received) for event in events] == [(3 * count * 8, 3 * count * 8)] * 3
    control = trainer.shared["control"]
    # They start at zero again with other workers, after a merge, which replaces no worker here, and after a loss.
    for step, workers in enumerate((4, 3, 5, 5, 5)):
        if step < 3:
            trainer.assign_nodes(tuple(Node(index, CPU, 64) for index in range(workers)))
        elif step == 3:
            other = trainer_of(2, distributed_algo="LoCoDL", synchronisation={"probability": 1, "density": 0.1})
            other.id = 1
            train(other, 1)
            trainer.absorb([other], {0: 0.5, 1: 0.5})
        else:
            with matrix.losing(lambda key: key.worker == 1):
                train(trainer, 1, 2)
        train(trainer, 1, 1)
        assert control.abs().max() > 1e-3
        corrections = [worker.state["correction"] for worker in trainer.local_workers.values()]
        torch.testing.assert_close(sum(corrections) / workers, control, rtol=0, atol=1e-12)


def test_locodl_settles_half_of_the_way_to_the_mean():
    trainer = trainer_of(3, distributed_algo="LoCoDL", synchronisation={"probability": 1e-9, "density": 0.1})
    train(trainer, 1)
    mean = sum(worker.state["copy"] for worker in trainer.local_workers.values()) / 3
    expected = torch.lerp(trainer.parameters, mean, 0.5)
    trainer.worker_group._settle(some_end=True)
    assert (trainer.parameters - mean).abs().max() > 1e-4
    torch.testing.assert_close(trainer.parameters, expected, rtol=0, atol=1e-12)


# Random draws


def test_all_workers_are_in_one_group_and_groups_change():
    generator = torch.Generator().manual_seed(0)
    draws = [noloco.draw_groups(7, 3, generator) for _ in range(20)]
    for groups in draws:
        assert [len(group) for group in groups] == [3, 3, 1]
        assert sorted(worker for group in groups for worker in group) == list(range(7))
    assert len({str(groups) for groups in draws}) > 10


def test_random_positions_are_distinct_and_equally_likely():
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(23)
    for _ in range(5000):
        positions = random_positions(23, 7, generator)
        assert len(positions.unique()) == 7
        counts[positions] += 1
    # 1522 of 5000 each; the standard deviation is 33 at most.
    assert (counts - 5000 * 7 / 23).abs().max() < 130
    assert random_positions(23, 23, generator).unique().tolist() == list(range(23))


# The threshold of FDA


def synchronised_after(trainer, rounds, inner_steps=4):
    reports = train(trainer, rounds, inner_steps)
    return [[event.step for event in report.events if event.communicates] for report in reports]


def test_fda_calibrates_its_threshold_in_the_first_rounds():
    """Three rounds of averaging with AdamW inside: the mean of the variances Var_i with weights i^(1/3)."""
    trainer = trainer_of(nodes=3, distributed_algo="FDA")
    problem = problem_of(trainer, 3, 3)
    assert synchronised_after(trainer, 3, 3) == [[3]] * 3
    workers, phi, variances = oracles.Workers(problem), problem.start, []
    for number in range(3):
        thetas = workers.round(number, [phi] * 3)
        phi = np.mean(thetas, axis=0)
        variances.append(np.mean([((theta - phi) ** 2).sum() for theta in thetas]))
    expected = np.average(variances, weights=[1, 2 ** (1 / 3), 3 ** (1 / 3)])
    assert trainer.worker_group.values["threshold"] == pytest.approx(expected, rel=1e-9)
    assert 0 < len(synchronised_after(trainer, 1, 12)[0]) < 12


def test_fda_calibrates_neither_with_one_worker_nor_while_the_learning_rate_warms_up():
    """Four rounds in which the rate grows; one of one worker, whose variance is 0; then three that count."""
    trainer = trainer_of(1, distributed_algo="FDA", warmup_steps=11, INITIAL_BATCH_SIZE=4, max_requested_batch=4)
    seen = []
    for nodes in (1, 2, 2, 2, 1, 2, 2, 2):
        trainer.assign_nodes(tuple(Node(index, CPU, 64) for index in range(nodes)))
        assert synchronised_after(trainer, 1, 3) == [[3] if nodes == 2 else []]
        seen.append(trainer.worker_group.values.get("calibrated", 0))
    assert seen == [0, 0, 0, 0, 0, 1, 2, 3]
    assert trainer.worker_group.values["threshold"] > 1e-3


def test_fda_calibrates_after_a_warm_up_in_rounds_of_one_inner_step():
    trainer = trainer_of(2, distributed_algo="FDA", warmup_steps=2)
    train(trainer, 2, 1)
    assert trainer.worker_group.values["calibrated"] == 0
    train(trainer, 3, 1)
    assert trainer.worker_group.values["calibrated"] == 3


def test_the_linear_estimate_is_never_below_the_variance_and_the_sketch_hardly_ever():
    generator = torch.Generator().manual_seed(1)
    above = 0
    for _ in range(60):
        drifts = torch.randn(4, 600, generator=generator) + 2 * torch.randn(600, generator=generator)
        direction = torch.nn.functional.normalize(drifts.mean(0) + torch.randn(600, generator=generator), dim=0)
        variance = (drifts - drifts.mean(0)).square().sum(1).mean()

        def linear(xi, drifts=drifts):
            return variance_estimate(torch.stack([torch.stack([u @ u, xi @ u]) for u in drifts]).mean(0))

        assert variance < linear(direction) < linear(0 * direction)
        states = [torch.cat([(u @ u).view(1), sketch(u, 0, 250, rows=5)]) for u in drifts]
        above += variance_estimate(torch.stack(states).mean(0)) > variance
    assert 60 > above > 45
    exact = torch.nn.functional.normalize(drifts.mean(0), dim=0)
    assert linear(exact) == pytest.approx(variance.item(), rel=1e-3)


# Parameters that make no sense


@pytest.mark.parametrize(
    ("method", "parameters", "problem"),
    [
        ("FedOpt", {"beta1": 1.0}, "beta1: must be at least 0 and less than 1, got 1.0"),
        ("StreamingDiLoCo", {"fragments": 0}, "fragments: must be a positive integer, got 0"),
        ("StreamingDiLoCo", {"fragments": True}, "fragments: should not be true or false, got True"),
        ("StreamingDiLoCo", {"mixing": 1.0}, "mixing: must be at least 0 and less than 1, got 1.0"),
        ("StreamingDiLoCo", {"fragments": 5}, "fragments: must divide number_of_inner_steps_between_outers, 12, got 5"),
        ("StreamingDiLoCo", {"delay": 6}, "delay: must be less than number_of_inner_steps_between_outers / fragments"),
        ("NoLoCo", {"group": 1}, "group: must be at least 2, got 1"),
        ("NoLoCo", {"pairs": 2}, "pairs: NoLoCo has no such parameter; it has group, consensus"),
        ("LoCoDL", {"density": 1.5}, "density: must be larger than 0 and at most 1, got 1.5"),
        ("SparseLoCo", {"chunk": 0}, "chunk: must be from 1 to 2^31, got 0"),
        ("SparseLoCo", {"bits": 1}, "bits: must be from 2 to 8, or 32, got 1"),
        ("DeMo", {"chunk": 8, "top_k": 65}, "top_k: must be at most chunk x chunk, 64, got 65"),
        ("FDA", {"monitor": "exact"}, "monitor: should be 'linear' or 'sketch', got 'exact'"),
        ("FDA", {"check_every": 9, "max_inner_steps": 8}, "check_every: must be at most max_inner_steps, 8, got 9"),
        ("Decoupled", {"quorum": 0}, "quorum: must be a positive integer, got 0"),
        ("Decoupled", {"mixing": 1.0}, "mixing: must be at least 0 and less than 1, got 1.0"),
        ("Decoupled", {"fragments": 13}, "fragments: must be at most the inner steps of a round, 12, got 13"),
        ("Decoupled", {"fragments": 5, "steps": 4}, "fragments: must be at most steps, 4, got 5"),
        ("Decoupled", {"qorum": 1}, "qorum: Decoupled has no such parameter; did you mean quorum?"),
        ("DelayedNesterov", {"buffer": 0}, "buffer: must be a positive integer, got 0"),
        ("DelayedNesterov", {"steps": 2, "dynamic_steps": True}, "steps: must be null with dynamic_steps, got 2"),
        ("DelayedNesterov", {"dynamic_steps": True}, "needs the simulated speeds of node_speeds to let slower workers"),
    ],
)
def test_a_wrong_parameter_is_refused(method, parameters, problem):
    values = {"max_tokens": 1, "number_of_inner_steps_between_outers": 12, "gradient_clipping": None}
    with pytest.raises(ConfigError) as refused:
        parse_config(values | {"distributed_algo": method, "synchronisation": parameters}, (), CHECKS)
    (line,) = refused.value.problems
    assert line.startswith("synchronisation")
    assert problem in line


@pytest.mark.parametrize("outside", [("embedding.weight",), ()])
def test_every_fragment_has_a_layer_or_what_is_outside_of_them(outside):
    """Adapters alone are all in layers, and so are the layers of an nn.Sequential."""
    names = (*outside, "layers.0.weight", "layers.1.weight")
    blocks = [Block(name, 16 * place, (4, 4)) for place, name in enumerate(names)]
    assert layer_fragments(blocks, len(names)) == [[block.slice] for block in blocks]
    config = make_config(distributed_algo="StreamingDiLoCo", synchronisation={"fragments": len(names) + 1})
    with pytest.raises(ConfigError, match=rf"^synchronisation.fragments: must be at most {len(names)}, the layers and"):
        method_of(config, SimpleNamespace(blocks=blocks))


def test_parameters_without_elements_are_not_sent():
    blocks = [Block("weight", 0, (4, 8)), Block("empty", 32, (0, 3))]
    assert METHODS["DeMo"]().matrices(blocks) == METHODS["DeMo"]().matrices(blocks[:1])
    sent = METHODS["SparseLoCo"]().capabilities.bytes_per_round
    assert sent(2, 0, 0, blocks, torch.float32) == sent(2, 0, 0, blocks[:1], torch.float32)
