"""Several processes of a run as threads of this one: they gather, and start at once."""

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.support.programs import LIMIT_SECONDS
from utils.config.schema import ConfigError
from utils.distributed.shard_groups import ShardGroup

T = TypeVar("T")


class _Place(ShardGroup):
    """In a shard group of so many of them, which share nothing here but the files that they write."""

    def __init__(self, size: int, index: int):
        self.size, self.index = size, index


class Thread:
    """One of them. machine: those with one number share a machine. devices: of a shard group."""

    def __init__(self, rank: int, count: int, shared: dict, machines: tuple[int, ...], devices: int):
        self.rank, self.count, self.is_main = rank, count, rank == 0
        self.shard_group = _Place(devices, rank % devices)
        self.first_here = machines.index(machines[rank]) == rank
        self._barrier, self._values = shared["barrier"], shared["values"]

    def gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def together(
    count: int, work: Callable[[Thread], T], machines: tuple[int, ...] | None = None, devices_per_node: int = 1
) -> list[T]:
    """What each of `count` processes makes of `work`; an exception of one that is in nobody's way is raised here."""
    shared = {
        "barrier": threading.Barrier(count, timeout=LIMIT_SECONDS),
        "values": [None] * count,
    }
    results: list = [None] * count
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Thread(rank, count, shared, machines or (0,) * count, devices_per_node))
        except Exception as error:
            errors.append(error)
            shared["barrier"].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if told or errors:
        raise (told or errors)[0]
    return results


def refusals(count: int, work, **keywords) -> list[str]:
    """What each of the processes is refused with."""

    def refused(process):
        with pytest.raises(ConfigError) as error:
            work(process)
        return str(error.value)

    return together(count, refused, **keywords)
