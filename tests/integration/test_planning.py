"""Estimates held against paper and against short runs; what does not fit is refused."""

import json
from pathlib import Path

import pytest

import run as program
from algorithms.nodes.communication_rounds import Link
from algorithms.synchronisation import METHODS
from fabrics.config_checks import CHECKS, CHOICES
from fabrics.models.meta_model import flops_per_token, meta_model
from fabrics.planning.command import as_text
from fabrics.planning.estimate import Resources, activation_bytes, estimate
from fabrics.planning.parse_units import amount, count, link, memory
from fabrics.sharding.layers import gathered_elements
from tests.support import matrix
from tests.support.helpers import TINY_ARCHITECTURE, Recorder, make_config, tiny_cluster
from utils.config.reading import load_config
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]
STEADY = {"sampling_method": "none", "number_of_inner_steps_between_outers": 2, "number_of_outer_steps": 3}
KNOWN = {"model_config": TINY_ARCHITECTURE | {"vocab_size": 300}, "sequence_length": 9}
ALONE = {"number_of_initial_trainers": 1, "nodes_per_gpu": 1}


def estimated(resources: Resources | None = None, **values):
    return estimate(make_config(**(KNOWN | STEADY | values)), resources)


# Bytes


def ran(**values):
    """The estimate of a short run, and the run's totals."""
    cluster = tiny_cluster(**(STEADY | values))
    cluster.train(Recorder())
    vocabulary = {"vocab_size": len(cluster.data.tokenizer)}
    values = values | {"model_config": cluster.config.model_config | vocabulary}
    return estimate(make_config(**(STEADY | values))), cluster.counters


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].capabilities.one_exchange])
def test_a_run_sends_what_is_estimated(method):
    values = {"nodes_per_gpu": 4, "number_of_initial_trainers": 1, "distributed_algo": method}
    found, totals = ran(**values, **matrix.PARAMETERS.get(method, {}))
    assert found.total_bytes == totals.bytes_synchronised > 0
    assert found.total_bytes == 3 * found.round_bytes
    assert found.worker_bytes == found.round_bytes / 4
    assert (found.rounds, found.communications) == (totals.outer_steps, totals.communications)


@pytest.mark.parametrize(
    "values",
    [
        {"communication_dtype": "int8"},
        {"nodes_per_gpu": 8, "sampling_method": "norm_test", "max_requested_batch": 4, "batch_test_start": 2}
        | {"statistics_batch_size": 2, "number_of_initial_trainers": 1},
        {"nodes_per_gpu": 2, "number_of_initial_trainers": 1, "statistics_estimator": "across_workers"}
        | {"sampling_method": "norm_test", "max_requested_batch": 4, "batch_test_start": 2},
        {"nodes_per_gpu": 7, "number_of_initial_trainers": 3, "merge_count": 3, "merge_frequency": 2},
        {"nodes_per_gpu": 6, "number_of_initial_trainers": 2},
    ],
    ids=lambda values: ",".join(values),
)
def test_statistics_merges_and_redistributions_are_estimated_to_the_byte(values):
    found, totals = ran(**({"nodes_per_gpu": 4} | values))
    assert found.total_bytes == totals.bytes_communicated > 0
    assert found.communications == totals.communications


def test_a_limit_of_tokens_ends_the_run():
    values = {"nodes_per_gpu": 4, "number_of_initial_trainers": 1, "number_of_outer_steps": None, "max_tokens": 450}
    found, totals = ran(**values)
    assert (found.rounds, found.tokens) == (totals.outer_steps, totals.tokens)
    assert found.total_bytes == totals.bytes_communicated


def test_bytes_of_methods_without_a_fixed_round_are_not_known():
    found = estimated(distributed_algo="StreamingDiLoCo", nodes_per_gpu=2, synchronisation={"fragments": 1})
    assert (found.round_bytes, found.total_bytes, found.link_seconds) == (None, None, {})
    assert "bytes: the rounds of StreamingDiLoCo are not of one known size" in found.unknown


# Seconds and memory on paper


def test_seconds_are_flops_over_rate_and_bytes_over_bandwidth():
    links = (("1Mb/s,20ms", Link(1e6, 0.02)),)
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 2, "max_batch_size": 2, "INITIAL_BATCH_SIZE": 8}
    found = estimated(Resources(tflops=1e-6, links=links, devices=2), **values)  # four nodes, two examples each
    module, _ = meta_model(make_config(**KNOWN))
    assert found.tokens == 3 * 2 * 8 * 9
    assert found.flops == found.tokens * flops_per_token(module, 9)
    assert found.compute_seconds == pytest.approx(found.flops / (2 * 1e6))
    each = 2 * 3 * 4 * found.parameters / 4  # a ring's reduction of float32 among four nodes
    assert found.worker_bytes == each
    assert found.link_seconds["1Mb/s,20ms"] == pytest.approx(3 * (0.02 + 8 * each / 1e6))
    assert "over 1Mb/s,20ms: " in as_text(found, Resources(links=links))


