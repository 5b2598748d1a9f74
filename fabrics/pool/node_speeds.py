"""How fast nodes are: as the configuration says, or as measured; and when a measurement changes who does how much."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from algorithms.nodes.balance import throughput
from fabrics.training.worker import Node, WorkerRound
from utils.config.schema import Config, ConfigError

# By what share more examples per second there have to be before shares of a batch change.
HYSTERESIS = 0.1
# A measured speed is that of so many rounds, without the first inner step of each.
ROUNDS = 3
# In so many inner steps at least a speed can be measured.
MEASURABLE = 2

# From the speeds of a trainer's nodes, None of those not known, to the examples of each in a round.
Work = Callable[[Sequence[float | None]], Sequence[int]]


def first_speeds(config: Config, nodes: int) -> tuple[float | None, ...]:
    """The speeds that nodes begin with: those given, or none.

    Raises:
        ConfigError: not every node has one.
    """
    given = config.node_speeds
    if given is not None and len(given) != nodes:
        raise ConfigError(f"node_speeds: must be one number for each of the run's {nodes} nodes, got {len(given)}")
    return (None,) * nodes if given is None else tuple(given)


class MeasuredSpeeds:
    """The speeds of nodes as the last rounds have them; the same in every process.

    Args:
        hysteresis: by what share more examples per second there have to be, before shares change.
    """

    def __init__(self, hysteresis: float):
        self._hysteresis = hysteresis
        self._rounds: dict[int, deque[tuple[float, int]]] = {}  # by node: seconds and examples

    def measure(self, workers: Sequence[WorkerRound]) -> None:
        """Take over what a round says."""
        for worker in workers:
            if worker.steady_examples and not worker.failed:
                rounds = self._rounds.setdefault(worker.node, deque(maxlen=ROUNDS))
                rounds.append((worker.steady_seconds, worker.steady_examples))

    def of(self, node: int) -> float | None:
        """Examples per second; None: nothing has been measured."""
        rounds = self._rounds.get(node)
        return None if not rounds else sum(count for _, count in rounds) / sum(seconds for seconds, _ in rounds)

    def change(self, nodes: Sequence[Node], work: Work) -> tuple[dict[int, float], str] | None:
        """New speeds of a trainer's nodes, and why; None: what is in use stays.

        Args:
            nodes: with the speeds in use. work: what they do at any.
        """
        speeds = [self.of(node.id) for node in nodes]
        if None in speeds:
            return None
        before, after = work([node.speed for node in nodes]), work(speeds)
        now, then = throughput(before, speeds), throughput(after, speeds)
        if then <= (1.0 + self._hysteresis) * now:
            return None
        measured = ", ".join(f"{speed:.4g}" for speed in speeds)
        why = (
            f"nodes {', '.join(str(node.id) for node in nodes)} make {measured} examples per second; with "
            f"{' / '.join(map(str, after))} examples a round instead of {' / '.join(map(str, before))} all of them "
            f"together make {then:.4g} instead of {now:.4g}, {then / now - 1:.0%} more"
        )
        return {node.id: speed for node, speed in zip(nodes, speeds, strict=True)}, why

    def state_dict(self) -> dict:
        """As JSON values."""
        return {str(node): list(map(list, rounds)) for node, rounds in self._rounds.items()}

    def load_state_dict(self, state: Mapping) -> None:
        self._rounds = {
            int(node): deque(((seconds, count) for seconds, count in rounds), maxlen=ROUNDS)
            for node, rounds in state.items()
        }
