"""The same mathematics on a GPU.

Without a GPU the tests that need nothing else of CUDA run on the CPU, so that they still run when there is one.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import os
import signal

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import adloco
from algorithms.schedule.limits import RoundSchedule
from fabrics.data.examples import PackedSequences
from fabrics.pool import max_batch
from fabrics.pool.max_batch import calculate_max_batch
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import InnerLoop, backward
from gradient_analysis.gradients import Gradients
from tests.support.helpers import (
    in_one_type,
    make_config,
    make_trainer,
    padded,
    per_example_statistics,
    random_sequences,
    tiny_llama,
    train,
)
from tests.support.library import Regression, trained_over_nccl, trained_regression
from tests.support.programs import ROOT
from tests.support.runs import assert_same_run, summary, write_config

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; make gpu runs these tests")
GPU = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _nccl_version() -> int:
    """Return the version of the NCCL that PyTorch has loaded, such as 23102; 0: none."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


# With one GPU two processes share it.
over_nccl = pytest.mark.skipif(
    not torch.cuda.is_available() or (torch.cuda.device_count() < 2 and _nccl_version() < 23100),
    reason="needs two GPUs, or one and NCCL 2.31",
)
NCCL = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
SHARED_GPU = {"devices": ["cuda:0"], "plugins": [str(ROOT / "tests" / "support" / "one_gpu.py")]}
OWN_GPUS = {"devices": ["cuda:0", "cuda:1"]} if torch.cuda.device_count() > 1 else SHARED_GPU


def test_statistics_on_a_gpu_equal_the_cpu():
    model = in_one_type(tiny_llama(tied=True))
    ids = torch.from_numpy(random_sequences(6)).long()
    expected = per_example_statistics(model, {"input_ids": ids, "labels": ids})
    on_gpu = {"input_ids": ids.to(GPU), "labels": ids.to(GPU)}
    got = per_example_statistics(model.to(GPU), on_gpu)
    assert vars(got) == pytest.approx(vars(expected), rel=1e-9)


def test_rounds_on_a_gpu_equal_the_cpu():
    config = make_config(INITIAL_BATCH_SIZE=8, ETA=0.5)
    examples, model = PackedSequences(random_sequences(60)), in_one_type(tiny_llama())
    expected = make_trainer(copy.deepcopy(model), config, examples)
    trainer = make_trainer(FlatModel(model, GPU), config, examples)
    reports = train(trainer, 3), train(expected, 3)
    assert [r.requested_batch for r in reports[0]] == [r.requested_batch for r in reports[1]]
    torch.testing.assert_close(trainer.parameters.cpu(), expected.parameters, rtol=1e-6, atol=1e-8)


def test_a_loop_of_ones_own_on_a_gpu_trains_as_on_the_cpu():
    batch = adloco.AdaptiveBatch(initial=4, max_micro_batch=4, largest=24, eta=0.4)
    loops = [Regression(device, batch=batch) for device in ("cpu", GPU)]
    for expected, found in zip(*(loop.train(12) for loop in loops), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-6)
    assert loops[0].worker.requested_batch == loops[1].worker.requested_batch > 4


