"""Local processes without torchrun."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from utils.distributed.launch import cores


def launch(function: Callable[..., Any], *arguments: Any, processes: int) -> list[Any]:
    """Call a function in local processes that find each other, as torchrun does, and return their results by rank.

    Args:
        function: a function of an importable module; a Worker in it is one worker of the run.
        arguments: of the function.
        processes: how many. They share the cores, unless OMP_NUM_THREADS says otherwise.

    Raises:
        ValueError: the number of processes is not a positive integer.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed; the others are ended.
    """
    if type(processes) is not int or processes < 1:
        raise ValueError(f"processes: must be a positive integer, got {processes!r}")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        run_id="adloco",
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        results = elastic_launch(config, _call)(function, *arguments)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
    return [results[rank] for rank in range(processes)]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function and close the connections, so that a process that still waits for this one gets an error.

    torch's launcher keeps this process alive until all have ended, also after `sys.exit(0)`.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    result = None
    try:
        result = function(*arguments)
    except SystemExit as end:
        if end.code:
            raise
    gc.collect()  # connections stay open while anything refers to them, such as a Worker in a reference cycle
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
