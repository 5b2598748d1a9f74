"""How long the rounds of a rehearsed run take, on devices of a given speed and over a given link."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.nodes.communication_rounds import Exchange
from algorithms.nodes.virtual_clock import Clocks, together
from benchmarks.compare.accounting import Hardware, compute_seconds
from benchmarks.compare.network import Network
from fabrics.planning.rehearsal import Round, TrainerRound
from utils.config.schema import Config

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


# Of a trainer's round by node: the seconds of an inner step, and of the statistics of that round.
Computing = dict[int, tuple[float, float]]


def _alone(config: dict, hardware: Hardware, part: TrainerRound, inner_steps: int) -> Computing:
    """What every node computes for a trainer where it has the device for itself; the fastest is as fast as that."""
    row, found = {"gradient_sample_size": 1.0 if part.tested else math.nan}, {}
    fastest = max(config["node_speeds"] or part.speeds)
    for node, speed, plan, own in zip(part.nodes, part.speeds, part.plans, part.steps, strict=True):
        step, statistics = compute_seconds(row, config, hardware, plan.effective_batch, plan.accumulation_steps)
        found[node] = fastest / speed * step * own / inner_steps, fastest / speed * statistics
    return found


def _computing(
    config: dict,
    hardware: Hardware | None,
    parts: Sequence[TrainerRound],
    inner_steps: int,
    devices: Sequence[Sequence[int]],
) -> list[Computing]:
    """The same of all trainers, as long as it takes on devices that nodes share.

    The nodes of a device have it in turns, and are done when it has done what all of them have to do: one whose
    neighbours are idle has it for itself. Nodes with given speeds share none: the fastest is as fast as one of a device
    whose nodes all work.
    """
    if hardware is None:
        return [dict.fromkeys(part.nodes, (0.0, 0.0)) for part in parts]
    alone, totals = [_alone(config, hardware, part, inner_steps) for part in parts], Counter()
    for part in alone:  # a node may have several trainers, in turn
        for node, (step, statistics) in part.items():
            totals[node] += inner_steps * step + statistics
    if config["node_speeds"] is not None:
        longer = dict.fromkeys(totals, max(map(len, devices)))
    else:
        shared = {node: sum(totals[other] for other in own) for own in devices for node in own}
        longer = {node: shared[node] / total for node, total in totals.items()}
    return [
        {node: (longer[node] * step, longer[node] * statistics) for node, (step, statistics) in part.items()}
        for part in alone
    ]


def computing_seconds(
    config: dict,
    hardware: Hardware,
    parts: Sequence[TrainerRound],
    inner_steps: int,
    devices: Sequence[Sequence[int]],
) -> float:
    """Of a round of all trainers, until the last node has computed what it has to; see `durations`."""
    totals: Counter[int] = Counter()
    for part in _computing(config, hardware, parts, inner_steps, devices):
        for node, (step, statistics) in part.items():
            totals[node] += inner_steps * step + statistics
    return max(totals.values())


def _ends(
    rounds: Sequence[Round],
    config: Config,
    hardware: Hardware | None,
    network: Network,
    devices: Sequence[Sequence[int]],
) -> list[float]:
    nodes = {node for own in devices for node in own}
    values, clocks, found = dataclasses.asdict(config), Clocks(network, len(nodes)), []

    def all_wait(exchange: Exchange | None) -> None:
        if exchange is not None and exchange.sent:
            clocks.together(network.seconds(exchange.link))

    for number in rounds:
        all_wait(number.redistributed)
        by_trainer = _computing(values, hardware, number.trainers, number.inner_steps, devices)
        for part, computing in zip(number.trainers, by_trainer, strict=True):
            sendings = together(event.sending(range(len(part.nodes))) for event in part.events)
            clocks.round(
                part.trainer,
                list(computing),
                number.inner_steps,
                *zip(*computing.values(), strict=True),
                sendings,
            )
        clocks.rest(nodes - {node for part in number.trainers for node in part.nodes})
        if len(number.trainers) > 1:
            clocks.meet()
        all_wait(number.merge)
        found.append(clocks.elapsed)
    found[-1] = clocks.arrived
    return found


def durations(
    rounds: Sequence[Round],
    config: Config,
    hardware: Hardware | None,
    network: Network,
    devices: Sequence[Sequence[int]],
) -> Durations:
    """Of a run on the nodes of these devices.

    Args:
        hardware: of a device, or island, as long as one node works there; None: not known, and only what is sent takes
            time.
    """
    computing = 0.0 if hardware is None else _ends(rounds, config, hardware, NO_LINK, devices)[-1]
    return Durations(tuple(_ends(rounds, config, hardware, network, devices)), computing)
