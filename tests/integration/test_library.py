"""AdLoCo as a library: a loop over adloco.Worker trains what `python run.py` trains."""

import copy
import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import adloco
from adloco import local_processes
from examples import fine_tune
from fabrics.data import python_docs
from run import train
from tests.support.blocks import ROOT
from tests.support.library import (
    Regression,
    Rows,
    assert_equal_tensors,
    begin_with_unlike_processes,
    leave_early,
    train_all_like_the_program,
    train_as_the_trainer,
)
from tests.support.runs import SHORT
from utils.config.schema import ConfigError

ADAPTIVE = adloco.AdaptiveBatch(initial=4, max_micro_batch=4, largest=24, eta=0.4)
# Keys of the program, and arguments of the worker.
CASES = {
    "DiLoCo with the norm test and accumulation": ({}, {"batch": ADAPTIVE}),
    "DiLoCo across workers": (
        {"statistics_estimator": "across_workers"},
        {"batch": ADAPTIVE, "statistics": "across_workers"},
    ),
    "DiLoCo in int8 with a fixed batch": (
        {"communication_dtype": "int8", "sampling_method": "none", "INITIAL_BATCH_SIZE": 8, "max_batch_size": 8},
        {"batch": 8, "communication_dtype": "int8"},
    ),
    "Synchronous": ({"distributed_algo": "Synchronous"}, {"batch": ADAPTIVE, "method": "Synchronous"}),
    "SparseLoCo": (
        {"distributed_algo": "SparseLoCo", "synchronisation": {"density": 0.25}},
        {"batch": ADAPTIVE, "method": "SparseLoCo", "parameters": {"density": 0.25}},
    ),
    "NoLoCo": ({"distributed_algo": "NoLoCo"}, {"batch": ADAPTIVE, "method": "NoLoCo"}),
    "Decoupled": (
        {"distributed_algo": "Decoupled", "synchronisation": {"fragments": 2, "steps": 2}},
        {"batch": ADAPTIVE, "method": "Decoupled", "parameters": {"fragments": 2, "steps": 2}},
    ),
    "DelayedNesterov": (
        {"distributed_algo": "DelayedNesterov", "synchronisation": {"steps": 3}},
        {"batch": ADAPTIVE, "method": "DelayedNesterov", "parameters": {"steps": 3}},
    ),
    "StreamingDiLoCo": (
        {"distributed_algo": "StreamingDiLoCo", "synchronisation": {"fragments": 2}},
        {"batch": ADAPTIVE, "method": "StreamingDiLoCo", "parameters": {"fragments": 2}},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _processes_are_forks():
    """Start processes from the fork server of tests/support/programs.py, which has imported everything."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(
                local_processes,
                "LaunchConfig",
                lambda **values: LaunchConfig(**values | {"start_method": "forkserver"}),
            )
        yield


def test_two_processes_train_the_same_bits_as_the_program(programs, tmp_path, cache_dir):
    common = {
        "log_dir": str(tmp_path / "logs"),
        "cache_dir": str(cache_dir),
        "number_of_initial_trainers": 1,
        "nodes_per_gpu": 2,
        "number_of_outer_steps": 3,
        "save_weights_every": None,
        "max_batch_growth": None,
        "compile_model": False,
        "gradient_clipping": 1.0,
        "outer_momentum": 0.5,
    }
    loops = []
    runs = []
    for name, (keys, arguments) in CASES.items():
        config = SHORT | common | {"run_name": name.replace(" ", "_")} | keys
        runs.append(train(config))
        loops.append((config, 12, arguments | {"gradient_clipping": 1.0, "outer_momentum": 0.5}))
    found = adloco.launch(train_all_like_the_program, loops, processes=2)[0]
    for name, run, loop in zip(CASES, runs, found, strict=True):
        weights = load_file(run.model_folder / "model.safetensors")
        different = [key for key in weights if not torch.equal(weights[key], loop["parameters"][key])]
        assert not different, name
        for count in ("communications", "bytes_communicated"):
            assert loop[count] == run.summary[count], name
        assert loop["requested_batch"] == {"DiLoCo in int8 with a fixed batch": 8}.get(name, 24), name


def test_a_resumed_loop_equals_an_uninterrupted_one(tmp_path):
    """A state can be loaded twice, into another loop and into one that has gone on."""
    loop, other = Regression(batch=ADAPTIVE), Regression(batch=ADAPTIVE)
    loop.train(12)
    torch.save(loop.worker.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    whole = loop.train(24)
    for resumed in (other, loop):
        next(resumed.worker.micro_batches(96))
        resumed.worker.load_state_dict(state)
        assert_equal_tensors(whole, resumed.train(24))


def test_the_state_before_the_first_step_begins_again():
    loop = Regression()
    initial = copy.deepcopy(loop.worker.state_dict())
    first = loop.train(3)
    loop.worker.load_state_dict(initial)
    assert_equal_tensors(first, loop.train(3))


def test_no_example_repeats_in_the_samples_of_the_statistics():
    """Nor at the end of an epoch: two rounds of four examples, and the eight of a sample, pass the end of twelve."""
    loop = Regression(batch=adloco.AdaptiveBatch(initial=2, largest=2), inner_steps=2)
    for _ in range(6):
        sample, *_ = _trained(loop, 12)
        assert len(set(sample.tolist())) == 8
        _trained(loop, 12)


def _trained(loop: Regression, examples: int) -> list:
    """Make an inner step; return its micro-batches."""
    found = []
    for indices in loop.worker.micro_batches(examples):
        found.append(indices)
        loop.worker.backward(loop.losses(indices))
    loop.worker.step()
    return found


@pytest.mark.parametrize("method", ["DiLoCo", "EagerDiLoCo", "NoLoCo", "SPARTA", "FDA"])
def test_the_parameters_of_one_worker_are_those_of_its_model(method):
    loop = Regression(method=method)
    loop.train(3)
    trained = loop.worker.trained_parameters()
    assert all(torch.equal(trained[name], parameter) for name, parameter in loop.model.named_parameters())


@pytest.mark.parametrize("rate", [1e-3, torch.tensor(1e-3)])
def test_a_learning_rate_may_be_a_tensor(rate):
    """Schedulers change it in place; FDA compares it with that of the previous round."""
    loop = Regression(method="FDA")
    loop.optimizer.param_groups[0]["lr"] = rate
    loop.train(3)
    torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 0.5)
    assert loop.worker.state_dict()["values"]["learning_rate"] == pytest.approx(1e-3)


def test_frozen_parameters_stay_on_their_device():
    model = nn.Sequential(nn.Linear(2, 2, device="meta").requires_grad_(False), nn.Linear(2, 1))
    adloco.Worker(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert [parameter.device.type for parameter in model.parameters()] == ["meta", "meta", "cpu", "cpu"]


@pytest.mark.parametrize("autocast", [False, True])
def test_one_worker_is_plain_training(autocast):
    """One worker equals a plain loop with a schedule of PyTorch, also in bfloat16."""
    loop = Regression(batch=4, inner_steps=1000)
    plain = Regression(batch=4)
    rates = [torch.optim.lr_scheduler.ExponentialLR(each.optimizer, 0.9) for each in (loop, plain)]
    order = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(6):
            for indices in loop.worker.micro_batches(96):
                order.append(indices)
                loop.worker.backward(loop.losses(indices))
            loop.worker.step()
            rates[0].step()
        for indices in order:
            plain.optimizer.zero_grad()
            plain.losses(indices).mean().backward()
            plain.optimizer.step()
            rates[1].step()
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**6)
    assert_equal_tensors(plain.model.parameters(), loop.model.parameters())


UNFIT = ("LBFGS", "SparseAdam")
NAMES = {name for name in torch.optim.__all__ if name[0].isupper()} - {"Optimizer", *UNFIT}
OPTIMIZERS = [getattr(torch.optim, name) for name in sorted(NAMES)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_of_pytorch_trains_as_in_a_plain_loop(optimizer, tmp_path):
    """With two micro-batches, clipping, and a state that was saved half-way (that of NAdam loses digits in float64)."""
    data = torch.randint(0, 12, (40, 3), generator=torch.Generator().manual_seed(0))
    plain, interrupted, resumed = (Rows() for _ in range(3))
    plain_optimizer = optimizer(plain.parameters(), lr=0.01)

    for model in (interrupted, resumed):
        trained = optimizer(model.parameters(), lr=0.01)
        worker = adloco.Worker(
            model,
            trained,
            inner_steps=3,
            outer_learning_rate=1.0,
            outer_momentum=0.0,
            batch=adloco.AdaptiveBatch("none", initial=6, max_micro_batch=4),
            gradient_clipping=2.0,
        )
        if model is resumed:
            worker.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for _ in range(3):
            examples = []
            for indices in worker.micro_batches(40):
                examples.extend(indices)
                worker.backward(model(data[indices]))
            worker.step()
            plain_optimizer.zero_grad()
            plain(data[examples]).mean().backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 2.0)
            plain_optimizer.step()
        torch.save(worker.state_dict(), tmp_path / "state.pt")
    for expected, found in zip(plain.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(expected, found, rtol=1e-9, atol=1e-9)


def test_a_loss_scaler_changes_nothing_where_nothing_overflows():
    """Statistics included, also if the scale changes from round to round: powers of two are exact."""
    batch = dataclasses.replace(ADAPTIVE, smoothing=0.5)
    plain = Regression(batch=batch)
    scaled = Regression(batch=batch, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    assert_equal_tensors(plain.train(12), scaled.train(12))
    assert scaled.worker.requested_batch == plain.worker.requested_batch > 4
    with pytest.raises(ValueError, match=r"^scaler: must be None with Synchronous"):
        Regression(method="Synchronous", scaler=torch.amp.GradScaler("cpu"))


def test_a_lone_worker_warns_once_the_batch_test_begins():
    loop = Regression(batch=dataclasses.replace(ADAPTIVE, first_round=2), statistics="across_workers")
    loop.train(3)
    assert loop.worker.warning is None
    loop.train(6)
    assert loop.worker.warning.startswith("across_workers needs two workers")


def test_a_step_that_overflows_is_left_out():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    loop = Regression(batch=4, scaler=scaler)
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    assert_equal_tensors(before, loop.train(1))
    assert scaler.get_scale() == 2.0**126


def test_a_compiled_model_is_trained_with_the_same_statistics():
    compiled = Regression(batch=ADAPTIVE)
    compiled.predict = torch.compile(compiled.model, backend="eager")
    compiled.predict(compiled.inputs[:4])  # compiled without hooks
    assert_equal_tensors(Regression(batch=ADAPTIVE).train(12), compiled.train(12))
    assert compiled.worker.requested_batch > 4


def test_models_are_compiled_again_after_passes_of_two_workers_that_overlapped():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled():
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))

    torch.compiler.set_stance("default")
    passes = []
    for _ in range(2):
        loop = Regression(batch=ADAPTIVE)
        passes.append(loop.worker.micro_batches(len(loop.inputs)))
        next(passes[-1])
    compiled()
    assert graphs == []  # it would pass over the hooks
    for reading in passes:
        reading.close()
    compiled()
    assert len(graphs) == 1


def zero_gradients_between(loop: Regression) -> None:
    loop.optimizer.zero_grad()
    for indices in loop.worker.micro_batches(96):
        loop.optimizer.zero_grad()
        loop.worker.backward(loop.losses(indices))
    loop.optimizer.zero_grad()


def remove_some_gradients_between(loop: Regression) -> None:
    for indices in loop.worker.micro_batches(96):
        loop.model[2].zero_grad()
        loop.worker.backward(loop.losses(indices))


def leave_and_begin_again(loop: Regression) -> None:
    for indices in loop.worker.micro_batches(96):
        loop.worker.backward(loop.losses(indices))
        break
    unfinished = loop.worker.micro_batches(96)  # as an exception leaves it
    next(unfinished)
    for indices in loop.worker.micro_batches(96):
        loop.worker.backward(loop.losses(indices))


def use_gradients_elsewhere(loop: Regression) -> None:
    loop.losses(slice(5)).mean().backward()
    for indices in loop.worker.micro_batches(96):
        loop.worker.backward(loop.losses(indices))


@pytest.mark.parametrize(
    "compute",
    [zero_gradients_between, remove_some_gradients_between, leave_and_begin_again, use_gradients_elsewhere],
)
def test_only_complete_inner_steps_count(compute):
    loop = Regression(batch=ADAPTIVE)
    while loop.worker.steps < 12:
        compute(loop)
        loop.worker.step()
    assert_equal_tensors(Regression(batch=ADAPTIVE).train(12), loop.model.parameters())


@pytest.fixture(scope="module")
def alone() -> Regression:
    """One worker after two rounds."""
    loop = Regression(batch=4)
    loop.train(6)
    return loop


@pytest.fixture(scope="module")
def two_processes(alone, programs) -> list[dict]:
    states = [Regression(batch=4), alone]
    before = signal.getsignal(signal.SIGTERM)
    states = [each.worker.state_dict() for each in states]
    results = adloco.launch(begin_with_unlike_processes, states, states[1], processes=2)
    assert signal.getsignal(signal.SIGTERM) is before
    return results


def test_processes_begin_alike_or_not_at_all(two_processes):
    for name, tensor in two_processes[0]["tensors"].items():
        assert torch.equal(tensor, two_processes[1]["tensors"][name]), name
    for result in two_processes:
        assert list(result["errors"]) == [
            "model, shapes",
            "model, types",
            "type of the model's device",
            "optimizer",
            "optimizer, rates in tensors",
            "optimizer, groups",
            "trainable parameters",
            "arguments",
            "examples",
            "state",
        ]
        for name, error in result["errors"].items():
            assert error.startswith(f"{name.split(',')[0]}: must be the same in all processes")


def test_models_that_others_synchronise_are_refused(two_processes):
    for result in two_processes:
        assert result["wrapped"].keys() == {"DistributedDataParallel", "fully_shard"}
        for name, error in result["wrapped"].items():
            expected = "must not be sharded" if name == "fully_shard" else f"must be without {name}, which averages"
            assert error.startswith(f"model: {expected}")


ANOTHER_STATE = "load_state_dict: the state must be of a worker with the same"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"method": "LocalSGD()"}, f"{ANOTHER_STATE} method DiLoCo(), got LocalSGD()"),
        ({"seed": 3}, f"{ANOTHER_STATE} seed 0, got 3"),
        ({"optimizer_type": "SGD"}, f"{ANOTHER_STATE} optimizer_type AdamW, got SGD"),
        # Also if its parameters are as many, in another order.
        ({"model": [["0.weight", [8, 4]]]}, f"{ANOTHER_STATE} model"),
        (
            {"worker_index": 1, "workers": 2},
            "load_state_dict: the state must be that of worker 0, got that of 1; save one state per process",
        ),
        (
            {"optimizer": {"state": {}, "param_groups": []}},
            "loaded state dict has a different number of parameter groups",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(alone, other, problem):
    loop = Regression(batch=4)
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        loop.worker.load_state_dict(alone.worker.state_dict() | other)
    assert_equal_tensors(before, loop.model.parameters())


def test_a_state_fits_a_model_whose_layers_are_compiled(alone):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0] = torch.compile(model[0])
    worker = adloco.Worker(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch=4)
    worker.load_state_dict(alone.worker.state_dict())
    assert torch.equal(model[2].weight, alone.model[2].weight)
    assert worker.effective_batch == alone.worker.effective_batch == 4


def test_a_fixed_batch_is_that_of_the_argument_and_not_of_the_state(alone):
    loop = Regression(batch=6)
    loop.worker.load_state_dict(alone.worker.state_dict())
    assert len(next(loop.worker.micro_batches(96))) == loop.worker.effective_batch == 6


def test_another_number_of_workers_continues_where_the_run_was(two_processes, alone):
    """Workers change from one to two and back; no example is repeated or left out."""
    first, second = two_processes
    assert first["state"]["counts"]["steps"] == 9
    for name, tensor in first["state"]["shared"].items():
        assert torch.equal(tensor, second["state"]["shared"][name]), name
    back = Regression(batch=4)
    back.worker.load_state_dict(first["state"])
    assert first["examples"] + second["examples"] == next(alone.worker.micro_batches(96)).tolist()
    alone.train(9)
    assert next(back.worker.micro_batches(96)).tolist() == next(alone.worker.micro_batches(96)).tolist()


@pytest.mark.usefixtures("programs")
def test_a_process_that_ends_early_ends_the_others():
    with pytest.raises(ChildFailedError, match="PeerLostError"):
        adloco.launch(leave_early, processes=2)


def test_no_processes_are_refused():
    with pytest.raises(ValueError, match=r"^processes: must be a positive integer, got 0"):
        adloco.launch(leave_early, processes=0)


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(local_processes, "cores", lambda: 6)
    before = torch.get_num_threads()
    try:
        assert local_processes._call(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)


def test_parameters_that_are_not_finite_end_the_run_and_are_never_sent():
    loop = Regression(batch=4)
    loop.targets[:] = torch.nan
    state = copy.deepcopy(loop.worker.state_dict())
    with pytest.raises(FloatingPointError, match=r"^step: the parameters of worker 0 became NaN or infinite"):
        loop.train(3)
    with pytest.raises(RuntimeError, match=r"^micro_batches: a step has failed; load a state in all processes"):
        loop.train(4)
    loop.targets[:] = 0.0
    loop.worker.load_state_dict(state)
    assert all(parameter.isfinite().all() for parameter in loop.train(3))


def test_a_data_loader_may_read_the_micro_batches():
    plain, loop = Regression(batch=ADAPTIVE), Regression(batch=ADAPTIVE)
    data = TensorDataset(loop.inputs, loop.targets)
    while loop.worker.steps < 9:
        for inputs, targets in DataLoader(data, batch_sampler=loop.worker.micro_batches(96)):
            loop.worker.backward((loop.model(inputs) - targets).square().mean(1))
        loop.worker.step()
    assert_equal_tensors(plain.train(9), loop.model.parameters())


def test_a_batch_that_switch_mode_cuts_is_seen():
    loop = Regression(batch=adloco.AdaptiveBatch("none", initial=12, max_micro_batch=8))
    loop.train(3)
    assert (loop.worker.requested_batch, loop.worker.effective_batch) == (12, 8)


def test_layers_added_later_are_noticed():
    loop = Regression(batch=4)
    loop.train(3)
    loop.model.append(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"^micro_batches: the model has got trainable parameters"):
        loop.train(6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"method": "DiLoCoo"}, "method"),
        ({"inner_steps": 0}, "inner_steps"),
        ({"parameters": {"fragments": 2}}, "parameters.fragments"),
        ({"method": "StreamingDiLoCo", "inner_steps": 5}, "parameters.fragments: must divide inner_steps"),
        ({"batch": adloco.AdaptiveBatch("norm_tst")}, "test"),
        ({"batch": 0}, "batch"),
        ({"parameters": [2]}, "parameters"),
        ({"batch": adloco.AdaptiveBatch(eta=-1.0)}, "eta"),
        ({"batch": adloco.AdaptiveBatch(max_micro_batch=None)}, "max_micro_batch"),
        ({"batch": adloco.AdaptiveBatch("inner_product_test", sample=4)}, "sample"),
        ({"batch": adloco.AdaptiveBatch("inner_product_test", confidence=1.0)}, "confidence"),
        ({"method": "DelayedNesterov", "parameters": {"dynamic_steps": True}}, "parameters"),
        ({"method": "LoCoDL"}, "method"),
        ({"method": "DeMo"}, "method"),
    ],
)
def test_a_wrong_argument_is_named(arguments, named):
    with pytest.raises((ConfigError, ValueError), match=rf"^{named}[:,] "):
        Regression(**arguments)


def test_locodl_waits_for_a_learning_rate_above_zero():
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    worker = adloco.Worker(model, torch.optim.SGD(model.parameters(), lr=0.0), method="LoCoDL", inner_steps=4)
    while worker.steps < 8:
        for indices in worker.micro_batches(32):
            worker.backward(model(torch.ones(len(indices), 4)).square().mean(1))
        worker.step()
    assert torch.equal(model.weight, before)


def test_models_and_optimizers_that_cannot_be_used_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"^model: 1 keeps running statistics"):
        adloco.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"^optimizer: must have exactly"):
        adloco.Worker(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    numbers = nn.Linear(2, 1, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"^model: trainable parameters must be real"):
        adloco.Worker(numbers, torch.optim.SGD(numbers.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"^method: DeMo needs torch.optim.SGD without momentum or maximize"):
        adloco.Worker(model[0], torch.optim.SGD(model[0].parameters(), lr=0.1, maximize=True), method="DeMo")
    for name in UNFIT:
        with pytest.raises(ValueError, match=f"^optimizer: {name} cannot be used"):
            adloco.Worker(model[0], getattr(torch.optim, name)(model[0].parameters()))
    with pytest.raises(ValueError, match=r"^model: must be without DataParallel"):
        adloco.Worker(nn.DataParallel(model[0]), torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"^optimizer: must be a torch Optimizer, got 'AdamW'"):
        adloco.Worker(model[0], "AdamW")
    with pytest.raises(ValueError, match=r"^scaler: must be a torch.amp.GradScaler or None, got True"):
        adloco.Worker(model[0], torch.optim.SGD(model[0].parameters(), lr=0.1), scaler=True)
    adloco.Worker(model[0], torch.optim.Adagrad(model[0].parameters()))  # has a state when it is new


def test_an_unknown_layer_is_refused_with_the_way_out():
    model = nn.Sequential(nn.Conv1d(1, 1, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^statistics: .*Conv1d[^;]*; \"across_workers\" works"):
        adloco.Worker(model, optimizer, batch=dataclasses.replace(ADAPTIVE, first_round=3))
    adloco.Worker(model, optimizer, batch=ADAPTIVE, statistics="across_workers")
    loop = Regression(batch=ADAPTIVE)
    next(loop.worker.micro_batches(96))
    with pytest.raises(ValueError, match=r"statistics=\"across_workers\" of adloco.Worker"):
        loop.losses(range(2))


def test_a_loop_in_the_wrong_order_is_an_error():
    loop = Regression(batch=adloco.AdaptiveBatch("none", initial=8, max_micro_batch=3))
    with pytest.raises(RuntimeError, match=r"^backward: "):
        loop.worker.backward(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"^step: read micro_batches to its end"):
        loop.worker.step()
    micro_batches = loop.worker.micro_batches(96)
    indices = next(micro_batches)
    with pytest.raises(ValueError, match=r"^backward: expected 3 losses"):
        loop.worker.backward(loop.losses(indices[:2]))
    with pytest.raises(RuntimeError, match=r"^micro_batches: call backward.*num_workers=0"):
        next(micro_batches)
    micro_batches = loop.worker.micro_batches(96)
    loop.worker.backward(loop.losses(next(micro_batches)))
    loop.optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"^backward: the gradient was overwritten"):
        loop.worker.backward(loop.losses(next(micro_batches)))
    with pytest.raises(ValueError, match=r"^micro_batches: examples must be a positive integer, got 2.5"):
        next(Regression().worker.micro_batches(2.5))
    assert len(next(Regression(batch=4).worker.micro_batches(np.int64(96)))) == 4
    moved = Regression()
    moved.model.double().float()
    with pytest.raises(RuntimeError, match=r"^micro_batches: the parameters have moved"):
        next(moved.worker.micro_batches(96))
    extended = Regression()
    extended.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match=r"^micro_batches: the optimizer has got other parameters"):
        next(extended.worker.micro_batches(96))


def test_the_error_of_a_loop_is_the_last_line_of_its_script():
    script = """
import torch, adloco
torch.compile(torch.nn.Linear(4, 1))
def train():
    model = torch.nn.Linear(4, 1)
    worker = adloco.Worker(model, torch.optim.SGD(model.parameters(), 0.1), batch=adloco.AdaptiveBatch())
    for _ in worker.micro_batches(64):
        raise KeyError("example")
train()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "KeyError: 'example'"


def test_the_example_trains_with_two_workers_of_torchrun(programs):
    line = programs.torchrun(2, ROOT / "examples" / "own_loop.py").stdout.strip()
    found = re.fullmatch(r"accuracy (0\.\d+) after 10 communications \(0\.4 MB\); the batch grew to (\d+)", line)
    assert float(found[1]) > 0.85
    assert int(found[2]) > 16


@pytest.fixture
def fine_tuning(tokenizer_folder, tmp_path) -> list[str]:
    """Options that fine-tune a small model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=600, **sizes))
    for part in (model, AutoTokenizer.from_pretrained(tokenizer_folder)):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("\n".join(python_docs.python_documents()[:40]))
    words = [str(tmp_path / "model"), str(tmp_path / "text"), "--output", str(tmp_path / "tuned")]
    return [*words, "--steps", "20", "--length", "32", "--rate", "3e-3"]


@pytest.mark.usefixtures("programs")
def test_the_trainer_of_hugging_face_makes_the_steps_of_a_loop_and_trains_adapters_in_whole_rounds(fine_tuning):
    """The same bits in a loop, in the Trainer, and after a resume from the Trainer's checkpoint, in both processes."""
    options = fine_tune.parse(fine_tuning)
    results = adloco.launch(train_as_the_trainer, options, processes=2)
    loop, *_ = results[0]
    for name, expected in loop.items():
        for found in (parameters[name] for result in results for parameters in result[:3]):
            assert torch.equal(expected, found), name
    # Adapters, which ask for five steps and get a whole round.
    first, second = (result[3] for result in results)
    assert all("lora" in name and torch.equal(parameter, second[name]) for name, parameter in first.items())
    assert Path(f"{options.output}_adapters", "worker_1", "checkpoint-10", "optimizer.pt").exists()


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("lora", [False, True])
def test_the_example_fine_tunes_a_model_of_hugging_face(fine_tuning, tmp_path, lora):
    """With adapters only these are sent: 4 bytes for each element and worker in each of two rounds."""
    if lora:
        pytest.importorskip("peft")
    options = fine_tune.parse([*fine_tuning, *["--lora"] * lora])
    first, second = adloco.launch(fine_tune.train, options, processes=2)
    assert first == second
    assert first["after"] < first["before"] - (0.02 if lora else 0.1)
    assert first["bytes"] == 2 * 2 * 4 * first["elements"]
    assert (first["elements"] < 12_000) == lora
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")  # with the adapters, if peft has written them
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match="fewer than --length 1000000"):
        fine_tune.sequences(tokenizer, options.text, 10**6)
    ids = fine_tune.sequences(tokenizer, options.text, 32)[:32]
    with torch.no_grad():
        assert fine_tune.losses(tuned, ids).mean().item() == pytest.approx(first["after"], rel=1e-4)
