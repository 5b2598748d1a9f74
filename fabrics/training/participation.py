"""Who takes part in a round: nodes by a schedule, a share of a trainer's workers, and whose messages are lost.

Everything is a function of the seed and of the place in the run, so that all processes know it without being told and a
run resumes from integers.
"""

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from algorithms.synchronisation import METHODS
from fabrics.training.worker import Place
from utils.config.schema import Config

# What is drawn for participants and messages is independent of all that is drawn from the seed elsewhere.
_PARTICIPANTS, _MESSAGES = (2,), (3,)


def scheduled_nodes(schedule: Sequence[Sequence[float]], progress: float) -> int:
    """How many nodes work when so much of the run is done; the first entry is (0, nodes)."""
    return int(next(nodes for share, nodes in reversed(schedule) if share <= progress))


def participant_count(share: float, workers: int) -> int:
    """How many of a trainer's workers take part in a round: the nearest number, halves rounded up, and at least one."""
    return max(1, int(share * workers + 0.5 + 1e-9))  # 0.29 * 50 is a little less than a half


def participants(share: float, place: Place, workers: int) -> tuple[int, ...]:
    """The numbers of the workers that take part in a round, in order; all sets of that size are as likely.

    place: of any of them.
    """
    count = participant_count(share, workers)
    if count == workers:
        return tuple(range(workers))
    sequence = np.random.SeedSequence([place.seed, place.trainer, place.round], spawn_key=_PARTICIPANTS)
    return tuple(sorted(np.random.default_rng(sequence).permutation(workers)[:count].tolist()))


def lost_messages(probability: float, place: Place, workers: Collection[int]) -> frozenset[int]:
    """Those of the workers that take part in a round whose exchange is lost, each by itself; one alone sends nothing.

    place: of any of them.
    """
    if probability == 0.0 or len(workers) < 2:
        return frozenset()

    def drawn(worker: int) -> float:
        entropy = [place.seed, place.trainer, place.round, worker]
        return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=_MESSAGES)).random()

    return frozenset(worker for worker in workers if drawn(worker) < probability)


def attendance_problems(config: Config) -> list[str]:
    """What is wrong with the keys that say who takes part, one line each."""
    found, schedule, name = [], config.node_schedule, config.distributed_algo
    if schedule is not None:
        shares, nodes = zip(*schedule, strict=True)
        grows = all(before < after for before, after in itertools.pairwise(shares))
        whole = all(float(count).is_integer() and count >= 1 for count in nodes)
        if not (shares[0] == 0.0 and grows and shares[-1] < 1.0 and whole):
            found.append(
                f"node_schedule: shares of the run must begin with 0 and grow, all below 1, and nodes be positive "
                f"integers, got {schedule}"
            )
    if config.budget is not None:
        found += [
            f"{key}: must be {neutral} with {config.budget}, which reckons with the same workers in every round to "
            f"come, got {value}"
            for key, neutral in (("node_schedule", None), ("participants", 1.0))
            if (value := getattr(config, key)) != neutral
        ]
    method = METHODS.get(name)
    if method is not None and config.participants < 1.0 and method.keeps != "shared":
        found.append(
            f"participants: must be 1 with {name}, whose workers go on from parameters of their own, which grow stale "
            f"while they rest, got {config.participants}"
        )
    if config.message_loss and method is not None:
        if method.capabilities.exchanges_gradients:
            found.append(
                f"message_loss: must be 0 with {name}, whose workers exchange gradients of the same parameters in "
                f"every inner step, got {config.message_loss}"
            )
        elif method.keeps != "shared":
            found.append(
                f"message_loss: must be 0 with {name}, which says itself from where its workers go on, "
                f"got {config.message_loss}"
            )
        if config.compares_workers:
            found.append(
                f"statistics_estimator: must be per_example with message_loss, after which workers are not at the same "
                f"parameters, got {config.statistics_estimator}"
            )
    return found
