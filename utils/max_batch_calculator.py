"""The largest micro-batch that fits: a linear memory model from two or three probes, confirmed where it can be.

The memory of a training step grows linearly with its examples, so probes of 1, 2 and 4 examples tell the slope
and one more run at the predicted size confirms it. On CUDA a probe is the allocator's peak. On the CPU, where a
process's peak cannot be reset, it is the bytes that autograd keeps for the backward pass, which are exactly linear,
doubled as a margin for the temporaries of that pass; nothing is confirmed there. Measured: a probed step of the
demo model with 256 examples raised the resident peak by 1178 MB where this says 1206 MB.
"""

import contextlib
from collections.abc import Callable

import psutil
import torch

from utils.distributed.devices import is_out_of_memory
from utils.distributed.shard_groups import ShardGroup

# Probing on the CPU says nothing new beyond this; batches as large as a dataset are refused elsewhere.
_CPU_PROBES = (1, 2)
_CUDA_PROBES = (1, 2, 4)


def fit_line(points: list[tuple[int, int]]) -> tuple[float, float]:
    """Least-squares (intercept, slope) of bytes against examples; one point is taken as all slope."""
    if len(points) == 1:
        batch, size = points[0]
        return 0.0, size / batch
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope


def find_max_batch(
    measure: Callable[[int], int | None],
    budget_bytes: int,
    probes: tuple[int, ...] = _CUDA_PROBES,
    confirm: bool = True,
) -> int:
    """The largest batch whose step stays within the budget.

    Args:
        measure: bytes that a step with so many examples needs, or None where the device ran out of memory.
        budget_bytes: what it may need.
        probes: batches to measure for the fit.
        confirm: measure the prediction too, and shrink it until it holds.

    Raises:
        MemoryError: not even one example fits.
    """
    points: list[tuple[int, int]] = []
    for batch in probes:
        size = measure(batch)
        if size is None or size > budget_bytes:
            break
        points.append((batch, size))
    if not points:
        raise MemoryError(f"one example does not fit into {budget_bytes:,} bytes")
    largest_seen = points[-1][0]
    if len(points) < len(probes):
        failed = probes[len(points)]
        candidates = range(failed - 1, largest_seen, -1)
        return next((b for b in candidates if (size := measure(b)) is not None and size <= budget_bytes), largest_seen)
    intercept, slope = fit_line(points)
    if slope <= 0.0:
        return largest_seen
    # A millionth of an example forgives the rounding of the fit.
    candidate = max(largest_seen, int((budget_bytes - intercept) / slope + 1e-6))
    while confirm and candidate > largest_seen:
        size = measure(candidate)
        if size is not None and size <= budget_bytes:
            break
        candidate = max(largest_seen, int(candidate * 0.9))
    return candidate


@contextlib.contextmanager
def _no_trace(gradient: torch.Tensor, device: torch.device):
    """Random numbers and gradients as before, and the allocator's cache emptied, when the context ends."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            gradient.zero_()
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)


def _measure_cuda(step: Callable[[int], None], device: torch.device) -> Callable[[int], int | None]:
    def measure(batch: int) -> int | None:
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

    return measure


def _measure_cpu(step: Callable[[int], None]) -> Callable[[int], int | None]:
    def measure(batch: int) -> int:
        # By storage and not by address: weights that FSDP2 has gathered are freed in the pass, and their places taken.
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

    return measure


def _together(measure: Callable[[int], int | None], shard_group: ShardGroup) -> Callable[[int], int | None]:
    """The most that a device of a shard group needs; None where one of them has not the memory."""

    def most(batch: int) -> int | None:
        size = measure(batch)
        if shard_group.least(int(size is not None)) == 0:
            return None
        return -shard_group.least(-size)

    return most


def calculate_max_batch(
    step: Callable[[int], None],
    gradient: torch.Tensor,
    device: torch.device,
    padding_percentage: float,
    sharing: int,
    reserved_bytes: int,
    shard_group: ShardGroup | None = None,
) -> int:
    """The max batch of a device's nodes; of a shard group, in examples of each of its devices, which measure together.

    Args:
        step: runs one forward and backward pass with so many examples on the device.
        gradient: the flat gradient that the steps fill; zero again afterwards.
        padding_percentage: share of the device's memory that may be used, 0 to 1.
        sharing: processes that run steps on the device at one time; the nodes of a process take turns.
        reserved_bytes: what will be allocated besides, by all of them.
        shard_group: the devices that make the steps together; None: this one alone.

    Raises:
        MemoryError: naming the keys to change, when one example does not fit.
    """
    on_gpu = device.type == "cuda"
    together = (
        shard_group is not None and shard_group.size > 1
    )  # a pass that one of them has not the memory for ends the run
    measure = _measure_cuda(step, device) if on_gpu else _measure_cpu(step)
    if shard_group is not None:
        measure = _together(measure, shard_group)
    with _no_trace(gradient, device):
        # What comes with the first steps is not to be measured: a model that is compiled makes a pass of its own, and
        # libraries of a GPU take memory to work with, which they keep.
        for count in (1, 2) if on_gpu else (2,):
            measure(count)
        if on_gpu:
            free, memory = torch.cuda.mem_get_info(device)
            taken = memory - free - (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
        else:
            state = psutil.virtual_memory()
            memory, taken = state.total, state.total - state.available
        budget = int((padding_percentage * memory - taken - reserved_bytes) / sharing)
        budget = budget if shard_group is None else shard_group.least(budget)
        try:
            return find_max_batch(measure, budget, _CUDA_PROBES if on_gpu else _CPU_PROBES, on_gpu and not together)
        except MemoryError as error:
            raise MemoryError(
                f"no example fits on {device}: {error} (padding_percentage {padding_percentage} of "
                f"{memory:,} bytes, less {taken:,} in use and {reserved_bytes:,} for a round's sums, "
                f"shared by {sharing} processes); use a smaller model or sequence_length, or fewer nodes_per_gpu, "
                f"trainers or processes"
            ) from None