@needs_gpu
@pytest.mark.parametrize("train_on", [trained_regression, pytest.param(trained_over_nccl, marks=over_nccl)])
def test_workers_of_the_library_may_share_a_gpu(train_on, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    batch = adloco.AdaptiveBatch(initial=4, max_micro_batch=4, largest=24, eta=0.4)
    results = []
    for device, work in (("cpu", trained_regression), (str(GPU), train_on)):
        results.append(adloco.launch(functools.partial(work, device, 12, batch=batch), processes=2))
    for (expected_batch, expected), (found_batch, found) in zip(*results, strict=True):
        assert found_batch == expected_batch > 4
        for tensors in zip(found, expected, strict=True):
            torch.testing.assert_close(*tensors, rtol=1e-4, atol=1e-6)


@needs_gpu
def test_flash_attention_takes_the_largest_batch_that_is_measured():
    model = tiny_llama(dtype=torch.float32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    working, examples = FlatModel(model, GPU, torch.bfloat16), PackedSequences(random_sequences(4, 8))

    def step(count: int) -> None:
        backward(working, examples, np.arange(count) % 4)

    assert calculate_max_batch(step, working, 0.9, 1, 0) == max_batch._CUDA_LARGEST


@needs_gpu
def test_the_max_batch_fits_and_leaves_no_trace():
    working = FlatModel(tiny_llama(dtype=torch.float32, hidden_size=256, intermediate_size=512), GPU)
    examples = PackedSequences(random_sequences(8, 512))
    parameters, state = working.parameters.detach().clone(), torch.cuda.get_rng_state(GPU)
    backward(working, examples, np.arange(1))  # libraries allocate memory at their first use
    working.gradient.zero_()
    allocated = torch.cuda.memory_allocated(GPU)
    # A small share of a large GPU, so that the confirmation stays short.
    share = 2e9 / torch.cuda.get_device_properties(GPU).total_memory
    free, total = torch.cuda.mem_get_info(GPU)

    def step(count: int) -> None:
        backward(working, examples, np.arange(count) % 8)

    batch = calculate_max_batch(step, working, share + (total - free) / total, 1, 0)
    assert batch >= 2
    assert torch.cuda.memory_allocated(GPU) == allocated
    assert torch.equal(working.parameters, parameters)
    assert working.gradient.abs().sum() == 0
    assert torch.equal(torch.cuda.get_rng_state(GPU), state)
    torch.cuda.reset_peak_memory_stats(GPU)
    step(batch)
    peak = torch.cuda.max_memory_allocated(GPU) - allocated
    assert 0.8 * 2e9 < peak < 1.1 * 2e9


def test_the_gradient_analysis_on_a_gpu_equals_the_cpu():
    results = []
    for device in (torch.device("cpu"), GPU):
        texts = padded([list(range(1, length)) for length in range(4, 20)])
        gradients = Gradients(FlatModel(in_one_type(tiny_llama()), device), texts, np.arange(16), 5)
        gradients.compute_full()
        batch = gradients.of_batch(np.array([1, 5, 9]))
        found = (gradients.loss, *dataclasses.astuple(batch), *dataclasses.astuple(gradients.example_statistics()))
        results.append(found)
    assert results[1] == pytest.approx(results[0], rel=1e-8, abs=1e-12)


@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(None, SDPBackend.EFFICIENT_ATTENTION), (torch.bfloat16, SDPBackend.FLASH_ATTENTION)]
)
def test_grouped_queries_run_in_a_fused_kernel(dtype, kernel):
    """PyTorch raises an error if the only kernel that is allowed does not take these tensors."""
    model = tiny_llama(dtype=torch.float32, hidden_size=256, intermediate_size=256)  # heads of 64, two for each key
    working = FlatModel(model, GPU, dtype)
    with sdpa_kernel(kernel):
        backward(working, PackedSequences(random_sequences(4, 64)), np.arange(4))
    assert working.gradient.isfinite().all()


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("pads", [False, True])
def test_inner_steps_never_wait_for_the_gpu(autocast, pads):
    """After the first, which is timed; with real attention kernels, accumulation and warm-up."""
    config = make_config(
        INITIAL_BATCH_SIZE=8, max_batch_size=4, switch_multiplier=1, warmup_steps=3, sampling_method="none"
    )
    size = 256 if GPU.type == "cuda" else 16  # heads of 64
    model = tiny_llama(dtype=torch.float32, hidden_size=size, intermediate_size=size)
    dtype = None if autocast is None else getattr(torch, autocast)
    texts = padded([[1 + place % 50 for place in range(50 + number)] for number in range(60)])
    working, examples = FlatModel(model, GPU, dtype), texts if pads else PackedSequences(random_sequences(60, 64))
    trainer = make_trainer(working, config, examples, nodes=1, max_batch=4)
    train(trainer, 1)  # libraries wait at their first use
    trainer.assign_nodes(trainer.nodes)
    assignment = trainer.assignments(trainer.split_work(), RoundSchedule(5, 0.0, 0.5))[0]
    assert assignment.plan.micro_batches == (4, 4)
    steps = InnerLoop(trainer.local_workers[0], assignment, trainer.parameters, False, lambda: None)
    working.load(trainer.parameters)
    working.gradient.zero_()
    steps._step()
    if GPU.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            steps._step()
    finally:
        if GPU.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert steps.done == 5
    assert steps._losses.isfinite().all()


@needs_gpu
def test_cuda_graphs_train_what_eager_steps_do():
    """Graphs are recorded and replayed for two sizes of micro-batches."""
    found = []
    for compiled in (False, "reduce-overhead"):
        config = make_config(
            INITIAL_BATCH_SIZE=7, max_batch_size=4, switch_multiplier=1, sampling_method="none",
            number_of_inner_steps_between_outers=6,
        )  # fmt: skip
        working = FlatModel(in_one_type(tiny_llama()), GPU, compiled=compiled)
        trainer = make_trainer(working, config, PackedSequences(random_sequences(60)), nodes=1, max_batch=4)
        train(trainer, 3)
        found.append(trainer.parameters)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)


