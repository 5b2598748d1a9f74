"""What a run has used so far."""

from dataclasses import dataclass

from algorithms.schedule.limits import Done


@dataclass
class RunCounters:
    """What the whole run has used so far, all trainers together.

    Bytes are what nodes send each other, counted as if each were a machine of its own, whatever the processes: for
    synchronisations of a trainer's workers, for merges, and for state that goes with nodes to other trainers.
    link_seconds are those that a link given in the config would add, where the run has a time_budget. measured_* are
    those of all rounds but the first, which also does what is done once (compiling, making room in memory).
    """

    outer_steps: int = 0
    examples: int = 0
    tokens: int = 0
    communications: int = 0
    bytes_synchronised: int = 0
    bytes_merged: int = 0
    bytes_redistributed: int = 0
    left_out: int = 0
    lost_messages: int = 0
    training_seconds: float = 0.0
    link_seconds: float = 0.0
    measured_seconds: float = 0.0
    measured_examples: int = 0

    @property
    def bytes_communicated(self) -> int:
        """All bytes together."""
        return self.bytes_synchronised + self.bytes_merged + self.bytes_redistributed

    @property
    def seconds_per_example(self) -> float | None:
        """Of training, by the rounds measured; None before there is one."""
        return self.measured_seconds / self.measured_examples if self.measured_examples else None

    def took(self, seconds: float, examples: int) -> None:
        """Add what the round that outer_steps counts already took for so many examples."""
        self.training_seconds += seconds
        if self.outer_steps > 1:
            self.measured_seconds += seconds
            self.measured_examples += examples

    def used(self, unit: str) -> float:
        """What counts towards a budget of that unit."""
        return {
            "communications": self.communications,
            "bytes": self.bytes_communicated,
            "seconds": self.training_seconds + self.link_seconds,
        }[unit]

    @property
    def done(self) -> Done:
        """What counts towards the limits of the run."""
        return Done(self.outer_steps, self.examples, self.tokens)

    def count(self, communications: int, bytes_synchronised: int, left_out: int, lost_messages: int = 0) -> None:
        """Add what a trainer's round communicated, and how many of its workers were left out or not heard of."""
        self.communications += communications
        self.bytes_synchronised += bytes_synchronised
        self.left_out += left_out
        self.lost_messages += lost_messages
