"""The number of processes of a run on one machine, and their start.

The process that the user starts is the first of the run. It starts the others with the environment that torchrun would
give them. PyTorch's own launcher would add a process that only waits, and seconds to every start. This module imports
nothing slow, so that a run prints its first line at once.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from utils.config.schema import Config

# The library through which PyTorch uses GPUs; containers have it, but not always /proc/driver/nvidia.
_GPU_DRIVER = "libcuda.so.1"
# Time for the other processes to end by themselves after the run.
_ENDING_SECONDS = 30.0
# The environment variable with the id of the process that started this one.
STARTED_BY = "ADLOCO_STARTED_BY"


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> int:
    try:  # without importing PyTorch, which is slow
        ctypes.CDLL(_GPU_DRIVER)
    except OSError:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hide_gpus(config: "Config") -> None:
    """Apply the configuration's CUDA_VISIBLE_DEVICES to this process and its children.

    CUDA reads the environment once, so this comes before GPUs are counted.
    """
    if config.CUDA_VISIBLE_DEVICES is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.CUDA_VISIBLE_DEVICES


def planned_processes(config: "Config") -> int:
    """Return the number of processes on this machine.

    `processes: auto` means one per GPU, or without GPUs one per core, and at most one per node. With `devices_per_node`
    it is a multiple of that number.
    """
    size = config.devices_per_node
    if config.processes != "auto":
        return config.processes
    gpus = _gpus()
    if config.devices is not None:
        gpus = min(gpus, sum(device.startswith("cuda") for device in config.devices))
    if gpus:
        return gpus if size == 1 else max(1, gpus // size) * size
    return _shard_groups_on_cores(config) * size


def _shard_groups_on_cores(config: "Config") -> int:
    return max(1, min(cores() // config.devices_per_node, config.nodes_per_gpu))


def threads_per_process(config: "Config") -> int:
    """Return the intra-op threads on a CPU: the configuration's, or the share of one process of `processes: auto`.

    It depends on the machine and the nodes, not on the number of processes. The bits of a sum depend on the threads,
    and a run must have the same bits on one process and on four.
    """
    return config.cpu_threads or max(1, cores() // (_shard_groups_on_cores(config) * config.devices_per_node))


class Launch:
    """Context of the other processes of a run on this machine; this one is rank 0.

    After it they have ended: by themselves, or killed if the context ends with an error.

    program: arguments of the Python interpreter.
    """

    def __init__(self, count: int, program: Sequence[str]):
        self._socket = socket.create_server(("127.0.0.1", 0))
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._socket.getsockname()[1]),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
        }
        # Every process compiles: torch.compile would start processes for all cores, at most 32, in each.
        compilers = str(max(1, min(32, cores() // count)))
        shared["TORCHINDUCTOR_COMPILE_THREADS"] = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", compilers)
        if Path("/sys/class/net/lo").exists():
            shared["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may resolve to another interface
            shared["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
        self._before = {key: os.environ.get(key) for key in [*shared, "RANK", "LOCAL_RANK"]}
        self.processes = {
            rank: subprocess.Popen(
                [sys.executable, *program],
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), STARTED_BY: str(os.getpid())},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(1, count)
        }
        os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})

    def detach_socket(self) -> int:
        """Return the descriptor of the listening socket at MASTER_PORT, which the caller closes."""
        return self._socket.detach()

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception) -> None:
        for process in self.processes.values():
            if kind is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_SECONDS)
        self.kill()
        self._socket.close()
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def start_processes(
    config: Path, overrides: Sequence[str], program: Sequence[str]
) -> contextlib.AbstractContextManager[Launch | None]:
    """Start the other processes that a configuration asks for; return a context with the Launch, or None if alone.

    Errors in the file are reported later, by the checks of the whole configuration.
    """
    from utils.config.reading import load_config
    from utils.config.schema import ConfigError

    try:
        read = load_config(config, overrides)[0]
    except ConfigError:
        return contextlib.nullcontext()
    hide_gpus(read)
    count = planned_processes(read)
    nodes = max(len(read.devices or ()), _gpus(), 1) * read.nodes_per_gpu
    if read.devices_per_node == 1 and count > nodes:
        raise ConfigError(f"processes: {count} processes on a machine with {nodes} nodes; every process needs one")
    return Launch(count, program) if count > 1 else contextlib.nullcontext()


def started_by_others() -> bool:
    """True if torchrun or a Launch started this process."""
    return "RANK" in os.environ


def is_main() -> bool:
    """True for the first process, which writes logs and prints."""
    return os.environ.get("RANK", "0") == "0"
