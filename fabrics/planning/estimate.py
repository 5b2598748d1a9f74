"""Estimate the memory, traffic and time of a run from formulas. Nothing is trained and no data are read.

Memory of a device, for P bytes of trainable parameters, N devices per node, p processes with t trainers and w workers
on the device:

    P / N * (2 * p                            parameters and gradients of the working models
             + inner optimizer's * w          2 for AdamW
             + (1 + method's) * t             parameters of each trainer and the method's state, e.g. a velocity
             + method's and encoding's * w    e.g. an error feedback
             + tensors of a round)            see `fabrics.pool.max_batch.round_tensors`
    + for every process activations and logits of the largest micro-batch, see `activation_bytes`
    + with autocast the copies of linear layers, see `cast_bytes`
    + for N > 1 the layers that a device holds whole at a time, see `gathered_elements`

What a batch test will ask for is unknown before the run. So the run is followed with several constant batches, from
the least (`INITIAL_BATCH_SIZE`, or that of a schedule) in powers of two to the largest that the configuration allows.
Every total is given as the range over these.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.traffic import Link, even_split, rounds_ahead
from fabrics.models.initialisation import META, flops_per_token, meta_model, recompute_activations
from fabrics.pool.max_batch import round_tensors
from fabrics.pool.run_checks import check_model
from fabrics.sharding.sharded_model import gathered_elements, sharded_parts
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import check_first_workers, exchange_sizes, method_of
from fabrics.training.optimizers import inner_optimizer_of
from fabrics.training.statistics import batch_schedule, probes_examples
from fabrics.training.work_split import scheduled_nodes
from fabrics.training.worker import personal_tensors
from utils.config.schema import Config, ConfigError
from utils.text import byte_size

# Vectors that autograd keeps per layer and token: of the hidden size, by bytes per element, and of the intermediate
# size. Measured on Llama, where the estimate is within 20%; attention keeps no scores.
_HIDDEN_VECTORS = {4: 11, 2: 16}
_INTERMEDIATE_VECTORS = 4
# Copies of the logits, in float32.
_LOGITS = 3
ACTIVATIONS = "activations and logits"
# The first advice for a device that is too small; with memory: auto it has been taken.
MEMORY_ADVICE = "memory: auto"
# Begins the refusal of a run whose state does not fit there.
HOST_MEMORY = "host memory: "


@dataclass(frozen=True)
class Resources:
    """The devices and links that a run is estimated for. None: unknown."""

    devices: int | None = None  # of all machines; None: those of the key `devices`, or one node's
    memory: int | None = None  # bytes per device
    tflops: float | None = None  # sustained by each device
    links: tuple[tuple[str, Link], ...] = ()  # by name
    processes: int | None = None  # that share a device; None: as the key `processes` says, one if it is auto
    host_memory: int | None = None  # bytes of the host for each device


@dataclass(frozen=True)
class Estimate:
    """The needs of a run.

    Attributes:
        micro_batch: examples of the micro-batch that the memory is for.
        memory: bytes of the busiest device, by part.
        host_bytes: of that device, state in host memory instead.
        ranges: the least and the most of every total that is known: `batch` and `workers` of a trainer, and of the
            run `rounds`, `tokens`, `flops`, `communications`, `sent_bytes`, `compute_seconds`, `over LINK seconds`.
    """

    parameters: int
    devices: int
    nodes: int
    trainers: int
    micro_batch: int
    flops_per_token: float
    memory: dict[str, int]
    device_bytes: int
    host_bytes: int
    ranges: dict[str, tuple[float, float]]
    assumptions: tuple[str, ...]


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
    at_a_time = min(tokens, config.loss_chunk_tokens or tokens)
    logits = _LOGITS * 4 * at_a_time * head if head > hidden else 0
    if at_a_time < tokens and probes_examples(config):
        logits += 4 * tokens * head  # per-example statistics keep the gradient of all logits
    if config.devices_per_node > 1 and probes_examples(config):
        probed = tokens * 4 * sum(child.in_features + child.out_features for child in linear)
        kept = max(kept, probed - logits)
    return kept, logits


def cast_bytes(config: Config, module: nn.Module) -> int:
    """Bytes of the copies of linear layers that autocast makes in every pass, and keeps for the backward pass.

    Nodes of several devices gather the layers' in that type instead, and copy the output layer's only.
    """
    if config.autocast is None:
        return 0
    layers = sharded_parts(module) if config.devices_per_node > 1 else []
    gathered = {child for parts in layers for part in parts for child in part.modules()}
    linear = [child for child in module.modules() if isinstance(child, nn.Linear | Conv1D) and child not in gathered]
    return 2 * sum(child.weight.numel() for child in linear)


class _Run:
    """The model, the method and the nodes of a run."""

    def __init__(self, config: Config, resources: Resources):
        self.config = config
        self.resources = resources
        self.assumptions: list[str] = []
        self.runs_less = False  # than a batch, because of the switch mode
        size = config.devices_per_node
        self.max_batch = config.max_batch_size  # what a node runs at once; None: unknown
        self.on_host = bool(config.devices) and all(name.startswith("cpu") for name in config.devices)
        self.devices = resources.devices or (size if self.on_host or not config.devices else len(config.devices))
        if self.devices % size:
            raise ConfigError(f"--devices: must be a multiple of devices_per_node, {size}, got {self.devices}")
        self.groups = self.devices // size
        # The processes of a machine without GPUs share its nodes.
        self.nodes = config.nodes_per_gpu * (1 if self.on_host and size > 1 else self.groups)
        self.trainers = config.number_of_initial_trainers
        self.workers = self.workers_of(config.INITIAL_BATCH_SIZE)  # of each trainer in the first round
        # Of the busiest device. Its nodes may all have other trainers once the batches differ.
        self.workers_here = -(-max(self.nodes, self.trainers) // self.groups)
        self.processes_here = 1
        if size == 1 and resources.processes is not None:
            self.processes_here = resources.processes
        elif size == 1 and config.processes != "auto":
            self.processes_here = -(-config.processes // self.groups)

        module, assumed = meta_model(config)
        if config.activation_checkpointing:
            recompute_activations(module, config.model_type)
        self.assumptions += assumed
        self.model = FlatModel(module, META, loss_chunk_tokens=config.loss_chunk_tokens or None)
        check_model(config, self.model)
        self.method = method_of(config, self.model)
        schedule = config.node_schedule
        working = self.nodes if schedule is None else min(self.nodes, scheduled_nodes(schedule, progress=0.0))
        check_first_workers(config, self.workers_of(config.INITIAL_BATCH_SIZE, working))
        self.flat_bytes = self.model.parameter_count * self.model.parameters.element_size()
        optimizer = inner_optimizer_of(config)
        self.moment_bytes = 0 if optimizer is None else optimizer.state_bytes(self.model)
        self.trainer_bytes = (1 + len(self.method.state)) * self.flat_bytes
        self.worker_bytes = len(personal_tensors(config, self.method)) * self.flat_bytes

    def most_workers(self, batch: int) -> int:
        smallest = self.config.smallest_worker_batch
        return self.nodes if smallest is None else max(1, min(self.nodes, batch // smallest))

    def workers_of(self, batch: int, working: int | None = None) -> tuple[int, ...]:
        """Workers of each trainer with this batch; working: the nodes that work, None: all."""
        return even_split(min(working or self.nodes, self.trainers * self.most_workers(batch)), self.trainers)

    # Memory

    def memory(self, activations: int) -> tuple[dict[str, int], int]:
        """Bytes of the busiest device by part, and bytes that it takes of its host's memory."""
        config = self.config
        size = config.devices_per_node
        workers = self.workers_here
        processes = self.processes_here
        workers_each = -(-workers // processes)
        trainers = processes * min(self.trainers, workers_each)
        owners = trainers if self.method.capabilities.exchanges_gradients else workers
        moments = owners * self.moment_bytes
        outer = trainers * self.trainer_bytes
        several = processes * self.groups > 1
        tensors = round_tensors(config, workers_each, several, self.nodes - workers_each)
        in_round = round(processes * self.flat_bytes * tensors)
        host = 0
        # PyTorch's pinned memory comes in powers of two.
        pinned = 1 << (self.flat_bytes // size - 1).bit_length()
        if config.offload_moments and not self.on_host:
            host += pinned * round(moments / self.flat_bytes)
            moments = processes * self.moment_bytes
        if config.offload_outer_state and not self.on_host:
            host += pinned * (outer // self.flat_bytes + processes)
            outer = 0
            in_round -= processes * self.flat_bytes
        module = self.model.module
        frozen = sum(p.numel() * p.element_size() for p in module.parameters() if not p.requires_grad)
        gathered = gathered_elements(module) * self.model.parameters.element_size() if size > 1 else 0
        parts = {
            "parameters of the working model": processes * (self.flat_bytes + frozen) // size,
            "its gradients": processes * self.flat_bytes // size,
            "state of the inner optimizer": moments // size,
            "parameters of the trainers and the method's state": outer // size,
            "state of the method and the encoding per worker": workers * self.worker_bytes // size,
            "sums of a round": in_round // size,
            "layers that are whole at a time": gathered,
            "copies of weights for autocast": processes * cast_bytes(config, module),
            ACTIVATIONS: activations,
        }
        return parts, host

    def micro_batch(self, largest_batch: int | None, room: int | None) -> tuple[int, int]:
        """The largest micro-batch of a node, and the bytes of its activations on a device."""
        config = self.config
        size = config.devices_per_node
        limits = [config.max_batch_size]
        if largest_batch is not None:
            limits.append(-(-largest_batch // self.workers_of(largest_batch)[-1]))
        micro_batch = min((limit for limit in limits if limit is not None), default=None)
        example = activation_bytes(config, self.model.module)
        if example is None:
            self.assumptions.append("activations: not counted, as the model's config names no hidden_size")
            return micro_batch or 1, 0
        kept, logits = (self.processes_here * size_each for size_each in example)
        if config.max_batch_size is None and room is not None:
            parts, _ = self.memory(activations=0)
            self.max_batch = max(1, size * int((room - sum(parts.values())) // (kept + logits)))
            micro_batch = min(self.max_batch, micro_batch or self.max_batch)
        elif config.max_batch_size is None:
            micro_batch = 1
            self.assumptions.append(
                "micro-batch: max_batch_size is null; memory is for one example, totals are without switch mode; "
                "--device-memory estimates the largest micro-batch that fits"
            )
        trained = -(-micro_batch // size) * (kept + logits)
        layers = self.model.module.config.num_hidden_layers
        return micro_batch, max(trained, config.eval_batch_size * (kept // layers + 2 * logits // _LOGITS))

    # Batches

    def known_batches(self) -> list[int]:
        """The first requested batch, and those of a schedule."""
        schedule = batch_schedule(self.config)
        requests = [self.config.INITIAL_BATCH_SIZE]
        if schedule is not None:
            requests += [int(request) for _, request in schedule.pairs]
        largest = self.config.max_requested_batch or max(requests)
        return [min(request, largest) for request in requests]

    def largest_batch(self) -> int | None:
        """The largest batch of a trainer that the configuration allows; None: unknown before data are read."""
        config = self.config
        if config.sampling_method == "none":
            return max(self.known_batches())
        if config.max_requested_batch is not None:
            return config.max_requested_batch
        if config.data_sample_size is not None:
            self.assumptions.append(
                "largest batch: all data of a trainer, one sequence per document; longer documents raise it"
            )
            return max(config.INITIAL_BATCH_SIZE, config.data_sample_size)
        if config.max_tokens is not None:
            self.assumptions.append("largest batch: one round trains max_tokens")
            steps = config.number_of_inner_steps_between_outers
            return max(config.INITIAL_BATCH_SIZE, config.max_tokens // (config.sequence_length * steps))
        self.assumptions.append(
            "batch: stays INITIAL_BATCH_SIZE; its limit is known with max_requested_batch or data_sample_size"
        )
        return None

    def totals(self, batch: int) -> dict[str, float]:
        """Follow the run, with merges, for trainers that all have this batch; return its totals by name."""
        config = self.config
        documents = config.data_sample_size
        most_tokens = config.max_tokens
        if config.number_of_training_epochs is not None and documents is not None and most_tokens is None:
            most_tokens = math.ceil(config.number_of_training_epochs * documents * config.sequence_length)
        workers = self.most_workers(batch)
        found = {"batch": batch, "workers": self.workers_of(batch)[-1]}
        if config.number_of_outer_steps is None and most_tokens is None:
            return found | {"workers": workers}  # of the last trainer, if all merge

        living = 0
        tokens = 0
        device_tokens = 0.0  # of the busiest device
        exchanges = []
        sizes = exchange_sizes(config, self.method, self.model)
        ahead = rounds_ahead(self.trainers, self.nodes, 1, config.merge_frequency, config.merge_count, sizes, workers)
        for number, (nodes_of_trainers, sent) in enumerate(ahead, start=1):
            if len(nodes_of_trainers) != living:  # at first, and after a merge
                living = len(nodes_of_trainers)
                request = batch
                if config.max_requested_batch is None and documents is not None:
                    request = min(batch, max(config.INITIAL_BATCH_SIZE, documents // living))
                step_tokens, busiest = self._step_tokens(request, nodes_of_trainers)
            steps = config.number_of_inner_steps_between_outers
            if most_tokens is not None:
                steps = min(steps, math.ceil((most_tokens - tokens) / step_tokens))
            tokens += steps * step_tokens
            device_tokens += steps * busiest
            exchanges += sent
            found["workers"] = max(found["workers"], len(nodes_of_trainers[0]))
            if number == config.number_of_outer_steps or (most_tokens is not None and tokens >= most_tokens):
                break

        token_flops = self.flops_per_token()
        found |= {"rounds": number, "tokens": tokens, "flops": tokens * token_flops}
        if self.method.capabilities.one_exchange:
            found["communications"] = sum(exchange.communications for exchange in exchanges)
            found["sent_bytes"] = sum(exchange.sent for exchange in exchanges)
            for name, link in self.resources.links:
                found[f"over {name} seconds"] = sum(link.seconds(each.link) for each in exchanges if each.sent)
        if self.resources.tflops is not None:
            rate = self.resources.tflops * 1e12 * config.devices_per_node
            found["compute_seconds"] = device_tokens * token_flops / rate
        return found

    def _step_tokens(self, request: int, nodes_of_trainers: Sequence[Sequence[int]]) -> tuple[int, float]:
        """Tokens of an inner step of all trainers, and of the busiest device."""
        total = 0
        of_devices = [0.0] * self.groups
        for nodes in nodes_of_trainers:
            of_trainer = self.config.sequence_length * self._step_examples(request, len(nodes))
            total += of_trainer
            for node in nodes:
                of_devices[node * self.groups // self.nodes] += of_trainer / len(nodes)
        return total, max(of_devices)

    def flops_per_token(self) -> float:
        """FLOPs of training on one token, with all that is computed again."""
        flops = flops_per_token(self.model.module, self.config.sequence_length)
        if self.config.activation_checkpointing:
            flops *= 4.0 / 3.0  # one more forward pass
        if self.config.loss_chunk_tokens:  # one more of the head
            flops += 2.0 * self.model.module.get_output_embeddings().weight.numel()
        return flops

    def _step_examples(self, batch: int, workers: int) -> int:
        config = self.config
        max_batches = [self.max_batch or batch] * workers
        plans = execution_plans(config.switch_mode, batch, max_batches, config.switch_multiplier)
        examples = sum(plan.effective_batch for plan in plans)
        self.runs_less |= examples < batch
        return examples


def _assumptions(run: _Run, adapts: bool, ends: bool) -> Iterator[str]:
    config = run.config
    if adapts:
        yield (
            "ranges: all trainers have one constant batch, from the least to the largest; growing ones end between, "
            "unless trainers differ"
        )
    if run.runs_less:
        yield f"switch mode: {config.switch_mode} runs some of these batches only in part"
    if config.objective == "time":
        yield "objective: time chooses method, workers, batch and inner steps, which is ignored"
    if run.on_host and config.processes == "auto" and run.nodes > 1:
        yield "memory: of one process; processes: auto starts one per core, each with its own model and activations"
    if config.smallest_worker_batch is not None:
        yield (
            f"workers: one joins for every {config.smallest_worker_batch} examples of a trainer's batch "
            f"(smallest_worker_batch)"
        )
    if not ends and not config.simulates_time_budget:
        yield "length: epochs of data end the run, and no data are read; give data_sample_size, or max_tokens"
    elif ends and config.max_tokens is None and config.number_of_training_epochs is not None:
        yield "length: data_sample_size documents have one sequence each"
    if run.resources.tflops is not None:
        yield f"computing: a device sustains {run.resources.tflops:g} TFLOP/s with any micro-batch; small ones do not"
        yield "computing: without evaluation, batch tests, checkpoints and reading of data"
    if run.resources.links:
        yield "sending: overlaps with nothing, and every node has a link of its own"
        if run.nodes > 1:
            yield "sending: n nodes of a device or machine that share one link take up to n times as long"
    if max(run.nodes, run.trainers) > 1 and not run.method.capabilities.one_exchange:
        yield (
            "communications and bytes: not estimated, as this is for methods with one exchange at the end of a round; "
            f"docs/methods.md says what {config.distributed_algo} sends"
        )
    if config.budget is not None:
        yield f"{config.budget}: ignored; rounds, communications and bytes are those of a run without it"
    if config.participants < 1.0 or config.message_loss or config.node_schedule or config.node_speeds:
        yield "nodes: all work all the time at one speed, and no message is lost"


def _too_large(config: Config, memory: dict[str, int], micro_batch: int, room: int) -> str:
    """Return what does not fit, and the keys that may help."""
    most = max(memory, key=memory.get)
    needed = sum(memory.values())
    helpful = [MEMORY_ADVICE, "a larger devices_per_node"]
    if config.nodes_per_gpu > 1:
        helpful.append("fewer nodes_per_gpu")
    if needed - memory[ACTIVATIONS] <= room:
        sizes = {"max_batch_size": micro_batch, "eval_batch_size": config.eval_batch_size}
        smaller = " and ".join([*(name for name, size in sizes.items() if size > 1), "sequence_length"])
        helpful.append(f"a smaller {smaller}")
    return (
        f"--device-memory: a run needs {byte_size(needed)} per device, {byte_size(memory[most])} of them for {most}, "
        f"and may use {byte_size(room)} (padding_percentage {config.padding_percentage}); what may help: "
        + ", ".join(helpful)
    )


def estimate(config: Config, resources: Resources | None = None) -> Estimate:
    """Estimate what a run needs; ConfigError: the run would refuse the configuration, or does not fit the memory."""
    resources = resources or Resources()
    run = _Run(config, resources)
    largest = run.largest_batch()
    room = None if resources.memory is None else round(config.padding_percentage * resources.memory)
    micro_batch, activations = run.micro_batch(largest, room)
    memory, host_bytes = run.memory(activations)
    if room is not None and sum(memory.values()) > room:
        raise ConfigError(_too_large(config, memory, micro_batch, room))
    if resources.host_memory is not None and host_bytes > resources.host_memory:
        raise ConfigError(
            f"{HOST_MEMORY}state of a device takes {byte_size(host_bytes)}, and the host has "
            f"{byte_size(resources.host_memory)} for each device"
        )
    batches = [min(run.known_batches())]
    while largest is not None and 2 * batches[-1] < largest:
        batches.append(2 * batches[-1])
    found = [run.totals(batch) for batch in dict.fromkeys([*batches, largest or batches[0]])]
    ranges = {}
    for name in found[0]:
        values = [totals[name] for totals in found]
        ranges[name] = (min(values), max(values))
    ranges["workers"] = (min(run.workers[-1], ranges["workers"][0]), ranges["workers"][1])
    assumptions = [*run.assumptions, *_assumptions(run, len(found) > 1, "rounds" in ranges)]
    return Estimate(
        parameters=run.model.parameter_count,
        devices=run.devices,
        nodes=run.nodes,
        trainers=run.trainers,
        micro_batch=micro_batch,
        flops_per_token=run.flops_per_token(),
        memory=memory,
        device_bytes=sum(memory.values()),
        host_bytes=host_bytes,
        ranges=ranges,
        assumptions=(
            *assumptions,
            "on GPUs every process takes 0.6 GB more for CUDA; nccl takes 1.6 GB, and 25 MB per process beyond two",
            "on GPUs memory has been compared with that of one model, and times with none",
        ),
    )
