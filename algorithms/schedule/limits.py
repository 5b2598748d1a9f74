"""The length of a run: how much of it is done, and how many inner steps the next round has."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

# Steps that are counted at once where a round would have more.
_COUNTED = 1024


@dataclass(frozen=True)
class Done:
    """What a run has used up, or will have: rounds, examples and tokens, all trainers together."""

    outer_steps: int
    examples: int
    tokens: int


@dataclass(frozen=True)
class RoundSchedule:
    """One round: its inner steps, and how much of the run is done before and after, 0 to 1."""

    inner_steps: int
    progress_before: float
    progress_after: float

    def in_rounds(self, done: int, left: int) -> "RoundSchedule":
        """The same with its progress counted in rounds, of which so many are done and left; the end stays the end."""
        after = 1.0 if self.progress_after >= 1.0 else (done + 1) / (done + left)
        return RoundSchedule(self.inner_steps, done / (done + left), after)


@dataclass(frozen=True)
class Limits:
    """Where a run ends, at the first limit that is reached; None: no limit of that kind.

    outer_steps: rounds. examples: may be a fraction, of a number of epochs. tokens: of training.
    """

    outer_steps: int | None
    examples: float | None
    tokens: int | None

    def progress(self, done: Done) -> float:
        """How much of the run is done, 0 to 1: the largest share of any limit."""
        shares = [
            used / limit
            for used, limit in (
                (done.outer_steps, self.outer_steps),
                (done.examples, self.examples),
                (done.tokens, self.tokens),
            )
            if limit
        ]
        return min(max(shares, default=0.0), 1.0)

    def next_round(
        self, done: Done, inner_steps: int, examples: Callable[[int], int], tokens: Callable[[int], int]
    ) -> RoundSchedule:
        """The next round; the last one is cut short so that a limit is exceeded by less than one inner step.

        Args:
            done: before it.
            inner_steps: of a whole round.
            examples: of the next so many inner steps, all trainers together.
            tokens: likewise.
        """
        steps = inner_steps
        if self.examples:
            steps = _steps_until(self.examples - done.examples, steps, examples)
        if self.tokens:
            # Steps differ in their tokens where examples do.
            steps = _steps_until(self.tokens - done.tokens, steps, tokens)
        after = Done(done.outer_steps + 1, done.examples + examples(steps), done.tokens + tokens(steps))
        return RoundSchedule(steps, self.progress(done), self.progress(after))


def _steps_until(amount: float, most: int, count: Callable[[int], int]) -> int:
    """The fewest steps, from 1 to `most`, that have so much; `most` may be far more than anybody could count."""
    end = min(most, _COUNTED)
    while end < most and count(end) < amount:
        end = min(most, 2 * end)
    return 1 + bisect_left(range(1, end), amount, key=count)
