"""FedOpt, SPARTA, FDA and LoCoDL against independent implementations of their papers."""

import dataclasses

import numpy as np
import pytest
import torch

from algorithms.synchronisation.fda import linear_state, sketch_state, variance_estimate
from algorithms.synchronisation.flat import random_positions
from fabrics.config_checks import CHECKS
from tests.support import oracles, oracles_sparse
from tests.support.helpers import make_config, make_trainer, tiny_llama, train
from tests.support.synchronising import EXAMPLES, assert_equals_oracle, history_of, problem_of, trainer_of
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

# FedOpt


@pytest.mark.parametrize(
    ("nodes", "kind", "parameters"),
    [
        (4, "avg", {}),
        (2, "adam", {}),
        (1, "adagrad", {"beta1": 0.5, "tau": 0.05}),
        (3, "yogi", {"beta2": 0.9, "tau": 0.01}),
    ],
)
def test_fed_opt(nodes, kind, parameters):
    assert_equals_oracle(
        lambda problem: oracles.fed_opt(problem, kind, 0.03, **parameters),
        nodes,
        inner_steps=2,
        INITIAL_BATCH_SIZE=2 * nodes - (nodes == 3),  # 5 examples for 3 workers
        distributed_algo="FedOpt",
        synchronisation={"server_optimizer": kind, **parameters},
        learning_rate_for_outer_opt=0.03,
    )


def test_fed_opt_that_averages_is_local_sgd_with_adamw_inside():
    values = {"inner_optimizer": "adamw", "learning_rate_for_outer_opt": 1.0}
    average = trainer_of(distributed_algo="FedOpt", synchronisation={"server_optimizer": "avg"}, **values)
    local = trainer_of(distributed_algo="LocalSGD", **values)
    for trainer in (average, local):
        train(trainer, 2, 1)
    assert torch.equal(average.parameters, local.parameters)


# SPARTA


def generator_at(step: int, inner_steps: int) -> torch.Generator:
    """As a method has it after an inner step of the run, counted from 0."""
    place = [make_config().training_seed, 0, step // inner_steps, step % inner_steps + 1]
    seed = np.random.SeedSequence(place, spawn_key=(1,)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))


@pytest.mark.parametrize("with_diloco", [False, True])
@pytest.mark.parametrize(("nodes", "share", "every"), [(4, 0.1, 1), (3, 0.3, 3), (2, 1.0, 5), (1, 0.5, 2)])
def test_sparta(nodes, share, every, with_diloco):
    def oracle(problem):
        size = len(problem.start)
        places = lambda step: random_positions(size, round(share * size), generator_at(step, 4)).numpy()  # noqa: E731
        return oracles_sparse.sparta(problem, places, every, with_diloco)

    assert_equals_oracle(
        oracle,
        nodes,
        distributed_algo="SPARTA",
        synchronisation={"share": share, "every": every, "with_diloco": with_diloco},
    )


def averaging_at_every_step(problem):
    each = dataclasses.replace(problem, inner_steps=1, rounds=problem.rounds * problem.inner_steps)
    history = oracles.local_sgd(dataclasses.replace(each, inner_optimizer="adamw"))
    last = slice(problem.inner_steps - 1, None, problem.inner_steps)
    return oracles.History(history.shared[last], history.workers[last])


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("SPARTA", {"share": 1}),
        ("FDA", {"threshold": 0}),
        ("FDA", {"threshold": 0, "outer": "nesterov"}),
    ],
)
def test_methods_that_average_at_every_step(method, parameters):
    assert_equals_oracle(
        averaging_at_every_step,
        inner_steps=3,
        distributed_algo=method,
        synchronisation=parameters,
        learning_rate_for_outer_opt=1.0,
        outer_momentum=0.0,
    )


def test_a_random_part_has_different_places_all_equally_likely():
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(23)
    for _ in range(5000):
        part = random_positions(23, 7, generator)
        assert len(part.unique()) == 7
        counts[part] += 1
    # 1522 of 5000 each; the standard deviation is 33 at most.
    assert (counts - 5000 * 7 / 23).abs().max() < 130
    assert random_positions(23, 23, generator).unique().tolist() == list(range(23))


