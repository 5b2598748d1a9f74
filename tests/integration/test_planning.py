"""`--plan`: estimates equal short runs and numbers computed by hand; a run that does not fit is refused."""

import argparse
import copy
import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import run as program
from algorithms.nodes.traffic import Link
from algorithms.synchronisation import METHODS
from fabrics.config_checks import CHECKS
from fabrics.data.examples import PackedSequences
from fabrics.models.initialisation import flops_per_token, meta_model
from fabrics.planning.command import parse_count, parse_link, parse_memory, parse_positive
from fabrics.planning.estimate import Estimate, Resources, activation_bytes, cast_bytes
from fabrics.pool.max_batch import bytes_on_cpu
from fabrics.sharding.sharded_model import gathered_elements
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import backward
from tests.support import matrix
from tests.support.helpers import (
    CPU,
    TINY_ARCHITECTURE,
    Recorder,
    make_config,
    random_sequences,
    tiny_cluster,
    tiny_llama,
)
from utils.config.reading import load_config
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]
STEADY = {"sampling_method": "none", "number_of_inner_steps_between_outers": 2, "number_of_outer_steps": 3}
KNOWN = {"model_config": TINY_ARCHITECTURE | {"vocab_size": 300}, "sequence_length": 9}
ALONE = {"number_of_initial_trainers": 1, "nodes_per_gpu": 1}


def estimated(resources: Resources | None = None, **values):
    return Estimate(make_config(**(KNOWN | STEADY | values)), resources)


# Bytes


def ran(**values):
    """The estimate of a short run, and the run's totals."""
    cluster = tiny_cluster(**(STEADY | values))
    cluster.train(Recorder())
    vocabulary = {"vocab_size": len(cluster.data.tokenizer)}
    values = values | {"model_config": cluster.config.model_config | vocabulary}
    return Estimate(make_config(**(STEADY | values))), cluster.counters


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name]().capabilities.one_exchange])
def test_a_run_sends_what_is_estimated(method):
    values = {"nodes_per_gpu": 4, "number_of_initial_trainers": 1, "distributed_algo": method}
    found, totals = ran(**values, **matrix.PARAMETERS.get(method, {}))
    assert found.ranges["sent_bytes"] == (totals.bytes_synchronised,) * 2
    assert found.ranges["rounds"] == (totals.outer_steps,) * 2
    assert found.ranges["communications"] == (totals.communications,) * 2


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
        {"nodes_per_gpu": 8, "number_of_initial_trainers": 2, "smallest_worker_batch": 2},
        {"nodes_per_gpu": 7, "number_of_initial_trainers": 5, "merge_count": 3, "merge_frequency": 1},
        {"nodes_per_gpu": 3, "number_of_initial_trainers": 5, "merge_frequency": 1},
        {"number_of_initial_trainers": 2, "merge_frequency": 1, "distributed_algo": "EagerDiLoCo"},
        {"number_of_initial_trainers": 2, "merge_frequency": 1, "distributed_algo": "SparseLoCo"}
        | matrix.PARAMETERS["SparseLoCo"],
    ],
    ids=lambda values: ",".join(values),
)
def test_statistics_merges_and_redistributions_are_estimated_to_the_byte(values):
    found, totals = ran(**({"nodes_per_gpu": 4} | values))
    assert found.ranges["sent_bytes"] == (totals.bytes_communicated,) * 2
    assert found.ranges["communications"] == (totals.communications,) * 2
    assert totals.bytes_communicated > 0


def test_trainers_on_one_node_send_nothing():
    found, totals = ran(nodes_per_gpu=1, number_of_initial_trainers=3, merge_frequency=1)
    assert found.ranges["sent_bytes"] == (totals.bytes_communicated,) * 2 == (0, 0)


def test_a_limit_of_tokens_ends_the_run():
    values = {"nodes_per_gpu": 4, "number_of_initial_trainers": 1, "number_of_outer_steps": None, "max_tokens": 450}
    found, totals = ran(**values)
    assert found.ranges["rounds"] == (totals.outer_steps,) * 2
    assert found.ranges["tokens"] == (totals.tokens,) * 2
    assert found.ranges["sent_bytes"] == (totals.bytes_communicated,) * 2


