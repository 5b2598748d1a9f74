"""`memory: auto`: the decision with numbers on paper, and its effect on plans and runs."""

import pytest

from fabrics.config_checks import CHECKS
from fabrics.planning import memory_choice
from fabrics.planning.estimate import ACTIVATIONS, Estimate, Resources
from fabrics.planning.memory_choice import token_time, with_chosen_memory
from run import train
from tests.support.helpers import CPU, TINY_ARCHITECTURE, LocalProcesses, make_config
from tests.support.runs import SHORT, write_config
from utils.config.reading import load_config
from utils.config.schema import ConfigError


@pytest.mark.parametrize(
    ("flops", "micro_batch", "host_tokens", "round_tokens", "expected"),
    [
        # Sequences of 512 tokens: a micro-batch of n examples takes the time of n + 1.
        (6.0, 1, 0, 10**9, 6.0 * 2),
        (6.3, 2, 0, 10**9, 6.3 * 1.5),
        (8.0, 8, 0, 10**9, 8.0 * 1.125),
        # While it waits for the host, a worker could train a twentieth of its tokens.
        (6.0, 2, 144_000, 2_880_000, 6.0 * (1.5 + 0.05)),
    ],
)
def test_the_time_of_a_token(flops, micro_batch, host_tokens, round_tokens, expected):
    assert token_time(flops, 512 * micro_batch, round_tokens, host_tokens) == pytest.approx(expected)


ALONE = {
    "model_config": TINY_ARCHITECTURE | {"vocab_size": 300, "num_hidden_layers": 4},
    "sequence_length": 512,
    "number_of_initial_trainers": 1,
    "nodes_per_gpu": 1,
    "number_of_outer_steps": 1,
    "sampling_method": "none",
    "INITIAL_BATCH_SIZE": 4,
    "eval_batch_size": 1,
    "max_batch_size": 4,
    "padding_percentage": 1.0,
}


def needed(**values) -> int:
    return Estimate(make_config(**(ALONE | values))).device_bytes


@pytest.mark.parametrize(
    "on", [{}, {"loss_chunk_tokens": 256}, {"loss_chunk_tokens": 256, "activation_checkpointing": True}]
)
def test_no_more_is_turned_on_than_fits(on):
    memory = needed(**on)
    config, line = with_chosen_memory(make_config(**ALONE, memory="auto"), Resources(1, memory), on_gpus=False)
    assert (config.activation_checkpointing, config.loss_chunk_tokens, config.offload_outer_state, config.memory) == (
        on.get("activation_checkpointing"), on.get("loss_chunk_tokens"), None, None,
    )  # fmt: skip
    assert Estimate(config, Resources(1, memory)).device_bytes == memory
    assert line.endswith(" a device, estimated for micro-batches of 4")


@pytest.mark.parametrize(("inner_steps", "chosen"), [(1, "loss_chunk_tokens 256"), (10**6, "offload_outer_state true")])
def test_state_goes_to_the_host_only_in_long_rounds(inner_steps, chosen):
    values = {"number_of_inner_steps_between_outers": inner_steps, "devices": ["cuda:0"]}
    memory = max(needed(**values, loss_chunk_tokens=256), needed(**values, offload_outer_state=True))
    assert needed(**values) > memory
    auto = make_config(**ALONE | values, memory="auto")
    _, line = with_chosen_memory(auto, Resources(1, memory), on_gpus=True)
    assert line.startswith(f"memory: auto chooses {chosen}; of ")


def test_keys_that_are_set_stay_so_and_too_little_memory_is_refused():
    auto = make_config(**ALONE, memory="auto", activation_checkpointing=True, loss_chunk_tokens=7)
    config, line = with_chosen_memory(auto, Resources(1, 10**12), on_gpus=True)
    assert (config.activation_checkpointing, config.loss_chunk_tokens) == (True, 7)
    assert line == "memory: auto chooses no other keys; of 1.0 TB a device, estimated for micro-batches of 4"
    off = make_config(**ALONE, memory="auto", activation_checkpointing=False, loss_chunk_tokens=False)
    for config, memory in ((auto, 10**4), (off, needed(loss_chunk_tokens=256))):
        problem = "nothing that auto may turn on makes the run fit; .* run needs .*; docs/large_models.md lists"
        with pytest.raises(ConfigError, match=f"memory: {problem}"):
            with_chosen_memory(config, Resources(1, memory), on_gpus=False)
    refused = make_config(**ALONE | {"memory": "auto", "model_config": {"preset": "demo", "num_attention_heads": 7}})
    with pytest.raises(ConfigError, match="model_config: cannot build"):
        with_chosen_memory(refused, Resources(1, 10**12), on_gpus=False)


