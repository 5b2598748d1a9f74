"""Nodes of several devices (`devices_per_node`): what cannot be had with them, and the working model that they need."""

import torch
from torch import nn

from algorithms.batch.calc_batch import NEED_INNER_PRODUCTS
from algorithms.synchronisation import METHODS
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes


def sharding_problems(config: Config) -> list[str]:
    """What a configuration asks for and nodes of several devices do not do, one line each."""
    size, found = config.devices_per_node, _statistics_problems(config)
    if size == 1:
        return found
    if config.processes != "auto" and config.processes % size:
        found.append(f"processes: must be a multiple of devices_per_node, {size}, got {config.processes}")
    method = METHODS.get(config.distributed_algo)
    if method is not None and not method.capabilities.shards:
        able = ", ".join(name for name in METHODS if METHODS[name].capabilities.shards)
        found.append(
            f"distributed_algo: {config.distributed_algo} does not say that it is right on parts of flat tensors; with "
            f"devices_per_node {size} there are {able}"
        )
    kind = None if method is None else inner_optimizer_name(config)
    if kind in INNER_OPTIMIZERS and not INNER_OPTIMIZERS[kind].shards:
        found.append(f"inner_optimizer: {kind} needs whole matrices; with devices_per_node {size} use adamw")
    return found


def _statistics_problems(config: Config) -> list[str]:
    if not config.compares_devices:
        return []
    found = []
    if config.devices_per_node == 1:
        found.append(
            "statistics_estimator: must not be across_devices with devices_per_node 1, as one device has one gradient"
        )
    if config.sampling_method in NEED_INNER_PRODUCTS:
        found.append(
            f"statistics_estimator: must not be across_devices with {config.sampling_method}, as gradients of "
            f"micro-batches do not say how inner products of the whole batch vary"
        )
    return found


def working_model(
    module: nn.Module, device: torch.device, processes: Processes, autocast: torch.dtype | None
) -> FlatModel:
    """The working model of a device: of the whole module, or of its part where the devices of a node shard it.

    Raises:
        ConfigError: the module cannot be sharded.
    """
    if processes.shard_group.size == 1:
        return FlatModel(module, device, autocast)
    # It knows the insides of one release of PyTorch; whole models train with others as well.
    from fabrics.sharding.sharded_model import ShardedModel

    try:
        return ShardedModel(module, device, processes.shard_group, autocast)
    except ValueError as error:
        raise ConfigError(f"devices_per_node: {error}") from None
