"""What a run will need: model, memory, batches, rounds, bytes, seconds, communications; nothing is trained.

What only training or the data tell is said to be unknown: `unknown` has a line for each.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.distribution import distribute_nodes
from algorithms.synchronisation import METHODS, Method
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from benchmarks.compare.accounting import Hardware
from benchmarks.compare.network import Network
from fabrics.config_checks import CHECKS, CHOICES
from fabrics.data.dataset_loader import DATASETS, load_data
from fabrics.models.flops import flops_per_token
from fabrics.models.meta_model import META, StepSizes, meta_model, step_sizes
from fabrics.models.model_family import ModelFamily
from fabrics.models.registry import MODELS
from fabrics.planning.durations import NO_LINK, Durations, computing_seconds, durations
from fabrics.planning.expected import Expected, expected_communications
from fabrics.planning.fitting import Demand, device_loads, probe_batch, refusal, smallest_micro_batch
from fabrics.planning.memory import Kept, Memory, Placement, whole_bytes
from fabrics.planning.rehearsal import Absent, Rehearsal, Round, TrainerRound, UnreadExamples
from fabrics.pool.node_pool import check_modules
from fabrics.sharding.checks import looked_at_by
from fabrics.sharding.model_layers import passed_bytes
from fabrics.training.flat_model import WorkingModel
from fabrics.training.method_config import method_settings
from training_logs.showing.prediction import lawless
from utils.config.reading import parse_config
from utils.config.schema import Config, ConfigError
from utils.distributed.placement import share_of
from utils.utils import json_text

# More than any run reads: examples, and how many fit at a time, where nobody knows.
_ENDLESS = 1 << 50


@dataclass(frozen=True)
class Asked:
    """What is planned for, besides the configuration.

    devices: of all machines; None: those that `devices` names, or else one island. memory: bytes of each; None: not
    known. tflops: TFLOP/s that each really does; None: not known. links: that may connect nodes.
    """

    devices: int | None = None
    memory: int | None = None
    tflops: float | None = None
    links: tuple[Network, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Examples that a trainer requests for all its workers; micro-batch and accumulation steps of who has most."""

    request: int
    workers: int
    micro_batch: int
    accumulation_steps: int


@dataclass(frozen=True)
class Checkpoints:
    """How many are written by rounds, and by the clock besides (None: not known, or off); bytes of their tensors."""

    by_rounds: int
    by_time: int | None
    first_bytes: int
    last_bytes: int


@dataclass(frozen=True)
class OverLink:
    """A run over a link: seconds of a round on average, and in all, and the share of them in which nodes wait for bytes
    (None: how fast devices compute is not known, and only what is sent takes time)."""

    link: str
    seconds_per_round: float
    seconds: float
    communicating: float | None


@dataclass(frozen=True)
class Bytes:
    """What nodes send each other, all together, as the logs of a run count it."""

    synchronised: int
    merged: int
    redistributed: int


@dataclass(frozen=True)
class Plan:
    """A run before it is begun.

    memory: of the device that needs most, with the largest micro-batch. whole_bytes: what the devices of an island send
    each other whenever tensors are needed whole, by when that is, in words.
    """

    parameters: int
    devices: int
    nodes: int
    trainers: int
    placement: Placement
    memory: Memory
    start: Batch
    cap: Batch | None
    rounds: int
    tokens: int
    first_round_tokens: int
    last_round_tokens: int
    checkpoints: Checkpoints
    first_round_bytes: Bytes
    last_round_bytes: Bytes
    bytes: Bytes
    whole_bytes: dict[str, int]
    communications: int
    compute_seconds: float | None
    links: tuple[OverLink, ...]
    expected: Expected | None
    unknown: tuple[str, ...]
    warnings: tuple[str, ...]

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        values = dataclasses.asdict(self)
        values["memory"] |= {"device": self.memory.device, "between_rounds": self.memory.between_rounds}
        return values


