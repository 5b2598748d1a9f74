"""Nodes of several devices: processes that share models give the results of one that has them whole."""

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from algorithms.batch.gradient_statistics import across_workers_estimate, gradient_moments
from fabrics.config_checks import CHECKS
from fabrics.planning.estimate import Estimate
from fabrics.pool.run_checks import sharding_warning
from fabrics.sharding import sharded_model
from fabrics.sharding.sharded_model import ShardedModel, layers_of, sharded_layers, sharded_parts
from fabrics.training.worker import TrainingError
from tests.support import shard_groups
from tests.support.helpers import CPU, LocalProcesses, example_losses, language_model, tiny_bert, tiny_data, tiny_llama
from tests.support.runs import summary, write_config
from utils.config.reading import ConfigError, parse_config


@pytest.fixture(scope="module")
def together(programs, alone, tmp_path_factory):
    """The results of two and four processes, by part, and the folder of their models."""
    folder = tmp_path_factory.mktemp("shard_groups")
    torch.save(alone(shard_groups.RESUMED)["stopped"], folder / "stopped.pt")
    shard_groups.write_pretrained(folder)
    results = {}
    for count in (2, 4):
        programs.torchrun(count, "tests/support/shard_groups.py", "scenarios", folder)
        results |= torch.load(folder / "results.pt", weights_only=True)
    assert list(results) == list(range(len(shard_groups.PARTS)))
    return results, folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The results of this process alone, by scenario; models are in its folder."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(name):
        return shard_groups.run_scenario(name, shard_groups.alone(shard_groups.nodes_of(name)), folder=folder / name)

    run.folder = folder
    return run


def assert_close(found, expected, tolerance: float) -> None:
    """Compare numbers, in lists of any depth, or tensors by name."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], list(expected.values())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, (_, _, names) in enumerate(shard_groups.PARTS) for name in names]
)
def test_shard_groups_train_like_single_devices(together, alone, part, name):
    """Losses, evaluations, statistics, requests and the checkpoint's tensors, after three rounds and a merge."""
    expected, found = alone(name), together[0][part][name]
    tested = name != "int8"
    assert found["unmasked"] == (name != "classification")
    assert expected["merges"] == (name != "sketches")
    assert len(set(expected["requests"])) > 1 or name not in ("norm test", "float32", "sketches", "classification")
    assert len(expected["statistics"]) == (len(expected["requests"]) if tested else 0)
    for what in ("requests", "bytes", "warnings"):
        assert found[what] == expected[what], what
    # Values that are rounded when computed or sent may be rounded differently in parts.
    tolerance = {"float32": 1e-5, "autocast": 3e-3, "int8": 3e-4}.get(name, 1e-9)
    for what in ("losses", "accuracies", "train_losses", "inner", "tensors"):
        if what != "tensors" or name not in ("autocast", "int8"):
            assert_close(found[what], expected[what], tolerance)
    assert_close(found["statistics"], expected["statistics"], 0.03 if name == "autocast" else tolerance)
    if name == "int8":
        # A worker's error is at most half a step of the scale. Of two nearly equal numbers one may be rounded up and
        # one down, in each of three rounds.
        step = 2 * max(tensor.abs().max().item() for key, tensor in expected["tensors"].items() if "error" in key)
        assert step < 2e-4 < 0.01 * expected["tensors"]["trainer_0 velocity"].abs().max().item()
        steps = {"error": 1.0, "parameters": 3.0, "velocity": 3.0, "step": 0.0}  # the others are moments
        for key, tensor in expected["tensors"].items():
            off = (found["tensors"][key] - tensor).abs().max().item()
            assert off <= steps.get(key.split()[-1], 0.3) * step, key


def test_methods_do_the_same_on_parts_as_on_whole_models(together):
    """All methods that support it, with two shard groups: parameters, worker state and events."""
    found = next(part["methods"] for part in together[0].values() if "methods" in part)
    for name, expected in shard_groups.methods(shard_groups.alone()).items():
        assert found[name]["requests"] == expected["requests"], name
        assert found[name]["events"] == expected["events"], name
        for what in ("losses", "train_losses", "tensors"):
            assert_close(found[name][what], expected[what], 1e-9)


