"""One, two and four processes give the same run; real processes, over gloo."""

import functools
import json
from collections.abc import Collection

import pytest
import torch

from algorithms.batch.gradient_statistics import MINIMUM_WORKERS
from algorithms.synchronisation.encodings import PLAIN
from tests.support import matrix, spmd
from tests.support.runs import assert_same_run, summary
from utils.distributed.reductions import Workers

IN_ORDER = [name for name in spmd.SCENARIOS if name != "all-reduce"]


def by_processes(names: Collection[str], of_four: Collection[str]) -> pytest.MarkDecorator:
    """Parametrise with the results of two and of four processes, which do less, and what they did."""
    cases = [(2, name) for name in names] + [(4, name) for name in names if name in of_four]
    return pytest.mark.parametrize(("results", "name"), cases, indirect=["results"])


every_method = by_processes(matrix.NAMES, matrix.POOL_OF_FOUR)


def scenarios(names: Collection[str]) -> pytest.MarkDecorator:
    return by_processes(names, [name for name in names if name not in spmd.OF_TWO])


@pytest.fixture(scope="module")
def of_two_and_four(programs, tmp_path_factory):
    found = {}
    for count in (2, 4):
        folder = tmp_path_factory.mktemp("spmd")
        programs.torchrun(count, "tests/support/spmd.py", folder)
        owners = json.loads((folder / "owners.json").read_text())
        found[count] = torch.load(folder / "results.pt", weights_only=True), owners
    return found


@pytest.fixture(params=[2, 4])
def results(request, of_two_and_four):
    """The results of several processes, and the owners of the nodes."""
    return of_two_and_four[request.param]


@pytest.fixture(scope="module")
def alone():
    """The results of this process alone, by scenario."""
    assert torch.get_num_threads() == 1
    return functools.cache(spmd.run_scenario)


@scenarios(IN_ORDER)
def test_several_processes_give_the_same_bits(results, alone, name):
    together, single = results[0][name], alone(name)
    assert single["merges"] >= 1 or name == "the most of the time"
    assert len(set(single["requests"])) > 1 or name == "across workers"
    assert together["parameters"].keys() == single["parameters"].keys()
    for trainer, parameters in single["parameters"].items():
        assert torch.equal(together["parameters"][trainer], parameters)
    for what in set(single) - {"parameters", "calls", "placement"}:
        assert together[what] == single[what], what


def test_an_all_reduce_differs_from_one_process_by_rounding_alone(results, alone):
    together, single = results[0]["all-reduce"], alone("all-reduce")
    assert together["requests"] == single["requests"]
    for trainer, parameters in single["parameters"].items():
        torch.testing.assert_close(together["parameters"][trainer], parameters, rtol=1e-10, atol=1e-10)
    assert any("all_reduce" in counts for rounds in together["calls"] for counts in rounds)


@scenarios([name for name in spmd.SCENARIOS if name not in spmd.UNCOUNTED])
def test_a_round_has_one_gather_and_one_mean_per_trainer_over_several_processes(results, name):
    """A mean is three exchanges: who takes part, the parts to sum, the parts of the mean.

    Synchronous means gradients in every inner step. Comparing the workers' gradients takes one more mean.
    """
    found, owners = results
    exchanges = spmd.INNER_STEPS if name == "Synchronous" else 1
    compared_from = 2 if name == "across workers" else MINIMUM_WORKERS
    seen = 0
    for rank, rounds in enumerate(found[name]["calls"]):
        placements = found[name]["placement"]
        for number, (calls, placement) in enumerate(zip(rounds, placements, strict=True)):
            merged = len(placements[min(number + 1, len(placements) - 1)]) < len(placement)
            ranks_of = {trainer: {owners[node] for node in nodes} for trainer, nodes in placement.items()}
            spread = [trainer for trainer, ranks in ranks_of.items() if rank in ranks and len(ranks) > 1]
            means = sum(exchanges + (len(placement[trainer]) >= compared_from) for trainer in spread)
            # The trainer that a merge makes is evaluated.
            assert calls == {"gather": 1 + merged} | ({"exchange": 3 * means} if means else {})
            seen += len(spread)
    assert seen > 0


