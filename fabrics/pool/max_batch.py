"""The largest micro-batch of every node, measured in the memory that its device has left.

The memory of a training step grows linearly with its examples. On CUDA a probe measures the allocator's peak: probes of
1, 2 and 4 examples give the line, and one more run at the predicted size confirms it. On a CPU the peak of a process
cannot be reset. There a probe counts the bytes that autograd keeps for the backward pass, doubled for the temporaries
of that pass. These are exactly linear, so two probes suffice and no prediction is confirmed.
"""

import statistics
from collections.abc import Callable

import numpy as np
import torch

from algorithms.batch.per_example import UnsupportedModuleError
from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.synchronisation.encodings import COMMUNICATION_DTYPES
from fabrics.data.examples import Examples
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import accumulate_gradients
from fabrics.training.method_config import method_of
from fabrics.training.optimizers import inner_optimizer_of
from fabrics.training.statistics import probes_examples
from fabrics.training.worker import TrainingError
from utils.config.schema import Config, ConfigError
from utils.distributed.devices import is_out_of_memory
from utils.distributed.processes import Processes
from utils.host_memory import host_memory
from utils.progress import progress_bar

# From a number of examples to the bytes of a step; None: the device ran out of memory.
Measure = Callable[[int], int | None]

_CPU_PROBES = (1, 2)
_CUDA_PROBES = (1, 2, 4)
# Flash attention starts one block of threads per example, along an axis on which CUDA allows no more blocks than this.
_CUDA_LARGEST = 65_535


def find_max_batch(
    measure: Measure,
    budget_bytes: int,
    probes: tuple[int, ...] = _CUDA_PROBES,
    confirm: bool = True,
    largest: int | None = None,
) -> int:
    """Return the largest batch whose step fits the budget, or 0.

    Args:
        confirm: measure the prediction until it fits.
        largest: no batch may be larger; None: no bound.
    """

    def fits(size: int | None) -> bool:
        return size is not None and size <= budget_bytes

    sizes: dict[int, int] = {}
    for batch in probes:
        size = measure(batch)
        if not fits(size):
            break
        sizes[batch] = size
    largest_seen = max(sizes, default=0)
    if len(sizes) < len(probes):
        between = range(largest_seen + 1, probes[len(sizes)])
        return next((batch for batch in reversed(between) if fits(measure(batch))), largest_seen)
    slope, intercept = statistics.linear_regression(list(sizes), list(sizes.values()))
    if slope <= 0.0:
        return largest_seen
    # A millionth of an example forgives the rounding of the fit.
    candidate = max(largest_seen, int((budget_bytes - intercept) / slope + 1e-6))
    if largest is not None:
        candidate = min(candidate, largest)
    while confirm and candidate > largest_seen and not fits(measure(candidate)):
        candidate = max(largest_seen, int(candidate * 0.9))
    return candidate


def _bytes_on_gpu(step: Callable[[int], None], device: torch.device, batch: int) -> int | None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        step(batch)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    return torch.cuda.max_memory_allocated(device) - before


def bytes_on_cpu(step: Callable[[int], None], batch: int) -> int:
    # By storage and not by address: weights gathered by FSDP2 are freed during the pass, and addresses reused.
    storages: dict[int, torch.UntypedStorage] = {}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(batch)
    return 2 * sum(sizes.values())


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of the device's memory, and those in use."""
    if device.type == "cuda":
        free, memory = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return memory, memory - free - cached
    return host_memory()


def calculate_max_batch(
    step: Callable[[int], None], model: FlatModel, padding_percentage: float, sharing: int, reserved_bytes: int
) -> int:
    """Return the largest micro-batch of each device of a model; reserved_bytes: that all will allocate besides."""
    device = model.device
    on_gpu = device.type == "cuda"
    shard_group = model.shard_group
    steps = 5 if on_gpu else 3
    bar = progress_bar(total=steps, desc="measuring the max batch", unit=" steps", leave=False, delay=1)

    def measure(batch: int) -> int | None:
        """The most bytes that a device of the shard group needs; None if one of them runs out of memory."""
        size = _bytes_on_gpu(step, device, batch) if on_gpu else bytes_on_cpu(step, batch)
        bar.update()
        if shard_group.least(int(size is not None)) == 0:
            return None
        return -shard_group.least(-size)

    with bar, torch.random.fork_rng(devices=[device] if on_gpu else []):
        try:
            # The first steps also compile the model, and allocate workspaces of GPU libraries that stay.
            for count in (1, 2) if on_gpu else (2,):
                measure(count)
            memory, taken = device_memory(device)
            budget = shard_group.least(int((padding_percentage * memory - taken - reserved_bytes) / sharing))
            # A shard group cannot try a batch that may not fit: running out of memory within a pass ends its run.
            confirm = on_gpu and shard_group.size == 1
            probes, largest = (_CUDA_PROBES, _CUDA_LARGEST) if on_gpu else (_CPU_PROBES, None)
            found = find_max_batch(measure, budget, probes, confirm, largest)
        finally:
            model.gradient.zero_()
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
    if found == 0:
        raise MemoryError(
            f"no example fits on {device}: one needs more than {budget:,} bytes. This is padding_percentage "
            f"{padding_percentage} of {memory:,} bytes, less {taken:,} in use and {reserved_bytes:,} for a round's "
            f"sums, shared by {sharing} processes. Use a smaller model or sequence_length, or fewer nodes_per_gpu, "
            f"trainers or processes"
        )
    return found


