"""Faults, injected: workers that diverge, and devices without memory or broken ones."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

import run as program
from algorithms.batch.per_example import UnsupportedModuleError
from fabrics.data.examples import PackedSequences
from fabrics.pool.device_errors import explain_setup_errors
from fabrics.pool.node_pool import NodePool
from fabrics.training import inner_loop
from fabrics.training.flat_model import FlatModel
from fabrics.training.worker import TrainingError
from tests.support import matrix
from tests.support.helpers import (
    CPU,
    LocalProcesses,
    Recorder,
    light_cluster,
    make_config,
    make_trainer,
    random_sequences,
    recorded_pseudo_gradients,
    resumed,
    tiny_llama,
    train,
)
from tests.support.runs import summary, write_config
from utils.checkpoint.checkpoint import newest_checkpoint
from utils.config.schema import ConfigError
from utils.distributed.devices import is_out_of_memory
from utils.distributed.peers import PeerLostError
from utils.distributed.reductions import Workers

EXAMPLES = PackedSequences(random_sequences(80))


def test_a_diverged_worker_is_left_out_of_the_average(monkeypatch):
    config = make_config(INITIAL_BATCH_SIZE=6, sampling_method="none", max_requested_batch=6)
    trainer = make_trainer(tiny_llama(), config, EXAMPLES, nodes=3)
    train(trainer, 1)
    x, v = trainer.parameters.clone(), trainer.shared["velocity"].clone()
    sent = recorded_pseudo_gradients(monkeypatch)
    with matrix.losing(lambda key: (key.round, key.worker) == (1, 0)):
        (report,) = train(trainer, 1)
    assert (report.left_out, len(sent)) == (1, 2)
    assert list(report.workers[0].losses)
    assert report.train_loss == pytest.approx(sum(sum(report.workers[w].losses) for w in (1, 2)) / 6)
    assert "worker 0 is left out of the average" in report.warnings[0]
    mean = (sent[0] + sent[1]) / 2
    velocity = 0.9 * v + mean
    torch.testing.assert_close(trainer.parameters, x - 0.7 * (mean + 0.9 * velocity), rtol=1e-12, atol=1e-14)


def test_when_all_diverge_the_run_ends_with_parameters_as_before():
    trainer = make_trainer(tiny_llama(), make_config(INITIAL_BATCH_SIZE=6), EXAMPLES, nodes=2)
    before = trainer.parameters.clone()
    message = r"trainer 0: .* in round 1; lower learning_rate_for_inner_opt"
    with matrix.losing(lambda key: True), pytest.raises(TrainingError, match=message):
        train(trainer, 1)
    assert torch.equal(trainer.parameters, before)
    assert not trainer.shared["velocity"].any()


def test_a_gradient_that_is_not_finite_stays_with_its_worker(monkeypatch):
    """A gradient that is not finite under a finite loss would spoil all parameters if it were exchanged."""
    accumulate, calls = inner_loop.accumulate_gradients, []

    def spoiled(working, *arguments):
        found = accumulate(working, *arguments)
        calls.append(1)
        if len(calls) == 3:  # the first worker's second step
            working.gradient.view(-1)[7] = float("inf")
        return found

    monkeypatch.setattr(inner_loop, "accumulate_gradients", spoiled)
    config = make_config(distributed_algo="Synchronous", INITIAL_BATCH_SIZE=6, sampling_method="none")
    trainer = make_trainer(tiny_llama(), config, EXAMPLES, nodes=2)
    before = trainer.parameters.clone()
    (report,) = train(trainer, 1)
    assert trainer.parameters.isfinite().all()
    assert not torch.equal(trainer.parameters, before)
    assert "its loss or gradient became NaN or infinite" in report.workers[0].left_out
    assert report.workers[1].left_out is None
    assert [len(worker.losses) for worker in report.workers.values()] == [2, 3]
    assert int(trainer.shared["step"]) == 3


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory (injected)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    torch.AcceleratorError("CUDA error: out of memory"),
    MemoryError(),
]


def test_what_says_that_there_is_no_memory():
    assert all(map(is_out_of_memory, NO_MEMORY))
    for other in (
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        PeerLostError("rank 1 was killed (SIGKILL); out of memory?"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(other)


def limit_memory(
    monkeypatch, largest: int, when: Callable[[bool], bool] = lambda eager: True, error: Exception = NO_MEMORY[0]
) -> list[tuple[int, int]]:
    """Let passes of more than `largest` examples fail; return the examples and the seed of each pass, failed or not."""
    backward = inner_loop.backward
    passes = []

    def limited(working, examples, indices, weight=1.0, eager=False):
        passes.append((len(indices), torch.initial_seed()))
        if len(indices) > largest and when(eager):
            working.gradient.add_(1.0)  # half a gradient is left
            raise error
        return backward(working, examples, indices, weight, eager)

    monkeypatch.setattr(inner_loop, "backward", limited)
    return passes


@pytest.mark.parametrize(("at_step", "error"), [(0, NO_MEMORY[0]), (2, NO_MEMORY[0]), (2, NO_MEMORY[1])])
def test_out_of_memory_halves_the_max_batch_and_runs_the_same_examples(monkeypatch, at_step, error):
    """The round equals one that had the memory, in float64 and up to the order of summation."""
    config = make_config(INITIAL_BATCH_SIZE=14, sampling_method="none")
    expected = make_trainer(tiny_llama(), config, EXAMPLES, nodes=2, max_batch=8)
    train(expected, 2)
    trainer = make_trainer(tiny_llama(), config, EXAMPLES, nodes=2, max_batch=8)
    passes = limit_memory(monkeypatch, 2, lambda eager: len(passes) > at_step, error)
    (report,) = train(trainer, 1)
    monkeypatch.undo()
    assert report.workers[0].plan.micro_batches == (2, 2, 2, 1)
    # From 8 to 4, and as 4 and 3 at a time failed as well, to 2.
    assert [worker.max_batch for worker in report.workers.values()] == [2, 2]
    assert report.examples == 3 * 14
    assert any("node 0 ran out of memory; its max batch is 2 from now on" in line for line in report.warnings)
    trainer.assign_nodes(tuple(dataclasses.replace(node, max_batch=2) for node in trainer.nodes))
    train(trainer, 1)
    torch.testing.assert_close(trainer.parameters, expected.parameters, rtol=1e-10, atol=1e-12)


def test_a_node_out_of_memory_keeps_its_smaller_max_batch(monkeypatch):
    cluster, recorder = light_cluster(number_of_initial_trainers=1, max_batch_size=8, INITIAL_BATCH_SIZE=16), Recorder()
    # In an inner step, and of a sample of its own.
    limit_memory(monkeypatch, 2, lambda eager: eager and cluster.counters.outer_steps == 1)
    cluster.train(recorder)
    assert [node.max_batch for node in cluster.nodes] == [2] * 4
    assert {max(worker.plan.micro_batches) for worker in recorder.rounds[2].reports[0].workers.values()} == {2}
    assert len(recorder.warnings) == 4
    again = resumed(cluster, light_cluster(number_of_initial_trainers=1, max_batch_size=8, INITIAL_BATCH_SIZE=16))
    assert [node.max_batch for node in again.nodes] == [2] * 4


def test_a_probe_batch_that_is_made_again_keeps_its_seed_for_dropout(monkeypatch):
    cluster = light_cluster(number_of_initial_trainers=1, nodes_per_gpu=1, max_batch_size=8, INITIAL_BATCH_SIZE=2)
    passes = limit_memory(monkeypatch, 4)
    cluster.run_round(Recorder())
    sizes, seeds = zip(*passes, strict=True)
    assert sizes == (8, 4, 4, 2, 2, 2)  # the probe batch, again, and three inner steps
    assert len(set(seeds[:3])) == 1
    assert len(set(seeds)) == 2


def test_a_resumed_run_takes_another_max_batch_asked_for_and_keeps_a_smaller_one_otherwise():
    for asked, expected in ((64, [64, 2]), (4, [4, 4]), (128, [128, 128])):
        pool = NodePool([CPU] * 2, make_config(max_batch_size=asked))
        pool.load_state_dict({"max_batches": [64, 2], "max_batch_size": 64, "measured": {}})
        assert [node.max_batch for node in pool.nodes] == expected
    cluster = light_cluster(number_of_initial_trainers=1)
    again = resumed(cluster, light_cluster(number_of_initial_trainers=1, max_batch_size=4))
    assert {node.max_batch for trainer in again.trainers.values() for node in trainer.nodes} == {4}


def test_a_resumed_run_takes_a_measured_max_batch_where_less_memory_is_left():
    pool = NodePool([CPU] * 3, make_config(max_batch_size=None))
    pool.set_max_batches({0: 16, 1: 32, 2: 64})
    pool.load_state_dict({"max_batches": [32, 32, 32], "max_batch_size": None, "measured": {}})
    assert [node.max_batch for node in pool.nodes] == [16, 32, 32]
    pool.load_state_dict({"max_batches": [1, 1], "max_batch_size": None, "measured": {}})  # of other nodes
    assert [node.max_batch for node in pool.nodes] == [16, 32, 32]


def test_one_example_that_does_not_fit_is_an_error(monkeypatch):
    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(inner_loop, "backward", full)
    trainer = make_trainer(tiny_llama(), make_config(sampling_method="none"), EXAMPLES, nodes=1)
    with pytest.raises(TrainingError, match="one example does not fit into the memory of cpu"):
        train(trainer, 1)


def test_out_of_memory_elsewhere_is_a_clear_error(monkeypatch):
    def mean(self, *arguments, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand so on")

    monkeypatch.setattr(Workers, "mean", mean)
    with pytest.raises(TrainingError, match=r"out of memory .*allocate 2 GiB; lower padding_percentage"):
        light_cluster().train(Recorder())


def test_a_layer_without_per_example_gradients_is_a_clear_error(monkeypatch):
    backward = inner_loop.backward

    def used_twice(*arguments, eager=False):
        if eager:
            raise UnsupportedModuleError("gradients do not add up")
        return backward(*arguments)

    values = {"sampling_method": "norm_test", "max_requested_batch": 4}
    cluster = light_cluster(**values)
    monkeypatch.setattr(inner_loop, "backward", used_twice)
    message = "statistics_estimator: gradients do not add up; set statistics_estimator: across_workers"
    with pytest.raises(TrainingError, match=message):
        cluster.train(Recorder())
    with pytest.raises(ConfigError, match=message):
        light_cluster(max_batch_size=None, **values)
    light_cluster(max_batch_size=None, sampling_method="none")  # a plain pass is measured


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_at_the_start_names_the_plan(error):
    with pytest.raises(ConfigError, match=r"no memory for models.*--plan"), explain_setup_errors():
        raise error


def test_another_error_at_the_start_stays_what_it_is():
    with pytest.raises(RuntimeError, match=r"^x$"), explain_setup_errors():
        raise RuntimeError("x")


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
def test_a_broken_device_ends_the_run_with_a_clear_message(kind, tmp_path, cache_dir, monkeypatch):
    """A broken device fails in every later call, as on CUDA. Libraries raise a RuntimeError."""
    accumulate, load = inner_loop.accumulate_gradients, FlatModel.load
    calls, failures = [], []

    def broken(*arguments):
        failures.append(1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", failing_stream)
        raise kind("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ...")

    def failing_stream():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def breaks(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 40:
            monkeypatch.setattr(FlatModel, "load", broken)
        return broken() if len(calls) >= 40 else accumulate(*arguments, **keywords)

    monkeypatch.setattr(inner_loop, "accumulate_gradients", breaks)
    config = write_config(tmp_path, cache_dir, save_weights_every=1, sampling_method="none", eval_every=99)
    code = program.main(["--config", str(config)])
    (folder,) = (tmp_path / "logs").iterdir()
    assert (code, len(calls), len(failures)) == (1, 40, 1)  # nothing else was tried
    found = summary(folder)
    assert found["status"] == "failed"
    log = (folder / "training_log.log").read_text()
    assert "error: a device broke down and cannot be used by this process any more: CUDA error: an illegal" in log
    assert "Traceback" not in log
    assert f"python run.py --resume {folder}" in log
    monkeypatch.setattr(FlatModel, "load", load)
    monkeypatch.setattr(inner_loop, "accumulate_gradients", accumulate)
    written = newest_checkpoint(folder / "checkpoints", LocalProcesses())
    assert written.state["cluster"]["counters"]["outer_steps"] == found["outer_steps"] >= 1
