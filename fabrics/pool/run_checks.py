"""Checks of a configuration that need the run's model, its nodes or the size of its data."""

import dataclasses
import sys
from collections.abc import Sequence

import torch

from algorithms.batch.calc_batch import BATCH_TESTS, NEED_INNER_PRODUCTS
from algorithms.batch.per_example import PerExampleProbe, UnsupportedModuleError
from fabrics.models.initialisation import is_launch_bound
from fabrics.pool.node_pool import NodePool
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import check_state
from fabrics.training.optimizers import check_inner_optimizer
from fabrics.training.statistics import probes_examples
from fabrics.training.work_split import participant_count
from fabrics.training.worker import Node
from utils.config.schema import Config, ConfigError


def turns_warning(model: FlatModel, nodes: int) -> list[str]:
    """Return a warning if nodes of a GPU take turns for no reason, otherwise none; nodes: of this process."""
    replays_graphs = model.compiled == "reduce-overhead"
    if nodes == 1 or model.shard_group.size > 1 or replays_graphs or not is_launch_bound(model.module, model.device):
        return []
    return [
        f"processes: {nodes} nodes take turns on {model.device}; with so small a model a process for each may train up "
        f"to {nodes} times as fast (docs/speed.md)"
    ]


def sharding_warning(model: FlatModel) -> list[str]:
    """Return a warning if sharding saves little memory, otherwise none."""
    if not model.gathered_whole:
        return []
    return [
        "devices_per_node: every pass gathers the whole model on each device, as no layers in a ModuleList were found "
        "(with autocast, none with linear parts)"
    ]


def check_model(config: Config, model: FlatModel) -> None:
    """Raise ConfigError if the model does not suit the inner optimizer, the method or the batch test."""
    check_inner_optimizer(config, model)
    check_state(config, model)
    if probes_examples(config):
        try:
            PerExampleProbe(model.module, batch_size=1)
        except UnsupportedModuleError as error:
            raise ConfigError(f"statistics_estimator: {error}") from None


def check_nodes(config: Config, devices: Sequence[torch.device]) -> None:
    """Raise ConfigError if these nodes, one per device, do not suit the run, as far as that is known without data."""
    pool = NodePool(devices, config)
    if config.budget is not None and len(pool.nodes) == 1 and not config.simulates_time_budget:
        raise ConfigError(
            f"{config.budget}: a run on one node never communicates; raise nodes_per_gpu, or use more devices"
        )
    nodes = pool.working(0.0)
    if config.max_batch_size is None:  # it is measured later
        nodes = [dataclasses.replace(node, max_batch=sys.maxsize) for node in nodes]
    check_statistics(config, nodes, smallest_subset=sys.maxsize)


def check_statistics(config: Config, nodes: Sequence[Node], smallest_subset: int) -> None:
    """Raise ConfigError if there are too few nodes, or data in the smallest subset or share, for the batch test."""
    if BATCH_TESTS[config.sampling_method] is None:
        return
    trainers = config.number_of_initial_trainers
    workers = len(nodes) // trainers
    participants = participant_count(config.participants, workers)
    check_inner_products(config, participants)
    smallest_batch = min(node.max_batch for node in nodes)
    if config.compares_devices:
        workers = -(-len(nodes) // trainers)  # the most of a trainer
        if config.smallest_worker_batch is not None:
            workers = max(1, min(workers, config.INITIAL_BATCH_SIZE // config.smallest_worker_batch))
        workers = participant_count(config.participants, workers)
        if config.INITIAL_BATCH_SIZE <= workers or smallest_batch < 2:
            raise ConfigError(
                f"statistics_estimator: across_devices needs two examples of a micro-batch in every worker from the "
                f"first round on, got INITIAL_BATCH_SIZE {config.INITIAL_BATCH_SIZE} for {workers} workers "
                f"and max_batch_size {config.max_batch_size}"
            )
    elif config.compares_workers:
        if len(nodes) < 2 * trainers:
            raise ConfigError(
                f"statistics_estimator: across_workers needs two nodes per trainer, got {len(nodes)} nodes "
                f"for {trainers} trainers; use per_example, or more nodes_per_gpu"
            )
        if participants < 2:
            raise ConfigError(
                f"participants: across_workers needs two workers of a trainer in every round, got "
                f"{config.participants} of {workers}; use per_example, or a larger share"
            )
    elif config.statistics_batch_size > smallest_subset:
        raise ConfigError(
            f"statistics_batch_size: must be at most the {smallest_subset} examples of a trainer's subset or share, "
            f"got {config.statistics_batch_size}"
        )


def check_inner_products(config: Config, nodes_per_trainer: int) -> None:
    """Raise ConfigError if the variance of inner products, or its error, could never be estimated."""
    method = config.sampling_method
    if method not in NEED_INNER_PRODUCTS:
        return
    # Samples of a round; workers join only once the batch has grown.
    several = config.statistics_estimator == "per_example" and config.smallest_worker_batch is None
    samples = nodes_per_trainer if several else 1
    # After many rounds they count as samples (1 + s) / (1 - s), of which the error needs more than three.
    needed = (3 - samples) / (3 + samples)
    if config.batch_test_confidence > 0.0 and config.statistics_smoothing <= needed:
        raise ConfigError(
            f"batch_test_confidence: must be 0 for {method} without a statistics_smoothing above {needed:g}, "
            f"got {config.batch_test_confidence}: the samples of few rounds do not tell the error"
        )
    if config.statistics_estimator == "per_example":
        if config.statistics_batch_size < 5:
            raise ConfigError(
                f"statistics_batch_size: must be at least 5 for {method}, which needs samples of two sizes, "
                f"got {config.statistics_batch_size}"
            )
    elif config.debias:
        raise ConfigError(
            f"debias: must be false for {method} with statistics_estimator {config.statistics_estimator}, "
            f"which sees only the gradient of the whole batch"
        )
    elif nodes_per_trainer < 3:
        raise ConfigError(
            f"statistics_estimator: {method} across_workers needs three nodes per trainer, got {nodes_per_trainer}"
        )
