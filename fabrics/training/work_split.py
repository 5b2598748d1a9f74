"""Division of a trainer's round over its workers: who takes part, with which examples, in which inner steps.

Everything follows from the configuration, the nodes, the requested batch and the place in the run. All processes know
it without messages, and a checkpoint needs only a few numbers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.balance import slice_offsets, steps_each
from fabrics.data.examples import Examples
from fabrics.data.sampler import Reading, tokens_ahead
from fabrics.training.statistics import Measurement
from fabrics.training.worker import Assignment, Node, RoundKey
from utils.config.schema import Config

# The first inner step of a round does not count for the speed, which needs a second one.
_LEAST_MEASURED_STEPS = 2
# Spawn keys: participants and lost messages are drawn independently of everything else that uses the seed.
_PARTICIPANTS = (2,)
_LOST_MESSAGES = (3,)

# See WorkerGroup.active_steps.
ActiveSteps = Callable[[Mapping[int, int], int, float], Mapping[int, Sequence[int]]]


def participant_count(share: float, worker_count: int) -> int:
    """Return how many of a trainer's workers take part in a round: the nearest integer, but at least one."""
    return max(1, int(share * worker_count + 0.5 + 1e-9))  # 0.29 * 50 is a little less than a half


def draw_participants(share: float, key: RoundKey, worker_count: int) -> tuple[int, ...]:
    """Draw the numbers of the workers that take part in a round; all sets of that size are equally likely."""
    count = participant_count(share, worker_count)
    if count == worker_count:
        return tuple(range(worker_count))
    sequence = np.random.SeedSequence([key.seed, key.trainer, key.round], spawn_key=_PARTICIPANTS)
    return tuple(sorted(np.random.default_rng(sequence).permutation(worker_count)[:count].tolist()))


def draw_lost_messages(probability: float, key: RoundKey, participants: Collection[int]) -> frozenset[int]:
    """Draw the participants whose messages are lost, each independently; a lone worker sends no message."""
    if probability == 0.0 or len(participants) < 2:
        return frozenset()

    def draw(worker: int) -> float:
        entropy = [key.seed, key.trainer, key.round, worker]
        return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=_LOST_MESSAGES)).random()

    return frozenset(worker for worker in participants if draw(worker) < probability)


def probe_batch(reading: Reading, end: int, worker: int, most: int) -> np.ndarray:
    """Return a worker's examples of a probe after the `end` examples of the round; no two probes share an example.

    Products of gradients are free of noise only between different examples. Near the end of an epoch the next examples
    may repeat; within two probes of all workers there are enough different ones.

    most: examples of a probe, if the data have as many for each worker.
    """
    size = min(most, reading.size // len(reading.workers))
    everyone = len(reading.workers) * size
    ahead = reading.places(end + reading.workers[0] * size, 2 * everyone)
    _, firsts = np.unique(ahead, return_index=True)
    different = ahead[np.sort(firsts)]
    place = reading.workers.index(worker)
    return different[place * size : (place + 1) * size]


class WorkSplit:
    """One round of a trainer, divided over the workers that take part; the others rest.

    Args:
        readings: where all workers read their examples.
        active_steps_of: gives the active steps if some workers make fewer; None: all make every inner step.

    Attributes:
        plans: the micro-batches of one inner step, by participant. The sum is M ceil(B / M) examples, unless the
            switch mode gives fewer.
        speeds: by participant; all 1 if one of them is unknown.
        step_seconds: of one inner step of the fastest worker; 0 without `node_speeds`.
    """

    def __init__(
        self,
        config: Config,
        requested_batch: int,
        nodes: Sequence[Node],
        participants: Sequence[int],
        readings: Sequence[Reading],
        examples: Examples,
        active_steps_of: ActiveSteps | None,
    ):
        self._config = config
        self._worker_count = len(nodes)
        self._readings = readings
        self._examples = examples
        self._active_steps_of = active_steps_of
        own = [nodes[worker].speed for worker in participants]
        if None in own:
            own = [1.0] * len(own)
        self.speeds = dict(zip(participants, own, strict=True))
        plans = execution_plans(
            config.switch_mode,
            requested_batch,
            [nodes[worker].max_batch for worker in participants],
            config.switch_multiplier,
            own if config.balance == "batch" else None,
        )
        self.plans = dict(zip(participants, plans, strict=True))
        self.step_seconds = 0.0
        if config.node_speeds is not None:
            self.step_seconds = min(plan.effective_batch / self.speeds[worker] for worker, plan in self.plans.items())

    @property
    def participants(self) -> tuple[int, ...]:
        """Numbers of the workers that take part, in order."""
        return tuple(self.plans)

    @property
    def effective_batch(self) -> int:
        """Examples of an inner step, if all participants make it."""
        return sum(plan.effective_batch for plan in self.plans.values())

    def steps_in_time(self, inner_steps: int) -> dict[int, int]:
        """Inner steps of its own that each participant has time for in a round of `inner_steps`."""
        if self._active_steps_of is None:
            return dict.fromkeys(self.plans, inner_steps)
        least = _LEAST_MEASURED_STEPS if self._config.node_speeds is None else 1
        own = steps_each(inner_steps, list(self.speeds.values()), least)
        return dict(zip(self.plans, own, strict=True))

    def active_steps(self, inner_steps: int) -> Mapping[int, Sequence[int]]:
        """The inner steps of the round, from 0, that each participant makes."""
        if self._active_steps_of is None:
            return dict.fromkeys(self.plans, tuple(range(inner_steps)))
        return self._active_steps_of(self.steps_in_time(inner_steps), inner_steps, self.step_seconds)

    def examples_each(self, inner_steps: int) -> list[int]:
        """Examples of each worker in a round of `inner_steps`, by number; 0 if it rests."""
        active = self.active_steps(inner_steps)
        each = [0] * self._worker_count
        for worker, plan in self.plans.items():
            each[worker] = plan.effective_batch * len(active[worker])
        return each

    def examples(self, inner_steps: int) -> int:
        """Examples of a round of `inner_steps` over all workers."""
        return sum(self.examples_each(inner_steps))

    def tokens(self, inner_steps: int) -> int:
        """Tokens of a round of `inner_steps` over all workers."""
        return tokens_ahead(self._readings, self.examples_each(inner_steps), self._examples)

    def assignments(
        self, learning_rates: Sequence[float], key: RoundKey, measurement: Measurement
    ) -> dict[int, Assignment]:
        """Return each participant's part of the round; learning_rates: of every inner step."""
        inner_steps = len(learning_rates)
        active = self.active_steps(inner_steps)
        each = self.examples_each(inner_steps)
        found = {}
        for reading in self._readings:
            readers = [worker for worker in reading.workers if worker in active]
            batches = [self.plans[worker].effective_batch for worker in readers]
            offsets = slice_offsets(batches, [active[worker] for worker in readers])
            end = sum(each[worker] for worker in readers)
            for worker, own_offsets in zip(readers, offsets, strict=True):
                found[worker] = Assignment(
                    plan=self.plans[worker],
                    learning_rates=learning_rates,
                    active_steps=active[worker],
                    examples=self._examples,
                    read=reading.places,
                    offsets=own_offsets,
                    probe_indices=partial(probe_batch, reading, end, worker, self._config.statistics_batch_size),
                    key=key._replace(worker=worker),
                    measurement=measurement,
                )
        return dict(sorted(found.items()))
