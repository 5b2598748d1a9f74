"""Progress and end of a run, and the inner steps of its next round."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

# Longer rounds are first tried with this many inner steps.
_FIRST_TRIED = 1024
_ANY_STEPS = 2**31


@dataclass
class RunCounters:
    """Resources that a run has used so far, over all trainers.

    Bytes are those that nodes send each other, counted as if every node were a machine of its own.

    Attributes:
        outer_steps: rounds.
        rounds_alone: rounds in which one worker worked alone, although there are several nodes.
        bytes_synchronised: of the workers of trainers.
        bytes_merged: of merges.
        bytes_redistributed: of state that moves with nodes.
        link_bytes_merged: of merges, through the busiest node's link.
        link_bytes_redistributed: of state that moves with nodes, likewise.
        left_out: workers whose updates were left out of a mean.
        lost_messages: workers whose messages were lost.
        training_seconds: measured.
        evaluation_seconds: measured.
        link_seconds: of exchanges over the simulated link, in a run with a `time_budget` of measured seconds.
        simulated_seconds: on the virtual clock, in a run with a `time_budget` and `node_speeds`.
        measured_seconds: training seconds without the first round, which also compiles and allocates.
        measured_examples: examples without the first round.
    """

    outer_steps: int = 0
    examples: int = 0
    tokens: int = 0
    communications: int = 0
    bytes_synchronised: int = 0
    bytes_merged: int = 0
    bytes_redistributed: int = 0
    link_bytes_merged: float = 0.0
    link_bytes_redistributed: float = 0.0
    left_out: int = 0
    lost_messages: int = 0
    rounds_alone: int = 0
    training_seconds: float = 0.0
    evaluation_seconds: float = dataclasses.field(default=0.0, compare=False)
    link_seconds: float = 0.0
    simulated_seconds: float = 0.0
    measured_seconds: float = 0.0
    measured_examples: int = 0

    @property
    def bytes_communicated(self) -> int:
        return self.bytes_synchronised + self.bytes_merged + self.bytes_redistributed

    def usage(self) -> dict[str, float]:
        """Return examples, tokens and communications so far, as round log and summary name them."""
        return {
            "examples": self.examples,
            "tokens": self.tokens,
            "communications": self.communications,
            "bytes_communicated": self.bytes_communicated,
            "bytes_synchronised": self.bytes_synchronised,
            "bytes_merged": self.bytes_merged,
            "bytes_redistributed": self.bytes_redistributed,
            "link_bytes_merged": self.link_bytes_merged,
            "link_bytes_redistributed": self.link_bytes_redistributed,
        }

    @property
    def seconds_per_example(self) -> float | None:
        """Measured training time; None before the second round."""
        return self.measured_seconds / self.measured_examples if self.measured_examples else None

    def used(self, unit: str) -> float:
        """The amount that counts towards a budget in this unit: communications, bytes or seconds."""
        if unit == "communications":
            return self.communications
        if unit == "bytes":
            return self.bytes_communicated
        return self.simulated_seconds or self.training_seconds + self.link_seconds

    def add_time(self, seconds: float, examples: int) -> None:
        """Add the training time of the round that `outer_steps` already counts."""
        self.training_seconds += seconds
        if self.outer_steps > 1:
            self.measured_seconds += seconds
            self.measured_examples += examples


@dataclass(frozen=True)
class RoundSchedule:
    """One round: its inner steps, and the progress of the run before and after it, 0 to 1."""

    inner_steps: int
    progress_before: float
    progress_after: float


@dataclass(frozen=True)
class Limits:
    """The limits of a run, which ends at the first that is reached; None: no such limit.

    Attributes:
        outer_steps: rounds.
        examples: may be a fraction, from a number of epochs.
        tokens: training tokens.
        seconds: on the virtual clock.
    """

    outer_steps: int | None
    examples: float | None
    tokens: int | None
    seconds: float | None = None

    def progress(self, counters: RunCounters) -> float:
        """The progress of the run, 0 to 1: the largest share of any limit."""
        used = (
            (counters.outer_steps, self.outer_steps),
            (counters.examples, self.examples),
            (counters.tokens, self.tokens),
            (counters.simulated_seconds, self.seconds),
        )
        return min(1.0, max((amount / limit for amount, limit in used if limit), default=0.0))

    def next_round(
        self,
        counters: RunCounters,
        inner_steps: int,
        examples: Callable[[int], int],
        tokens: Callable[[int], int],
        seconds: Callable[[int], float] | None = None,
    ) -> RoundSchedule:
        """Return the next round; the last one is cut so that a limit is exceeded by less than one inner step.

        It is extended to the limit in seconds if no round of one inner step and its exchange would fit after it.

        Args:
            counters: before the round.
            inner_steps: of a whole round.
            examples: from a number of inner steps to the examples of all trainers in them.
            tokens: from a number of inner steps to the tokens of all trainers in them.
            seconds: from a number of inner steps to the seconds of the round with its exchanges; needed with a limit.
        """
        steps = inner_steps
        if self.seconds:
            left = self.seconds - counters.simulated_seconds
            if seconds(steps) + seconds(1) > left:
                steps = _steps_until(left, _ANY_STEPS, seconds)
        if self.examples:
            steps = _steps_until(self.examples - counters.examples, steps, examples)
        if self.tokens:
            steps = _steps_until(self.tokens - counters.tokens, steps, tokens)
        after = dataclasses.replace(
            counters,
            outer_steps=counters.outer_steps + 1,
            examples=counters.examples + examples(steps),
            tokens=counters.tokens + tokens(steps),
            simulated_seconds=counters.simulated_seconds + (seconds(steps) if self.seconds else 0.0),
        )
        return RoundSchedule(steps, self.progress(counters), self.progress(after))


def _steps_until(amount: float, most: int, count: Callable[[int], float]) -> int:
    """The fewest steps, from 1 to `most`, that have this amount. `most` may be too large to be counted."""
    end = min(most, _FIRST_TRIED)
    while end < most and count(end) < amount:
        end = min(most, 2 * end)
    return 1 + bisect_left(range(1, end), amount, key=count)
