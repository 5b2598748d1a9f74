"""What connects the nodes of a simulated run; when each of them is done says `algorithms.nodes.virtual_clock`."""

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from algorithms.nodes.communication_rounds import Link

# One number for all nodes, or one for each; where there are more nodes than numbers, they take them in turn.
PerNode = float | Annotated[tuple[float, ...], Field(min_length=1)]


def _of(values: PerNode, node: int) -> float:
    return values[node % len(values)] if isinstance(values, tuple) else values


def _all(values: PerNode) -> tuple[float, ...]:
    return values if isinstance(values, tuple) else (values,)


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Network:
    """What connects the nodes.

    bits_per_second: of every node's link, there and back each. latency: seconds until all who take part have begun and
    ended an exchange. server_bits_per_second: of the link of a server, through which passes what all workers send to
    it; None: it is as wide as it has to be.
    """

    name: str
    bits_per_second: PerNode
    latency: PerNode
    server_bits_per_second: float | None = None

    def link(self, nodes: Iterable[int]) -> Link:
        """The slowest of these nodes' links, for which all of them wait."""
        numbers = list(nodes)
        bits = min(_of(self.bits_per_second, node) for node in numbers)
        return Link(bits, max(_of(self.latency, node) for node in numbers))

    def seconds(self, link_bytes: float) -> float:
        """Of an exchange of all nodes that sends so many bytes through each link."""
        return Link(min(_all(self.bits_per_second)), max(_all(self.latency))).seconds(link_bytes)


def same_networks(some: Sequence[dict], others: Sequence[dict]) -> bool:
    """Whether networks, as JSON values, are the same; what is not given is None, or not there."""

    def given(networks: Sequence[dict]) -> list[dict]:
        return [{key: value for key, value in network.items() if value is not None} for network in networks]

    return given(some) == given(others)