@pytest.mark.parametrize(("documents", "rounds", "examples"), [(24, 6, 48), (1000, 10, 80)])
def test_the_first_of_several_limits_ends_the_run(documents, rounds, examples):
    """Two epochs, 10 rounds of two inner steps with 4 examples, or more tokens."""
    limits = {"number_of_training_epochs": 2, "number_of_outer_steps": 10, "max_tokens": 10**6}
    ranges = estimated(**ALONE, **limits, data_sample_size=documents).ranges
    assert (ranges["rounds"], ranges["tokens"]) == ((rounds,) * 2, (9 * examples,) * 2)


@pytest.mark.parametrize("several", ["nodes_per_gpu", "number_of_initial_trainers", None])
def test_bytes_of_methods_without_a_fixed_round_are_not_known(several):
    values = ALONE | ({several: 2} if several else {})
    found = estimated(distributed_algo="StreamingDiLoCo", synchronisation={"fragments": 1}, **values)
    assert not found.ranges.keys() & {"communications", "sent_bytes"}
    said = any("docs/methods.md says what StreamingDiLoCo sends" in line for line in found.assumptions)
    assert said == bool(several)


@pytest.mark.parametrize("dataset", ["text", "messages"])
def test_examples_that_may_be_shorter_are_named(dataset):
    found = estimated(dataset=dataset, text_files=["x"]).assumptions
    assert any("every example has sequence_length" in line for line in found) == (dataset == "messages")


# Seconds and memory on paper


@pytest.mark.parametrize("rounds", [3, 10**9])
def test_seconds_are_flops_over_rate_and_bytes_over_bandwidth(rounds):
    links = (("1Mb/s,20ms", Link(1e6, 0.02)),)
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 2, "max_batch_size": 2, "INITIAL_BATCH_SIZE": 8}
    values |= {"number_of_outer_steps": rounds}
    found = estimated(Resources(tflops=1e-6, links=links, devices=2), **values)  # four nodes, two examples each
    module, _ = meta_model(make_config(**KNOWN))
    tokens = rounds * 2 * 8 * 9
    flops = tokens * flops_per_token(module, 9)
    each = 2 * 3 * 4 * found.parameters / 4  # a ring's reduction of float32 among four nodes
    computing, sending = flops / (2 * 1e6), rounds * (0.02 + 8 * each / 1e6)
    totals = {name: most for name, (least, most) in found.ranges.items() if least == most}
    assert totals == {
        "batch": 8, "workers": 4, "rounds": rounds, "tokens": tokens, "flops": flops, "communications": rounds,
        "sent_bytes": rounds * 4 * each, "compute_seconds": pytest.approx(computing),
        "over 1Mb/s,20ms seconds": pytest.approx(sending),
        "in all over 1Mb/s,20ms seconds": pytest.approx(computing + sending),
    }  # fmt: skip


def test_the_busiest_device_determines_the_seconds():
    """The first of three devices serves two of four trainers in turn, the first of two both workers of one trainer."""
    values = STEADY | {"merge_frequency": 9, "INITIAL_BATCH_SIZE": 4}

    def seconds(devices: int, **more) -> float:
        found = estimated(Resources(tflops=1.0, devices=devices), **(values | more))
        return found.ranges["compute_seconds"][1] / found.ranges["flops"][1] * 1e12

    assert seconds(3, nodes_per_gpu=1, number_of_initial_trainers=4) == pytest.approx(2 / 4)
    alone = {"number_of_initial_trainers": 1, "smallest_worker_batch": 2}
    assert seconds(2, nodes_per_gpu=2, **alone) == pytest.approx(1.0)
    assert seconds(2, nodes_per_gpu=1, **alone) == pytest.approx(1 / 2)