def test_a_random_part_is_all_that_sparta_sends():
    trainer = trainer_of(distributed_algo="SPARTA", synchronisation={"share": 0.1, "every": 2})
    events = [[(event.step, event.kind) for event in report.events] for report in train(trainer, 2, 3)]
    assert events == [[(2, "parameters")], [(1, "parameters"), (3, "parameters")]]
    count = round(0.1 * len(trainer.parameters))
    assert train(trainer, 1, 1)[0].events == ()
    event = train(trainer, 1, 1)[0].events[0]
    assert event.sent == event.received == 2 * 3 / 4 * 8 * count  # there and back, of float64


# FDA

FDA_CASES = [
    (4, {"threshold": 0.05, "monitor": "linear"}),
    (3, {"threshold": 0.6, "monitor": "linear", "check_every": 3, "max_inner_steps": 5}),
    (4, {"threshold": 1e9, "monitor": "sketch", "check_every": 2, "max_inner_steps": 3}),
    (1, {"threshold": 0.02, "monitor": "linear", "check_every": 2}),
]


def fda_oracle(problem, **parameters):
    return oracles.fda(
        problem, **({"check_every": 1, "max_inner_steps": None} | parameters), xi=np.zeros_like(problem.start)
    )


@pytest.mark.parametrize(("nodes", "parameters"), FDA_CASES)
def test_fda(nodes, parameters):
    seen = {**parameters, "monitor": "linear"}  # with a threshold that nobody reaches
    assert_equals_oracle(
        lambda problem: fda_oracle(problem, **seen), nodes, distributed_algo="FDA", synchronisation=parameters
    )


def test_fda_with_nesterov_is_diloco_over_the_ends_of_rounds():
    values = {"threshold": 1e9, "max_inner_steps": 4, "outer": "nesterov"}
    trainer = trainer_of(distributed_algo="FDA", synchronisation=values)
    expected = oracles.diloco(problem_of(trainer, 2, 4), lr=0.7, momentum=0.9)
    found = history_of(trainer, 4, 2)
    np.testing.assert_allclose(found.shared[1::2], expected.shared, rtol=0, atol=1e-10)


@pytest.mark.parametrize("outer", ["adam", "adagrad", "yogi"])
def test_fda_with_a_servers_optimiser_is_fed_opt_over_the_ends_of_rounds(outer):
    parameters = {"beta1": 0.8, "beta2": 0.9, "tau": 0.01}
    values = {"threshold": 1e9, "max_inner_steps": 4, "outer": outer, **parameters}
    trainer = trainer_of(distributed_algo="FDA", synchronisation=values, learning_rate_for_outer_opt=0.03)
    expected = oracles.fed_opt(problem_of(trainer, 2, 4), outer, 0.03, **parameters)
    found = history_of(trainer, 4, 2)
    np.testing.assert_allclose(found.shared[1::2], expected.shared, rtol=0, atol=1e-10)


def synchronised_after(trainer, rounds, inner_steps=4):
    reports = train(trainer, rounds, inner_steps)
    return [[event.step for event in report.events if event.communicates] for report in reports]


def test_fda_takes_its_threshold_from_the_first_rounds():
    """Of two rounds that are LocalSGD's with AdamW inside, (1 Var_1 + 2^(1/3) Var_2) / (1 + 2^(1/3))."""
    trainer = trainer_of(nodes=3, distributed_algo="FDA", synchronisation={"calibrate": 2})
    problem, variances = problem_of(trainer, 2, 3), []
    assert synchronised_after(trainer, 2, 3) == [[3], [3]]
    workers, phi = oracles.Workers(problem), problem.start
    for number in range(2):
        thetas = [workers.round(i, number, phi.copy()) for i in range(3)]
        phi = np.mean(thetas, axis=0)
        variances.append(np.mean([((theta - phi) ** 2).sum() for theta in thetas]))
    expected = (variances[0] + 2 ** (1 / 3) * variances[1]) / (1 + 2 ** (1 / 3))
    assert trainer._values["threshold"] == pytest.approx(expected, rel=1e-9)
    assert 0 < len(synchronised_after(trainer, 1, 12)[0]) < 12


