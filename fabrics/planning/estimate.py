"""Estimate the memory, traffic and time of a run from formulas. Nothing is trained and no data are read.

The requested batch is assumed to stay `INITIAL_BATCH_SIZE`, because a batch test's answers are unknown before the run.

Memory of a device, for P bytes of trainable parameters, N devices per node, t trainers and w workers on the device:

    P / N * (2                                parameters and gradients of the working model
             + inner optimizer's * w          2 for AdamW
             + (1 + method's) * t             parameters of each trainer and the method's state, e.g. a velocity
             + method's and encoding's * w    e.g. an error feedback
             + tensors of a round)            see `fabrics.pool.max_batch.round_tensors`
    + activations and logits of the largest micro-batch, see `activation_bytes`
    + for N > 1 the layers that a device holds whole at a time, see `gathered_elements`

The bytes of a round are the method's `bytes_per_round`; those of merges and redistributions are counted by
`algorithms.nodes.traffic`. Compute time is FLOPs over the rate of equally busy devices. Sending takes latency + bytes /
bandwidth per exchange and overlaps with nothing.
"""

import math
from dataclasses import dataclass

from torch import nn

from algorithms.batch.calc_batch import BATCH_TESTS
from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.traffic import Exchange, ExchangeSizes, Link, even_split, rounds_ahead
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from algorithms.synchronisation.method import Method
from fabrics.models.initialisation import META, flops_per_token, meta_model
from fabrics.pool.max_batch import round_tensors
from fabrics.pool.run_checks import check_model
from fabrics.sharding.layers import gathered_elements
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import check_method, method_of, round_bytes
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from fabrics.training.statistics import probes_examples
from fabrics.training.worker import personal_tensors
from utils.config.schema import Config, ConfigError

# Vectors that autograd keeps per layer and token: of the hidden size, by bytes per element, and of the intermediate
# size. Measured on Llama, where the estimate is within 20%; attention keeps no scores.
_HIDDEN_VECTORS = {4: 11, 2: 16}
_INTERMEDIATE_VECTORS = 4
# Copies of the logits, in float32.
_LOGITS = 3


@dataclass(frozen=True)
class Resources:
    """The devices and links that a run is estimated for. None: unknown."""

    devices: int | None = None  # of all machines; None: those of the key `devices`, or one node's
    memory: int | None = None  # bytes per device
    tflops: float | None = None  # sustained by each device
    links: tuple[tuple[str, Link], ...] = ()  # by name


@dataclass(frozen=True)
class Estimate:
    """The needs of a run. None: unknown."""

    parameters: int
    devices: int
    nodes: int
    trainers: int
    workers: int  # of all trainers, in the first round
    memory: dict[str, int]  # bytes of the busiest device, by part
    host_bytes: int  # state in host memory instead
    batch: int  # examples of an inner step, over all trainers
    micro_batch: int | None  # largest of a node; None: measured by the run
    rounds: int | None  # None if only epochs end the run
    tokens: int | None
    communications: int | None
    round_bytes: float | None  # sent by all workers in a round with a batch test
    total_bytes: float | None  # sent in the run, including merges and redistributions
    checkpoint_bytes: int
    flops: float | None
    compute_seconds: float | None
    link_seconds: dict[str, float]  # by link
    unknown: tuple[str, ...]  # what the estimate leaves out

    @property
    def device_bytes(self) -> int:
        return sum(self.memory.values())


