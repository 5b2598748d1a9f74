"""The nodes of a run: where they are, the largest micro-batch of each, and which of them still work."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from algorithms.batch.calc_batch import BATCH_TESTS, NEED_INNER_PRODUCTS
from algorithms.batch.per_example import PerExampleProbe, UnsupportedModuleError
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from fabrics.data.examples import Examples
from fabrics.pool.node_speeds import HYSTERESIS, MeasuredSpeeds, Work, first_speeds
from fabrics.pool.round_scheduler import check_budget
from fabrics.training.flat_model import FlatModel
from fabrics.training.forward_backward import backward, probed_backward
from fabrics.training.method_config import check_state, method_of
from fabrics.training.optimizers import check_inner_optimizer
from fabrics.training.work_split import participant_count, scheduled_nodes
from fabrics.training.worker import Node, TrainingError, WorkerRound
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes
from utils.max_batch_calculator import calculate_max_batch


def probes_examples(config: Config) -> bool:
    """Whether inner steps are probed for per-example statistics."""
    return BATCH_TESTS[config.sampling_method] is not None and config.statistics_estimator == "per_example"


def check_modules(config: Config, working: FlatModel) -> None:
    """Raise ConfigError where the model's modules do not give what the configuration needs of them.

    That is matrices for Muon, names for the method's state that its moments leave free, and per-example statistics for
    the batch test.
    """
    check_inner_optimizer(config, working)
    check_state(config, working)
    if probes_examples(config):
        try:
            PerExampleProbe(working.module, batch_size=1)
        except UnsupportedModuleError as error:
            raise ConfigError(f"statistics_estimator: {error}") from None


def round_tensors(config: Config, workers: int, several_processes: bool, elsewhere: int = 0) -> float:
    """Tensors of model size that a round of a trainer needs on a device, besides what lives between rounds.

    The sum of the pseudo-gradients, and what the method has besides for a moment; what an encoding needs while it is
    made; where they go to other processes one of each worker; and what the across-workers estimator keeps. Where
    workers deliver messages, those of all workers here and one as it is made; and what goes to other processes and
    comes from there.

    Args:
        workers: the most that a trainer has on the device.
        several_processes: whether a trainer's workers may be in several. elsewhere: how many are then, at most.
    """
    held = workers if several_processes else 0
    able = method_of(config).capabilities
    if able.message_tensors:
        each = elsewhere if able.recipients is None else min(able.recipients, elsewhere)
        coming = workers + min(elsewhere, workers * each) if several_processes else 0
        held = max(held, able.message_tensors * (workers + 1 + coming))
    encodings = COMMUNICATION_DTYPES[config.communication_dtype]
    encoding = 0 if encodings.lossless else 3 if encodings.keeps_error else 2
    compared = workers if config.compares_workers else 0
    return 1 + held + encoding + compared + able.temporaries + able.temporaries_per_worker * (workers + elsewhere)


def measured_max_batches(
    config: Config,
    working: Mapping[torch.device, FlatModel],
    examples: Examples,
    processes: Processes,
    state_bytes: int,
) -> dict[int, int]:
    """The max batch of every node, as its device's memory allows; all processes together, with all trainers made.

    What lives between rounds is on the devices then, and so in use; on a CPU it is not, before it is written to for
    the first time. Nodes of a process take turns; processes that share a device do not, and share what is left. The
    devices of a shard group measure together, and the one with the least room decides.

    Args:
        working: the working model of each device of this process.
        examples: all training examples.
        state_bytes: what lives between rounds in this process.

    Raises:
        ConfigError: not even one example fits into a device's memory; or the statistics cannot be had of this model.
    """
    processes.gather(None)  # everybody's tensors are there afterwards
    per_device = config.nodes_per_gpu
    own: dict[int, int] = {}
    for first in range(0, len(processes.devices), per_device):
        # Whoever owns the first node of a device measures it, alone.
        if processes.owns(first):
            model, nodes = working[processes.devices[first]], range(first, first + per_device)
            sharing = processes.sharing(first)
            workers = sum(map(processes.owns, nodes))
            parameters = model.parameters
            size = parameters.numel() * parameters.element_size()
            elsewhere = len(processes.devices) - workers
            needed = round(size * round_tensors(config, workers, processes.count > 1, elsewhere))
            if model.device.type == "cpu":
                needed += state_bytes
            own[first] = _measured_max_batch(config, model, examples, sharing, sharing * needed)
    largest = {first: measured for share in processes.gather(own) for first, measured in share.items()}
    return {node: largest[node - node % per_device] for node in range(len(processes.devices))}


def _measured_max_batch(config: Config, working: FlatModel, examples: Examples, sharing: int, reserved: int) -> int:
    # The most that a step can need: the last of a round is also probed.
    probed, devices = probes_examples(config) or working.compares_devices, working.shard_group.size
    step = probed_backward if probed else backward

    def run(count: int) -> None:
        working.gradient.zero_()
        indices = np.full(count * devices, examples.largest)
        if working.attempt(lambda: step(working, examples, indices)) is None:
            raise MemoryError(f"a step with {count} examples did not fit")

    room = config.padding_percentage, sharing, reserved
    try:
        return devices * calculate_max_batch(run, working.gradient, working.device, *room, working.shard_group)
    except UnsupportedModuleError as error:
        raise ConfigError(f"statistics_estimator: {error}") from None
    except (MemoryError, TrainingError) as error:
        raise ConfigError(f"max_batch_size: {error}") from None


def check_statistics(config: Config, nodes: Sequence[Node], smallest_subset: int) -> None:
    """Raise ConfigError where the nodes or a trainer's data are too few for the statistics of the batch test.

    Args:
        smallest_subset: examples of the trainer, or of a worker's own share, that has the fewest.
    """
    if BATCH_TESTS[config.sampling_method] is None:
        return
    trainers = config.number_of_initial_trainers
    together = participant_count(config.participants, len(nodes) // trainers)
    if config.sampling_method in NEED_INNER_PRODUCTS:
        _check_inner_products(config, together)
    if config.compares_devices:
        most = len(nodes) if config.smallest_worker_batch is None else 1
        if config.INITIAL_BATCH_SIZE <= most // trainers or min(node.max_batch for node in nodes) < 2:
            raise ConfigError(
                f"statistics_estimator: across_devices needs two examples of a micro-batch in every worker from the "
                f"first round on, got INITIAL_BATCH_SIZE {config.INITIAL_BATCH_SIZE} for {most // trainers} workers "
                f"and max_batch_size {config.max_batch_size}"
            )
        return
    if config.compares_workers:
        if len(nodes) < 2 * trainers:
            raise ConfigError(
                f"statistics_estimator: across_workers needs two nodes per trainer, got {len(nodes)} nodes "
                f"for {trainers} trainers; use per_example, or more nodes_per_gpu"
            )
        if together < 2:
            raise ConfigError(
                f"participants: across_workers needs two workers of a trainer in every round, got "
                f"{config.participants} of {len(nodes) // trainers}; use per_example, or a larger share"
            )
        return
    if min(node.max_batch for node in nodes) < 2:
        raise ConfigError(
            "max_batch_size: statistics_estimator per_example needs at least 2 examples at a time, got 1; "
            "use across_workers, or sampling_method: none"
        )
    if config.statistics_batch_size > smallest_subset:
        raise ConfigError(
            f"statistics_batch_size: must be at most the {smallest_subset} examples of a trainer's subset or share, "
            f"got {config.statistics_batch_size}"
        )


def check_nodes(config: Config, devices: Sequence[torch.device]) -> None:
    """Raise ConfigError where these nodes, one for each entry, do not suit the config, as far as that is known before
    there are data."""
    pool = NodePool(devices, config)
    check_budget(config, len(pool.nodes))
    nodes = pool.working(0.0)
    if config.max_batch_size is None:  # it is measured later
        nodes = [dataclasses.replace(node, max_batch=sys.maxsize) for node in nodes]
    check_statistics(config, nodes, smallest_subset=sys.maxsize)


def _check_inner_products(config: Config, nodes_per_trainer: int) -> None:
    """Raise ConfigError where the variance of inner products, or its error, could never be known."""
    if config.batch_test_confidence > 0.0 and config.statistics_smoothing == 0.0:
        raise ConfigError(
            f"batch_test_confidence: must be 0 for {config.sampling_method} without statistics_smoothing, "
            f"got {config.batch_test_confidence}: one round does not tell the error"
        )
    if config.statistics_estimator == "per_example":
        if config.statistics_batch_size < 5:
            raise ConfigError(
                f"statistics_batch_size: must be at least 5 for {config.sampling_method}, which needs samples of two "
                f"sizes, got {config.statistics_batch_size}"
            )
    elif config.debias:
        raise ConfigError(
            f"debias: must be false for {config.sampling_method} with statistics_estimator across_workers, which sees "
            f"the batch's own gradient alone"
        )
    elif nodes_per_trainer < 3:
        raise ConfigError(
            f"statistics_estimator: {config.sampling_method} across_workers needs three nodes per trainer, "
            f"got {nodes_per_trainer}"
        )


class NodePool:
    """The nodes and what becomes of them; the same in every process.

    Attributes:
        nodes: all of the run, of the devices given.
        failed: those that work no more.

    Raises:
        ConfigError: not every node has a speed, or a schedule asks for more nodes than there are.
    """

    def __init__(self, devices: Sequence[torch.device], config: Config):
        # Without one given, the max batch is measured later.
        self.nodes = tuple(
            Node(node, device, config.max_batch_size or 1, speed)
            for node, (device, speed) in enumerate(zip(devices, first_speeds(config, len(devices)), strict=True))
        )
        follows = config.balance != "equal" and config.node_speeds is None
        self._measured = MeasuredSpeeds(HYSTERESIS) if follows else None
        self.failed: set[int] = set()
        self._schedule = config.node_schedule
        if self._schedule is not None and (most := max(nodes for _, nodes in self._schedule)) > len(devices):
            raise ConfigError(
                f"node_schedule: must have at most the {len(devices)} nodes that there are (nodes_per_gpu "
                f"{config.nodes_per_gpu} on every device), got {most:.0f}"
            )

    def working(self, progress: float) -> tuple[Node, ...]:
        """Those that work when so much of the run is done: the first ones that have not failed, by the schedule."""
        able = tuple(node for node in self.nodes if node.id not in self.failed)
        return able if self._schedule is None else able[: scheduled_nodes(self._schedule, progress)]

    def look_after(self, workers: Sequence[WorkerRound]) -> None:
        """Take over what a round says of the nodes: smaller max batches, measured speeds, nodes that failed."""
        nodes = list(self.nodes)
        for worker in workers:
            if worker.max_batch < nodes[worker.node].max_batch:
                nodes[worker.node] = dataclasses.replace(nodes[worker.node], max_batch=worker.max_batch)
        self.nodes = tuple(nodes)
        if self._measured is not None:
            self._measured.measure(workers)
        self.failed |= {worker.node for worker in workers if worker.failed}

    def balance(self, trainers: Mapping[int, tuple[Sequence[Node], Work]]) -> list[str]:
        """Let nodes have the speeds that were measured, where that pays for their trainers; what to say of it.

        trainers: of each its nodes, and what these would do at other speeds; see MeasuredSpeeds.change.
        """
        said = []
        for trainer, (nodes, work) in trainers.items() if self._measured else ():
            if (change := self._measured.change(nodes, work)) is not None:
                speeds, why = change
                self._set_speeds(speeds)
                said.append(f"trainer {trainer}: {why}")
        return said

    def _set_speeds(self, speeds: Mapping[int, float]) -> None:
        self.nodes = tuple(dataclasses.replace(node, speed=speeds.get(node.id, node.speed)) for node in self.nodes)

    def speeds_state(self) -> dict | None:
        """The speeds in use and what was measured, as JSON values; None: nothing is."""
        if self._measured is None:
            return None
        return {"in_use": [node.speed for node in self.nodes], "measured": self._measured.state_dict()}

    def load_speeds(self, state: Mapping | None) -> None:
        """Go on with what was measured of as many nodes."""
        if self._measured is not None and state is not None and len(state["in_use"]) == len(self.nodes):
            self._set_speeds(dict(enumerate(state["in_use"])))
            self._measured.load_state_dict(state["measured"])

    def limit(self, max_batches: Mapping[int, int]) -> None:
        """Give every node its max batch."""
        self.nodes = tuple(dataclasses.replace(node, max_batch=max_batches[node.id]) for node in self.nodes)

    def state_dict(self) -> list[int]:
        """The max batches; nodes that failed work again after a resume."""
        return [node.max_batch for node in self.nodes]

    def load_state_dict(self, max_batches: Sequence[int]) -> None:
        """Take over max batches, where there are as many nodes, but for nodes whose own is smaller.

        A saved one may be smaller than that of a new pool because a node ran out of memory, and with the same
        micro-batches a run goes on with the same bits. A node's own is smaller where less was asked for since then
        (`max_batch_size`), or where less memory was measured: more would not fit, or not be what was asked for.
        """
        if len(max_batches) == len(self.nodes):
            self.limit(
                {node.id: min(node.max_batch, saved) for node, saved in zip(self.nodes, max_batches, strict=True)}
            )
