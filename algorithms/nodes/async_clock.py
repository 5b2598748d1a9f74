"""When workers that are not equally fast are done, in a round without a barrier: a virtual clock of inner steps.

A round of H inner steps lasts as long as the fastest worker's H. Another one makes h <= H of its own meanwhile: the
k-th is done at k H / h, where k <= 0 was in a round before and k > h is in one to come, and later by what it has waited
for answers, if it does. Whatever happens does so at the first inner step of the round that is not earlier.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

_PRECISION = 10**6  # of a time, in inner steps
_NONE, _PART = Fraction(0), Fraction(1 - _PRECISION, _PRECISION)


def in_steps(seconds: float, step_seconds: float) -> Fraction:
    """A time in inner steps of the round; 0 where nobody knows how long they take."""
    return Fraction(seconds / step_seconds).limit_denominator(_PRECISION) if step_seconds else _NONE


def time_of(own_step: int, own_steps: int, inner_steps: int) -> Fraction:
    """When a worker has made that step of its own, in inner steps of the round."""
    return Fraction(own_step * inner_steps, own_steps)


def made_at(time: int, own_steps: int, inner_steps: int) -> int:
    """Steps of its own that a worker has made then."""
    return time * own_steps // inner_steps


@dataclass(frozen=True, order=True)
class Arrival:
    """time: of the worker's last step, in inner steps of the round. stop: the first that is not earlier."""

    time: Fraction
    worker: int

    @property
    def stop(self) -> int:
        return math.ceil(self.time)


@dataclass(frozen=True)
class Legs:
    """What a worker does in a round. made: when each of its steps is. ends: when it arrives. begun: steps of its leg
    that are made after the round. late: inner steps until the answer is there, then; negative: of its next step, which
    part is made.
    """

    made: tuple[Fraction, ...]
    ends: tuple[Fraction, ...]
    begun: int
    late: Fraction

    @property
    def turns(self) -> tuple[int, ...]:
        """During which inner steps of the round, from 0, it makes its own."""
        return tuple(math.ceil(time) - 1 for time in self.made)


def legs(
    own_steps: int, inner_steps: int, leg: int, begun: int = 0, late: Fraction = _NONE, travel: Fraction = _NONE
) -> Legs:
    """A round of a worker that arrives after every `leg` steps of its own, and waits so long for the answer.

    It makes one step at least: where none is done in time, at the end of the round, for which it may have to hurry.

    Args:
        own_steps: for which there is time in a round without waiting, at least 1.
        begun, late: after the round before.
        travel: of an exchange, in inner steps of the round.
    """
    length = time_of(1, own_steps, inner_steps)
    time, made, ends = late if late > 0 else late * length, [], []
    while time + length <= inner_steps or not made:
        time = min(time + length, Fraction(inner_steps))
        made.append(time)
        begun += 1
        if begun == leg:
            ends.append(time)
            begun, time = 0, time + travel
    over = time - inner_steps
    # A whole step would be one of the round that has ended.
    return Legs(tuple(made), tuple(ends), begun, over if over > 0 else max(over / length, _PART))


@dataclass(frozen=True)
class LegRound:
    """A round of all workers. legs: of each, by number. arrivals: those first who are done first, ties in the order of
    workers."""

    legs: Mapping[int, Legs]
    arrivals: tuple[Arrival, ...]

    @property
    def values(self) -> dict[str, float]:
        """What there is to remember of workers after the round, by name."""
        late = {f"late_{worker}": float(own.late) for worker, own in self.legs.items() if own.late}
        return {f"begun_{worker}": own.begun for worker, own in self.legs.items()} | late


@functools.lru_cache(maxsize=16)
def _leg_round(starts: tuple[tuple[int, int, int, float], ...], inner_steps: int, leg: int, travel: Fraction):
    each = {
        worker: legs(own, inner_steps, leg, begun, Fraction(late).limit_denominator(_PRECISION), travel)
        for worker, own, begun, late in starts
    }
    found = (Arrival(time, worker) for worker, own in each.items() for time in own.ends)
    return LegRound(each, tuple(sorted(found)))


def leg_round(
    own_steps: Mapping[int, int], inner_steps: int, leg: int, values: Mapping[str, float], travel: Fraction = _NONE
) -> LegRound:
    """The round of workers that arrive after every `leg` steps of their own; see `legs`.

    Args:
        own_steps: by number. values: after the round before; a worker without any begins a leg.
    """
    starts = (
        (worker, own, int(values.get(f"begun_{worker}", 0)), values.get(f"late_{worker}", 0.0))
        for worker, own in own_steps.items()
    )
    return _leg_round(tuple(starts), inner_steps, leg, travel)


@dataclass(frozen=True)
class Collected:
    """workers: who gives. stop: when. back: when the answer is with them; later than the round, in one to come."""

    stop: int
    workers: tuple[int, ...]
    back: int


def collections(
    own_steps: Sequence[int],
    inner_steps: int,
    period: int,
    ready: Sequence[int],
    quorum: int,
    grace: Fraction = _NONE,
    travel: Fraction = _NONE,
    back: int = 0,
) -> list[Collected]:
    """When a server collects something in a round, and from whom.

    It waits until `quorum` workers are ready, or all if there are fewer, and `grace` longer; not when all are. Who is
    ready by then gives at the next stop, has an answer `travel` later, and is ready again `period` steps after it gave.
    Nothing is collected before the last answer is there.

    Args:
        own_steps: of every worker in the round.
        ready: after how many of these each is ready; 0 or less: it has been since then.
        back: when the answer of a round before is there.
    """
    ready, found, stop = list(ready), [], 0
    while True:
        times = [time_of(step, own, inner_steps) for step, own in zip(ready, own_steps, strict=True)]
        in_order = sorted(times)
        closes = max(min(in_order[min(quorum, len(times)) - 1] + grace, in_order[-1]), back)
        stop = max(math.ceil(closes), stop + 1)
        if stop > inner_steps:
            return found
        workers = tuple(worker for worker, time in enumerate(times) if time <= closes)
        back = math.ceil(stop + travel)
        found.append(Collected(stop, workers, back))
        for worker in workers:
            ready[worker] = made_at(stop, own_steps[worker], inner_steps) + period


def forget(values: dict[str, float], workers: Collection[int] | None = None) -> None:
    """Drop the values of these workers, or of all: those whose names end with the number of one."""
    for name in [*values]:
        number = name.rpartition("_")[2]
        if number.isdigit() and (workers is None or int(number) in workers):
            del values[name]
