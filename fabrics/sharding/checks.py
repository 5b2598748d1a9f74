"""What nodes of several devices (`devices_per_node`) cannot do."""

from algorithms.batch.calc_batch import NEED_INNER_PRODUCTS
from algorithms.synchronisation import METHODS
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from utils.config.schema import Config


def sharding_problems(config: Config) -> list[str]:
    """Return what the configuration asks for and nodes of several devices cannot do, one line each."""
    size = config.devices_per_node
    found = []
    if config.compares_devices and size == 1:
        found.append(
            "statistics_estimator: must not be across_devices with devices_per_node 1, as one device has one gradient"
        )
    if config.compares_devices and config.sampling_method in NEED_INNER_PRODUCTS:
        found.append(
            f"statistics_estimator: must not be across_devices with {config.sampling_method}, as gradients of "
            f"micro-batches do not say how inner products of the whole batch vary"
        )
    if size == 1:
        return found
    if config.processes != "auto" and config.processes % size:
        found.append(f"processes: must be a multiple of devices_per_node, {size}, got {config.processes}")
    method = METHODS.get(config.distributed_algo)
    if method is None:
        return found
    if not method.capabilities.shards:
        able = ", ".join(name for name in METHODS if METHODS[name].capabilities.shards)
        found.append(
            f"distributed_algo: {config.distributed_algo} does not say that it is right on parts of flat tensors; with "
            f"devices_per_node {size} there are {able}"
        )
    optimizer = inner_optimizer_name(config)
    if optimizer in INNER_OPTIMIZERS and not INNER_OPTIMIZERS[optimizer].shards:
        found.append(f"inner_optimizer: {optimizer} needs whole matrices; with devices_per_node {size} use adamw")
    return found