class Planner:
    """What does not depend on the largest micro-batch of a run: model, nodes, and data as far as they are known.

    step: what a step keeps, where it is known of the same model.

    Raises:
        ConfigError: a run would refuse the configuration.
    """

    def __init__(self, config: Config, asked: Asked, step: StepSizes | None = None):
        self.config, self.asked, self.placement = config, asked, Placement.of(config)
        self.unknown: list[str] = []
        each = self.placement.devices_per_node
        self.devices = asked.devices or (len(config.devices) if config.devices and not self.placement.on_host else each)
        if self.devices % each:
            raise ConfigError(f"--devices: must be a multiple of devices_per_node, {each}, got {self.devices}")
        self.nodes_of = self._placed(self.devices // each)
        self._read_data()
        module, assumed = meta_model(config, self.data)
        if assumed:
            self.unknown.append(
                f"the vocabulary: the tokenizer is not trained yet, and taken to have {config.vocab_size} tokens"
            )
        self.working = WorkingModel(module, META)
        check_modules(config, self.working)
        self.kept = Kept.of(config, self.working)
        self.step = step or step_sizes(meta_model(config, self.data)[0], config)
        if self.step is None:
            self.unknown.append("activations: this model takes nothing but real numbers; memory is without them")
        elif config.activation_checkpointing and self.step.recomputed is None:
            self.unknown.append("what a layer computes again: a rough estimate, as layers here cannot be called alone")
        if self.placement.on_host:
            self.unknown.append("on CPUs: freed memory that the allocator keeps, and the copy that a checkpoint is of")
        self.island = self._island()

    def _placed(self, islands: int) -> tuple[Sequence[int], ...]:
        """The nodes of every device, or island: as `share_out` of `utils.distributed.placement` gives them to
        processes."""
        each, size = self.config.nodes_per_gpu, self.placement.devices_per_node
        if not self.placement.on_host or size == 1:
            return tuple(range(island * each, (island + 1) * each) for island in range(islands))
        # The processes of a machine have its CPUs in common, and so its nodes.
        if islands > each:
            raise ConfigError(
                f"--devices: {self.devices} processes on CPUs are {islands} islands of devices_per_node {size}, and a "
                f"machine has {each} nodes for them (nodes_per_gpu); every island needs one"
            )
        return tuple(share_of(range(each), island, islands) for island in range(islands))

    @property
    def groups(self) -> int:
        """Groups of nodes that communicate for nothing: devices, or islands, and all of a machine's CPUs together."""
        return self.nodes // self.config.nodes_per_gpu

    def _processes(self) -> Absent:
        return Absent([META] * self.groups, self.config.nodes_per_gpu)

    def _read_data(self) -> None:
        """Read the data only where their number ends the run, or a model of somebody's own has an output for each of
        their classes."""
        config, self.data = self.config, None
        task, family = DATASETS[config.dataset].task, MODELS[config.model_type]
        asks = isinstance(family, ModelFamily) and task == "classification"
        if asks or config.number_of_training_epochs is not None:
            self.data = load_data(config, self._processes())
            self.examples = self.data.train
            return
        self.examples = UnreadExamples(_ENDLESS, config.sequence_length)
        self.unknown.append("the data: they are not read, and taken to be enough for all requests and samples")
        if not config.packing or task != "causal_lm":
            self.unknown.append("tokens: all sequences are taken to be as long as sequence_length")

    def _island(self) -> Hardware | None:
        """One, or a device, at the given speed, which its nodes share; None: it is not known."""
        if self.asked.tflops is None:
            return None
        length = self.config.sequence_length
        flops = flops_per_token(self.working.module, length) * length
        if self.placement.activation_checkpointing:
            flops *= 4.0 / 3.0  # one more forward pass
        return Hardware("island", 0.0, flops / (1e12 * self.asked.tflops * self.placement.devices_per_node))

    @property
    def nodes(self) -> int:
        """Of the run."""
        return sum(map(len, self.nodes_of))

    def _seconds(self, parts: Sequence[TrainerRound], inner_steps: int) -> float:
        """That a round takes to compute, as a run with a budget of seconds would measure it."""
        return computing_seconds(dataclasses.asdict(self.config), self.island, parts, inner_steps, self.nodes_of)

    @property
    def moves(self) -> bool:
        """Whether requests move in the run."""
        config = self.config
        return config.sampling_method != "none" or bool(config.batch_schedule) or config.plans_batches

    def rehearse(self, max_batch: int) -> tuple[Rehearsal, list[Round]]:
        """The rounds of the run with such a max batch."""
        seconds = None if self.island is None else self._seconds
        shares = self.data and self.data.shares and self.data.shares.sizes
        rehearsal = Rehearsal(self.config, self.working, self.examples, self.groups, max_batch, seconds, shares)
        return rehearsal, list(rehearsal.rounds())

    def demand(self, rounds: Sequence[Round]) -> Demand:
        """What these rounds ask of the memory of a device."""
        found = {tuple((part.trainer, part.all_nodes) for part in one.trainers): None for one in rounds}
        if self.config.smallest_worker_batch is not None and self.moves:  # all nodes have work in the end
            groups = {node: node for node in range(self.nodes)}
            for trainers in [[trainer for trainer, _ in assignment] for assignment in found]:
                found[tuple(distribute_nodes(dict.fromkeys(trainers, 1), groups).items())] = None
        return Demand(self.kept, self.step, device_loads(self.config, list(found), self.nodes_of), self.placement)

    def largest_request(self, rehearsal: Rehearsal) -> int | None:
        """Of a trainer, ever, in examples; None: nothing bounds it that is known."""
        bounds = [self.config.max_requested_batch or (rehearsal.largest_request if self.data else None)]
        if self.config.batch_schedule:
            bounds.append(int(max(batch for _, batch in self.config.batch_schedule)))
        return min((bound for bound in bounds if bound is not None), default=None)

    def workers_of(self, request: int, part: TrainerRound, trainers: int) -> int:
        """Of a trainer with so many others that has them as in a round, when its request is so large."""
        smallest = self.config.smallest_worker_batch
        if smallest is None or not self.moves:
            return len(part.nodes)
        return max(len(part.nodes), min(self.nodes // trainers, request // smallest))


def _batch(config: Config, request: int, part: TrainerRound, max_batch: int, workers: int | None = None) -> Batch:
    """A request of the trainer, with the plan of the worker that has most of it; workers: other than in this round."""
    workers = workers or len(part.nodes)
    speeds = part.speeds if config.balance == "batch" and workers == len(part.nodes) else None
    plans = execution_plans(config.switch_mode, request, [max_batch] * workers, config.switch_multiplier, speeds)
    plan = max(plans, key=lambda plan: plan.effective_batch)
    return Batch(request, workers, max(plan.micro_batches), plan.accumulation_steps)


def _checkpoints(config: Config, kept: Kept, rounds: Sequence[Round], times: Durations | None) -> Checkpoints:
    every, minutes, count = config.save_weights_every, config.checkpoint_every_minutes, len(rounds)
    due = {number for number in range(1, count + 1) if every and number % every == 0} | {count}
    by_time, last = None, 0.0
    if times is not None and minutes is not None:
        by_time = 0
        for number, end in enumerate(times.ends, 1):
            late = end - last >= 60.0 * minutes
            by_time += late and number not in due
            last = end if late or number in due else last

    def size(one: Round) -> int:
        workers = sum(len(part.all_nodes) for part in one.trainers)
        return kept.state_bytes(len(one.trainers), workers)

    return Checkpoints(len(due), by_time, size(rounds[0]), size(rounds[-1]))


def without_law(config: Config) -> str | None:
    """Why the laws of communications are not about such a run; None: they are."""
    method, speeds = METHODS[config.distributed_algo], set(config.node_speeds or ())
    # Those that wait for a server do so however fast they are.
    waits = speeds and method.turns is not Method.turns and (config.link_bits_per_second or config.link_latency_seconds)
    fewer = bool(waits or len(speeds) > 1) and method.fewer_steps(method_settings(config))
    return lawless(dataclasses.asdict(config), fewer)


def _expected(planner: Planner, rehearsal: Rehearsal, rounds: Sequence[Round]) -> Expected | None:
    """By the laws, which are about the rounds after the last merge; None: they are not about such a run."""
    config, last = planner.config, rounds[-1]
    if without_law(config) is not None:
        return None
    merged = next((one.totals for one in reversed(rounds) if one.merge is not None), None)
    after = [one for one in rounds[-2:] if len(one.trainers) == len(last.trainers)]  # the last may be cut short
    largest = planner.largest_request(rehearsal)
    return expected_communications(
        examples=last.totals.examples,
        done=(merged.examples, merged.communications) if merged else (0, 0),
        per_round=max(sum(event.communicates for part in one.trainers for event in part.events) for one in after),
        batch=sum(part.batch for part in last.trainers),
        largest=None if largest is None else largest * len(last.trainers),
        inner_steps=config.number_of_inner_steps_between_outers,
        growth=config.max_batch_growth,
    )


def _round_bytes(one: Round) -> Bytes:
    return Bytes(*(round(part.sent) if part else 0 for part in (one.synchronised, one.merge, one.redistributed)))


def _over(planner: Planner, rounds: Sequence[Round], network: Network) -> Durations:
    return durations(rounds, planner.config, planner.island, network, planner.nodes_of)


def _unknown(planner: Planner, rehearsal: Rehearsal, max_batch: int | None) -> list[str]:
    """What the plan cannot know, in words."""
    config, found = planner.config, list(planner.unknown)
    if max_batch is None:
        found.append(
            "the max batch: a run measures it; without --device-memory and max_batch_size all are taken to fit"
        )
    if config.sampling_method != "none":
        found.append("how the batch test moves the batch: rounds and bytes are those of a batch that stays")
    if config.smallest_worker_batch is not None and planner.moves:
        found.append("when workers join: they do as the batch grows, and bytes with them")
    if (reason := without_law(config)) is not None:
        found.append(f"communications by the laws, which are not about such a run: {reason}")
    if COMMUNICATION_DTYPES[config.communication_dtype].adapts:
        found.append("the levels of the encoding, which follow the loss: bytes are those of the first")
    if config.plans_batches:
        found.append("the noise scale, which shapes planned batches")
    if method := rehearsal.unforeseen:
        found.append(f"when workers communicate: {method}")
    if config.checkpoint_every_minutes is not None and planner.asked.tflops is None:
        found.append("checkpoints by the clock: without --tflops nothing says how long computing takes")
    if planner.placement.devices_per_node > 1:
        found.append("how long devices of an island take for what they send each other")
    return found


def _whole_bytes(config: Config, working: WorkingModel, step: StepSizes | None) -> dict[str, int]:
    """See Plan."""
    if config.devices_per_node == 1:
        return {}
    cast = None if config.autocast is None else getattr(torch, config.autocast).itemsize
    found = {"each micro-batch": passed_bytes(working.module, config.devices_per_node, cast, step.once if step else ())}
    whens = "each message of a worker, and each mean", "each inner step of a worker"
    itemsize = working.parameters.element_size()
    for when, numbers in zip(whens, looked_at_by(config, working), strict=True):
        size = sum(working.blocks[number].size for number in numbers)
        if sent := whole_bytes(size, itemsize, config.devices_per_node):
            found[when] = sent
    return found


def _works(planner: Planner, change: dict) -> bool:
    """Whether a run with such a change of where things are and of how many, not of the model, is a run, and fits."""
    try:
        values = json.loads(json_text(dataclasses.asdict(planner.config) | change))
        _plan(Planner(parse_config(values, (), CHOICES, CHECKS)[0], planner.asked, planner.step), advise=False)
    except ConfigError:
        return False
    return True


def make_plan(config: Config, asked: Asked) -> Plan:
    """The plan of a run.

    Raises:
        ConfigError: a run would refuse the configuration, or it does not fit into the memory that is given.
    """
    return _plan(Planner(config, asked), advise=True)


def _plan(planner: Planner, advise: bool) -> Plan:
    """See make_plan; advise: of a run that does not fit, look for a change with which it would."""
    config, asked = planner.config, planner.asked
    least, max_batch = smallest_micro_batch(config), config.max_batch_size
    if max_batch is None and asked.memory is not None and planner.step is not None:
        budget = config.padding_percentage * asked.memory
        max_batch = max(least, planner.demand(planner.rehearse(_ENDLESS)[1]).largest(budget))
    rehearsal, rounds = planner.rehearse(max_batch or _ENDLESS)
    demand, last = planner.demand(rounds), rounds[-1]
    start = _batch(config, config.INITIAL_BATCH_SIZE, rounds[0].trainers[0], max_batch or _ENDLESS)
    largest = planner.largest_request(rehearsal) if planner.moves else config.INITIAL_BATCH_SIZE
    cap = None
    if largest is not None:
        part = last.trainers[0]
        cap = _batch(
            config, largest, part, max_batch or _ENDLESS, planner.workers_of(largest, part, len(last.trainers))
        )
    micro_batch = max(start.micro_batch, cap.micro_batch if cap else max_batch or 0)
    micro_batch = max(micro_batch, probe_batch(config, max_batch or _ENDLESS))
    if asked.memory is not None:
        share = config.padding_percentage
        problem = refusal(
            demand, micro_batch, least, asked.memory, share, lambda change: advise and _works(planner, change)
        )
        if problem is not None:
            raise ConfigError(problem)
    computing = None if planner.island is None else _over(planner, rounds, NO_LINK)
    over = [(network.name, _over(planner, rounds, network)) for network in asked.links]
    totals, known = last.totals, planner.island is not None
    before = rounds[-2].totals.tokens if len(rounds) > 1 else 0
    return Plan(
        parameters=planner.working.parameter_count,
        devices=planner.devices,
        nodes=planner.nodes,
        trainers=config.number_of_initial_trainers,
        placement=planner.placement,
        memory=demand.memory(micro_batch),
        start=start,
        cap=cap,
        rounds=len(rounds),
        tokens=totals.tokens,
        first_round_tokens=rounds[0].totals.tokens,
        last_round_tokens=totals.tokens - before,
        checkpoints=_checkpoints(config, planner.kept, rounds, over[0][1] if over and known else computing),
        first_round_bytes=_round_bytes(rounds[0]),
        last_round_bytes=_round_bytes(last),
        bytes=Bytes(totals.bytes_synchronised, totals.bytes_merged, totals.bytes_redistributed),
        whole_bytes=_whole_bytes(config, planner.working, planner.step),
        communications=totals.communications,
        compute_seconds=None if computing is None else computing.total,
        links=tuple(
            OverLink(name, times.total / len(rounds), times.total, times.communicating if known else None)
            for name, times in over
        ),
        expected=_expected(planner, rehearsal, rounds),
        unknown=tuple(_unknown(planner, rehearsal, max_batch)),
        warnings=tuple(rehearsal.warnings),
    )
