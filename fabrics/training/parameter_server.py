"""How long workers that reach a server wait for its answer, over the link of a configuration, and what they do then."""

import math
from collections.abc import Mapping, Sequence

from algorithms.nodes.async_clock import in_steps
from algorithms.nodes.communication_rounds import Link
from algorithms.synchronisation.encodings.encoding import PLAIN
from fabrics.training.work_split import Turns
from fabrics.training.worker_group import Workforce
from utils.config.schema import Config


def server_seconds(config: Config, workforce: Workforce, numbers: int) -> float:
    """Until so many numbers of a worker are with a server and its answer back."""
    if len(workforce) == 1:
        return 0.0
    there = workforce.encoding
    back = PLAIN if workforce.method.delivers else there.way_back
    sent = sum(way.sent_bytes(numbers, workforce.dtype) for way in (there, back))
    return Link(config.link_bits_per_second or math.inf, config.link_latency_seconds).seconds(sent)


def worker_turns(config: Config, workforce: Workforce, values: Mapping[str, float]) -> Turns:
    """During which inner steps of the round at hand workers make their own; values: of the method."""

    def found(own_steps: Mapping[int, int], inner_steps: int, step_seconds: float) -> Mapping[int, Sequence[int]]:
        travel = in_steps(server_seconds(config, workforce, workforce.parameter_count), step_seconds)
        return workforce.method.turns(own_steps, inner_steps, values, travel)

    return found
