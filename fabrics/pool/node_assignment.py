"""The assignment of nodes to trainers, and merges: decisions of `algorithms.nodes`, carried out and counted."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from algorithms.nodes.distribution import distribute_nodes
from algorithms.nodes.policies import MERGE_POLICIES, MergePlan
from algorithms.nodes.traffic import merge_exchange, redistribution_exchange
from algorithms.schedule.limits import RunCounters
from fabrics.pool.node_pool import NodePool
from fabrics.pool.round_scheduler import RoundScheduler
from fabrics.training.worker import TrainingError
from utils.config.schema import Config

if TYPE_CHECKING:
    from trainers import Trainer


class NoNodeLeftError(TrainingError):
    """All nodes failed; the trainers are as they were after their last round."""


class NodeAssigner:
    """Gives trainers their nodes and merges trainers. All processes decide alike.

    Args:
        config: the run's configuration.
        pool: all nodes.
        scheduler: counts the seconds of exchanges.
    """

    def __init__(self, config: Config, pool: NodePool, scheduler: RoundScheduler):
        self._config = config
        self._pool = pool
        self._scheduler = scheduler

    def assignment(
        self, requests: Mapping[int, int], trainers: Mapping[int, "Trainer"], progress: float
    ) -> dict[int, tuple[int, ...]]:
        """Return the nodes of every trainer.

        Args:
            requests: the requested batch of every trainer.
            trainers: keep their present nodes as far as they can.
            progress: of the run, 0 to 1.

        Raises:
            NoNodeLeftError: all nodes failed.
        """
        nodes = [node.id for node in self._pool.working(progress)]
        if not nodes:
            raise NoNodeLeftError("no node is left to train on: all of them failed")
        present = {number: [node.id for node in trainer.nodes] for number, trainer in trainers.items()}
        return distribute_nodes(requests, nodes, present, self._config.smallest_worker_batch)

    def assign(
        self, assignment: Mapping[int, Sequence[int]], trainers: Mapping[int, "Trainer"], counters: RunCounters
    ) -> None:
        """Give every trainer its nodes, and count the bytes."""
        new_nodes = 0
        sent = 0
        for number, nodes in assignment.items():
            trainer = trainers[number]
            new_nodes += len(set(nodes) - {node.id for node in trainer.nodes})
            sent += trainer.assign_nodes(tuple(self._pool.nodes[node] for node in nodes))
        counters.bytes_redistributed += sent
        self._scheduler.count_link_seconds(counters, redistribution_exchange(new_nodes, sent))

    def merge(self, trainers: dict[int, "Trainer"], counters: RunCounters) -> MergePlan:
        """Merge the trainers that the policy selects into their representative, and count the bytes.

        Args:
            trainers: the living trainers, of which the merged ones are removed.

        Raises:
            TrainingError: the policy's plan is not a merge of these trainers.
        """
        policy = self._config.merging_policy
        plan = MERGE_POLICIES[policy](requested_batches(trainers), self._config.merge_count)
        problem = plan.problem(trainers)
        if problem is not None:
            raise TrainingError(f"merging_policy: {policy} {problem}")
        if self._config.weigh_shares:
            plan = plan.weighted({trainer: len(trainers[trainer].cursor) for trainer in plan.weights})
        others = [trainers.pop(trainer) for trainer in plan.weights if trainer != plan.representative]
        representative = trainers[plan.representative]
        sent = representative.absorb(others, plan.weights)
        counters.bytes_merged += sent
        counters.communications += 1
        self._scheduler.count_link_seconds(counters, merge_exchange(len(others), len(representative.nodes), sent))
        return plan


def requested_batches(trainers: Mapping[int, "Trainer"]) -> dict[int, int]:
    """The requested batch of every trainer, by id."""
    return {number: trainer.requested_batch for number, trainer in trainers.items()}