def activation_bytes(config: Config, module: nn.Module) -> tuple[int, int] | None:
    """Bytes that a training pass keeps of one example, and bytes of its logits; None for an unknown architecture.

    With `activation_checkpointing` all layers keep their inputs, and one layer the rest. On nodes of several devices
    per-example statistics keep the inputs and output gradients of all linear layers, which may be more.
    """
    shape = getattr(module, "config", None)
    hidden = getattr(shape, "hidden_size", None)
    layers = getattr(shape, "num_hidden_layers", None)
    if hidden is None or layers is None:
        return None
    tokens = config.sequence_length
    itemsize = 2 if config.autocast is not None else 4
    intermediate = getattr(shape, "intermediate_size", None) or 4 * hidden
    linear = [child for child in module.modules() if isinstance(child, nn.Linear)]

    layer = tokens * itemsize * (_HIDDEN_VECTORS[itemsize] * hidden + _INTERMEDIATE_VECTORS * intermediate)
    kept = layers * layer
    if config.activation_checkpointing:
        kept = layer + layers * tokens * itemsize * hidden
    head = linear[-1].out_features
    logits = _LOGITS * 4 * tokens * head if head > hidden else 0
    if config.devices_per_node > 1 and probes_examples(config):
        probed = tokens * 4 * sum(child.in_features + child.out_features for child in linear)
        kept = max(kept, probed - logits)
    return kept, logits


