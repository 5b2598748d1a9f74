"""What a run takes of its devices' memory, and the smallest change with which it would fit."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from algorithms.batch.switch_mode import in_parts, only_gradient_accumulation
from fabrics.models.meta_model import StepSizes
from fabrics.planning.memory import Kept, Load, Memory, Placement, device_memory, largest_micro_batch
from fabrics.pool.node_pool import probes_examples, round_tensors
from fabrics.training.statistics_plan import measures
from utils.config.schema import Config
from utils.distributed.placement import share_of
from utils.utils import byte_size

# What a step can be made of at least, and at most, where nothing says how many.
_MOST = 1 << 20


@dataclass(frozen=True)
class Demand:
    """What a run asks of the memory of a device.

    loads: of the busiest devices, without micro-batches, which are all of one size.
    """

    kept: Kept
    step: StepSizes | None
    loads: tuple[Load, ...]
    placement: Placement

    def memory(self, micro_batch: int) -> Memory:
        """Of the device that needs most, with micro-batches of so many examples."""
        loads = (dataclasses.replace(load, micro_batch=micro_batch) for load in self.loads)
        return max(
            (device_memory(self.kept, self.step, load, self.placement) for load in loads), key=lambda m: m.device
        )

    def largest(self, budget: float, most: int = _MOST) -> int:
        """Examples of the largest micro-batch that fits everywhere; 0: none."""
        return min(largest_micro_batch(self.kept, self.step, load, self.placement, budget, most) for load in self.loads)

    def evaluating(self, examples: int) -> "Demand":
        """With evaluation batches of so many examples."""
        loads = tuple(dataclasses.replace(load, evaluated=examples) for load in self.loads)
        return dataclasses.replace(self, loads=loads)

    def placed(self, **changes) -> "Demand":
        """With another placement."""
        return dataclasses.replace(self, placement=dataclasses.replace(self.placement, **changes))


def device_loads(
    config: Config, assignments: Sequence[Sequence[tuple[int, Sequence[int]]]], devices: Sequence[Sequence[int]]
) -> tuple[Load, ...]:
    """The loads of all devices under all assignments of nodes to trainers, each once.

    Processes that share a device have near-equal parts of its nodes, and each of them the trainers that work there.

    Args:
        assignments: trainers with their nodes. devices: the nodes of each, or of each island.
    """
    found = {}
    processes = min(config.processes_per_gpu if config.processes == "auto" else 1, config.nodes_per_gpu)
    several = processes * len(devices) > 1
    for trainers in assignments:
        for nodes in devices:
            parts = [set(share_of(nodes, index, processes)) for index in range(processes)]
            workers = [[len(part & set(own)) for _, own in trainers] for part in parts]
            load = Load(
                trainers=sum(count > 0 for part in workers for count in part),
                workers=sum(map(sum, workers)),
                round_tensors=sum(
                    max(
                        round_tensors(config, here, several, len(own) - here)
                        for here, (_, own) in zip(part, trainers, strict=True)
                    )
                    for part in workers
                ),
                processes=processes,
                evaluated=config.eval_batch_size,
            )
            found[load] = None
    return tuple(found)


def probe_batch(config: Config, max_batch: int) -> int:
    """Examples of the largest micro-batch of a sample that is taken beside inner steps; 0: none is."""
    if not probes_examples(config):
        return 0
    plan = only_gradient_accumulation(config.statistics_batch_size, max_batch)
    return max(in_parts(plan, measures(config, 2, tested=True, together=False).probes).micro_batches)


def smallest_micro_batch(config: Config) -> int:
    """Examples that a node has to be able to run at a time."""
    return 2 if probes_examples(config) else 1


_MORE_DEVICES = range(2, 65)


def _changes(placement: Placement) -> Iterator[dict]:
    """Placements that need less of a device, those that cost least first."""
    recomputed = {} if placement.activation_checkpointing else {"activation_checkpointing": True}
    outer = {} if placement.on_host or placement.outer_state == "cpu" else {"outer_state": "cpu"}
    moments = {} if placement.on_host or placement.idle_moments == "cpu" else {"idle_moments": "cpu"}
    more = [{"devices_per_node": n} for n in _MORE_DEVICES if n > placement.devices_per_node]
    alone = [recomputed, outer, moments, outer | moments, recomputed | outer, recomputed | outer | moments]
    for change in [*alone, *more, *(change | recomputed | outer | moments for change in more)]:
        if change:
            yield change


def _fitting(demand: Demand, micro_batch: int, least: int, budget: float) -> Iterator[dict]:
    """Changes of the configuration with which a device has room for what the run asks of it, the smallest first."""
    asked = max(load.evaluated for load in demand.loads)
    for change in ({}, *_changes(demand.placement)):
        placed = demand.placed(**change)
        evaluated = bisect.bisect_right(
            range(1, asked + 1), budget, key=lambda count, placed=placed: placed.evaluating(count).memory(least).device
        )
        if not evaluated and (asked or placed.memory(least).device > budget):
            continue
        placed = placed.evaluating(evaluated)
        largest = placed.largest(budget, micro_batch) if placed.step is not None else micro_batch
        found = change | ({"eval_batch_size": evaluated} if evaluated < asked else {})
        if found := found | ({"max_batch_size": largest} if largest < micro_batch else {}):
            yield found


def smallest_change(
    demand: Demand, micro_batch: int, least: int, budget: float, works: Callable[[dict], bool] = lambda change: True
) -> str | None:
    """What would make a run fit, in words of the configuration; None: nothing that is known here.

    Args:
        micro_batch: examples that it would have; least: that it has to have.
        works: whether the run can be made with such a change, and fits then.
    """
    change = next(filter(works, _fitting(demand, micro_batch, least, budget)), None)
    return None if change is None else " ".join(f"{key}={str(value).lower()}" for key, value in change.items())


def refusal(
    demand: Demand, micro_batch: int, least: int, memory: int, share: float, works: Callable[[dict], bool]
) -> str | None:
    """Why a run does not fit into devices of so many bytes, and what would; None: it does.

    Args:
        share: of a device's memory that may be used.
        works: see `smallest_change`.
    """
    needed, budget = demand.memory(micro_batch), share * memory
    if needed.device <= budget:
        return None
    change = smallest_change(demand, micro_batch, least, budget, works)
    advice = f"the smallest change that would fit: {change}" if change else "use a smaller model or fewer nodes_per_gpu"
    return (
        f"--device-memory: {byte_size(needed.device)} per device with micro-batches of {micro_batch}, of which "
        f"{byte_size(needed.between_rounds)} live between rounds, do not fit into {byte_size(budget)} "
        f"(padding_percentage {share} of {byte_size(memory)}); {advice}"
    )