@pytest.mark.parametrize("part", shard_groups.ONE_GROUP)
def test_across_devices_compares_the_gradients_of_a_shard_groups_devices(together, part):
    """The reference: the gradient of each device's part of every micro-batch by itself, in float64."""
    devices, model, examples = shard_groups.PARTS[part][1], shard_groups.model_of_devices(), tiny_data().train

    def gradient_sum(indices):
        batch = examples.batch(indices, CPU)
        labels = batch.pop("labels")
        loss = example_losses(model(**batch).logits, labels).sum()
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])

    for micro_batches, found in zip(shard_groups.MICRO_BATCHES, together[0][part]["devices"], strict=True):
        total, ends = sum(micro_batches), np.cumsum(micro_batches)
        parts = [
            own
            for end, size in zip(ends, micro_batches, strict=True)
            for own in np.array_split(np.arange(end - size, end), devices)
            if len(own)
        ]
        sums = [gradient_sum(own) for own in parts]
        mean = sum(sums) / total
        distances = [len(own) * (y / len(own) - mean).square().sum() for own, y in zip(parts, sums, strict=True)]
        assert found["variance"] == pytest.approx(sum(distances).item() / (len(parts) - 1), rel=1e-9)
        pairs = [(i, j) for i in range(len(parts)) for j in range(len(parts)) if i != j]
        weight = sum(len(parts[i]) * len(parts[j]) for i, j in pairs)
        squared_norm = sum((sums[i] @ sums[j]).item() for i, j in pairs) / weight
        assert found["squared_norm"] == pytest.approx(squared_norm, rel=1e-9)
        if len(micro_batches) == 1:  # parts of one size: the paper's formula, and the errors of across_workers
            plain = found["squared_norm"] + found["variance"] / total
            assert plain == pytest.approx(mean.square().sum().item(), rel=1e-9)
            of_all = sum(sums) / len(sums)
            expected = across_workers_estimate([gradient_moments(y, of_all) for y in sums], [len(own) for own in parts])
            assert found["squared_norm_error"] == pytest.approx(expected.squared_norm_error, rel=1e-9)
            assert found["variance_error"] == pytest.approx(expected.variance_error, rel=1e-9, abs=1e-12)
        assert 0 < found["squared_norm_error"] < float("inf") > found["variance_error"] > 0


@pytest.mark.parametrize("part", shard_groups.ONE_GROUP)
def test_autocast_gathers_projections_in_its_type_and_nothing_else(together, part):
    for name, dtype in together[0][part]["gathered types"].items():
        assert dtype == ("torch.bfloat16" if "_proj" in name else "torch.float32"), name