def test_memory_by_hand():
    found = estimated(**ALONE, max_batch_size=2, INITIAL_BATCH_SIZE=2)
    flat = 4 * found.parameters
    moments = 2 * flat + 4  # and AdamW's step count
    hidden = TINY_ARCHITECTURE["hidden_size"]
    kept = TINY_ARCHITECTURE["num_hidden_layers"] * 9 * 4 * (11 * hidden + 4 * TINY_ARCHITECTURE["intermediate_size"])
    logits = 3 * 4 * 9 * 300
    config = make_config(**(KNOWN | STEADY))
    assert activation_bytes(config, meta_model(config)[0]) == (kept, logits)
    chunked = make_config(**(KNOWN | STEADY), loss_chunk_tokens=2)
    assert activation_bytes(chunked, meta_model(chunked)[0]) == (kept, logits * 2 // 9)
    tested = make_config(**KNOWN, sampling_method="norm_test", loss_chunk_tokens=2)
    assert activation_bytes(tested, meta_model(tested)[0]) == (kept, logits * 2 // 9 + 4 * 9 * 300)
    without_layers = meta_model(config)[0]
    without_layers.config.num_hidden_layers = 0
    assert activation_bytes(config, without_layers) is None
    evaluated = config.eval_batch_size * (kept // TINY_ARCHITECTURE["num_hidden_layers"] + 2 * logits // 3)
    assert found.memory == {
        "parameters of the working model": flat,
        "its gradients": flat,
        "state of the inner optimizer": moments,
        "parameters of the trainers and the method's state": 2 * flat,
        "state of the method and the encoding per worker": 0,
        "sums of a round": flat,
        "layers that are whole at a time": 0,
        "copies of weights for autocast": 0,
        "activations and logits": max(2 * (kept + logits), evaluated),
    }
    assert found.device_bytes == sum(found.memory.values())
    assert found.host_bytes == 0


def test_every_process_of_a_device_has_models_and_activations():
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 2, "devices": ["cpu"], "max_batch_size": 2}
    alone, several = (estimated(**values, processes=count).memory for count in (1, 2))
    for name in ("parameters of the working model", "its gradients", "activations and logits"):
        assert several[name] == 2 * alone[name] > 0
    flat = alone["its gradients"]
    assert several["state of the inner optimizer"] == alone["state of the inner optimizer"]
    outer = "parameters of the trainers and the method's state"
    assert (alone[outer], several[outer]) == (2 * flat, 4 * flat)
    # In each the sum, and with several the worker's own tensor.
    assert (alone["sums of a round"], several["sums of a round"]) == (flat, 4 * flat)
    assert any("memory: of one process" in line for line in estimated(**values).assumptions)


def test_autocast_keeps_copies_of_linear_layers_for_the_backward_pass():
    """Bytes that do not grow with the examples, beyond those without autocast; `bytes_on_cpu` doubles bytes."""
    module, examples = tiny_llama(dtype=torch.float32, hidden_size=64), PackedSequences(random_sequences(2))

    def constant(autocast: torch.dtype | None) -> int:
        model = FlatModel(copy.deepcopy(module), CPU, autocast)
        measure = partial(bytes_on_cpu, lambda count: backward(model, examples, np.arange(count)))
        return (2 * measure(1) - measure(2)) // 2

    config = make_config(autocast="bfloat16")
    assert constant(torch.bfloat16) - constant(None) == pytest.approx(cast_bytes(config, module), rel=0.01)
    assert cast_bytes(make_config(), module) == 0
    sharded = make_config(autocast="bfloat16", devices_per_node=2)
    assert cast_bytes(sharded, module) == 2 * module.lm_head.weight.numel()


def test_state_on_the_host_and_on_several_devices():
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 2, "devices": ["cuda:0"]}
    flat = 4 * estimated(**values).parameters
    found = estimated(**values, offload_outer_state=True)
    moments = 2 * (2 * flat + 4)
    assert found.memory["parameters of the trainers and the method's state"] == found.memory["sums of a round"] == 0
    assert found.memory["state of the inner optimizer"] == moments
    assert found.host_bytes == 3 * 2 ** math.ceil(math.log2(flat))  # pinned memory comes in powers of two
    found = estimated(**values, offload_moments=True)
    assert found.memory["state of the inner optimizer"] == moments / 2
    assert found.host_bytes == 4 * 2 ** math.ceil(math.log2(flat))
    values |= {"devices": None, "nodes_per_gpu": 1, "devices_per_node": 4}
    found = estimated(Resources(devices=8), **values)
    assert (found.nodes, found.memory["state of the inner optimizer"]) == (2, moments // 8)
    assert found.memory["layers that are whole at a time"] == 4 * gathered_elements(meta_model(make_config(**KNOWN))[0])
    with pytest.raises(ConfigError, match=r"--devices: .*devices_per_node, 4, got 6"):
        estimated(Resources(devices=6), **values)


def test_the_largest_micro_batch_is_the_last_that_fits():
    needed = {size: estimated(**ALONE, max_batch_size=size, INITIAL_BATCH_SIZE=size).device_bytes for size in (40, 41)}
    values = {"max_batch_size": None, "sampling_method": "norm_test", "padding_percentage": 1.0, "eval_batch_size": 1}
    assert estimated(Resources(memory=needed[40]), **ALONE, **values).micro_batch == 40
    assert estimated(Resources(memory=needed[41] - 1), **ALONE, **values).micro_batch == 40
    assert estimated(**ALONE, **values).micro_batch == 1


def test_switch_mode_follows_the_micro_batch_that_fits():
    """A share of 60 examples, 1.5 micro-batches of 40, is cut to one of them."""
    values = ALONE | {"padding_percentage": 1.0, "eval_batch_size": 1, "INITIAL_BATCH_SIZE": 60}
    room = estimated(**values, max_batch_size=40).device_bytes
    found = [estimated(**values, max_batch_size=40), estimated(Resources(memory=room), **values, max_batch_size=None)]
    assert [(each.micro_batch, each.ranges["tokens"]) for each in found] == [(40, (6 * 40 * 9, 6 * 40 * 9))] * 2
    whole = estimated(**values, max_batch_size=None)
    assert whole.ranges["tokens"] == (6 * 60 * 9, 6 * 60 * 9)
    told = ["switch mode: threshold_switch_mode runs" in str(each.assumptions) for each in (*found, whole)]
    assert told == [True, True, False]


@pytest.mark.parametrize(
    ("name", "parameters", "fits_one_device"),
    [("c4_llama_1b", 1_100_048_384, True), ("c4_llama_3b", 3_426_473_600, False)],
)
def test_the_large_configurations_are_for_nodes_of_8(name, parameters, fits_one_device):
    """Parameters as TinyLlama 1.1B and OpenLLaMA 3B are published."""
    path = ROOT / "configs" / f"{name}.yaml"
    config, _ = load_config(path, (), CHECKS)
    assert Estimate(config, Resources(devices=64, memory=80 * 10**9)).parameters == parameters
    one, _ = load_config(path, ("devices_per_node=1", "max_batch_size=2"), CHECKS)
    needed = Estimate(one).device_bytes
    assert (needed < 0.9 * 80e9) is fits_one_device


def test_the_range_of_the_demo_holds_what_the_demo_does():
    """29 communications and 64.4 MB, as docs/planning.md says; its four nodes join as the batch grows."""
    config, _ = load_config(ROOT / "config.yaml", (), CHECKS)
    ranges = Estimate(config).ranges
    assert ranges["communications"][0] <= 29 <= ranges["communications"][1] < 100
    assert ranges["sent_bytes"][0] <= 64.4e6 <= ranges["sent_bytes"][1] < 2 * 64.4e6
    assert ranges["workers"] == (1, 4)


def test_a_batch_grows_to_the_limit_or_to_the_data_of_its_trainer():
    """The trainers' data are united by merges; a step of 4 workers has one example of each at least."""
    values = {"sampling_method": "norm_test", "number_of_initial_trainers": 2, "INITIAL_BATCH_SIZE": 4}
    steps = 3 * 2 * 9  # rounds, inner steps, and tokens of an example
    found = estimated(**values, max_requested_batch=24)
    assert found.ranges["batch"] == (4, 24)
    assert found.ranges["tokens"][0] == steps * 4 * (2 + 2 + 1) / 3
    found = estimated(**values, merge_frequency=9, data_sample_size=96)
    assert found.ranges["batch"] == (4, 96)
    assert found.ranges["tokens"] == (steps * 2 * 4, steps * 96)
    assert estimated(**values).ranges["batch"] == (4, 4)


ACROSS = {"statistics_estimator": "across_workers"}
BUDGET = {"communication_budget": 5, "number_of_outer_steps": None, "max_tokens": 1000}


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"node_speeds": [1.0, 2.0]}, "node_speeds: "),
        ({"node_schedule": [[0, 10]]}, "node_schedule: "),
        (BUDGET | {"nodes_per_gpu": 1}, "communication_budget: a run on one node"),
        (ACROSS | {"nodes_per_gpu": 1}, "across_workers needs two nodes"),
        (ACROSS | {"node_schedule": [[0, 1]]}, "statistics_estimator: "),
        (ACROSS | {"participants": 0.3}, "participants: "),
        ({"sampling_method": "inner_product_test", "statistics_batch_size": 2}, "statistics_batch_size: "),
    ],
)
def test_values_that_do_not_fit_the_nodes_are_refused(values, refused):
    values = {"number_of_initial_trainers": 1, "nodes_per_gpu": 4, "sampling_method": "norm_test"} | values
    with pytest.raises(ConfigError, match=refused):
        estimated(**values)