def test_moments_wait_in_host_memory_only_where_workers_take_turns():
    """Between all moments on the device and one worker's is room for no other key.

    The rounds are too many to be followed.
    """
    long = {"number_of_outer_steps": 10**9, "merge_frequency": 10**9}
    fixed = long | {"activation_checkpointing": False, "loss_chunk_tokens": False, "offload_outer_state": False}
    for trainers, chosen in ((4, True), (1, None)):
        values = ALONE | fixed | {"number_of_initial_trainers": trainers, "devices": ["cuda:0"]}
        plain = Estimate(make_config(**values))
        moments = plain.memory["state of the inner optimizer"] // trainers
        memory = plain.device_bytes - (trainers - 1) * moments
        config, _ = with_chosen_memory(make_config(**values, memory="auto"), Resources(1, memory), on_gpus=True)
        assert config.offload_moments is chosen
        found = Estimate(config, Resources(1, memory))
        assert (found.device_bytes, found.memory["state of the inner optimizer"]) == (memory, moments)


def test_state_goes_to_host_memory_only_where_the_host_has_room():
    values = ALONE | {"activation_checkpointing": False, "loss_chunk_tokens": False, "devices": ["cuda:0"]}
    offloaded = Estimate(make_config(**values, offload_outer_state=True))
    auto = make_config(**values, memory="auto")
    for room, chosen in ((0, True), (-1, None)):
        resources = Resources(1, offloaded.device_bytes, host_memory=offloaded.host_bytes + room)
        if chosen:
            config, _ = with_chosen_memory(auto, resources, on_gpus=True)
            assert config.offload_outer_state is chosen
        else:
            with pytest.raises(ConfigError, match=r"memory: nothing that auto .*; host memory: state of a"):
                with_chosen_memory(auto, resources, on_gpus=True)


def test_processes_that_share_a_device_are_counted():
    """Four processes with a node each need four working models; `processes` says nothing of torchrun's."""
    values = ALONE | {"nodes_per_gpu": 4, "devices": ["cuda:0"]}
    alone, shared = (Estimate(make_config(**values), Resources(1, processes=count)).memory for count in (1, 4))
    for part in ("parameters of the working model", "its gradients", ACTIVATIONS):
        assert shared[part] == 4 * alone[part]


def test_nodes_of_one_cpu_are_one_device():
    found = memory_choice.resources_of(make_config(nodes_per_gpu=4), LocalProcesses([CPU], 4))
    assert (found.devices, found.processes, found.host_memory) == (1, 1, None)
    assert LocalProcesses([CPU], 4).devices_here == 1


@pytest.mark.usefixtures("programs")
def test_a_run_records_the_keys_that_were_chosen(tmp_path, cache_dir, monkeypatch):
    model = SHORT["model_config"] | {"num_hidden_layers": 4}
    values = {"model_config": model, "eval_batch_size": 1, "padding_percentage": 1.0, "number_of_outer_steps": 1}
    path = write_config(tmp_path, cache_dir, **values)
    memory = Estimate(load_config(path, ["activation_checkpointing=true"], CHECKS)[0]).device_bytes
    monkeypatch.setattr(memory_choice, "device_memory", lambda device: (memory, 0))
    run = train(path, memory="auto")
    recorded, _ = load_config(run.folder / "config.yaml", [], CHECKS)
    assert (recorded.memory, recorded.activation_checkpointing, recorded.loss_chunk_tokens) == (None, True, None)
    log = (run.folder / "training_log.log").read_text()
    assert "memory: auto chooses activation_checkpointing true; of " in log
