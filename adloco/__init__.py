"""AdLoCo as a library: low-communication training inside your own loop. `docs/library.md` begins with an example."""

from collections.abc import Callable
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from adloco.worker import AdaptiveBatch, Worker

__all__ = ["AdaptiveBatch", "Worker", "launch"]


def launch(function: Callable[..., Any], *arguments: Any, processes: int) -> list[Any]:
    """Call a function in local processes that find each other, as torchrun does, and return their results by rank.

    Args:
        function: a function of an importable module; a Worker in it is one worker of the run.
        arguments: of the function.
        processes: how many.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed; the others are ended.
    """
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
    results = elastic_launch(config, function)(*arguments)
    return [results[rank] for rank in range(processes)]
