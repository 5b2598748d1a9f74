"""How long the rounds of a rehearsed run take, on devices of a given speed and over a given link."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.exchanges import Exchange
from algorithms.virtual_clock import Clocks
from benchmarks.accounting import Hardware, compute_seconds
from benchmarks.clocks import Network
from benchmarks.planning.rehearsal import Round, TrainerRound
from utils.config import Config

NO_LINK = Network("none", math.inf, 0.0)


@dataclass(frozen=True)
class Durations:
    """Seconds since the start at the end of every round, evaluation and checkpoints excluded; and what of the last
    nodes compute, when nothing takes time to send; 0 where the speed of devices is not known."""

    ends: tuple[float, ...]
    computing: float

    @property
    def total(self) -> float:
        return self.ends[-1]

    @property
    def communicating(self) -> float:
        """Share of the time in which nodes wait for each other's bytes."""
        return 1.0 - self.computing / self.total if self.total else 0.0


def _computing(
    config: dict, hardware: Hardware | None, part: TrainerRound, inner_steps: int, busy: Counter
) -> dict[int, tuple[float, float]]:
    """By node the seconds of an inner step of a trainer's round, and of the statistics of that round.

    Of nodes with given speeds the fastest is as fast as the hardware; others share a device in turns, and are as fast
    as the hardware where all of it work. busy: how many of each device do.
    """
    if hardware is None:
        return dict.fromkeys(part.nodes, (0.0, 0.0))
    row, found = {"gradient_sample_size": 1.0 if part.tested else math.nan}, {}
    fastest = max(config["node_speeds"] or part.speeds)
    for node, speed, plan, own in zip(part.nodes, part.speeds, part.plans, part.steps, strict=True):
        step, statistics = compute_seconds(row, config, hardware, plan.effective_batch, plan.accumulation_steps)
        slower = fastest / speed
        if config["node_speeds"] is None:
            slower *= busy[node // config["nodes_per_gpu"]] / config["nodes_per_gpu"]
        found[node] = slower * step * own / inner_steps, slower * statistics
    return found


def _ends(rounds: Sequence[Round], config: Config, hardware: Hardware | None, network: Network, nodes: int) -> list:
    values, clocks, found = dataclasses.asdict(config), Clocks(network, nodes), []

    def together(exchange: Exchange | None) -> None:
        if exchange is not None and exchange.sent:
            clocks.together(network.seconds(exchange.link))

    for number in rounds:
        together(number.redistributed)
        busy = Counter(node // config.nodes_per_gpu for part in number.trainers for node in part.nodes)
        for part in number.trainers:
            computing = _computing(values, hardware, part, number.inner_steps, busy)
            sendings = [event.sending(range(len(part.nodes))) for event in part.events]
            clocks.round(
                part.trainer,
                list(computing),
                number.inner_steps,
                *zip(*computing.values(), strict=True),
                sendings,
            )
        clocks.rest(set(range(nodes)) - {node for part in number.trainers for node in part.nodes})
        if len(number.trainers) > 1:
            clocks.meet()
        together(number.merge)
        found.append(clocks.elapsed)
    found[-1] = clocks.arrived
    return found


def durations(
    rounds: Sequence[Round], config: Config, hardware: Hardware | None, network: Network, nodes: int
) -> Durations:
    """Of a run on so many nodes.

    Args:
        hardware: of a node; None: not known, and only what is sent takes time.
    """
    computing = 0.0 if hardware is None else _ends(rounds, config, hardware, NO_LINK, nodes)[-1]
    return Durations(tuple(_ends(rounds, config, hardware, network, nodes)), computing)
