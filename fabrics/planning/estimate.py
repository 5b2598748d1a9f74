"""Estimate the memory, traffic and time of a run from formulas. Nothing is trained and no data are read.

docs/memory.md has the formula for memory; docs/planning.md says what every total counts, and what none of them does.

What a batch test will ask for is unknown before the run. So the run is followed with several constant batches, from
the least (`INITIAL_BATCH_SIZE`, or that of a schedule) in powers of two to the largest that the configuration allows.
Every total is given as the range over these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import mul
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from algorithms.batch.switch_mode import execution_plans
from algorithms.nodes.traffic import Link, even_split, rounds_ahead
from algorithms.schedule.limits import Limits, RunCounters
from fabrics.data.dataset_loader import DATASETS
from fabrics.models.initialisation import META, flops_per_token, meta_model, recompute_activations
from fabrics.pool.max_batch import round_tensors
from fabrics.pool.run_checks import check_model, check_nodes
from fabrics.sharding.sharded_model import gathered_elements, sharded_parts
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import exchange_sizes, method_of
from fabrics.training.optimizers import inner_optimizer_of
from fabrics.training.statistics import batch_schedule, probes_examples
from fabrics.training.worker import personal_tensors
from utils.config.schema import Config, ConfigError
from utils.text import byte_size

# Vectors that autograd keeps per layer and token: of the hidden size, by bytes per element, and of the intermediate
# size. Measured on Llama, where the estimate is within 20%; attention keeps no scores.
_HIDDEN_VECTORS = {4: 11, 2: 16}
_INTERMEDIATE_VECTORS = 4
# Copies of the logits, in float32.
_LOGITS = 3
# More rounds than a run has.
_ANY_ROUNDS = 2**40
ACTIVATIONS = "activations and logits"


@dataclass(frozen=True)
class Resources:
    """The devices and links that a run is estimated for. None: unknown."""

    devices: int | None = None  # of all machines; None: those of the key `devices`, or one node's
    memory: int | None = None  # bytes per device
    tflops: float | None = None  # sustained by each device
    links: tuple[tuple[str, Link], ...] = ()  # by name
    processes: int | None = None  # that share a device; None: as the key `processes` says, one if it is auto
    host_memory: int | None = None  # bytes of the host for each device


def activation_bytes(config: Config, module: nn.Module) -> tuple[int, int] | None:
    """Bytes that a training pass keeps of one example, and bytes of its logits; None for an unknown architecture.

    With `activation_checkpointing` all layers keep their inputs, and one layer the rest. On nodes of several devices
    per-example statistics keep the inputs and output gradients of all linear layers, which may be more.
    """
    shape = getattr(module, "config", None)
    hidden = getattr(shape, "hidden_size", None)
    layers = getattr(shape, "num_hidden_layers", None)
    if hidden is None or not layers:
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


class DoesNotFitError(ConfigError):
    """A run needs more memory than there is."""


class Estimate:
    """The needs of a run; ConfigError: the run would refuse the configuration; DoesNotFitError: memory is too small.

    Attributes:
        memory: bytes of the busiest device, by part.
        host_bytes: of that device, state in host memory instead.
        micro_batch: examples of the micro-batch that the memory is for.
    """

    def __init__(self, config: Config, resources: Resources | None = None):
        resources = resources or Resources()
        self.config = config
        self.resources = resources
        size = config.devices_per_node
        self.max_batch = config.max_batch_size  # what a node runs at once; None: unknown
        self.on_host = bool(config.devices) and all(name.startswith("cpu") for name in config.devices)
        self.devices = resources.devices or (size if self.on_host or not config.devices else len(config.devices))
        if self.devices % size:
            raise ConfigError(f"--devices: must be a multiple of devices_per_node, {size}, got {self.devices}")
        self.groups = self.devices // size
        # The processes of a machine without GPUs share its nodes.
        self.nodes = config.nodes_per_gpu * (1 if self.on_host and size > 1 else self.groups)
        check_nodes(config, [META] * self.nodes)
        self.trainers = config.number_of_initial_trainers
        self.processes_here = 1  # on the busiest device
        if size == 1 and resources.processes is not None:
            self.processes_here = resources.processes
        elif size == 1 and config.processes != "auto":
            self.processes_here = -(-config.processes // self.groups)

        module, self.guesses = meta_model(config)
        if config.activation_checkpointing:
            recompute_activations(module, config.model_type)
        self.model = FlatModel(module, META, loss_chunk_tokens=config.loss_chunk_tokens or None)
        check_model(config, self.model)
        self.parameters = self.model.parameter_count
        self.method = method_of(config, self.model)
        self.largest_batch = self._largest_batch()
        self.runs_less = False  # than a batch, because of the switch mode
        room = None
        if resources.memory is not None:
            room = round(config.padding_percentage * resources.memory)
        self.micro_batch, activations = self._micro_batch(room)
        self.memory, self.host_bytes = self._memory(activations)
        self.device_bytes = sum(self.memory.values())
        self._check_memory(room)

    def most_workers(self, batch: int) -> int:
        smallest = self.config.smallest_worker_batch
        return self.nodes if smallest is None else max(1, min(self.nodes, batch // smallest))

    def workers_of(self, batch: int) -> tuple[int, ...]:
        """Workers of each trainer with this batch."""
        return even_split(min(self.nodes, self.trainers * self.most_workers(batch)), self.trainers)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of training on one token, with all that is computed again."""
        flops = flops_per_token(self.model.module, self.config.sequence_length)
        if self.config.activation_checkpointing:
            flops *= 4.0 / 3.0  # one more forward pass
        if self.config.loss_chunk_tokens:  # one more of the head
            flops += 2.0 * self.model.module.get_output_embeddings().weight.numel()
        return flops

    # Memory

    def _memory(self, activations: int) -> tuple[dict[str, int], int]:
        """Bytes of the busiest device by part, and bytes that it takes of its host's memory."""
        config = self.config
        model = self.model
        size = config.devices_per_node
        processes = self.processes_here
        flat = self.parameters * model.parameters.element_size()
        optimizer = inner_optimizer_of(config)
        moment = 0 if optimizer is None else optimizer.state_bytes(model)
        # The device's nodes may all have other trainers once the batches differ.
        workers = -(-max(self.nodes, self.trainers) // self.groups)
        workers_each = -(-workers // processes)
        trainers = processes * min(self.trainers, workers_each)
        moments = moment * (trainers if self.method.capabilities.exchanges_gradients else workers)
        outer = trainers * (1 + len(self.method.state)) * flat
        tensors = round_tensors(config, workers_each, processes * self.groups > 1, self.nodes - workers_each)
        in_round = round(processes * flat * tensors)
        host = 0
        pinned = 1 << (flat // size - 1).bit_length()  # PyTorch's pinned memory comes in powers of two
        if config.offload_moments and not self.on_host:
            host += pinned * round(moments / flat)
            moments = processes * moment
        if config.offload_outer_state and not self.on_host:
            host += pinned * (outer // flat + processes)
            outer = 0
            in_round -= processes * flat
        frozen = sum(p.numel() * p.element_size() for p in model.module.parameters() if not p.requires_grad)
        personal = len(personal_tensors(config, self.method))
        gathered = gathered_elements(model.module) * model.parameters.element_size() if size > 1 else 0
        parts = {
            "parameters of the working model": processes * (flat + frozen) // size,
            "its gradients": processes * flat // size,
            "state of the inner optimizer": moments // size,
            "parameters of the trainers and the method's state": outer // size,
            "state of the method and the encoding per worker": workers * personal * flat // size,
            "sums of a round": in_round // size,
            "layers that are whole at a time": gathered,
            "copies of weights for autocast": processes * cast_bytes(config, model.module),
            ACTIVATIONS: activations,
        }
        return parts, host

    def _micro_batch(self, room: int | None) -> tuple[int, int]:
        """The largest micro-batch of a node, and the bytes of its activations on a device."""
        config = self.config
        size = config.devices_per_node
        shares = []  # of the largest batch, if that is known
        if self.largest_batch is not None:
            shares.append(-(-self.largest_batch // self.workers_of(self.largest_batch)[-1]))
        example = activation_bytes(config, self.model.module)
        if example is None:
            self.guesses.append("activations: not counted, as the model's config names no hidden_size")
            return min([self.max_batch or 1, *shares]), 0
        kept, logits = (self.processes_here * size_each for size_each in example)
        if self.max_batch is None and room is not None:
            parts, _ = self._memory(activations=0)
            self.max_batch = max(1, size * int((room - sum(parts.values())) // (kept + logits)))
        elif self.max_batch is None:
            self.guesses.append(
                "micro-batch: max_batch_size is null; memory is for one example, totals are without switch mode; "
                "--device-memory estimates the largest micro-batch that fits"
            )
        micro_batch = min([self.max_batch or 1, *shares])
        trained = -(-micro_batch // size) * (kept + logits)
        layers = self.model.module.config.num_hidden_layers
        return micro_batch, max(trained, config.eval_batch_size * (kept // layers + 2 * logits // _LOGITS))

    def _check_memory(self, room: int | None) -> None:
        if room is not None and self.device_bytes > room:
            part = max(self.memory, key=self.memory.get)
            raise DoesNotFitError(
                f"--device-memory: a run needs {byte_size(self.device_bytes)} per device, "
                f"{byte_size(self.memory[part])} of them for {part}, and may use {byte_size(room)} "
                f"(padding_percentage {self.config.padding_percentage}); docs/large_models.md lists what helps"
            )
        if self.resources.host_memory is not None and self.host_bytes > self.resources.host_memory:
            raise DoesNotFitError(
                f"host memory: state of a device takes {byte_size(self.host_bytes)}, and the host has "
                f"{byte_size(self.resources.host_memory)} for each device"
            )

    # Totals

    def _known_batches(self) -> list[int]:
        """The first requested batch, and those of a schedule."""
        schedule = batch_schedule(self.config)
        requests = [self.config.INITIAL_BATCH_SIZE]
        if schedule is not None:
            requests += [int(request) for _, request in schedule.pairs]
        limit = self.config.max_requested_batch or max(requests)
        return [min(request, limit) for request in requests]

    def _largest_batch(self) -> int | None:
        """The largest batch of a trainer that the configuration allows; None: unknown before data are read."""
        config = self.config
        if config.sampling_method == "none":
            return max(self._known_batches())
        if config.max_requested_batch is not None:
            return config.max_requested_batch
        if config.data_sample_size is not None:
            self.guesses.append(
                "largest batch: all data of a trainer, one sequence per document; longer documents raise it"
            )
            return max(config.INITIAL_BATCH_SIZE, config.data_sample_size)
        if config.max_tokens is not None:
            self.guesses.append("largest batch: one round trains max_tokens")
            step_tokens = config.sequence_length * config.number_of_inner_steps_between_outers
            return max(config.INITIAL_BATCH_SIZE, config.max_tokens // step_tokens)
        self.guesses.append(
            "batch: stays INITIAL_BATCH_SIZE; its limit is known with max_requested_batch or data_sample_size"
        )
        return None

    def _limits(self) -> Limits:
        """The limits that are known before data are read."""
        config = self.config
        examples = None
        if config.number_of_training_epochs is not None and config.data_sample_size is not None:
            examples = config.number_of_training_epochs * config.data_sample_size
        return Limits(config.number_of_outer_steps, examples, config.max_tokens)

    def _totals(self, batch: int) -> dict[str, float]:
        """Follow the run, with merges, for trainers that all have this batch; return its totals by name."""
        config = self.config
        limits = self._limits()
        found = {"batch": batch, "workers": self.workers_of(batch)[-1]}
        if limits == Limits(None, None, None):
            return found | {"workers": self.most_workers(batch)}  # of the last trainer, if all merge

        whole_round = config.number_of_inner_steps_between_outers
        counters = RunCounters()
        living = 0
        device_examples = 0.0  # of the busiest device
        communications = 0
        sent_bytes = 0
        seconds = {name: 0.0 for name, _ in self.resources.links}
        sizes = exchange_sizes(config, self.method, self.model)
        workers = self.most_workers(batch)
        ahead = rounds_ahead(self.trainers, self.nodes, 1, config.merge_frequency, config.merge_count, sizes, workers)
        for number, (nodes_of_trainers, exchanges) in enumerate(ahead, start=1):
            if len(nodes_of_trainers) != living:  # at first, and after a merge
                living = len(nodes_of_trainers)
                step_examples, busiest = self._step_examples(batch, nodes_of_trainers)
                examples_of = partial(mul, step_examples)  # of a number of inner steps
                tokens_of = partial(mul, step_examples * config.sequence_length)
            most_steps = whole_round
            # The rounds of the last trainer are alike once it has its nodes and the batch test has begun.
            if living == 1 and len(exchanges) == 1 and number >= config.batch_test_start:
                most_steps *= (config.number_of_outer_steps or _ANY_ROUNDS) - counters.outer_steps
            steps = limits.next_round(counters, most_steps, examples_of, tokens_of).inner_steps
            rounds = -(-steps // whole_round)
            counters.outer_steps += rounds
            counters.examples += examples_of(steps)
            counters.tokens += tokens_of(steps)
            device_examples += steps * busiest
            for exchange in exchanges:
                communications += rounds * exchange.communications
                sent_bytes += rounds * exchange.sent
                for name, link in self.resources.links:
                    if exchange.sent:
                        seconds[name] += rounds * link.seconds(exchange.link)
            found["workers"] = max(found["workers"], len(nodes_of_trainers[0]))
            if limits.progress(counters) >= 1.0:
                break

        token_flops = self.flops_per_token
        found |= {"rounds": counters.outer_steps, "tokens": counters.tokens, "flops": counters.tokens * token_flops}
        if self.method.capabilities.one_exchange:
            found |= {"communications": communications, "sent_bytes": sent_bytes}
            found |= {f"over {name} seconds": needed for name, needed in seconds.items()}
        if self.resources.tflops is not None:
            rate = self.resources.tflops * 1e12 * config.devices_per_node
            computing = device_examples * config.sequence_length * token_flops / rate
            found["compute_seconds"] = computing
            if self.method.capabilities.one_exchange:
                found |= {f"in all over {name} seconds": computing + needed for name, needed in seconds.items()}
        return found

    def _step_examples(self, batch: int, nodes_of_trainers: Sequence[Sequence[int]]) -> tuple[int, float]:
        """Examples of an inner step of all trainers, and of the busiest device."""
        config = self.config
        if config.max_requested_batch is None and config.data_sample_size is not None:
            batch = min(batch, max(config.INITIAL_BATCH_SIZE, config.data_sample_size // len(nodes_of_trainers)))
        total = 0
        of_devices = [0.0] * self.groups
        for nodes in nodes_of_trainers:
            max_batches = [self.max_batch or batch] * len(nodes)
            plans = execution_plans(config.switch_mode, batch, max_batches, config.switch_multiplier)
            of_trainer = sum(plan.effective_batch for plan in plans)
            self.runs_less |= of_trainer < batch
            total += of_trainer
            for node in nodes:
                of_devices[node * self.groups // self.nodes] += of_trainer / len(nodes)
        return total, max(of_devices)

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the most of every total that is known.

        `batch` and `workers` of a trainer, and of the run `rounds`, `tokens`, `flops`, `communications`, `sent_bytes`,
        `compute_seconds`, `over LINK seconds` and their sum, `in all over LINK seconds`.
        """
        batches = [min(self._known_batches())]
        largest = self.largest_batch or batches[0]
        while 2 * batches[-1] < largest:
            batches.append(2 * batches[-1])
        if largest > batches[-1]:
            batches.append(largest)
        found = [self._totals(batch) for batch in batches]
        ranges = {}
        for name in found[0]:
            values = [totals[name] for totals in found]
            ranges[name] = (min(values), max(values))
        first_workers = self.workers_of(self.config.INITIAL_BATCH_SIZE)[-1]
        ranges["workers"] = (min(first_workers, ranges["workers"][0]), ranges["workers"][1])
        return ranges

    @property
    def assumptions(self) -> list[str]:
        """The assumptions of this plan; docs/planning.md has those of all plans."""
        config = self.config
        ends = "rounds" in self.ranges  # which also finds `runs_less`
        lines = list(self.guesses)
        if self.runs_less:
            lines.append(f"switch mode: {config.switch_mode} runs some of these batches only in part")
        if config.objective == "time":
            lines.append("objective: time chooses method, workers, batch and inner steps, which is ignored")
        if self.on_host and config.processes == "auto" and self.nodes > 1:
            lines.append(
                "memory: of one process; processes: auto starts one per core, each with its own model and activations"
            )
        if not ends and not config.simulates_time_budget:
            lines.append(
                "length: epochs of data end the run, and no data are read; give data_sample_size, or max_tokens"
            )
        elif config.number_of_training_epochs is not None and config.data_sample_size is not None:
            lines.append("length: data_sample_size documents have one sequence each")
        elif config.number_of_training_epochs is not None:
            lines.append("length: number_of_training_epochs is ignored without data_sample_size, as no data are read")
        if not DATASETS[config.dataset].packed:
            lines.append(
                "length: every example has sequence_length tokens; with shorter ones max_tokens lasts for more rounds, "
                "communications and bytes, and other limits for fewer tokens"
            )
        if max(self.nodes, self.trainers) > 1 and not self.method.capabilities.one_exchange:
            lines.append(
                "communications and bytes: not estimated, as this is for methods with one exchange at the end of a "
                f"round; docs/methods.md says what {config.distributed_algo} sends"
            )
        if config.budget is not None:
            lines.append(f"{config.budget}: ignored; rounds, communications and bytes are those of a run without it")
        if self.resources.links and self.nodes > 1:
            lines.append("links: every node has its own; nodes of one machine that share one take longer")
        if config.participants < 1.0 or config.message_loss or config.node_schedule or config.node_speeds:
            lines.append("nodes: all work all the time at one speed, and no message is lost")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """All numbers and assumptions by name, for JSON."""
        return {
            "parameters": self.parameters,
            "devices": self.devices,
            "nodes": self.nodes,
            "trainers": self.trainers,
            "micro_batch": self.micro_batch,
            "flops_per_token": self.flops_per_token,
            "memory": self.memory,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "ranges": self.ranges,
            "assumptions": self.assumptions,
        }
