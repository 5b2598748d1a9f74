"""An estimate of what a run needs, from formulas; nothing is trained and no data are read.

The requested batch is taken to stay `INITIAL_BATCH_SIZE`: how a batch test moves it is not known before a run. P is the
size of the trainable parameters, N the devices of a node.

Memory of a device with t trainers, w workers and p processes on it:

    P / N * (2 p                              parameters and gradients of the working model
             + moments per worker * w         two of AdamW
             + (1 + method's) * t             x of every trainer, and what the method keeps of it
             + method's and encoding's * w)   e.g. an error feedback
    + tensors of a round (fabrics.pool.node_pool.round_tensors)
    + activations and logits of the largest micro-batch, see `activation_bytes`
    + on nodes of several devices the layers that are whole at a time, see `gathered_elements`

Bytes of a round are the method's own statement (`Method.bytes_per_round`) with the encoding's, and those of merges and
redistributions as `algorithms.nodes.communication_rounds` counts them. Seconds are FLOPs over the rate of the devices,
all equally busy, plus latency + bytes / bandwidth of every exchange; nothing overlaps.
"""

import functools
import math
from dataclasses import dataclass, field

from torch import nn

from algorithms.batch.calc_batch import BATCH_TESTS
from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.communication_rounds import Exchange, Link, even_shares, merged, redistributed, synchronised
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from algorithms.synchronisation.method import Method
from fabrics.models.meta_model import META, flops_per_token, meta_model
from fabrics.pool.node_pool import check_modules, probes_examples, round_tensors
from fabrics.sharding.layers import gathered_elements
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import check_method, method_of, round_bytes
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from fabrics.training.worker import personal_tensors
from utils.config.schema import Config, ConfigError

# Vectors of the hidden size that autograd keeps of a layer and a token, by bytes per element.
_HIDDEN_VECTORS = {4: 11, 2: 16}
_INTERMEDIATE_VECTORS = 4