def round_tensors(config: Config, workers: int, several_processes: bool, elsewhere: int = 0) -> float:
    """Model-sized tensors that a round of a trainer allocates on a device, besides the state between rounds.

    Args:
        workers: the most workers of a trainer on the device.
        elsewhere: the most workers of a trainer in other processes.
    """
    method = method_of(config).capabilities
    encoding = COMMUNICATION_DTYPES[config.communication_dtype]
    held = workers if several_processes else 0
    if method.message_tensors:
        messages = workers + 1
        if several_processes:
            received = elsewhere if method.recipients is None else min(method.recipients, elsewhere)
            messages += workers + min(elsewhere, workers * received)
        held = max(held, method.message_tensors * messages)
    encoded = 0
    if not encoding.lossless:
        encoded = 3 if encoding.keeps_error else 2
    compared = workers if config.compares_workers else 0
    temporaries = method.temporaries + method.temporaries_per_worker * (workers + elsewhere)
    return 1 + held + encoded + compared + temporaries  # one: the sum of the pseudo-gradients


def measured_max_batches(
    config: Config,
    model: FlatModel,
    examples: Examples,
    processes: Processes,
    state_bytes: int,
) -> dict[int, int]:
    """Measure the max batch of every node, once all trainers exist; all processes call this together.

    The owner of a device's first node measures for all nodes of the device. The nodes of a process take turns;
    processes that share a device divide what is left. The devices of a shard group measure together, and the one with
    the least memory decides.

    state_bytes: bytes between rounds in this process, which on a CPU are not in use before they are first written.
    """
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes that share the GPU
    processes.gather(None)  # afterwards the tensors of all processes exist
    per_device = config.nodes_per_gpu
    own: dict[int, int] = {}
    for first in range(0, len(processes.devices), per_device):
        if processes.owns(first):
            workers = sum(processes.owns(node) for node in range(first, first + per_device))
            elsewhere = len(processes.devices) - workers
            tensors = round_tensors(config, workers, processes.count > 1, elsewhere)
            needed = round(model.parameters.numel() * model.parameters.element_size() * tensors)
            if model.device.type == "cpu":
                needed += state_bytes
            if config.offload_moments:  # the worker that trains brings its own
                needed += inner_optimizer_of(config).state_bytes(model) // model.shard_group.size
            sharing = processes.sharing(first)
            own[first] = _measured_max_batch(config, model, examples, sharing, sharing * needed)
    measured: dict[int, int] = {}
    for of_process in processes.gather(own):
        measured |= of_process
    return {node: measured[node - node % per_device] for node in range(len(processes.devices))}


def _measured_max_batch(config: Config, model: FlatModel, examples: Examples, sharing: int, reserved: int) -> int:
    probe = probes_examples(config) or model.compares_devices  # such a step needs more than a plain one
    devices = model.shard_group.size

    def run(count: int) -> None:
        model.gradient.zero_()
        indices = np.full(count * devices, examples.largest)
        plan = ExecutionPlan((len(indices),))
        if model.attempt(lambda: accumulate_gradients(model, examples, plan, indices, probe)) is None:
            raise MemoryError(f"a step with {count} examples did not fit")

    try:
        return devices * calculate_max_batch(run, model, config.padding_percentage, sharing, reserved)
    except UnsupportedModuleError as error:
        raise ConfigError(f"statistics_estimator: {error}") from None
    except TrainingError:  # in a pass of a shard group, which cannot be made smaller
        raise ConfigError(
            f"max_batch_size: measuring it takes passes of up to {_CUDA_PROBES[-1]} examples per device, and one did "
            f"not fit; give it instead of null, in examples of a node of {devices} devices (one each: {devices})"
        ) from None
    except MemoryError as error:
        raise ConfigError(f"max_batch_size: {error}") from None
