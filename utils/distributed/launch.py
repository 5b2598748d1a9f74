"""How many processes a run on one machine should have, and starting them.

Imports nothing at first that takes long, so that a run can say something at once.
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

# What PyTorch reaches GPUs through: containers and other systems have it even where they lack /proc/driver/nvidia.
_GPU_DRIVER = "libcuda.so.1"
# For the others to end by themselves after the run.
_ENDING_SECONDS = 30.0
# Of the process that started this one.
STARTED_BY = "ADLOCOSTARTED_BY"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> int:
    try:  # before PyTorch, which takes long to import, is asked
        ctypes.CDLL(_GPU_DRIVER)
    except OSError:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hide_gpus(config: "Config") -> None:
    """From this process and those that it starts, but for those that the configuration leaves visible.

    CUDA looks once, when it is first asked: how many there are may be asked only afterwards.
    """
    if config.CUDA_VISIBLE_DEVICES is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.CUDA_VISIBLE_DEVICES


def planned_processes(config: "Config") -> int:
    """Processes for this machine: those that the config gives, else as many as there are nodes for.

    That is `processes_per_gpu` on each GPU, or without GPUs one per core; with `devices_per_node` as many for every
    island, of which there is at least one.
    """
    size = config.devices_per_node
    if config.processes != "auto":
        return config.processes
    gpus = _gpus()
    if config.devices is not None:
        gpus = min(gpus, sum(device.startswith("cuda") for device in config.devices))
    if gpus:
        shared = min(config.processes_per_gpu, config.nodes_per_gpu)
        return gpus * shared if size == 1 else max(1, gpus // size) * size
    return _islands_on_cores(config) * size


def _islands_on_cores(config: "Config") -> int:
    return max(1, min(cores() // config.devices_per_node, config.nodes_per_gpu))


def threads_per_process(config: "Config") -> int:
    """Intra-op threads on a CPU: those that the config gives, or what one process of `processes: auto` may use.

    It depends on the machine and the nodes, and not on how many processes there really are: the bits of a sum over
    threads depend on their number, and the same run on one process or four should have the same.
    """
    return config.cpu_threads or max(1, cores() // (_islands_on_cores(config) * config.devices_per_node))


class Launch:
    """The other processes of a run on this machine, ranks 1 and up; the one that starts them is rank 0.

    A context: at its end the others have ended, by themselves where it ends without an error, and the environment is
    as it was.

    Args:
        count: processes in all.
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
        if Path("/sys/class/net/lo").exists():
            shared["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the host's name resolves to
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
        """The descriptor of the listening socket at MASTER_PORT, which belongs to the caller from now on."""
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
        """End the others now."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def start_processes(
    config: Path, overrides: Sequence[str], program: Sequence[str]
) -> contextlib.AbstractContextManager[Launch | None]:
    """The other processes that the configuration asks for; None where there are none, or where it is wrong.

    What is wrong is found, and said, by whoever reads the configuration whole; but for processes that are too many.

    Args:
        config: the configuration file.
        overrides: its overrides.
        program: arguments of the Python interpreter.

    Raises:
        ConfigError: there are more processes than nodes: none is started.
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
    """Whether torchrun, or a Launch, started this process."""
    return "RANK" in os.environ


def is_main() -> bool:
    """Whether this is the process that writes and speaks."""
    return os.environ.get("RANK", "0") == "0"