@dataclass(frozen=True)
class Resources:
    """What a run is estimated for, besides its configuration.

    devices: of all machines; None: those of the key `devices`, or one node's.
    memory: bytes of each device; None: not known.
    tflops: TFLOP/s that each device really does; None: not known.
    links: by name, that may connect the nodes.
    """

    devices: int | None = None
    memory: int | None = None
    tflops: float | None = None
    links: tuple[tuple[str, Link], ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes of the busiest device, part by part; `host`: what is kept in host memory instead."""

    parameters: int
    gradients: int
    moments: int
    trainers: int
    workers: int
    round: int
    gathered: int
    activations: int
    host: int

    @property
    def device(self) -> int:
        """Bytes of the device in all."""
        return sum(value for name, value in vars(self).items() if name != "host")


@dataclass(frozen=True)
class Estimate:
    """What a run needs.

    parameters: trainable ones.
    workers: of all trainers, in the first round.
    batch: examples of an inner step of all workers of all trainers.
    micro_batch: examples of the largest one of a node; None: the run measures it.
    rounds: None where only epochs of data end the run.
    round_bytes: what the workers of all trainers send in the first round that tests the batch; None: not known.
    total_bytes: of the run, merges and redistributions included; None: not known.
    checkpoint_bytes: of the first checkpoint's tensors.
    compute_seconds: of the run; None: not known.
    link_seconds: of the run, by link: what it takes to send all that is sent.
    unknown: what the estimate leaves out, one line each.
    """

    parameters: int
    devices: int
    nodes: int
    trainers: int
    workers: int
    memory: Memory
    batch: int
    micro_batch: int | None
    rounds: int | None
    tokens: int | None
    communications: int | None
    worker_bytes: float | None
    round_bytes: float | None
    total_bytes: float | None
    checkpoint_bytes: int
    flops: float | None
    compute_seconds: float | None
    link_seconds: dict[str, float]
    unknown: tuple[str, ...]


def activation_bytes(config: Config, module: nn.Module) -> tuple[int, int] | None:
    """Bytes that a pass keeps of one example, and bytes of its logits; None where the architecture does not tell.

    A layer keeps 11 vectors of the hidden size and 4 of the intermediate size of each token, in float32; with autocast
    16 and 4 in two bytes, as norms stay in float32. That was measured on Llama, where it is right within 20%; attention
    keeps no scores. Where activations are computed again, all layers keep their inputs and one layer the rest. Logits
    are there three times, in float32. On nodes of several devices per-example statistics keep inputs and output
    gradients of all linear layers until the pass ends, which may be more.
    """
    shape = getattr(module, "config", None)
    hidden = getattr(shape, "hidden_size", None)
    layers = getattr(shape, "num_hidden_layers", None)
    if hidden is None or layers is None:
        return None
    tokens = config.sequence_length
    itemsize = 2 if config.autocast is not None else 4
    intermediate = getattr(shape, "intermediate_size", None) or 4 * hidden
    layer = tokens * itemsize * (_HIDDEN_VECTORS[itemsize] * hidden + _INTERMEDIATE_VECTORS * intermediate)
    inside = layer + layers * tokens * itemsize * hidden if config.activation_checkpointing else layers * layer
    head = [child for child in module.modules() if isinstance(child, nn.Linear)][-1]
    logits = 3 * 4 * tokens * head.out_features if head.out_features > hidden else 0
    if config.devices_per_node > 1 and probes_examples(config):
        linear = (child for child in module.modules() if isinstance(child, nn.Linear))
        held = tokens * 4 * sum(child.in_features + child.out_features for child in linear)
        inside = max(inside, held - logits)
    return inside, logits


class _Estimator:
    """The figures of one configuration on some devices."""

    def __init__(self, config: Config, resources: Resources):
        self.config = config
        self.resources = resources
        size = config.devices_per_node
        on_host = bool(config.devices) and all(name.startswith("cpu") for name in config.devices)
        self.devices = resources.devices or (len(config.devices) if config.devices and not on_host else size)
        if self.devices % size:
            raise ConfigError(f"--devices: must be a multiple of devices_per_node, {size}, got {self.devices}")
        self.groups = self.devices // size
        # The processes of a machine without GPUs share its nodes.
        self.nodes = config.nodes_per_gpu * (1 if on_host and size > 1 else self.groups)
        self.on_host = on_host
        self.trainers = config.number_of_initial_trainers
        module, self.unknown = meta_model(config)
        self.working = FlatModel(module, META)
        check_modules(config, self.working)
        self.method: Method = method_of(config, self.working)
        kind = inner_optimizer_name(config)
        moments = {} if kind is None else INNER_OPTIMIZERS[kind].state_shapes(self.working)
        self.flat_bytes = self.working.parameter_count * self.working.parameters.element_size()
        self.moment_bytes = sum(tensor.nbytes for tensor in moments.values())
        self.trainer_bytes = (1 + len(self.method.state)) * self.flat_bytes
        self.worker_bytes = len(personal_tensors(config, self.method)) * self.flat_bytes

        check_method(config, self.shares(self.trainers)[-1])
        if config.smallest_worker_batch is not None:
            self.unknown.append("when idle nodes join: they do as the batch grows, and bytes with them")

    def shares(self, trainers: int) -> tuple[int, ...]:
        """Workers of each of so many trainers."""
        config = self.config
        nodes = self.nodes
        if config.smallest_worker_batch is not None:
            useful = max(1, config.INITIAL_BATCH_SIZE // config.smallest_worker_batch)
            nodes = min(nodes, trainers * useful)
        return even_shares(nodes, trainers)

    def step_examples(self, workers: int) -> int:
        """Examples of an inner step of a trainer with so many workers."""
        config = self.config
        largest = config.max_batch_size or config.INITIAL_BATCH_SIZE
        multiplier = config.switch_multiplier
        plans = execution_plans(config.switch_mode, config.INITIAL_BATCH_SIZE, [largest] * workers, multiplier)
        return sum(plan.effective_batch for plan in plans)

    def micro_batch(self) -> int | None:
        """Examples of the largest micro-batch that a node may be asked for; None: the run measures what fits."""
        config = self.config
        largest = [config.max_batch_size]
        if config.sampling_method == "none" and not config.batch_schedule:
            largest.append(-(-config.INITIAL_BATCH_SIZE // self.shares(self.trainers)[-1]))
        elif config.max_requested_batch is not None:
            largest.append(-(-config.max_requested_batch // self.shares(self.trainers)[-1]))
        return min((count for count in largest if count is not None), default=None)

    def memory(self, micro_batch: int) -> Memory:
        """Memory of the busiest device with micro-batches of so many examples."""
        config = self.config
        size = config.devices_per_node
        workers = -(-max(self.nodes, self.trainers) // self.groups)
        trainers = min(self.trainers, workers)
        owners = trainers if self.method.capabilities.exchanges_gradients else workers
        moments = owners * self.moment_bytes
        outer = trainers * self.trainer_bytes
        several = self.groups > 1
        in_round = round(self.flat_bytes * round_tensors(config, workers, several, self.nodes - workers))
        host = 0
        if "idle_moments" in config.offload and not self.on_host and owners > 1:
            host += (owners - 1) * self.moment_bytes
            moments = self.moment_bytes
        if "outer_state" in config.offload and not self.on_host:
            host += outer + self.flat_bytes
            outer = 0
            in_round -= self.flat_bytes
        frozen = sum(p.numel() * p.element_size() for p in self.working.module.parameters() if not p.requires_grad)
        activations = 0
        example = activation_bytes(config, self.working.module)
        if example is not None:
            inside, logits = example
            layers = self.working.module.config.num_hidden_layers
            training = -(-micro_batch // size) * (inside + logits)
            activations = max(training, config.eval_batch_size * (inside // layers + 2 * logits // 3))
        gathered = gathered_elements(self.working.module) * self.working.parameters.element_size() if size > 1 else 0
        return Memory(
            parameters=(self.flat_bytes + frozen) // size,
            gradients=self.flat_bytes // size,
            moments=moments // size,
            trainers=outer // size,
            workers=workers * self.worker_bytes // size,
            round=in_round // size,
            gathered=gathered,
            activations=activations,
            host=host // size,
        )

    def tests(self, number: int) -> bool:
        """Whether a batch test follows this round, counted from 1."""
        return BATCH_TESTS[self.config.sampling_method] is not None and number >= self.config.batch_test_start

    def round_bytes(self, workers: int, tested: bool) -> int:
        """Bytes that so many workers of a trainer send in a round; tested: whether a batch test follows."""
        encoding = COMMUNICATION_DTYPES[self.config.communication_dtype]
        return round_bytes(self.config, self.method, encoding, self.working, workers, tested)

    def run(self) -> "_Run":
        """All rounds, with merges, until a limit of rounds or tokens ends them."""
        config = self.config
        method = self.method
        averaged = ("parameters", *(name for name in method.state if name not in method.capabilities.copies))
        given_bytes = len(averaged) * self.flat_bytes
        joining_bytes = self.trainer_bytes + self.moment_bytes
        sent = functools.cache(self.round_bytes)
        shares = self.shares(self.trainers)
        arriving = None
        done = _Run()
        while done.rounds != config.number_of_outer_steps and (
            not config.max_tokens or done.tokens < config.max_tokens
        ):
            done.rounds += 1
            if arriving is not None:
                done.exchanges.append(arriving)
                arriving = None
            step = config.sequence_length * sum(self.step_examples(workers) for workers in shares)
            inner_steps = config.number_of_inner_steps_between_outers
            if config.max_tokens:
                inner_steps = min(inner_steps, math.ceil((config.max_tokens - done.tokens) / step))
            done.tokens += inner_steps * step
            done.device_tokens += inner_steps * step / min(self.groups, sum(shares))
            if method.capabilities.one_exchange:
                tested = self.tests(done.rounds)
                done.exchanges.append(synchronised((workers, sent(workers, tested)) for workers in shares))
            if len(shares) > 1 and done.rounds % config.merge_frequency == 0:
                others = min(config.merge_count, len(shares)) - 1
                done.exchanges.append(merged(others, shares[0], (others + shares[0] - 1) * given_bytes))
                left = shares[: len(shares) - others]
                shares = self.shares(len(left))
                came = sum(shares) - sum(left)
                if came > 0:
                    arriving = redistributed(came, came * joining_bytes)
        return done


@dataclass
class _Run:
    """Totals of a run; device_tokens: of the tokens those that one node's devices train on."""

    rounds: int = 0
    tokens: int = 0
    device_tokens: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)