class _Run:
    """The model, the method and the workers of a run."""

    def __init__(self, config: Config, resources: Resources):
        self.config = config
        size = config.devices_per_node
        self.on_host = bool(config.devices) and all(name.startswith("cpu") for name in config.devices)
        self.devices = resources.devices or (size if self.on_host or not config.devices else len(config.devices))
        if self.devices % size:
            raise ConfigError(f"--devices: must be a multiple of devices_per_node, {size}, got {self.devices}")
        self.groups = self.devices // size
        # The processes of a machine without GPUs share its nodes.
        self.nodes = config.nodes_per_gpu * (1 if self.on_host and size > 1 else self.groups)
        trainers = config.number_of_initial_trainers
        self.most_workers = self.nodes  # of a trainer
        if config.smallest_worker_batch is not None:
            self.most_workers = max(1, config.INITIAL_BATCH_SIZE // config.smallest_worker_batch)
        self.workers = even_split(min(self.nodes, trainers * self.most_workers), trainers)  # of each trainer

        module, self.assumed = meta_model(config)
        self.model = FlatModel(module, META)
        check_model(config, self.model)
        self.method: Method = method_of(config, self.model)
        check_method(config, self.workers[-1])
        self.flat_bytes = self.model.parameter_count * self.model.parameters.element_size()
        kind = inner_optimizer_name(config)
        self.moment_bytes = 0 if kind is None else INNER_OPTIMIZERS[kind].state_bytes(self.model)
        self.trainer_bytes = (1 + len(self.method.state)) * self.flat_bytes
        self.worker_bytes = len(personal_tensors(config, self.method)) * self.flat_bytes

    def step_examples(self, workers: int) -> int:
        """Examples of an inner step of a trainer with this number of workers."""
        config = self.config
        largest = config.max_batch_size or config.INITIAL_BATCH_SIZE
        plans = execution_plans(
            config.switch_mode, config.INITIAL_BATCH_SIZE, [largest] * workers, config.switch_multiplier
        )
        return sum(plan.effective_batch for plan in plans)

    def largest_micro_batch(self) -> int | None:
        """The largest micro-batch that the configuration allows a node; None: no limit."""
        config = self.config
        limits = [config.max_batch_size]
        if config.sampling_method == "none" and not config.batch_schedule:
            limits.append(-(-config.INITIAL_BATCH_SIZE // self.workers[-1]))
        elif config.max_requested_batch is not None:
            limits.append(-(-config.max_requested_batch // self.workers[-1]))
        return min((limit for limit in limits if limit is not None), default=None)

    def memory(self, activations: int) -> tuple[dict[str, int], int]:
        """Bytes of the busiest device by part, and bytes in host memory."""
        config = self.config
        size = config.devices_per_node
        workers = -(-max(self.nodes, len(self.workers)) // self.groups)
        trainers = min(len(self.workers), workers)
        owners = trainers if self.method.capabilities.exchanges_gradients else workers
        moments = owners * self.moment_bytes
        outer = trainers * self.trainer_bytes
        in_round = round(self.flat_bytes * round_tensors(config, workers, self.groups > 1, self.nodes - workers))
        host = 0
        if "idle_moments" in config.offload and not self.on_host and owners > 1:
            host += moments - self.moment_bytes
            moments = self.moment_bytes
        if "outer_state" in config.offload and not self.on_host:
            host += outer + self.flat_bytes
            outer = 0
            in_round -= self.flat_bytes
        module = self.model.module
        frozen = sum(p.numel() * p.element_size() for p in module.parameters() if not p.requires_grad)
        gathered = gathered_elements(module) * self.model.parameters.element_size() if size > 1 else 0
        parts = {
            "parameters": (self.flat_bytes + frozen) // size,
            "gradients": self.flat_bytes // size,
            "moments": moments // size,
            "trainers": outer // size,
            "workers": workers * self.worker_bytes // size,
            "round": in_round // size,
            "gathered": gathered,
            "activations": activations,
        }
        return parts, host // size

    def round_bytes(self, workers: int, number: int) -> int:
        """Bytes that this number of workers of a trainer send in a round, counted from 1."""
        tested = BATCH_TESTS[self.config.sampling_method] is not None and number >= self.config.batch_test_start
        encoding = COMMUNICATION_DTYPES[self.config.communication_dtype]
        return round_bytes(self.config, self.method, encoding, self.model, workers, tested)

    def exchange_sizes(self) -> ExchangeSizes:
        method = self.method
        given = 1 + sum(name not in method.capabilities.copies for name in method.state)
        known = method.capabilities.one_exchange
        return ExchangeSizes(
            round=self.round_bytes if known else lambda workers, number: 0,
            merge=given * self.flat_bytes,
            joining=self.trainer_bytes + self.moment_bytes,
        )


@dataclass
class _Length:
    """Totals of a run; `device_tokens`: tokens of one node."""

    rounds: int
    tokens: int
    device_tokens: float
    exchanges: list[Exchange]


def _length(run: _Run) -> _Length | None:
    """Follow the rounds, with merges, until a limit in rounds or tokens; None if there is no such limit."""
    config = run.config
    if config.number_of_outer_steps is None and config.max_tokens is None:
        return None
    done = _Length(0, 0, 0.0, [])
    trainers = config.number_of_initial_trainers
    ahead = rounds_ahead(
        trainers, run.nodes, 1, config.merge_frequency, config.merge_count, run.exchange_sizes(), run.most_workers
    )
    for workers, exchanges in ahead:
        step_tokens = config.sequence_length * sum(run.step_examples(count) for count in workers)
        steps = config.number_of_inner_steps_between_outers
        if config.max_tokens:
            steps = min(steps, math.ceil((config.max_tokens - done.tokens) / step_tokens))
        done.rounds += 1
        done.tokens += steps * step_tokens
        done.device_tokens += steps * step_tokens / min(run.groups, sum(workers))
        done.exchanges += exchanges
        if done.rounds == config.number_of_outer_steps or (config.max_tokens and done.tokens >= config.max_tokens):
            break
    return done


def _left_out(config: Config, method: Method) -> list[str]:
    """Parts of the configuration that the estimate ignores, one line each."""
    adapts = config.sampling_method != "none" or config.batch_schedule
    endless = config.number_of_outer_steps is None and config.max_tokens is None
    changing = config.participants < 1.0 or config.message_loss or config.node_schedule or config.node_speeds
    ignored = [
        (adapts, "growth of the batch: rounds and bytes are those of a constant batch"),
        (config.smallest_worker_batch is not None, "workers that join as the batch grows, and their bytes"),
        (endless, "rounds: epochs of data end the run, and no data are read"),
        (not method.capabilities.one_exchange, f"bytes: a round of {config.distributed_algo} has no fixed size"),
        (config.budget is not None, f"the effect of {config.budget} on the length of rounds"),
        (changing, "nodes that rest, join later or differ in speed, and lost messages"),
    ]
    return [line for applies, line in ignored if applies]


def _activations(run: _Run, memory: int | None) -> tuple[int | None, int]:
    """The largest micro-batch of a node and the bytes of its activations; None: the run measures it.

    memory: bytes that the run may use of a device, in which a micro-batch without a limit has to fit.
    """
    size = run.config.devices_per_node
    micro_batch = run.largest_micro_batch()
    example = activation_bytes(run.config, run.model.module)
    if example is None:
        return micro_batch, 0
    kept, logits = example
    if micro_batch is None and memory is not None:
        parts, _ = run.memory(activations=0)
        micro_batch = max(1, size * int((memory - sum(parts.values())) // (kept + logits)))
    trained = -(-(micro_batch or 1) // size) * (kept + logits)
    layers = run.model.module.config.num_hidden_layers
    return micro_batch, max(trained, run.config.eval_batch_size * (kept // layers + 2 * logits // _LOGITS))


def estimate(config: Config, resources: Resources | None = None) -> Estimate:
    """Estimate what a run needs.

    Raises:
        ConfigError: the run would refuse the configuration, or does not fit into the given memory.
    """
    resources = resources or Resources()
    run = _Run(config, resources)
    method = run.method.capabilities
    workers = sum(run.workers)
    room = None if resources.memory is None else round(config.padding_percentage * resources.memory)
    micro_batch, activations = _activations(run, room)
    memory, host_bytes = run.memory(activations)
    if room is not None and sum(memory.values()) > room:
        most = max(memory, key=memory.get)
        raise ConfigError(
            f"--device-memory: a run needs {sum(memory.values()):,} bytes per device, {memory[most]:,} of them for "
            f"{most}, and may use {room:,} (padding_percentage {config.padding_percentage}); lower max_batch_size, "
            f"eval_batch_size or sequence_length, raise devices_per_node, or set activation_checkpointing: true or "
            f"offload: [outer_state, idle_moments]"
        )
    unknown = [*run.assumed, *_left_out(config, run.method)]
    if not activations:
        unknown.append("activations: the model's config names no hidden_size")
    if micro_batch is None:
        unknown.append("the largest micro-batch, which the run measures: memory is that of one example")

    token_flops = flops_per_token(run.model.module, config.sequence_length)
    if config.activation_checkpointing:
        token_flops *= 4.0 / 3.0  # one more forward pass
    length = _length(run)
    compute_seconds = None
    if length is not None and resources.tflops is not None:
        rate = resources.tflops * 1e12 * config.devices_per_node
        compute_seconds = length.device_tokens * token_flops / rate
    round_bytes = None
    communications = None
    total_bytes = None
    link_seconds = {}
    if method.one_exchange:
        round_bytes = sum(run.round_bytes(count, config.batch_test_start) for count in run.workers)
        if length is not None:
            communications = sum(exchange.communications for exchange in length.exchanges)
            total_bytes = sum(exchange.sent for exchange in length.exchanges)
            for name, link in resources.links:
                link_seconds[name] = sum(link.seconds(each.link) for each in length.exchanges if each.sent)

    owners = len(run.workers) if method.exchanges_gradients else workers
    return Estimate(
        parameters=run.model.parameter_count,
        devices=run.devices,
        nodes=run.nodes,
        trainers=len(run.workers),
        workers=workers,
        memory=memory,
        host_bytes=host_bytes,
        batch=sum(run.step_examples(count) for count in run.workers),
        micro_batch=micro_batch,
        rounds=length and length.rounds,
        tokens=length and length.tokens,
        communications=communications,
        round_bytes=round_bytes,
        total_bytes=total_bytes,
        checkpoint_bytes=len(run.workers) * run.trainer_bytes + workers * run.worker_bytes + owners * run.moment_bytes,
        flops=length and length.tokens * token_flops,
        compute_seconds=compute_seconds,
        link_seconds=link_seconds,
        unknown=tuple(unknown),
    )
