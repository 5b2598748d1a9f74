"""Who does how much of a trainer's round: who takes part, with how many examples, in how many inner steps, from where.

All of it follows from the configuration, the nodes and the place in the run, and needs no model.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.balance import places, steps_each, turns
from fabrics.data.examples import Examples
from fabrics.data.sampler import Reading
from fabrics.training.statistics import StatisticsPlan
from fabrics.training.worker import Assignment, Node, Place
from utils.config.schema import Config

# From the inner steps for which each worker has time in a round, by number, those of the round, and the seconds of one
# of the fastest worker, 0 where speeds are not given, to the inner steps of the round during which each makes its own.
Turns = Callable[[Mapping[int, int], int, float], Mapping[int, Sequence[int]]]


def even_turns(own_steps: Mapping[int, int], inner_steps: int, step_seconds: float) -> dict[int, Sequence[int]]:
    """Of workers that wait for nothing."""
    return {worker: turns(own, inner_steps) for worker, own in own_steps.items()}


# The first inner step of a round is not measured, so a speed needs a second one.
_LEAST_MEASURED_STEPS = 2
# Spawn keys: participants and lost messages are drawn independently of everything else that uses the seed.
_PARTICIPANTS = (2,)
_LOST_MESSAGES = (3,)


def scheduled_nodes(schedule: Sequence[Sequence[float]], progress: float) -> int:
    """Return the number of nodes that work at this progress; the first entry of the schedule is (0, nodes)."""
    return int(next(nodes for share, nodes in reversed(schedule) if share <= progress))


def participant_count(share: float, workers: int) -> int:
    """Return how many of a trainer's workers take part in a round: the nearest integer, but at least one."""
    return max(1, int(share * workers + 0.5 + 1e-9))  # 0.29 * 50 is a little less than a half


def participants(share: float, place: Place, workers: int) -> tuple[int, ...]:
    """Draw the numbers of the workers that take part in a round; all sets of that size are equally likely."""
    count = participant_count(share, workers)
    if count == workers:
        return tuple(range(workers))
    sequence = np.random.SeedSequence([place.seed, place.trainer, place.round], spawn_key=_PARTICIPANTS)
    return tuple(sorted(np.random.default_rng(sequence).permutation(workers)[:count].tolist()))


def lost_messages(probability: float, place: Place, workers: Collection[int]) -> frozenset[int]:
    """Draw the participants whose messages are lost, each independently; a lone worker sends no message."""
    if probability == 0.0 or len(workers) < 2:
        return frozenset()

    def draw(worker: int) -> float:
        entropy = [place.seed, place.trainer, place.round, worker]
        return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=_LOST_MESSAGES)).random()

    return frozenset(worker for worker in workers if draw(worker) < probability)


class Shares:
    """What the workers of a trainer that take part in a round have of it; the others rest, and have nothing.

    Args:
        config: the run's.
        request: the trainer's requested batch.
        nodes: of all its workers, in order.
        present: the numbers of those that take part, in order.
        fewer_steps: whether those on slower nodes make fewer inner steps of a round.
        turns: when those that make fewer inner steps do so.

    Attributes:
        speeds: of the nodes that take part, by worker; all are 1 as long as one of them is not known.
        plans: of their inner steps, by worker: shares of M ceil(B / M) examples through the switch mode.
    """

    def __init__(
        self,
        config: Config,
        request: int,
        nodes: Sequence[Node],
        present: Sequence[int],
        fewer_steps: bool,
        turns: Turns = even_turns,
    ):
        own = [nodes[worker].speed for worker in present]
        self.speeds = dict(zip(present, [1.0] * len(own) if None in own else own, strict=True))
        plans = execution_plans(
            config.switch_mode,
            request,
            [nodes[worker].max_batch for worker in present],
            config.switch_multiplier,
            list(self.speeds.values()) if config.balance == "batch" else None,
        )
        self.plans = dict(zip(present, plans, strict=True))
        self._workers, self._fewer_steps, self._turns = len(nodes), fewer_steps, turns
        given = config.node_speeds is not None
        self._least_steps = 1 if given else _LEAST_MEASURED_STEPS
        seconds = (plan.effective_batch / self.speeds[worker] for worker, plan in self.plans.items())
        self._step_seconds = min(seconds) if given else 0.0

    @property
    def batch(self) -> int:
        """Examples of an inner step that all of them make."""
        return sum(plan.effective_batch for plan in self.plans.values())

    def paces(self, inner_steps: int) -> dict[int, int]:
        """Inner steps for which everyone that takes part has time in a round of so many."""
        if not self._fewer_steps:
            return dict.fromkeys(self.plans, inner_steps)
        own = steps_each(inner_steps, list(self.speeds.values()), self._least_steps)
        return dict(zip(self.plans, own, strict=True))

    def turns(self, inner_steps: int) -> Mapping[int, Sequence[int]]:
        """During which inner steps of such a round, from 0, each makes its own."""
        if not self._fewer_steps:
            return dict.fromkeys(self.plans, tuple(range(inner_steps)))
        return self._turns(self.paces(inner_steps), inner_steps, self._step_seconds)

    def steps(self, inner_steps: int) -> dict[int, int]:
        """Inner steps of everyone that takes part in a round of so many."""
        return {worker: len(own) for worker, own in self.turns(inner_steps).items()}

    def examples(self, inner_steps: int) -> int:
        """Examples of a round of so many inner steps, all together."""
        return sum(self.examples_each(inner_steps))

    def examples_each(self, inner_steps: int) -> list[int]:
        """Likewise of every worker of the trainer, by number; 0 of those that rest."""
        steps, found = self.steps(inner_steps), [0] * self._workers
        for worker, plan in self.plans.items():
            found[worker] = plan.effective_batch * steps[worker]
        return found


def assignments(
    config: Config,
    shares: Shares,
    learning_rates: Sequence[float],
    examples: Examples,
    readings: Iterable[Reading],
    place: Place,
    statistics: StatisticsPlan,
) -> dict[int, Assignment]:
    """What everyone that takes part is to do in a round.

    Args:
        learning_rates: of every inner step of the round.
        readings: where all workers read.
        place: of any worker in the round.
        statistics: that the round takes.
    """
    inner_steps = len(learning_rates)
    own, paces = shares.turns(inner_steps), shares.paces(inner_steps)
    each, found = shares.examples_each(inner_steps), {}
    for reading in readings:
        here = [worker for worker in reading.workers if worker in own]
        firsts = places([shares.plans[worker].effective_batch for worker in here], [own[worker] for worker in here])
        after = sum(each[worker] for worker in here)
        for worker, first in zip(here, firsts, strict=True):
            found[worker] = Assignment(
                plan=shares.plans[worker],
                learning_rates=learning_rates,
                turns=own[worker],
                pace=paces[worker],
                examples=examples,
                places=reading.places,
                first_examples=first,
                place=place._replace(worker=worker),
                sample=after + worker * config.statistics_batch_size,
                probes=statistics.probed_parts,
                hands_back=statistics.compared,
                weight=reading.share if config.weigh_shares else None,
            )
    return dict(sorted(found.items()))
