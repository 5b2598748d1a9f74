"""One, two and four processes give the same run; real ones, started by torchrun, over gloo."""

import contextlib
import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from algorithms.batch.across_workers import MINIMUM_WORKERS
from algorithms.synchronisation.encodings.encoding import BFLOAT16, INT4, INT8, PLAIN
from tests.support import matrix, spmd
from tests.support.runs import assert_same_run, summary
from utils.distributed import reductions
from utils.distributed.processes import LocalProcesses
from utils.distributed.reductions import DistributedWorkers, LocalWorkers, ProcessGroup

ROOT = Path(__file__).resolve().parents[2]
IN_ORDER = [name for name in spmd.SCENARIOS if not name.startswith("all-reduce")]
# Processes of workers that rest are told of a round as well, which is not counted, and have less to be sent later; and
# where messages are lost gradients are not held against each other.
_OTHERWISE = {"participants", "message_loss"}
NOBODY_RESTS = [name for name, (values, _) in spmd.SCENARIOS.items() if not _OTHERWISE & values.keys()]


@pytest.fixture(scope="module")
def of_two_and_four(programs, tmp_path_factory):
    """Results of every scenario in two and in four processes, which are forked before anything is replaced here."""
    found = {}
    for count in (2, 4):
        folder = tmp_path_factory.mktemp("spmd")
        programs.torchrun(count, "tests/support/spmd.py", folder)
        owners = json.loads((folder / "owners.json").read_text())
        found[count] = torch.load(folder / "results.pt", weights_only=True), owners
    return found


@pytest.fixture(params=[2, 4])
def results(request, of_two_and_four):
    """Results of every scenario in several processes, and the owners of the nodes."""
    return of_two_and_four[request.param]


@pytest.fixture(scope="module")
def alone():
    """The same in this process: from the name of a scenario to what it makes."""
    assert torch.get_num_threads() == 1
    return functools.cache(spmd.run_scenario)


@pytest.mark.parametrize("name", IN_ORDER)
def test_several_processes_give_the_same_bits(results, alone, name):
    together, single = results[0][name], alone(name)
    assert single["merges"] >= 1
    assert len(set(single["requests"])) > 1 or name == "across workers"
    assert together["parameters"].keys() == single["parameters"].keys()
    for trainer, parameters in single["parameters"].items():
        assert torch.equal(together["parameters"][trainer], parameters)
    for what in set(single) - {"parameters", "collectives", "evaluated", "placement", "received"}:
        assert together[what] == single[what], what


def test_clusters_of_a_changing_pool_differ_and_messages_are_lost(alone):
    found = alone("clusters in a pool that changes")
    sizes, digest = found["shares"]
    assert len(set(sizes)) == 4
    assert len(digest) == 64
    assert found["lost"] > 1


def test_one_all_reduce_differs_by_the_order_of_summation_alone(results, alone):
    for name, tolerance in (("all-reduce", 1e-5), ("all-reduce in float64", 1e-10)):
        together, single = results[0][name], alone(name)
        assert together["requests"] == single["requests"]
        for trainer, parameters in single["parameters"].items():
            scale = parameters.abs().max().item()
            torch.testing.assert_close(
                together["parameters"][trainer], parameters, rtol=tolerance, atol=tolerance * scale
            )


@pytest.mark.parametrize("name", NOBODY_RESTS)
def test_a_round_has_one_reduction_per_trainer_over_several_processes_and_one_gather(results, name):
    """Counted in every process: trainers on one process communicate nothing. Gradients are reduced in every inner step.

    In worker order, who takes part is found out before, in a sum of as many integers as there are workers. Where the
    workers' gradients are held against each other, whole or as sketches, their mean is one more.
    """
    (results_of, owners), expected_per_trainer = results, dict.fromkeys(spmd.IN_ORDER_REDUCTION, 1)
    if name.startswith("all-reduce"):
        expected_per_trainer = {"all_reduce": 1}
    exchanges = spmd.INNER_STEPS if name == "Synchronous" else 1
    compared_from = 2 if name == "across workers" else MINIMUM_WORKERS
    seen = 0
    for rank, rounds in enumerate(results_of[name]["collectives"]):
        for counts, placement in zip(rounds, results_of[name]["placement"], strict=True):
            ranks_of = {trainer: {owners[node] for node in nodes} for trainer, nodes in placement.items()}
            spread = [trainer for trainer, ranks in ranks_of.items() if rank in ranks and len(ranks) > 1]
            reductions = sum(exchanges + (len(placement[trainer]) >= compared_from) for trainer in spread)
            expected = {kind: reductions * count for kind, count in expected_per_trainer.items() if spread}
            # A merge moves models between processes, and nothing else does.
            counted = {kind: count for kind, count in counts.items() if kind not in spmd.MOVES}
            assert counted == {"all_gather_object": 1, **expected}
            seen += len(spread)
    assert seen > 0