def test_memory_by_hand():
    found = estimated(**ALONE, max_batch_size=2, INITIAL_BATCH_SIZE=2)
    flat = 4 * found.parameters
    needed = found.memory
    step = 4  # bytes of the step count of AdamW
    assert (needed.parameters, needed.gradients, needed.moments) == (flat, flat, 2 * flat + step)
    assert needed.trainers == 2 * flat  # its parameters and the velocity
    assert (needed.workers, needed.round, needed.gathered, needed.host) == (0, flat, 0, 0)
    hidden, intermediate, layers = (
        TINY_ARCHITECTURE[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    inside = layers * 9 * 4 * (11 * hidden + 4 * intermediate)
    logits = 3 * 4 * 9 * 300
    config = make_config(**(KNOWN | STEADY))
    assert activation_bytes(config, meta_model(config)[0]) == (inside, logits)
    evaluated = config.eval_batch_size * (inside // layers + 2 * logits // 3)
    assert needed.activations == max(2 * (inside + logits), evaluated)
    assert needed.device == 7 * flat + step + needed.activations
    assert found.checkpoint_bytes == 4 * flat + step


def test_state_on_the_host_and_on_several_devices():
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 2, "devices": ["cuda:0"]}
    flat = 4 * estimated(**values).parameters
    needed = estimated(**values, offload=["outer_state", "idle_moments"]).memory
    assert (needed.trainers, needed.moments, needed.round, needed.host) == (0, 2 * flat + 4, 0, 5 * flat + 4)
    values |= {"devices": None, "nodes_per_gpu": 1, "devices_per_node": 4}
    found = estimated(Resources(devices=8), **values)
    assert (found.nodes, found.memory.moments) == (2, (2 * flat + 4) // 4)
    assert found.memory.gathered == 4 * gathered_elements(meta_model(make_config(**KNOWN))[0])
    with pytest.raises(ConfigError, match="--devices: must be a multiple of devices_per_node, 4, got 6"):
        estimated(Resources(devices=6), **values)


def test_the_largest_micro_batch_is_the_last_that_fits():
    needed = {size: estimated(**ALONE, max_batch_size=size, INITIAL_BATCH_SIZE=size).memory.device for size in (40, 41)}
    room = needed[40] + 1
    values = {"max_batch_size": None, "sampling_method": "norm_test", "padding_percentage": 1.0, "eval_batch_size": 1}
    assert needed[41] > room
    found = estimated(Resources(memory=room), **ALONE, **values)
    assert found.micro_batch == 40
    assert estimated(**ALONE, **values).micro_batch is None


@pytest.mark.parametrize(
    ("name", "parameters", "fits_one_device"),
    [("c4_llama_1b", 1_100_048_384, True), ("c4_llama_3b", 3_426_473_600, False)],
)
def test_the_large_configurations_are_for_nodes_of_8(name, parameters, fits_one_device):
    """Parameters as TinyLlama 1.1B and OpenLLaMA 3B are published."""
    path = ROOT / "configs" / f"{name}.yaml"
    config, _ = load_config(path, (), CHOICES, CHECKS)
    assert estimate(config, Resources(devices=64, memory=80 * 10**9)).parameters == parameters
    one, _ = load_config(path, ("devices_per_node=1", "max_batch_size=2"), CHOICES, CHECKS)
    needed = estimate(one).memory.device
    assert (needed < 0.9 * 80e9) is fits_one_device


# Command


def test_links_and_sizes():
    assert link("1Gb/s,20ms") == Link(1e9, 0.02)
    assert link("100MB/s") == Link(8e8, 0.0)
    assert (memory("80GB"), memory("1.5GiB"), memory("100B")) == (80 * 10**9, 3 * 2**29, 100)
    assert (amount("0.5"), count("3")) == (0.5, 3)
    for reader, text in ((link, "fast"), (link, "0b/s"), (memory, "80"), (memory, "0GB"), (amount, "-1"), (count, "0")):
        with pytest.raises(ValueError, match="must be a"):
            reader(text)


def test_the_command(tmp_path, capsys):
    small = ["model_config.num_hidden_layers=1", "max_tokens=20000", "number_of_outer_steps=null"]
    file = tmp_path / "plan.json"
    assert program.main(["--plan", "--link=1Gb/s,20ms", "--tflops=0.1", f"--json={file}", *small]) == 0
    said = capsys.readouterr().out
    assert "over 1Gb/s,20ms: " in said
    assert "not known: how the batch moves" in said
    assert program.main(["--plan", "--link=1Gb/s,20ms", "--tflops=0.1", "--json=-", *small]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_a_run_that_does_not_fit_is_refused_in_one_line(capsys):
    assert program.main(["--plan", "--device-memory=1MB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --device-memory: a run needs ")
    assert program.main(["--plan", "--devices=0", "--tflops=much"]) == 2
    assert capsys.readouterr().err.count("error: --") == 2
    with pytest.raises(SystemExit):
        program.main(["--link=1Gb/s"])
    assert "--link has a meaning with --plan only" in capsys.readouterr().err