def test_fsdp_norm_in_small(together):
    """Every request follows the paper's rule, V / (eta^2 ||g||^2), from the statistics of its round."""
    found, config, workers = together[0][0]["recipe"], shard_groups.recipe(), 4
    requests, statistics = found["requests"], found["statistics"]
    assert requests[0] == config["INITIAL_BATCH_SIZE"]
    for request, following, (variance, squared_norm, *_) in zip(requests[:-1], requests[1:], statistics, strict=False):
        gradient = max(squared_norm, 0.0) + variance / (workers * -(-request // workers))
        asked = math.ceil(variance / (config["ETA"] ** 2 * gradient))
        assert following == max(request, min(asked, config["max_requested_batch"]))
    assert len(set(requests)) > 2
    assert len(statistics) == len(requests) == config["number_of_outer_steps"]


def test_a_run_resumes_with_shard_groups_of_another_size(together, alone):
    """Resume a run of one device with shard groups, and back."""
    name = shard_groups.RESUMED
    expected, results = alone(name), together[0][1]
    back = shard_groups.run_scenario(name, shard_groups.alone(shard_groups.nodes_of(name)), results[name]["stopped"])
    for found in (results["resumed"], back):
        assert_close(found["tensors"], expected["tensors"], 1e-9)
        assert_close(found["losses"], expected["losses"][-len(found["losses"]) :], 1e-9)


@pytest.mark.parametrize("name", shard_groups.WRITTEN)
def test_models_are_written_whole(together, alone, name):
    """The same files as from one device, with tied parameters once, frozen ones, and the model's own class."""
    alone(name)
    (expected,) = (alone.folder / name).glob("trainer_*")
    written = together[1] / "models" / name / expected.name
    assert_close(*(load_file(folder / "model.safetensors") for folder in (written, expected)), 1e-9)
    assert (written / "config.json").read_text() == (expected / "config.json").read_text()


def test_a_run_whose_device_dies_resumes_on_one_device(programs, cache_dir, tmp_path):
    """The device is killed in round 4."""
    config = write_config(
        tmp_path, cache_dir, processes=2, devices_per_node=2, nodes_per_gpu=2, number_of_initial_trainers=2,
        number_of_inner_steps_between_outers=2, max_requested_batch=8, save_weights_every=1,
    )  # fmt: skip
    done = programs.run("tests/support/killed_in_round.py", "SIGKILL", 1, "--config", config, status=1)
    said = done.stdout + done.stderr
    assert "was killed (SIGKILL); out of memory?" in said, said
    assert "error: rank 1 (process " in said
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"python run.py --resume {folder}" in said
    assert "Traceback" not in said
    resumed = programs.run("run.py", "--resume", folder, "processes=1", "devices_per_node=1")
    assert "resumed after round" in resumed.stdout
    assert summary(folder)["status"] == "completed"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's peak")
def test_a_device_of_two_needs_little_more_than_half_of_the_memory(programs, tmp_path):
    """Training 30M parameters needs the estimated memory, and with a checkpoint not much more."""
    programs.torchrun(2, "tests/support/shard_groups.py", "memory", tmp_path)
    trained, saved = json.loads((tmp_path / "peaks_2.json").read_text())
    alone, planned = (Estimate(shard_groups.memory_config(devices)).device_bytes for devices in (1, 2))
    assert trained == pytest.approx([planned] * 2, rel=0.1)
    assert alone > 6 * 29_893_120 * 4  # parameters, gradient, x, velocity, two moments
    assert planned <= 0.6 * alone
    assert max(saved) <= 1.2 * planned


def test_a_device_that_runs_out_of_memory_in_a_pass_ends_the_run():
    def pass_through():
        raise torch.OutOfMemoryError("no memory left")

    model = object.__new__(ShardedModel)
    model.device = CPU
    model.shard_group = SimpleNamespace(index=1, size=2)
    with pytest.raises(TrainingError, match="max_batch_size: cpu, device 1 of a node of 2, ran out of memory"):
        model.attempt(pass_through)


# The start of a run


def test_the_max_batch_of_a_shard_group_fits_its_smallest_device(together):
    """Each of two devices has half of the examples, and half of the memory."""
    small, large = together[0][0]["max batches"]
    assert large == pytest.approx(2 * small, rel=0.05)
    assert small % 2 == 0
    single = shard_groups.measured_max_batch(shard_groups.alone(2), shard_groups.FREE_BYTES)
    assert small == pytest.approx(single, rel=0.05)


@pytest.mark.parametrize("name", shard_groups.INITIAL)
def test_sharded_models_start_with_the_bits_of_whole_ones(together, name):
    """Two trainers with different seeds; tied, frozen, recast and pretrained models, and their buffers."""
    results, folder = together
    expected = shard_groups.initial_tensors(name, shard_groups.alone(2), folder)
    found = results[0]["initial"][name]
    for what in ("model", "trainers"):
        assert found[what].keys() == expected[what].keys()
        for key, tensor in expected[what].items():
            assert torch.equal(found[what][key], tensor), key


# What is refused

_ACROSS_DEVICES = {"statistics_estimator": "across_devices"}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"processes": 3}, "processes"),
        ({"sampling_method": "inner_product_test"} | _ACROSS_DEVICES | {"debias": False}, "statistics_estimator"),
        *(({"distributed_algo": name}, "distributed_algo") for name in ("DeMo", "SparseLoCo", "SPARTA")),
        ({"compile_model": True}, "compile_model"),
        ({"inner_optimizer": "muon"}, "inner_optimizer"),
    ],
)
def test_what_shard_groups_cannot_do_is_refused_by_key(values, key):
    config = {"number_of_outer_steps": 1, "max_batch_size": 4} | values
    parse_config({name: value for name, value in config.items() if name not in _ACROSS_DEVICES}, (), CHECKS)
    with pytest.raises(ConfigError) as caught:
        parse_config(config | {"devices_per_node": 2}, (), CHECKS)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}: ")