def test_the_last_trainer_has_all_nodes_also_if_the_length_is_unknown():
    found = estimated(number_of_outer_steps=None, number_of_training_epochs=1, number_of_initial_trainers=2)
    assert found.ranges["workers"] == (2, 4)


def test_a_schedule_gives_the_least_and_the_largest_batch():
    """The four nodes of the first half of the run are too many for the second."""
    values = {"number_of_initial_trainers": 1, "INITIAL_BATCH_SIZE": 16, "smallest_worker_batch": 4}
    found = estimated(**values, batch_schedule=[[0, 16], [0.5, 4]])
    assert (found.ranges["batch"], found.ranges["workers"]) == ((4, 16), (1, 4))
    assert found.ranges["communications"] == (0, 3)
    of_known_data = estimated(**values, batch_schedule=[[0, 16], [0.5, 4]], data_sample_size=1000)
    assert of_known_data.ranges["tokens"] == found.ranges["tokens"]
    assert estimated(**values, batch_schedule=[[0, 16], [0.5, 64]], max_requested_batch=32).ranges["batch"] == (16, 32)


# Command


def test_options_are_read_with_their_units():
    assert parse_link("1Gb/s,20ms") == ("1Gb/s,20ms", Link(1e9, 0.02))
    assert parse_link("100MB/s") == ("100MB/s", Link(8e8, 0.0))
    assert (parse_memory("80GB"), parse_memory("1.5GiB"), parse_memory("100B")) == (80 * 10**9, 3 * 2**29, 100)
    assert (parse_positive("0.5"), parse_count("3")) == (0.5, 3)
    for parse, text in (
        (parse_link, "fast"),
        (parse_memory, "80"),
        (parse_positive, "-1"),
        (parse_count, "0"),
        (parse_count, "9" * 20),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be a .*, got '{text}'"):
            parse(text)


def test_the_command(capsys):
    small = ["model_config.num_hidden_layers=1", "max_tokens=20000", "number_of_outer_steps=null"]
    told = ["memory=auto", "single_seed=true"]  # a choice, and a warning
    given = ["--plan", "--link=1Gb/s,20ms", "--tflops=0.1", "--device-memory=8GB", *told, *small]
    assert program.main(given) == 0
    said = capsys.readouterr().out
    assert "sending over 1Gb/s,20ms: " in said
    assert said.index("assumptions:") > said.index("sending over")
    assert program.main([*given, "--json"]) == 0
    out, notes = capsys.readouterr()
    plan = json.loads(out)
    assert plan["ranges"]["tokens"][0] >= 20000
    assert f"{plan['parameters']:,} parameters" in said
    assert said.startswith(notes)
    choice, warning = notes.splitlines()
    assert choice.startswith("memory: auto chooses no other keys; ")
    assert warning.startswith("warning: single_seed: has no effect ")


def test_the_page_has_what_is_printed(capsys):
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    command, printed = re.search(r"```bash\npython run.py (.*)\n```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    assert program.main(command.split()) == 0
    assert capsys.readouterr().out == printed


def test_a_run_that_does_not_fit_is_refused_in_one_line(capsys):
    assert program.main(["--plan", "--device-memory=1MB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = (
        r"error: --device-memory: a run needs \S+ MB per device, \S+ MB of them for .+, and may use 900\.0 kB "
        r"\(padding_percentage 0\.9\); docs/large_models\.md lists what helps"
    )
    assert re.fullmatch(found, line), line


def test_options_of_the_plan_need_plan(capsys):
    with pytest.raises(SystemExit):
        program.main(["--link=1Gb/s"])
    assert "--link needs --plan" in capsys.readouterr().err