@pytest.mark.parametrize("name", NOBODY_RESTS)
def test_what_a_process_per_node_sends_to_move_state_is_what_is_counted(results, name):
    """Fewer processes send less and count the same."""
    (_, owners), found = results, results[0][name]
    flat, model = found["flat_bytes"]
    _, merged, redistributed = found["bytes"]
    assert merged > 0
    models, step_counts = divmod(merged + redistributed, model)
    assert step_counts < 100 * 4
    if len(set(owners)) == len(owners):
        assert sum(found["received"]) == models * flat + step_counts
    else:
        assert 0 < sum(found["received"]) < models * flat


def test_what_moving_nodes_opened_is_closed_again(results):
    """After 40 redistributions of two trainers there are no more groups or files than after the first."""
    for process in results[0]["churn"]:
        assert process["groups"] <= 2
        assert process["descriptors"] == 0


def test_the_evaluation_is_shared_out(results):
    """Six batches for every trainer, by its workers in turn; each is evaluated once, and never all by one process."""
    results_of, owners = results
    for name in ("in order", "all-reduce"):
        evaluated = results_of[name]["evaluated"]
        for step, placement in enumerate(results_of[name]["placement"]):
            turns = [owners[nodes[batch % len(nodes)]] for nodes in placement.values() for batch in range(6)]
            by_rank = [rounds[step] for rounds in evaluated]
            assert by_rank == [turns.count(rank) for rank in range(len(by_rank))]
            assert max(by_rank) < 6 * len(placement)


def test_a_failed_node_works_no_more_and_its_trainer_goes_on(alone):
    result = alone("a node fails")
    failed = next(index for index, placement in enumerate(result["placement"]) if index == 2)
    assert any(1 in nodes for nodes in result["placement"][failed].values())
    for placement in result["placement"][failed + 1 :]:
        used = [node for nodes in placement.values() for node in nodes]
        assert sorted(used) == [0, 2, 3]
    assert result["left_out"] == 1
    assert any("node 1 failed: pulled out" in warning for warning in result["warnings"])


# Every method


@pytest.fixture
def _methods_are_ready(of_two_and_four):
    with matrix.ready():
        yield


every_method = pytest.mark.parametrize("name", matrix.NAMES)


def assert_same_runs(together: dict, alone: dict) -> None:
    for moment, state in together["states"].items():
        matrix.assert_same_state(state, alone["states"]["final" if moment == "resumed" else moment])
    for what in ("losses", "train_losses", "events", "requests", "workers", "moved", "refreshed", "left_out"):
        assert together[what] == alone[what], what


@every_method
@pytest.mark.usefixtures("_methods_are_ready")
def test_every_method_has_the_same_bits_in_several_processes(results, name):
    """Parameters, what workers keep, values and events; two processes resume in the middle as well."""
    assert_same_runs(results[0]["methods"][name], matrix.alone(name))


@every_method
@pytest.mark.usefixtures("_methods_are_ready")
def test_a_pool_that_changes_has_the_same_bits_in_several_processes(results, name):
    """In processes, too, that have no worker at first, or at the end, or one that rests."""
    tried, owners = results[0]["pools"], results[1]
    assert set(tried) == set(matrix.NAMES if len(set(owners)) == 2 else matrix.POOL_OF_FOUR)
    if name in tried:
        assert_same_runs(tried[name], matrix.pool_alone(name))


@every_method
def test_what_every_method_moves_to_a_process_per_node_is_what_is_counted(results, name):
    """State that goes with nodes and merges; what is sent to refresh parameters before is a mean, and no broadcast."""
    found, owners = results[0]["methods"][name], results[1]
    counted = found["moved"] - found["refreshed"]
    assert counted > 0
    if len(set(owners)) == len(owners):
        assert found["received"] == counted
    else:
        assert found["received"] < counted


@every_method
def test_what_every_method_sends_is_what_its_events_say(results, name):
    """Of two workers in two processes. A collective rounds up to rows, and says who takes part."""
    wire, owners = results[0]["methods"][name]["wire"], results[1]
    if len(set(owners)) > 2:  # a server has no process: what goes through it goes to everybody
        return
    assert wire["events"] > 0
    assert wire["sent"] == pytest.approx(wire["counted"], rel=0.02, abs=64 * wire["events"])


def test_messages_come_to_the_processes_whose_workers_they_are_for(results):
    owners = results[1]
    for (takers, absent), found in zip(matrix.DELIVERIES, results[0]["delivered"], strict=True):
        for rank, came in enumerate(found):
            here = [w for w in range(4) if rank in {owners[w], *(owners[taker] for taker in takers[w])}]
            assert came == {worker: [worker, 10 * worker, 100] for worker in here if worker not in absent}


@pytest.mark.usefixtures("_methods_are_ready")
def test_a_round_in_which_all_diverge_is_evaluated_as_in_one_process(results):
    """Before the processes have told each other who is lost."""
    assert results[0]["all lost"] == spmd.all_lost() != []


def mean_of(given, like, encoding, weights=None):
    mean = LocalWorkers(3).mean(like, encoding, weights)
    for worker, rows in given:
        mean.add(worker, rows)
    return mean.result()


