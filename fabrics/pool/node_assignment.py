"""Which nodes work for which trainer, and which trainers become one; what is sent for it."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from algorithms.nodes.distribution import HYSTERESIS, distribute_nodes
from algorithms.nodes.policies import MERGE_POLICIES, MergePlan
from algorithms.nodes.traffic import Exchange, Move, Transfer, merge_exchange, redistribution_exchange, total_bytes
from fabrics.data.partition_sampler import ShareCursor
from fabrics.data.sampler import DataCursor
from fabrics.pool.node_pool import NodePool
from fabrics.pool.round_scheduler import RoundScheduler
from fabrics.pool.run_counters import RunCounters
from fabrics.training.worker import Node, TrainingError
from utils.config.schema import Config


class NoNodeLeftError(TrainingError):
    """All nodes failed; trainers are as they were after their last round."""


class Movable(Protocol):
    """What is asked of a trainer here."""

    cursor: DataCursor | ShareCursor

    @property
    def requested_batch(self) -> int:
        """In examples over all its workers."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Of all its workers."""

    def assign_nodes(self, nodes: tuple[Node, ...]) -> list[Transfer]:
        """Let these work for it from now on; what arrives at them."""

    def absorb(self, others: list, weights: Mapping[int, float]) -> list[Transfer]:
        """Become the merge of itself with others; what arrives at nodes."""


class NodeAssigner:
    """Gives trainers their nodes and merges them; bytes and communications are counted. Every process decides alike.

    Args:
        config: the run's.
        pool: all nodes.
        groups: of every node, in order; nodes of a group are near each other.
        scheduler: of the run.
    """

    def __init__(self, config: Config, pool: NodePool, groups: Sequence[int], scheduler: RoundScheduler):
        self._config, self._pool, self._groups, self._scheduler = config, pool, groups, scheduler
        self._moves: list[Move] = []

    def new_moves(self) -> tuple[Move, ...]:
        """What was sent since this was asked the last time."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def _noted(self, kind: Literal["merge", "redistribution"], trainer: int, transfers: list[Transfer]) -> int:
        """The bytes of transfers, which are remembered."""
        self._moves += [Move(kind, trainer, transfer) for transfer in transfers]
        return total_bytes(transfers)

    def assignment(
        self, requests: Mapping[int, int], trainers: Mapping[int, Movable], progress: float
    ) -> dict[int, tuple[int, ...]]:
        """The nodes of every trainer that requests a batch, when so much of the run is done.

        Args:
            trainers: whose nodes stay where they are, as far as they can.

        Raises:
            NoNodeLeftError: as it says.
        """
        groups = {node.id: self._groups[node.id] for node in self._pool.working(progress)}
        if not groups:
            raise NoNodeLeftError("no node is left to train on: all of them failed")
        present = {number: [node.id for node in trainer.nodes] for number, trainer in trainers.items()}
        return distribute_nodes(requests, groups, present, HYSTERESIS, self._config.smallest_worker_batch)

    def assign(
        self, assignment: Mapping[int, Sequence[int]], trainers: Mapping[int, Movable], counters: RunCounters
    ) -> Exchange:
        """Give every trainer these nodes; what was sent for it."""
        came, arrived = _coming(assignment, trainers), 0
        for number, nodes in assignment.items():
            transfers = trainers[number].assign_nodes(tuple(self._pool.nodes[node] for node in nodes))
            arrived += self._noted("redistribution", number, transfers)
        counters.bytes_redistributed += arrived
        exchange = redistribution_exchange(came, arrived)
        self._scheduler.count(counters, exchange)
        return exchange

    def merge(self, trainers: dict[int, Movable], counters: RunCounters) -> tuple[MergePlan, Exchange]:
        """Merge those that the policy picks, of which the representative alone lives on; what was sent for it.

        Raises:
            TrainingError: that is no merge of these trainers.
        """
        policy = self._config.merging_policy
        plan = MERGE_POLICIES[policy](requests_of(trainers), self._config.merge_count)
        if problem := plan.problem(trainers):
            raise TrainingError(f"merging_policy: {policy} {problem}")
        if self._config.weigh_shares:
            plan = plan.weighted({trainer: len(trainers[trainer].cursor) for trainer in plan.weights})
        others = [trainers.pop(trainer) for trainer in plan.weights if trainer != plan.representative]
        representative = trainers[plan.representative]
        arrived = self._noted("merge", plan.representative, representative.absorb(others, plan.weights))
        counters.bytes_merged += arrived
        counters.communications += 1
        exchange = merge_exchange(len(others), len(representative.nodes), arrived)
        self._scheduler.count(counters, exchange)
        return plan, exchange


def requests_of(trainers: Mapping[int, Movable]) -> dict[int, int]:
    """The requested batch of every trainer."""
    return {number: trainer.requested_batch for number, trainer in trainers.items()}


def _coming(assignment: Mapping[int, Sequence[int]], trainers: Mapping[int, Movable]) -> int:
    """How many nodes would be new to trainers; at the start there are none of these yet."""
    own = {number: {node.id for node in trainer.nodes} for number, trainer in trainers.items()}
    return sum(len(set(nodes) - own.get(number, set())) for number, nodes in assignment.items())
