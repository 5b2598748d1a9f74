"""What a server takes of a fragment in a round from workers that are not equally fast, and what that leaves behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from algorithms.nodes.async_clock import collections, made_at

# A worker's values of a fragment, before the numbers of both: its own inner steps of the round until it is ready; steps
# and examples since it gave; and the inner step of the round after which its answer is there, if it has none yet.
_READY, _STEPS, _EXAMPLES, _BACK = "ready", "steps", "examples", "back"


@dataclass(frozen=True)
class Taken:
    """stop: when. weights: of those that give, tokens^2 / steps. back: when they have the answer."""

    stop: int
    weights: dict[int, float]
    back: int


@dataclass(frozen=True)
class Answered:
    """stop: when. workers: whether each has gone on since it gave."""

    stop: int
    workers: dict[int, bool]


@dataclass(frozen=True)
class Waiting:
    """When a server takes a fragment. first: after how many of its own inner steps a new worker is ready; `period`: any
    later time. The others: see `algorithms.nodes.async_clock.collections`."""

    first: int
    period: int
    quorum: int
    grace: Fraction
    travel: Fraction


def fragment_round(
    fragment: int,
    values: Mapping[str, float],
    waiting: Waiting,
    own_steps: Sequence[int],
    batches: Sequence[int],
    inner_steps: int,
) -> tuple[list[Taken | Answered], dict[str, float]]:
    """What happens to a fragment in a round, in order, and its values after it.

    Args:
        values: of all fragments, after the round before.
        own_steps: of every worker in the round. batches: examples of each in one.
    """
    workers, happens = range(len(own_steps)), []

    def known(name: str, default: int) -> list[int]:
        return [int(values.get(f"{name}_{fragment}_{worker}", default)) for worker in workers]

    ready, steps, examples, backs = (
        known(name, default) for name, default in ((_READY, waiting.first), (_STEPS, 0), (_EXAMPLES, 0), (_BACK, 0))
    )
    collected = collections(
        own_steps, inner_steps, waiting.period, ready, waiting.quorum, waiting.grace, waiting.travel, max(backs)
    )

    def made(worker: int, stop: int) -> int:
        return made_at(stop, own_steps[worker], inner_steps)

    def answered(stop: int) -> None:
        """Whoever awaits the fragment has it, if that is in the round."""
        due = [worker for worker in workers if backs[worker] == stop > 0]
        if due and stop <= inner_steps:
            happens.append(Answered(stop, {worker: steps[worker] + made(worker, stop) > 0 for worker in due}))
            for worker in due:
                backs[worker] = 0

    answered(max(backs))
    for each in collected:
        weights = {}
        for worker in each.workers:
            here = made(worker, each.stop)
            since, seen = steps[worker] + here, examples[worker] + here * batches[worker]
            weights[worker] = seen**2 / since
            steps[worker], examples[worker] = -here, -here * batches[worker]
            ready[worker], backs[worker] = here + waiting.period, each.back
        happens.append(Taken(each.stop, weights, each.back))
        answered(each.back)
    left = {}
    for worker, own in enumerate(own_steps):
        left[f"{_READY}_{fragment}_{worker}"] = ready[worker] - own
        left[f"{_STEPS}_{fragment}_{worker}"] = steps[worker] + own
        left[f"{_EXAMPLES}_{fragment}_{worker}"] = examples[worker] + own * batches[worker]
        if backs[worker]:
            left[f"{_BACK}_{fragment}_{worker}"] = backs[worker] - inner_steps
    return happens, left