def test_bfloat16_rounds_stay_near_float32_rounds():
    found = []
    for dtype in (None, torch.bfloat16):
        config, examples = make_config(INITIAL_BATCH_SIZE=8), PackedSequences(random_sequences(60))
        working = FlatModel(tiny_llama(dtype=torch.float32), GPU, dtype)
        trainer = make_trainer(working, config, examples, nodes=1)
        reports = train(trainer, 2)
        assert trainer.parameters.dtype == torch.float32
        found.append(reports[-1].train_loss)
    assert found[1] != found[0]
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_state_in_host_memory_gives_nearly_the_same_rounds():
    """The host makes the outer step with `offload_outer_state`."""
    found = []
    on_gpu = GPU.type == "cuda"
    for key in (None, "offload_outer_state", "offload_moments"):
        values = {} if key is None else {key: True}
        config, examples = make_config(**values), PackedSequences(random_sequences(60))
        trainer = make_trainer(FlatModel(tiny_llama(), GPU), config, examples)
        train(trainer, 3)
        moments = trainer.local_workers[0].moments["exp_avg"]
        for state, offloads in ((trainer.parameters, "offload_outer_state"), (moments, "offload_moments")):
            offload = key == offloads
            assert (state.is_pinned(), state.is_cuda) == (on_gpu and offload, on_gpu and not offload)
        found.append(trainer.parameters.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found[2], found[0], rtol=0.0, atol=0.0)


@needs_gpu
def test_an_interrupted_run_resumes_with_the_same_bits(programs, tmp_path, cache_dir):
    values = {"devices": ["cuda:0"], "deterministic": True, "save_weights_every": 1}
    runs = []
    for name in ("whole", "interrupted"):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, cache_dir, **values)
        killed = ("tests/support/killed_in_round.py", "SIGKILL", 0) if name == "interrupted" else ("run.py",)
        status = -signal.SIGKILL if name == "interrupted" else 0
        programs.run(*killed, "--config", config, fresh=True, status=status)
        runs.append(next((tmp_path / name / "logs").iterdir()))
    programs.run("run.py", "--resume", runs[1], fresh=True)
    assert_same_run(*runs)


def final_loss(programs, folder, cache_dir, **values) -> float:
    folder.mkdir()
    config = write_config(folder, cache_dir, **values)
    programs.run("run.py", "--config", config, env=NCCL, fresh=True)
    (run,) = (folder / "logs").iterdir()
    return summary(run)["final_loss"]


@needs_gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("nccl", [False, pytest.param(True, marks=over_nccl)])
def test_two_processes_that_share_a_gpu_equal_one(programs, tmp_path, cache_dir, nccl, deterministic):
    """Tensors travel over gloo, or over nccl as with a GPU for each."""
    values = {"devices": ["cuda:0"], "deterministic": deterministic}
    expected = final_loss(programs, tmp_path / "one", cache_dir, **values)
    values |= OWN_GPUS | {"nodes_per_gpu": 2} if nccl else {}
    found = final_loss(programs, tmp_path / "two", cache_dir, processes=2, **values)
    assert found == pytest.approx(expected, rel=1e-6 if deterministic else 1e-3)


@over_nccl
def test_a_node_of_two_gpus_trains_like_one_and_resumes_when_one_has_died(programs, tmp_path, cache_dir):
    """The main process waits in a collective for the one that is killed."""
    values = {"devices": ["cuda:0"], "nodes_per_gpu": 2, "number_of_initial_trainers": 2, "save_weights_every": 1}
    values["float32_matmul_precision"] = "highest"
    expected = final_loss(programs, tmp_path / "one", cache_dir, **values)
    values |= OWN_GPUS | {"processes": 2, "devices_per_node": 2}
    assert final_loss(programs, tmp_path / "two", cache_dir, **values) == pytest.approx(expected, rel=1e-4)
    (tmp_path / "killed").mkdir()
    config = write_config(tmp_path / "killed", cache_dir, **values)
    arguments = ("tests/support/killed_in_round.py", "SIGKILL", 1, "--config", config)
    ended = programs.run(*arguments, env=NCCL, fresh=True, status=1)
    (run,) = (tmp_path / "killed" / "logs").iterdir()
    said = ended.stdout + ended.stderr
    assert "was killed (SIGKILL)" in said
    assert f"to resume: python run.py --resume {run}" in said
    assert summary(run)["status"] == "failed"
    programs.run("run.py", "--resume", run, "processes=1", "devices_per_node=1", "devices=[cuda:0]", fresh=True)
    assert summary(run)["final_loss"] == pytest.approx(expected, rel=1e-4)