def _left_out(config: Config, method: Method) -> list[str]:
    """What of the configuration the estimate does not follow, one line each."""
    found = []
    if config.sampling_method != "none" or config.batch_schedule:
        found.append("how the batch moves: rounds and bytes are those of a batch that stays")
    if config.number_of_outer_steps is None and config.max_tokens is None:
        found.append("rounds: epochs of the data end the run, and data are not read")
    if not method.capabilities.one_exchange:
        found.append(f"bytes: the rounds of {config.distributed_algo} are not of one known size")
    if config.budget is not None:
        found.append(f"how {config.budget} changes the length of rounds")
    if config.participants < 1.0 or config.message_loss or config.node_schedule or config.node_speeds:
        found.append("nodes that rest, join later, differ in speed, or whose messages are lost")
    if not config.packing:
        found.append("tokens: all sequences are taken to be as long as sequence_length")
    return found


def _check_fit(estimator: _Estimator, micro_batch: int) -> None:
    """Raise ConfigError where a device has not the memory for micro-batches of so many examples."""
    given = estimator.resources.memory
    if given is None:
        return
    config = estimator.config
    room = round(config.padding_percentage * given)
    needed = estimator.memory(micro_batch)
    if needed.device > room:
        parts = {name: size for name, size in vars(needed).items() if name != "host"}
        most = max(parts, key=parts.get)
        raise ConfigError(
            f"--device-memory: a run needs {needed.device:,} bytes of a device with micro-batches of {micro_batch} "
            f"examples, {parts[most]:,} of them for {most}, and may use {room:,} (padding_percentage "
            f"{config.padding_percentage} of {given:,}); lower max_batch_size, eval_batch_size or sequence_length, "
            f"raise devices_per_node, or set activation_checkpointing: true or offload: [outer_state, idle_moments]"
        )