def test_fda_sets_its_threshold_where_a_resumed_run_asks_for_fewer_rounds_than_it_has_seen():
    begun = trainer_of(nodes=2, distributed_algo="FDA", synchronisation={"calibrate": 3})
    train(begun, 2, 3)
    trainer = trainer_of(nodes=2, distributed_algo="FDA", synchronisation={"calibrate": 1})
    tensors = begun.tensors()
    trainer.load_state_dict(begun.state_dict(), lambda group, name: tensors[group][name])
    assert synchronised_after(trainer, 1, 3) == [[3]]
    weighted, weights = trainer._values["weighted"], [number ** (1 / 3) for number in (1, 2, 3)]
    assert trainer._values["threshold"] == pytest.approx(weighted / sum(weights))


def test_spread_is_never_below_the_variance():
    generator = torch.Generator().manual_seed(1)
    above = 0
    for _ in range(60):
        drifts = torch.randn(4, 600, generator=generator) + 2 * torch.randn(600, generator=generator)
        direction = torch.nn.functional.normalize(drifts.mean(0) + torch.randn(600, generator=generator), dim=0)
        variance = (drifts - drifts.mean(0)).square().sum(1).mean()
        blind, linear = (
            torch.stack([linear_state(u, xi) for u in drifts]).mean(0) for xi in (0 * direction, direction)
        )
        assert variance < variance_estimate(linear) < variance_estimate(blind)
        above += variance_estimate(torch.stack([sketch_state(u) for u in drifts]).mean(0)) > variance
    assert 60 > above > 45
    exact = torch.nn.functional.normalize(drifts.mean(0), dim=0)
    assert variance_estimate(torch.stack([linear_state(u, exact) for u in drifts]).mean(0)) == pytest.approx(
        variance.item(), rel=1e-3
    )


def test_what_fda_sends_to_look():
    for monitor, numbers in (("linear", 2), ("sketch", 1 + 5 * 250)):
        trainer = trainer_of(2, distributed_algo="FDA", synchronisation={"threshold": 1e9, "monitor": monitor})
        events = train(trainer, 1, 2)[0].events
        assert [(event.kind, event.sent) for event in events] == [("monitor", numbers * 8)] * 2
        assert not any(event.communicates for event in events)


def test_fda_goes_on_from_what_a_merge_made():
    config = make_config(
        distributed_algo="FDA",
        synchronisation={"threshold": 1e9, "outer": "nesterov"},
        sampling_method="none",
    )
    first, second = (make_trainer(tiny_llama(seed), config, EXAMPLES, 2, trainer_id=seed) for seed in (0, 1))
    for trainer in (first, second):
        train(trainer, 1)
    first.absorb([second], {0: 0.25, 1: 0.75})
    for own in (first.shared["synchronised"], *(worker.state["copy"] for worker in first.workers.values())):
        assert torch.equal(own, first.parameters)
    second.refresh()
    assert not torch.equal(second.parameters, second.shared["synchronised"])


# LoCoDL


@pytest.mark.parametrize(
    ("nodes", "parameters"),
    [
        (4, {"probability": 0.5, "density": 0.25, "rho": 0.5, "chi": 0.3}),
        (3, {"probability": 0.4, "density": 1, "rho": 1, "chi": 1}),
        (2, {"probability": 0.7, "density": 0.1}),
        (1, {"probability": 1, "density": 0.5}),
    ],
)
def test_locodl(nodes, parameters):
    density, probability = parameters["density"], parameters["probability"]
    coins = []

    def oracle(problem):
        size, omega = len(problem.start), 0.0
        count = round(density * size)
        omega = size / count - 1

        def coin(step):
            coins.append(torch.rand((), generator=generator_at(step, 4), dtype=torch.float64).item() < probability)
            return coins[-1]

        def compressor(worker, step, vector):
            generator, found = generator_at(step, 4), np.zeros_like(vector)
            torch.rand((), generator=generator, dtype=torch.float64)
            places = [random_positions(size, count, generator) for _ in range(worker + 1)][-1]
            found[places] = vector[places] * size / count
            return found

        rho, chi = (parameters.get(name, 1 / (1 + omega / nodes)) for name in ("rho", "chi"))
        return oracles_sparse.locodl(problem, probability, compressor, coin, rho, chi, omega)

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