@pytest.mark.parametrize("encoding", [PLAIN, BFLOAT16, INT8, INT4])
def test_the_mean_leaves_out_who_gives_nothing_and_equal_weights_leave_no_trace(encoding):
    tensors = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).double()
    given = [(0, encoding.encode(tensors[0])), (2, encoding.encode(tensors[2]))]
    mean, count = mean_of(given, tensors[0], encoding)
    assert count == 2
    rough = {PLAIN: 1e-15, BFLOAT16: 0.02, INT8: 0.04, INT4: 0.3}[encoding]
    torch.testing.assert_close(mean, (tensors[0] + tensors[2]) / 2, rtol=0, atol=rough)
    equal, _ = mean_of(given, tensors[0], encoding, [6.0] * 3)
    assert torch.equal(equal, mean)
    weighted, count = mean_of(given, tensors[0], encoding, [1.0, 9.0, 3.0])
    assert count == 2
    torch.testing.assert_close(weighted, (tensors[0] + 3 * tensors[2]) / 4, rtol=0, atol=rough)
    nobody, count = mean_of([], tensors[0], encoding)
    assert count == 0
    assert not nobody.any()


class OnSecondDevice(torch.Tensor):
    """A tensor that says it is on the second device of its kind, and leaves it by `to`."""

    device = torch.device("cpu", 1)

    def to(self, device):
        return self.as_subclass(torch.Tensor).clone()


def test_a_broadcast_goes_through_the_device_of_the_group_alone(monkeypatch):
    """Where a process has several GPUs, a tensor on another one than the others use would wait for ever."""
    sent, handed = [torch.arange(3.0), torch.arange(3.0, 8.0), torch.tensor([8.0])], []

    def broadcast(tensor, source, group, async_op=False):
        handed.append(tensor.device)
        tensor.copy_(sent[len(handed) - 1])
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reductions.dist, "broadcast", broadcast)
    group = ProcessGroup((0, 1), None, torch.device("cpu"), SimpleNamespace(explaining=contextlib.nullcontext))
    received = [torch.zeros(3), torch.zeros(5).as_subclass(OnSecondDevice), torch.zeros(1)]
    group.broadcast(received, 0)
    assert handed == [torch.device("cpu")] * 3
    assert torch.equal(torch.cat([tensor.as_subclass(torch.Tensor) for tensor in received]), torch.arange(9.0))


def test_more_processes_than_nodes_is_a_clear_error(programs, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"{{number_of_outer_steps: 1, nodes_per_gpu: 1, clearml: 'off', log_dir: {tmp_path}/logs}}")
    result = programs.torchrun(2, "run.py", "--config", config, status=1)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: processes: 2 processes on a machine with 1 nodes (cpu, nodes_per_gpu 1)")
    assert not (tmp_path / "logs").exists()


def test_one_process_owns_everything():
    processes = LocalProcesses([torch.device("cpu")], 3)
    assert processes.groups == (0, 0, 0)
    assert processes.gather("x") == ["x"]
    assert processes.workers([0, 2]).local_workers == (0, 1)
    assert os.environ.get("RANK") is None


def test_the_demo_shortened_gives_the_same_run_on_one_two_and_four_processes(programs, tmp_path, cache_dir):
    """The program itself, through merges, redistribution and accumulation: weights, CSVs and summary."""
    arguments = [
        *(
            "config.yaml",
            "clearml=off",
            f"cache_dir={cache_dir}",
            "cpu_threads=1",
            "plot_at_end=false",
        ),
        *("data_sample_size=600", "val_size=10", "number_of_outer_steps=6", "number_of_inner_steps_between_outers=3"),
        *("sequence_length=32", "model_config.num_hidden_layers=1"),
        *("model_config.hidden_size=32", "model_config.intermediate_size=48"),
        *("max_requested_batch=24", "merge_count=2", "merge_frequency=2", "max_batch_size=4"),
        *("ETA=0.4", "ETA_at_end=null", "debias=false", "batch_test_start=1", "identical_initialisation=false"),
    ]
    folders = {}
    for processes in (1, 2, 4):
        logs = tmp_path / f"{processes}"
        programs.torchrun(processes, "run.py", "--config", *arguments, f"log_dir={logs}")
        (folders[processes],) = logs.iterdir()
    assert summary(folders[1])["merges"] == 3
    assert summary(folders[1])["largest_requested_batch"] == 24
    assert [summary(folder)["processes"] for folder in folders.values()] == [1, 2, 4]
    for processes in (2, 4):
        assert_same_run(folders[processes], folders[1], besides=("processes",))


class Alone:
    """A group of one rank, to which nothing comes from elsewhere."""

    ranks, device = (0,), torch.device("cpu")

    def all_reduce(self, tensor):
        pass

    def all_to_all(self, received, sent, receive, send):
        received.copy_(sent)


def test_messages_of_workers_that_share_a_process_need_not_travel():
    workers = DistributedWorkers((0, 0), 0, Alone(), in_order=True)
    messages = workers.messages(3, [{1}, {0}], torch.device("cpu"))
    for worker in range(2):
        messages.add(worker, torch.full((3,), worker, dtype=torch.uint8))
    arrived = messages.result()
    assert {worker: message.tolist() for worker, message in arrived.items()} == {0: [0, 0, 0], 1: [1, 1, 1]}
