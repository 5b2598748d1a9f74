"""`memory: auto`: the cheapest way to run a model on a device, from the estimates of `--plan`.

Less memory costs time: a forward pass is computed again, state is sent to the host, or micro-batches are small.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

import torch

from fabrics.config_checks import CHECKS
from fabrics.planning.estimate import ACTIVATIONS, DoesNotFitError, Estimate, Resources
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


def token_time(flops: float, micro_batch_tokens: int, round_tokens: int, host_tokens: int) -> float:
    """Time of a token, in FLOPs: its own, its part of a micro-batch's start, and of a round's waiting for the host.

    round_tokens: that a worker trains in a round.
    host_tokens: that it could train in a round while it waits.
    """
    return flops * (1.0 + _START_TOKENS / micro_batch_tokens + host_tokens / round_tokens)


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
    best = None
    refusal = None
    least = math.inf
    for values in _combinations(config, on_gpus):
        tried = dataclasses.replace(config, memory=None, **values)
        if any(problem for problems in CHECKS.problems for problem in problems(tried)):
            continue
        try:
            found = Estimate(tried, resources)
        except DoesNotFitError as error:
            refusal = error
            continue
        except ConfigError:
            if not values:  # the configuration itself is refused
                raise
            continue
        step_examples = -(-config.INITIAL_BATCH_SIZE // found.workers_of(config.INITIAL_BATCH_SIZE)[-1])
        host_tokens = 0
        if tried.offload_outer_state:
            host_tokens += _OUTER_STATE_TOKENS
        if tried.offload_moments:
            host_tokens += _MOMENTS_TOKENS
        time = token_time(
            found.flops_per_token,
            micro_batch_tokens=found.micro_batch * config.sequence_length,
            round_tokens=step_examples * config.sequence_length * config.number_of_inner_steps_between_outers,
            host_tokens=host_tokens,
        )
        if time < least:
            least = time
            best = tried
            line = _choice(values, found)
    if best is None:
        raise ConfigError(f"memory: nothing that auto may turn on makes the run fit; {refusal}")
    return best, line


def _choice(values: Mapping[str, bool | int], found: Estimate) -> str:
    keys = ", ".join(f"{key} {str(value).lower()}" for key, value in values.items()) or "no other keys"
    line = (
        f"memory: auto chooses {keys}; of {byte_size(found.resources.memory)} a device, estimated for micro-batches of "
        f"{found.micro_batch:,}"
    )
    return line if found.memory[ACTIVATIONS] else f"{line}, activations not counted"


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