def test_locodl_sends_values_alone_and_its_corrections_cancel():
    trainer = trainer_of(4, distributed_algo="LoCoDL", synchronisation={"probability": 1, "density": 0.1})
    count = round(0.1 * len(trainer.parameters))
    events = train(trainer, 1)[0].events
    assert [(event.sent, event.received) for event in events] == [(3 * count * 8, 3 * count * 8)] * 3
    control, corrections = trainer.shared["control"], [w.state["correction"] for w in trainer.workers.values()]
    assert control.abs().max() > 1e-3
    torch.testing.assert_close(sum(corrections) / 4, control, rtol=0, atol=1e-12)
    # With another number of workers they begin anew, from zero on.
    trainer.assign_nodes(trainer.nodes[:3])
    train(trainer, 1, 1)
    corrections = [worker.state["correction"] for worker in trainer.workers.values()]
    torch.testing.assert_close(sum(corrections) / 3, control, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "values", "expected"),
    [
        ("FedOpt", {"beta1": 1.0}, "synchronisation.beta1: must be at least 0 and less than 1, got 1.0"),
        ("FedOpt", {"tau": 0.0}, "synchronisation.tau: must be a positive number, got 0.0"),
        ("SPARTA", {"share": 0.0}, "synchronisation.share: must be larger than 0 and at most 1, got 0.0"),
        ("SPARTA", {"every": 0}, "synchronisation.every: must be a positive number of inner steps, got 0"),
        ("FDA", {"threshold": -1.0}, "synchronisation.threshold: must be a number that is not negative, got -1.0"),
        (
            "FDA",
            {"threshold": float("inf")},
            "synchronisation.threshold: must be a number that is not negative, got inf",
        ),
        ("FDA", {"threshold": 1, "calibrate": 2}, "synchronisation.calibrate: must be null with a threshold, got 2"),
        ("FDA", {"tau": 0.0, "outer": "adam"}, "synchronisation.tau: must be a positive number, got 0.0"),
        ("FDA", {"tau": 0.1}, "synchronisation.tau: must be left out with mean, which has none"),
        ("FDA", {"calibrate": 0}, "synchronisation.calibrate: must be a positive number, got 0"),
        (
            "FDA",
            {"check_every": 9, "max_inner_steps": 8},
            "synchronisation.check_every: must be at most max_inner_steps, 8, got 9",
        ),
        ("LoCoDL", {"density": 1.5}, "synchronisation.density: must be larger than 0 and at most 1, got 1.5"),
    ],
)
def test_parameters_that_make_no_sense(method, values, expected):
    config = {"max_tokens": 1, "distributed_algo": method, "synchronisation": values, "gradient_clipping": None}
    with pytest.raises(ConfigError) as error:
        parse_config(config, (), CHECKS)
    assert error.value.problems == [expected]


def test_locodl_refuses_what_is_no_plain_sgd():
    config = {"max_tokens": 1, "distributed_algo": "LoCoDL", "inner_optimizer": "adamw"}
    with pytest.raises(ConfigError) as error:
        parse_config(config, ["communication_dtype=int8"], CHECKS)
    assert error.value.problems == [
        "communication_dtype: must be float32 with LoCoDL, got int8",
        "inner_optimizer: must be null or sgd with LoCoDL, got adamw",
        "gradient_clipping: must be null with LoCoDL, got 1.0",
    ]
