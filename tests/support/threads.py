"""Stand-ins for the processes of a run: threads that gather values and start at once."""

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.support.programs import LIMIT_SECONDS
from utils.config.schema import ConfigError
from utils.distributed.shard_groups import ShardGroup

T = TypeVar("T")


class Thread:
    """The Processes of one rank.

    Args:
        rank: this process.
        values: the value that each rank gathers.
        barrier: of all ranks.
        machines: the machine of each rank.
        devices_per_node: size of the shard groups, which share nothing here but the files that they write.
    """

    def __init__(
        self, rank: int, values: list, barrier: threading.Barrier, machines: tuple[int, ...], devices_per_node: int
    ):
        self.rank = rank
        self.count = len(values)
        self.is_main = rank == 0
        self.first_here = machines.index(machines[rank]) == rank
        self.shard_group = ShardGroup(devices_per_node, rank % devices_per_node)
        self._barrier = barrier
        self._values = values

    def gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def together(
    count: int, work: Callable[[Thread], T], machines: tuple[int, ...] | None = None, devices_per_node: int = 1
) -> list[T]:
    """Run `work` in `count` threads, and return their results, or raise the first exception of one."""
    barrier = threading.Barrier(count, timeout=LIMIT_SECONDS)
    values: list = [None] * count
    results: list = [None] * count
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Thread(rank, values, barrier, machines or (0,) * count, devices_per_node))
        except threading.BrokenBarrierError:
            pass  # another thread has failed
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def refusals(count: int, work, **keywords) -> list[str]:
    """Return the ConfigError of each thread."""

    def refused(process):
        with pytest.raises(ConfigError) as error:
            work(process)
        return str(error.value)

    return together(count, refused, **keywords)
