"""What nodes send each other when they change trainers and when trainers merge: from whom, to whom, and how much.

Every node counts as a machine of its own, whatever the processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from algorithms.nodes.distribution import HandOver, StateBytes


@dataclass(frozen=True)
class Transfer:
    """Bytes that nodes send to others. sources: who send, each as much. targets: who get them. arriving: at each."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    arriving: float

    @property
    def total(self) -> float:
        """All that arrives, and so all that is sent."""
        return len(self.targets) * self.arriving


@dataclass(frozen=True)
class Move:
    """A transfer, what it was for, and the trainer at whose nodes it arrived."""

    kind: Literal["merge", "redistribution"]
    trainer: int
    transfer: Transfer


def total(transfers: Iterable[Transfer]) -> int:
    """All bytes of some transfers."""
    return round(sum(transfer.total for transfer in transfers))


def averaged(nodes: Sequence[int], sent: float) -> list[Transfer]:
    """A mean over these nodes, for which they send so many bytes together."""
    return [Transfer(tuple(nodes), tuple(nodes), sent / len(nodes))] if sent else []


def redistributed(
    old: Sequence[int], new: Sequence[int], moves: Sequence[HandOver], sizes: StateBytes
) -> list[Transfer]:
    """What arrives at nodes when a trainer's nodes change.

    A node that the trainer had holds parameters and velocity, and a worker's state is on its node; everything else is
    sent once to every node that needs it, by the first node that stays, if one does. At the start (old: none) nothing
    is: all begin from the same seed.

    Args:
        old, new: the node of each worker before and after.
        moves: what `hand_overs` says of them.
    """
    if not old:
        return []
    holder = next((node for node in old if node in new), old[0])
    found = [Transfer((holder,), tuple(sorted(set(new) - set(old))), sizes.trainer)]
    for move in moves:
        takers = tuple(node for node in move.takers.values() if node != move.source)
        found.append(Transfer((move.source,), takers, sizes.worker + move.whole * sizes.personal))
    return [transfer for transfer in found if transfer.total]


def merged(representative: Sequence[int], others: Sequence[Sequence[int]], size: int) -> list[Transfer]:
    """What arrives at nodes when trainers merge.

    The representative's first node gets what the others have, if it does not serve them too, and sends the average to
    its other nodes.

    Args:
        representative, others: the nodes of the trainers.
        size: bytes of what a trainer gives: parameters, and the outer velocity unless it begins anew.
    """
    first, *rest = representative
    found = [Transfer((nodes[0],), (first,), size) for nodes in others if first not in nodes]
    return found + ([Transfer((first,), tuple(rest), size)] if rest else [])