# Every method


@pytest.fixture
def _methods_are_ready(of_two_and_four):
    with matrix.ready():
        yield


def assert_same_runs(together: dict, alone: dict) -> None:
    for moment, state in together["states"].items():
        matrix.assert_same_state(state, alone["states"]["final" if moment == "resumed" else moment])
    for what in ("losses", "train_losses", "events", "requests", "workers", "moved", "refreshed", "left_out"):
        assert together[what] == alone[what], what


@every_method
@pytest.mark.usefixtures("_methods_are_ready")
def test_every_method_has_the_same_bits_in_several_processes(results, name):
    """Parameters, worker state, values and events; two processes resume in the middle as well."""
    assert_same_runs(results[0]["methods"][name], matrix.alone(name))


@every_method
@pytest.mark.usefixtures("_methods_are_ready")
def test_a_changing_pool_has_the_same_bits_in_several_processes(results, name):
    """Some processes have no worker at first or at the end, or one that rests."""
    assert_same_runs(results[0]["pools"][name], matrix.pool_alone(name))


@every_method
def test_the_state_that_moves_to_a_process_per_node_is_what_is_counted(results, name):
    """State moves with nodes and merges. Fewer processes copy less and count the same."""
    found, owners = results[0]["methods"][name], results[1]
    counted = found["moved"] - found["refreshed"]
    assert counted > 0
    if len(set(owners)) == len(owners):
        assert found["copied"] == counted
    else:
        assert found["copied"] < counted


@pytest.mark.parametrize("name", matrix.NAMES)
def test_a_method_sends_the_bytes_of_its_events(of_two_and_four, name):
    """Two workers in two processes. A mean rounds up to rows, and says who takes part."""
    wire = of_two_and_four[2][0]["methods"][name]["wire"]
    assert wire["events"] > 0
    assert wire["sent"] == pytest.approx(wire["counted"], rel=0.02, abs=64 * wire["events"])


def test_equal_weights_change_no_bits_of_a_mean():
    def mean_of(weights):
        mean = Workers((0, 0, 0)).mean(torch.zeros(300), weights=weights)
        for worker, tensor in enumerate(torch.randn(3, 300, generator=torch.Generator().manual_seed(0))):
            mean.add(worker, PLAIN.encode(tensor))
        return mean.result()[0]

    assert torch.equal(mean_of([6.0] * 3), mean_of(None))


def test_the_shortened_demo_gives_the_same_run_on_one_and_four_processes(programs, tmp_path, cache_dir):
    """The program itself, through merges, redistribution and accumulation: weights, CSVs and summary."""
    values = {
        "clearml": "off", "cache_dir": cache_dir, "cpu_threads": 1, "plot_at_end": "false", "data_sample_size": 600,
        "val_size": 10, "number_of_outer_steps": 6, "number_of_inner_steps_between_outers": 3, "sequence_length": 32,
        "model_config.num_hidden_layers": 1, "model_config.hidden_size": 32, "model_config.intermediate_size": 48,
        "max_requested_batch": 24, "merge_count": 2, "merge_frequency": 2, "max_batch_size": 4, "ETA": 0.4,
        "ETA_at_end": "null", "debias": "false", "batch_test_start": 1, "identical_initialisation": "false",
    }  # fmt: skip
    arguments = [f"{key}={value}" for key, value in values.items()]
    folders = {}
    for processes in (1, 4):
        logs = tmp_path / f"{processes}"
        programs.torchrun(processes, "run.py", "--config", "config.yaml", *arguments, f"log_dir={logs}")
        (folders[processes],) = logs.iterdir()
    assert summary(folders[1])["merges"] == 3
    assert summary(folders[1])["largest_requested_batch"] == 24
    assert [summary(folder)["processes"] for folder in folders.values()] == [1, 4]
    assert_same_run(folders[4], folders[1], besides=("processes",))
