"""`memory: auto`: the cheapest way to run a model on a device, from the estimates of `--plan`.

Less memory costs time: a forward pass is computed again, state is sent to the host, or micro-batches are small.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fabrics.config_checks import CHECKS
from fabrics.planning.estimate import HOST_MEMORY, MEMORY_ADVICE, Resources, estimate
from fabrics.pool.max_batch import device_memory
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes
from utils.text import byte_size

# Start-up time of a micro-batch, in tokens: with this many tokens in it, a device reaches half of its speed. Derived
# for an H100, not measured.
_START_TOKENS = 512
# What a worker's round takes longer with state on the host, in tokens. The outer step of 1.1B parameters took as long
# as 144,000 tokens, with recomputed activations, on the 16 cores beside an H200 (docs/results/gpu.json,
# large_with_less). The moments only travel, not measured: for P parameters 16 P bytes at 25 GB/s take as long as 6 P
# FLOPs for each of 42,000 tokens at 400 TFLOP/s.
_OUTER_STATE_TOKENS = 144_000
_MOMENTS_TOKENS = 42_000
_CHUNK = 256


@dataclass(frozen=True)
class MemoryOption:
    """One way to run a model that fits into the memory.

    Attributes:
        keys: the configuration keys that it turns on.
        micro_batch: examples of its micro-batch.
        flops_per_token: of training, with all that is computed again.
        host_tokens: tokens that a worker could train in a round instead of waiting for state in host memory.
    """

    keys: tuple[str, ...]
    micro_batch: int
    flops_per_token: float
    host_tokens: int


def cheapest(options: Sequence[MemoryOption], sequence_length: int, round_tokens: int) -> MemoryOption:
    """Return the option whose tokens take the least time; the first of equal ones; round_tokens: of a worker.

    A token takes the time of its FLOPs, of its part of a micro-batch's start, and of its part of a round's waiting.
    """
    least = min(option.flops_per_token for option in options)

    def time(option: MemoryOption) -> float:
        start = _START_TOKENS / (option.micro_batch * sequence_length)
        return option.flops_per_token / least * (1.0 + start) + option.host_tokens / round_tokens

    return min(options, key=time)


def resources_of(config: Config, processes: Processes) -> Resources:
    """Return what every device of a run has at least: its memory and that of the host, now; all processes call this."""
    on_gpus = processes.devices[0].type == "cuda"
    memory, used = device_memory(processes.own_device)
    if on_gpus:  # CUDA and nccl have taken theirs by now
        memory -= used
    if not on_gpus:  # the processes of a node share the memory of their host
        memory //= config.devices_per_node
    host_memory = None
    if on_gpus:
        host, used = device_memory(torch.device("cpu"))
        host_memory = min(processes.gather((host - used) // processes.devices_here))
    sharing = max(processes.sharing(node) for node in range(len(processes.devices)))
    return Resources(
        devices=len(processes.devices) // config.nodes_per_gpu * config.devices_per_node,
        memory=min(processes.gather(memory)),
        processes=sharing,
        host_memory=host_memory,
    )


def with_chosen_memory(config: Config, resources: Resources, on_gpus: bool) -> tuple[Config, str]:
    """Return the configuration with `memory: auto` carried out, and the choice in one line; ConfigError: nothing fits.

    Keys that the configuration sets stay as they are. The resources have a memory.
    """
    options = {}
    refusals = []
    for values in _combinations(config, on_gpus):
        tried = dataclasses.replace(config, memory=None, **values)
        if any(problem for problems in CHECKS.problems for problem in problems(tried)):
            continue
        try:
            found = estimate(tried, resources)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        keys = tuple(f"{key} {str(value).lower()}" for key, value in values.items())
        host_tokens = _OUTER_STATE_TOKENS * bool(tried.offload_outer_state)
        host_tokens += _MOMENTS_TOKENS * bool(tried.offload_moments)
        options[MemoryOption(keys, found.micro_batch, found.flops_per_token, host_tokens)] = tried
    if not options:
        too_large = [refusal for refusal in refusals if refusal.startswith("--device-memory")]
        if not too_large:  # the configuration itself is refused
            raise ConfigError(refusals[0])
        others = too_large[-1].replace(f"{MEMORY_ADVICE}, ", "")
        of_host = "".join(f"; {refusal}" for refusal in refusals[-1:] if refusal.startswith(HOST_MEMORY))
        raise ConfigError(f"memory: nothing that auto may turn on makes the run fit; {others}{of_host}")
    step_examples = -(-config.INITIAL_BATCH_SIZE // found.ranges["workers"][0])
    round_tokens = step_examples * config.sequence_length * config.number_of_inner_steps_between_outers
    chosen = cheapest(tuple(options), config.sequence_length, round_tokens)
    what = ", ".join(chosen.keys) or "no other keys"
    line = f"memory: auto chooses {what}; of {byte_size(resources.memory)} a device, estimated for micro-batches of"
    return options[chosen], f"{line} {chosen.micro_batch:,}"


def _combinations(config: Config, on_gpus: bool) -> Iterator[dict[str, bool | int]]:
    able: dict[str, bool | int] = {"activation_checkpointing": True, "loss_chunk_tokens": _CHUNK}
    if on_gpus:
        able["offload_outer_state"] = True
    if on_gpus and (config.nodes_per_gpu > 1 or config.number_of_initial_trainers > 1):  # otherwise no worker waits
        able["offload_moments"] = True
    left_open = [key for key in able if getattr(config, key) is None]
    for count in range(len(left_open) + 1):
        for keys in itertools.combinations(left_open, count):
            yield {key: able[key] for key in keys}
