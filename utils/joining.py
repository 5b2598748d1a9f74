"""Joining the processes of a run on the devices that the configuration names."""

import os

import torch

from utils.config import Config, ConfigError
from utils.devices import resolve_devices
from utils.distributed import Processes, connect
from utils.launch import Launch


def join_processes(config: Config, launch: Launch | None = None) -> tuple[Processes, list[str]]:
    """The processes of the run, as the environment says, and warnings about the devices.

    Raises:
        ConfigError: devices or processes are not to be had.
    """
    try:
        devices, warnings = resolve_devices(config.devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from None
    on_cpu = all(device.type == "cpu" for device in devices)
    in_order = on_cpu if config.deterministic is None else config.deterministic
    if in_order and not on_cpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    if config.real_device_ids and len(config.real_device_ids) != len(devices):
        warnings.append(
            f"real_device_ids: {len(config.real_device_ids)} labels for {len(devices)} devices, none is used"
        )
    try:
        return connect(devices, config.nodes_per_gpu, in_order, launch), warnings
    except ValueError as error:
        raise ConfigError(f"processes: {error}") from None