def test_one_process_is_no_shard_group():
    with pytest.raises(ValueError, match="1 processes do not make shard groups of devices_per_node 2"):
        LocalProcesses().place([CPU], 4, True, 2)


# How a model is cut


def test_the_layers_of_a_model_are_in_its_lists():
    llama, bert = tiny_llama(), tiny_bert()
    assert layers_of(llama) == list(llama.model.layers)
    assert layers_of(bert) == list(bert.bert.encoder.layer)
    nested = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])), nn.Linear(2, 2)])
    assert layers_of(nn.Sequential(nested)) == [nested[0]]  # a single layer of the list belongs to the root
    # A layer that is used twice is one layer, and a container in a list is none.
    first, second = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    pair = nn.ModuleDict({"block": second, "norm": nn.LayerNorm(2)})
    model = nn.Sequential(nn.ModuleList([first, first]), nn.ModuleList([nn.ModuleList([first, nn.Linear(2, 2)]), pair]))
    assert layers_of(model) == sharded_layers(model) == [first, second]

    class Stage(nn.ModuleList):
        def forward(self, x):
            return self[1](self[0](x))

    stages = [Stage([first, second]), Stage([nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)])]
    assert layers_of(nn.Sequential(nn.ModuleList(stages))) == stages


@pytest.mark.parametrize(
    ("autocast", "layer", "whole"),
    [
        (None, nn.Linear, False),
        (None, None, True),
        (torch.bfloat16, nn.Linear, False),
        (torch.bfloat16, nn.Bilinear, True),
    ],
)
def test_a_model_that_is_gathered_whole_is_warned_of(monkeypatch, autocast, layer, whole):
    """Without layers in a ModuleList, and with autocast also without linear parts in them."""
    model = object.__new__(ShardedModel)
    model.shard_group = SimpleNamespace(mesh=None, size=2, index=0)
    sizes = (2, 2, 2) if layer is nn.Bilinear else (2, 2)
    layers = [nn.Sequential(layer(*sizes)) for _ in range(2)] if layer else []
    model.module, model._autocast = nn.Sequential(nn.ModuleList(layers), nn.Linear(2, 2)), autocast
    monkeypatch.setattr(sharded_model, "fully_shard", lambda *arguments, **options: None)
    model._shard(torch.float32)
    assert model.gathered_whole is whole
    assert len(sharding_warning(model)) == whole


def test_layers_that_share_a_parameter_belong_to_the_root():
    llama = tiny_llama(num_hidden_layers=3)
    layers = list(llama.model.layers)
    assert sharded_layers(llama) == layers
    layers[0].mlp.up_proj.weight = layers[2].mlp.up_proj.weight
    assert sharded_layers(llama) == [layers[1]]


def test_the_linear_parts_of_a_layer_are_gathered_together_with_autocast():
    """Of Qwen3 as well, whose attention has norms between its linear layers."""
    gpt2 = language_model("gpt2", num_hidden_layers=2)
    assert sharded_parts(gpt2) == [[layer.attn, layer.mlp] for layer in gpt2.transformer.h]
    qwen3 = language_model("qwen3", num_hidden_layers=2)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert sharded_parts(qwen3) == [
        [*(getattr(layer.self_attn, name) for name in projections), layer.mlp] for layer in qwen3.model.layers
    ]