def _largest_fitting(estimator: _Estimator, room: float) -> int:
    """Examples of the largest micro-batch whose memory is at most `room`, at least one."""
    low, high = 1, 1 << 20
    while low < high:
        middle = (low + high + 1) // 2
        if estimator.memory(middle).device <= room:
            low = middle
        else:
            high = middle - 1
    return low


def estimate(config: Config, resources: Resources | None = None) -> Estimate:
    """Estimate what a run needs.

    Raises:
        ConfigError: a run would refuse the configuration, or it does not fit into the memory that is given.
    """
    resources = resources or Resources()
    estimator = _Estimator(config, resources)
    unknown = [*estimator.unknown, *_left_out(config, estimator.method)]
    module = estimator.working.module
    if activation_bytes(config, module) is None:
        unknown.append("activations: the model's config names no hidden_size; memory is without them")
    micro_batch = estimator.micro_batch()
    if micro_batch is None and resources.memory is not None and activation_bytes(config, module) is not None:
        micro_batch = _largest_fitting(estimator, config.padding_percentage * resources.memory)
    if micro_batch is None:
        unknown.append("the largest micro-batch: the run measures it; memory is that of one example")
    _check_fit(estimator, micro_batch or 1)

    shares = estimator.shares(estimator.trainers)
    run = None
    if config.number_of_outer_steps is not None or config.max_tokens is not None:
        run = estimator.run()
    round_bytes = None
    if estimator.method.capabilities.one_exchange:
        tested = estimator.tests(config.batch_test_start)
        round_bytes = sum(estimator.round_bytes(workers, tested) for workers in shares)
    per_token = flops_per_token(module, config.sequence_length)
    if config.activation_checkpointing:
        per_token *= 4.0 / 3.0  # one more forward pass
    compute_seconds = None
    if run is not None and resources.tflops is not None:
        rate = resources.tflops * 1e12 * config.devices_per_node
        compute_seconds = run.device_tokens * per_token / rate
    sends = run is not None and estimator.method.capabilities.one_exchange
    owners = estimator.trainers if estimator.method.capabilities.exchanges_gradients else sum(shares)
    state_bytes = estimator.trainers * estimator.trainer_bytes + sum(shares) * estimator.worker_bytes
    return Estimate(
        parameters=estimator.working.parameter_count,
        devices=estimator.devices,
        nodes=estimator.nodes,
        trainers=estimator.trainers,
        workers=sum(shares),
        memory=estimator.memory(micro_batch or 1),
        batch=sum(estimator.step_examples(workers) for workers in shares),
        micro_batch=micro_batch,
        rounds=run and run.rounds,
        tokens=run and run.tokens,
        flops=run and run.tokens * per_token,
        communications=sum(exchange.communications for exchange in run.exchanges) if sends else None,
        worker_bytes=None if round_bytes is None else round_bytes / sum(shares),
        round_bytes=round_bytes,
        total_bytes=sum(exchange.sent for exchange in run.exchanges) if sends else None,
        checkpoint_bytes=state_bytes + owners * estimator.moment_bytes,
        compute_seconds=compute_seconds,
        link_seconds={
            name: sum(link.seconds(exchange.link) for exchange in run.exchanges if exchange.sent)
            for name, link in resources.links
            if sends
        },
        unknown=tuple(unknown),
    )
