"""Placement of the nodes of a run on the devices that the configuration names."""

import os

import torch

from utils.config.schema import Config, ConfigError
from utils.distributed.collective_checks import agree, done_by_all
from utils.distributed.devices import resolve_devices
from utils.distributed.launch import hide_gpus
from utils.distributed.processes import Processes, meet


def _own_devices(config: Config) -> tuple[list[torch.device], list[str]]:
    try:
        return resolve_devices(config.devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from None


def place_nodes(processes: Processes, config: Config) -> list[str]:
    """Give the processes of a run their nodes, as the configuration says, and return warnings.

    Raises:
        ConfigError: the devices do not exist, or there are too many or too few processes.
    """
    hide_gpus(config)
    devices, warnings = done_by_all(processes, lambda: _own_devices(config))
    on_cpu = all(device.type == "cpu" for device in devices)
    in_order = on_cpu if config.deterministic is None else config.deterministic
    agree(processes, "devices, and deterministic is null", {"deterministic": in_order})
    if in_order and not on_cpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    try:
        processes.place(devices, config.nodes_per_gpu, in_order, config.devices_per_node)
    except ValueError as error:
        raise ConfigError(f"processes: {error}") from None
    shard_groups, trainers = processes.count // config.devices_per_node, config.number_of_initial_trainers
    if config.devices_per_node > 1 and shard_groups < trainers:
        warnings.append(
            f"number_of_initial_trainers: {trainers} trainers take turns on {shard_groups} shard groups of "
            f"{config.devices_per_node} devices, which hold the state of all of them"
        )
    return warnings


def join_processes(config: Config) -> Processes:
    """Return the processes of the run, as the environment says, with their nodes.

    Raises:
        ConfigError: the devices do not exist, or there are too many or too few processes.
    """
    processes = meet()
    place_nodes(processes, config)
    return processes
