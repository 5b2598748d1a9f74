"""The nodes of a run: where they are, the largest micro-batch of each, and which of them still work."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from algorithms.calc_batch import BATCH_TESTS
from algorithms.gradient_statistics import PerExampleProbe, UnsupportedModuleError
from algorithms.policies import slow_nodes
from fabrics.examples import Examples
from fabrics.passes import backward, probed_backward
from fabrics.worker import Node, WorkerRound
from fabrics.working_model import WorkingModel
from utils.config import Config, ConfigError
from utils.distributed import Processes
from utils.max_batch_calculator import calculate_max_batch


def probes_examples(config: Config) -> bool:
    """Whether inner steps are probed for per-example statistics."""
    return BATCH_TESTS[config.sampling_method] is not None and config.statistics_estimator == "per_example"


def build_nodes(
    config: Config, working: Mapping[torch.device, WorkingModel], examples: Examples, processes: Processes
) -> tuple[Node, ...]:
    """All nodes of the run, with max batches as the config gives them or as measured; all processes together.

    Args:
        working: the working model of each device of this process.
        examples: all training examples.

    Raises:
        ConfigError: the module cannot be probed, or not even one example fits into a device's memory.
    """
    if probes_examples(config):
        try:
            PerExampleProbe(next(iter(working.values())).module, batch_size=1)
        except UnsupportedModuleError as error:
            raise ConfigError(f"statistics_estimator: {error}") from None
    devices, per_device = processes.devices, config.nodes_per_gpu
    largest = dict.fromkeys(range(0, len(devices), per_device), config.max_batch_size)
    if config.max_batch_size is None:
        # Whoever owns the first node of a device measures it, alone.
        own = {
            first: _measured_max_batch(config, working[devices[first]], examples)
            for first in largest
            if processes.owns(first)
        }
        for measured in processes.gather(own):
            largest.update(measured)
    return tuple(Node(node, device, largest[node - node % per_device]) for node, device in enumerate(devices))


def _measured_max_batch(config: Config, working: WorkingModel, examples: Examples) -> int:
    # Still to come: two moments per worker, and the round's pseudo-gradient.
    workers = max(config.nodes_per_gpu, config.number_of_initial_trainers)
    reserved = (2 * workers + 1) * working.parameters.numel() * working.parameters.element_size()
    # The most that a step can need: the last of a round is also probed.
    step = probed_backward if probes_examples(config) else backward

    def run(count: int) -> None:
        working.gradient.zero_()
        step(working, examples, np.full(count, examples.largest))

    try:
        return calculate_max_batch(
            run, working.gradient, working.device, config.padding_percentage, config.nodes_per_gpu, reserved
        )
    except MemoryError as error:
        raise ConfigError(f"max_batch_size: {error}") from None


def check_statistics(config: Config, nodes: Sequence[Node], trainers: int, smallest_subset: int) -> None:
    """Raise ConfigError where the nodes or a trainer's data are too few for the statistics of the batch test.

    Args:
        trainers: at the start.
        smallest_subset: examples of the trainer that has the fewest.
    """
    if BATCH_TESTS[config.sampling_method] is None:
        return
    if config.statistics_estimator == "across_workers":
        if len(nodes) < 2 * trainers:
            raise ConfigError(
                f"statistics_estimator: across_workers needs two nodes per trainer, got {len(nodes)} nodes "
                f"for {trainers} trainers; use per_example, or more nodes_per_gpu"
            )
        return
    if min(node.max_batch for node in nodes) < 2:
        raise ConfigError(
            "max_batch_size: statistics_estimator per_example needs at least 2 examples at a time, got 1; "
            "use across_workers, or sampling_method: none"
        )
    if config.statistics_batch_size > smallest_subset:
        raise ConfigError(
            f"statistics_batch_size: must be at most the {smallest_subset} examples of a trainer's subset, "
            f"got {config.statistics_batch_size}"
        )


class NodePool:
    """The nodes and what becomes of them; the same in every process.

    Attributes:
        nodes: all of the run.
        failed: those that work no more.
    """

    def __init__(self, nodes: tuple[Node, ...], drop_slow_nodes: float | None):
        self.nodes = nodes
        self.failed: set[int] = set()
        self._factor = drop_slow_nodes

    def look_after(self, workers: Sequence[WorkerRound]) -> list[str]:
        """Take over what a round says of the nodes: smaller max batches, nodes that failed, nodes that are too slow.

        Returns:
            What to warn of.
        """
        nodes = list(self.nodes)
        for worker in workers:
            if worker.max_batch < nodes[worker.node].max_batch:
                nodes[worker.node] = dataclasses.replace(nodes[worker.node], max_batch=worker.max_batch)
        self.nodes = tuple(nodes)
        slow = self._slow(workers)
        self.failed |= {worker.node for worker in workers if worker.failed} | set(slow)
        return [
            f"node {node} took {seconds:.3g} s per example, more than drop_slow_nodes allows; it works no more"
            for node, seconds in slow.items()
        ]

    def _slow(self, workers: Sequence[WorkerRound]) -> dict[int, float]:
        """The nodes that are too slow, with their seconds per example."""
        if self._factor is None:
            return {}
        seconds: dict[int, float] = {}
        examples: dict[int, int] = {}
        for worker in workers:
            if not worker.failed:
                seconds[worker.node] = seconds.get(worker.node, 0.0) + worker.seconds
                count = worker.plan.effective_batch * len(worker.losses)
                examples[worker.node] = examples.get(worker.node, 0) + count
        if len(seconds) < 2:
            return {}
        pace = {node: seconds[node] / examples[node] for node in seconds}
        return {node: pace[node] for node in sorted(slow_nodes(pace, self._factor))}

    def state_dict(self) -> list[int]:
        """The max batches; nodes that failed work again after a resume."""
        return [node.max_batch for node in self.nodes]

    def load_state_dict(self, max_batches: Sequence[int]) -> None:
        """Take over max batches, where there are as many nodes."""
        if len(max_batches) == len(self.nodes):
            self.nodes = tuple(
                dataclasses.replace(node, max_batch=max_batch)
                for node, max_batch in zip(self.nodes, max_batches, strict=True)
            )
