"""One worker of a training run whose loop belongs to the user. Each process is one worker.

The same parts as in `python run.py`: methods, encodings, batch tests, switch mode and data order. There is one trainer,
whose workers are the processes of torch.distributed's default group; a process without one trains alone.
"""

import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from algorithms.batch.calc_batch import BATCH_TESTS
from algorithms.batch.per_example import PerExampleProbe, UnsupportedModuleError, compared_micro_batches, step_estimate
from algorithms.batch.switch_mode import (
    SWITCH_MODES,
    ExecutionPlan,
    execution_plans,
    in_parts,
    only_gradient_accumulation,
)
from algorithms.nodes.balance import slice_offsets
from algorithms.nodes.traffic import Event
from algorithms.synchronisation import METHODS, Method
from algorithms.synchronisation.encodings import BFLOAT16, COMMUNICATION_DTYPES, PLAIN
from algorithms.synchronisation.group import Clock, Group, Inner, LocalWorker, Outer
from algorithms.synchronisation.method import COPY
from fabrics.data.sampler import DataCursor, Subsets
from fabrics.pool.run_checks import check_inner_products
from fabrics.training.flat_model import FlatModel, shared_state_problem
from fabrics.training.inner_loop import clip
from fabrics.training.method_config import method_of, method_problems
from fabrics.training.statistics import (
    Measurement,
    batch_control,
    compare_workers,
    measurement_of,
    probes_examples,
    samples_for_test,
)
from fabrics.training.work_split import probe_batch
from fabrics.training.worker import RoundKey, WorkerRound, method_generator, personal_tensors
from utils.config.reading import Checks, parse_config
from utils.config.schema import Config, ConfigError
from utils.distributed.devices import identity, transport_device
from utils.distributed.peers import PeerWatch
from utils.distributed.reductions import Transport, Workers

# Parts of a parameter's name that wrappers of its module add.
_WRAPPERS = r"\b(_orig_mod|_checkpoint_wrapped_module)\."
# The loop is the user's: the worker knows no end.
_NO_END = 2**31


@dataclass(frozen=True)
class AdaptiveBatch:
    """The number of examples of an inner step, and the rule that changes it.

    Attributes:
        test: a batch test (`sampling_method`); "none" keeps the initial batch.
        initial: examples of the first inner step, over all workers.
        max_micro_batch: the largest micro-batch of a forward and backward pass; see switch_mode.
        largest: the largest batch, over all workers; None: the number of training examples.
        eta: of the norm test.
        theta: of the inner product test.
        nu: of the orthogonality test.
        debias: divide by an unbiased estimate of the squared norm of the gradient.
        smoothing: weight of the past in the average of the statistics over rounds.
        confidence: standard errors by which the test's answer is lowered.
        max_batch_growth: factor per round; None: no bound.
        first_round: the first round with a test, counted from 1.
        sample: examples of the statistics if an inner step of a worker has fewer.
        switch_mode: what a worker runs of a share above max_micro_batch. threshold_switch_mode accumulates above twice
            max_micro_batch, and runs max_micro_batch up to there; only_gradient_accumulation always accumulates.
    """

    test: str = "norm_test"
    initial: int = 16
    max_micro_batch: int = 16
    largest: int | None = None
    eta: float = 0.8
    theta: float = 0.9
    nu: float = 5.84
    debias: bool = False
    smoothing: float = 0.0
    confidence: float = 0.0
    max_batch_growth: float | None = None
    first_round: int = 1
    sample: int = 8
    switch_mode: str = "threshold_switch_mode"


@dataclass
class _Round:
    """A round in progress.

    Attributes:
        plan: of this worker's inner steps; batch: examples of one over all workers.
        offsets: where this worker's examples of each inner step begin.
        ready: the gradient of the next inner step is complete.
        samples: gradient statistics of this worker; vector: its gradient, or the sketch, for the comparison.
    """

    plan: ExecutionPlan
    batch: int
    offsets: list[int]
    stops: tuple[int, ...]
    group: Group
    measurement: Measurement
    step: int = 0
    ready: bool = False
    samples: tuple = ()
    vector: torch.Tensor | None = None


class Worker:
    """A worker of a run, around a model and its optimizer.

    All workers start from the parameters and buffers of the first process. While a worker exists, the model's trainable
    parameters and their gradients are views of two flat buffers; the worker zeroes the gradients.

    Args:
        model: any nn.Module; its trainable parameters have one type and one device.
        optimizer: over exactly these parameters. Its learning rates may change, alike in all processes.
        method: a synchronisation method (`distributed_algo`).
        parameters: the method's parameters (`synchronisation`).
        inner_steps: of a round.
        outer_learning_rate: of the outer step.
        outer_momentum: of the outer step.
        communication_dtype: how pseudo-gradients are encoded.
        batch: an AdaptiveBatch, or a number of examples per inner step over all workers.
        statistics: "per_example" (exact, for known layers) or "across_workers" (any layer, two workers or more).
        gradient_clipping: the largest norm of a worker's gradient; None: no clipping.
        scaler: scales the losses (float16); None: bfloat16 and float32 need no scaling.
        seed: of the data order and of the method's random numbers.

    Attributes:
        steps: inner steps made.
        rounds: rounds made.
        communications: synchronisations with other workers.
        bytes_communicated: bytes that all workers have sent.
        index: number of this worker.
        workers: number of workers.
        effective_batch: examples of an inner step over all workers, as run in the latest round; switch_mode may run
            fewer than requested.
        warning: why the last batch test decided nothing; None if it did.

    Raises:
        ConfigError: an argument is wrong; one line per problem. It is a ValueError.
        ValueError: the model, the optimizer or the method cannot be used, or the processes differ in them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        method: str = "DiLoCo",
        parameters: Mapping[str, Any] | None = None,
        inner_steps: int = 20,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        communication_dtype: str = "float32",
        batch: AdaptiveBatch | int = 16,
        statistics: str = "per_example",
        gradient_clipping: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
    ):
        if type(batch) is int and batch > 0:
            batch = AdaptiveBatch("none", batch, batch)
        if not isinstance(batch, AdaptiveBatch):
            raise ValueError(f"batch: must be an AdaptiveBatch or a positive integer, got {batch!r}")
        self._config = _config(
            batch,
            method=method,
            parameters={} if parameters is None else parameters,
            inner_steps=inner_steps,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            communication_dtype=communication_dtype,
            statistics=statistics,
            gradient_clipping=gradient_clipping,
            seed=seed,
        )
        model = getattr(model, "_orig_mod", model)  # of torch.compile, which shares its parameters
        _check_model(model, optimizer)
        if not isinstance(scaler, torch.amp.GradScaler | None):
            raise ValueError(f"scaler: must be a torch.amp.GradScaler or None, got {scaler!r}")
        self._connect()
        self._optimizer = optimizer
        self._scaler = scaler
        trainable = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._model = FlatModel(model, trainable.device)
        if self.workers > 1 and trainable.is_cuda:
            torch.cuda.set_device(trainable.device)  # nccl uses the current device
        self._places = self._model.views(self._model.parameters.data)
        self._gradients = self._model.views(self._model.gradient)
        with _naming_arguments():
            self._method = method_of(self._config, self._model)
            if self.workers > 1 or not self._config.compares_workers:  # a worker alone warns instead
                check_inner_products(self._config, self.workers)
        _check_method(self._method, method, optimizer)
        if probes_examples(self._config):
            _check_layers(self._model)
        if scaler is not None and self._method.capabilities.exchanges_gradients:
            raise ValueError(f"scaler: must be None with {method}, whose workers exchange gradients; use bfloat16")
        self._control = batch_control(self._config)
        self._values: dict[str, float] = {}
        self._cursor: DataCursor | None = None
        self._examples = 0
        self._round: _Round | None = None
        self._reading: Iterator[np.ndarray] | None = None
        self._weight: float | None = None
        self._version: int | None = None
        self._failed = False
        self._events: list[Event] = []
        self.steps = 0
        self.rounds = 0
        self.communications = 0
        self.bytes_communicated = 0
        self.effective_batch = 0
        self.warning: str | None = None
        self._agree("arguments", self._config)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._agree("model", [(name, tensor.shape, tensor.dtype) for name, tensor in tensors])
        self._agree("type of the model's device", self._model.device.type)
        self._agree("trainable parameters", [block.name for block in self._model.blocks])
        names = {parameter: name for name, parameter in model.named_parameters()}
        members = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        self._agree("optimizer", (type(optimizer).__name__, _plain_values(optimizer), members))
        self._make_state()

    # Set-up

    def _connect(self) -> None:
        """Find the other processes: the default group, or torchrun's, or none."""
        if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
            # Plain objects travel in host memory, which needs no current GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        together = dist.is_initialized()
        self.index = dist.get_rank() if together else 0
        self.workers = dist.get_world_size() if together else 1
        self._peers = PeerWatch()

    def _gather(self, value: Any) -> list[Any]:
        values = [value] * self.workers
        if self.workers > 1:
            with self._peers.explaining():
                dist.all_gather_object(values, value)
        return values

    def _agree(self, name: str, value: Any) -> None:
        for rank, other in enumerate(values := self._gather(repr(value))):
            if other != values[0]:
                raise ValueError(f"{name}: must be the same in all processes, but those of ranks 0 and {rank} differ")

    def _make_state(self) -> None:
        model = self._model
        device = model.device
        everyone = range(self.workers)
        transport = None
        if self.workers > 1:
            travels_in = transport_device(device, self._gather(identity(device)), dist.get_backend_config())
            transport = Transport(self.index, everyone, dist.group.WORLD, travels_in, self._peers)
            if travels_in.type == "cuda":
                transport.meet_all()
            fixed = [tensor for tensor in model.module.parameters() if not tensor.requires_grad]
            for tensor in (model.parameters, *fixed, *model.module.buffers()):
                whole = tensor.data.contiguous()
                transport.copy([whole], 0, set(everyone) - {0})
                tensor.data = whole
        self._links = Workers(everyone, self.index, transport, in_order=device.type == "cpu")
        flat = model.parameters.data
        self._shared = {"parameters": flat.clone()}
        for name in self._method.state:
            copied = name in self._method.capabilities.copies
            self._shared[name] = flat.clone() if copied else torch.zeros_like(flat)
        self._state = {name: torch.zeros_like(flat) for name in personal_tensors(self._config, self._method)}
        if self._method.keeps == "replica":
            self._state[COPY] = flat
        elif COPY in self._state:
            self._state[COPY].copy_(flat)

    # What the method's group asks of the workers (fabrics.training.worker_group.WorkerGroup)

    def _group_links(self) -> SimpleNamespace:
        return SimpleNamespace(
            encoding=COMMUNICATION_DTYPES[self._config.communication_dtype],
            mean=lambda like, encoding=PLAIN, weights=None: self._links.mean(like, encoding, weights),
            messages=lambda size, takers: self._links.messages(size, takers, self._model.device),
            shared=self._shared,
            model=self._model,
        )

    # The loop

    @property
    def requested_batch(self) -> int:
        """Examples of an inner step over all workers, as the batch test asks."""
        return self._control.requested_batch

    def micro_batches(self, examples: int) -> Iterator[np.ndarray]:
        """Yield this worker's examples of the next inner step, one micro-batch at a time, for `backward`.

        Some passes serve the gradient statistics only; a loop treats them like the others. After an exception, or a
        `break`, the next call begins the inner step again.

        Args:
            examples: number of training examples; the same in every call and every process.

        Yields:
            Indices of examples, int64 [micro-batch].
        """
        if self._failed:
            raise RuntimeError("micro_batches: a step has failed; load a state in all processes, or start again")
        if self._reading is not None:
            self._reading.close()
        self._reading = self._read_step(examples)
        return self._reading

    def _read_step(self, examples: int) -> Iterator[np.ndarray]:
        if self._round is None:
            self._begin_round(examples)
        current = self._round
        if current.ready:
            raise RuntimeError("micro_batches: the examples of this inner step are done; call step")
        if examples != self._examples:
            raise ValueError(f"micro_batches: the data have {self._examples} examples, got {examples}")
        self._weight = None
        self._version = None
        if current.step == 0:
            current.samples = ()
            current.vector = None
        self._rebind_gradients()
        self._model.gradient.zero_()
        reading = self._cursor.readings(self.workers)[0]
        plan = current.plan
        measurement = current.measurement
        probed = current.step == 0 and measurement.probed_parts > 0
        most = self._config.statistics_batch_size
        if probed and plan.effective_batch < most:
            end = self._config.number_of_inner_steps_between_outers * current.batch
            sample = probe_batch(reading, end, self.index, most)
            if len(sample) > plan.effective_batch:  # of few data the step itself has as many
                own = only_gradient_accumulation(len(sample), self._config.max_batch_size)
                yield from self._pass(in_parts(own, measurement.probed_parts), sample, True)
                self._take_statistics(measurement.compared, len(sample))
                self._model.gradient.zero_()
                self._version = None
        examples_of_step = reading.places(current.offsets[current.step], plan.effective_batch)
        probed = probed and plan.effective_batch > 1
        parts = in_parts(plan, measurement.probed_parts) if probed else plan
        yield from self._pass(parts, examples_of_step, probed)
        if current.step == 0:
            self._take_statistics(measurement.compared, plan.effective_batch)
        current.ready = True

    def _pass(self, plan: ExecutionPlan, indices: np.ndarray, probed: bool) -> Iterator[np.ndarray]:
        self._probes: list[PerExampleProbe] = []
        start = 0
        with_products = compared_micro_batches(plan.micro_batches)
        for number, size in enumerate(plan.micro_batches):
            self._weight = size / plan.effective_batch
            self._size = size
            micro_batch = indices[start : start + size]
            if probed:
                with _uncompiled(), self._model.probe(size, number in with_products) as probe:
                    yield micro_batch
                for found in (probe.squared_norms, probe.inner_products, probe.squared_norm):
                    found.div_(self._scale**2)
                self._probes.append(probe)
            else:
                yield micro_batch
            if self._weight is not None:
                raise RuntimeError(
                    "micro_batches: call backward with the losses of every micro-batch in turn; a DataLoader with this "
                    "batch_sampler needs num_workers=0"
                )
            start += size

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradient of these losses, with the weight of the micro-batch in the inner step.

        Args:
            losses: of each example of the micro-batch, [micro-batch], or their mean, [].

        Raises:
            ValueError: there are more or fewer losses than examples.
            RuntimeError: no micro-batch is due, or the gradient of earlier ones was overwritten.
        """
        if self._weight is None:
            raise RuntimeError("backward: take a micro-batch from micro_batches first")
        if losses.dim() > 0 and losses.shape != (self._size,):
            raise ValueError(f"backward: expected {self._size} losses or their mean, got shape {list(losses.shape)}")
        self._rebind_gradients()
        gradient = self._model.gradient
        if self._version not in (None, gradient._version):
            raise RuntimeError("backward: the gradient was overwritten, as zero_grad(set_to_none=False) does")
        loss = losses.mean() * self._weight
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self._weight = None
        self._version = gradient._version

    def step(self) -> None:
        """Make the inner step: clip the gradient and update the parameters; at a stop of the method, synchronise.

        The last step of a round ends with the batch test.

        Raises:
            RuntimeError: `micro_batches` was not read to its end.
            FloatingPointError: this worker's parameters are not finite; nothing of them was sent.
            PeerLostError: another process has died.
        """
        current = self._round
        if current is None or not current.ready:
            raise RuntimeError("step: read micro_batches to its end, and call backward for every micro-batch")
        self._rebind_gradients()
        self._failed = True  # until all has succeeded
        if not self._method.capabilities.exchanges_gradients:
            self._update()
        current.ready = False
        current.step += 1
        self.steps += 1
        if current.step in current.stops:
            self._synchronise()
        if current.step == current.stops[-1]:
            self._conclude_round()
        self._failed = False

    def _update(self) -> None:
        gradient = self._model.gradient
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        clip(self._model, gradient, self._config.gradient_clipping)
        correction = self._method.capabilities.correction
        if correction is not None:
            gradient.add_(self._state[correction])
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        gradient.zero_()

    def _rebind_gradients(self) -> None:
        """Let the parameters' gradients be views of the flat one again, after a user's zero_grad has removed them."""
        for parameter, place in self._gradients.items():
            if parameter.grad is not place:
                parameter.grad = place

    # A round

    def _begin_round(self, examples: int) -> None:
        if self._cursor is None:
            if not isinstance(examples, int | np.integer) or examples < 1:
                raise ValueError(f"micro_batches: examples must be a positive integer, got {examples!r}")
            self._examples = int(examples)
            self._agree("examples", self._examples)
            self._cursor = DataCursor(Subsets(self._config.training_seed, self._examples), [0])
        if {parameter for parameter in self._model.module.parameters() if parameter.requires_grad} - set(self._places):
            raise RuntimeError("micro_batches: the model has got trainable parameters since the worker was made")
        if any(parameter.data_ptr() != place.data_ptr() for parameter, place in self._places.items()):
            raise RuntimeError(
                "micro_batches: the parameters have moved: make one worker only, and call model.to() before it is made"
            )
        if sum(len(group["params"]) for group in self._optimizer.param_groups) != len(self._places):
            raise RuntimeError("micro_batches: the optimizer has got other parameters since the worker was made")
        config = self._config
        inner_steps = config.number_of_inner_steps_between_outers
        plans = execution_plans(
            config.switch_mode,
            self.requested_batch,
            [config.max_batch_size] * self.workers,
            config.switch_multiplier,
        )
        batches = [plan.effective_batch for plan in plans]
        self.effective_batch = sum(batches)
        group = self._make_group(inner_steps, batches)
        method = self._method
        stops = range(1, inner_steps + 1) if method.capabilities.exchanges_gradients else method.stops(group)
        self._round = _Round(
            plan=plans[self.index],
            batch=sum(batches),
            offsets=slice_offsets(batches, [range(inner_steps)] * self.workers)[self.index],
            stops=tuple(stops),
            group=group,
            measurement=measurement_of(config, self.workers, self._control.measures(self.rounds + 1)),
        )

    @property
    def _learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])  # schedulers change a tensor in place

    def _make_group(self, inner_steps: int, batches: list[int]) -> Group:
        self._events = []
        decay = self._optimizer.param_groups[0].get("weight_decay", 0.0)
        encoding = COMMUNICATION_DTYPES[self._config.communication_dtype]
        dtype = torch.bfloat16 if encoding is BFLOAT16 else self._model.parameters.dtype
        group = Group(
            workers=self._group_links(),
            shared=self._shared,
            values=self._values,
            weights=[1.0 / self.workers] * self.workers,
            clock=Clock(
                inner_steps=inner_steps,
                seconds=[0.0] * self.workers,
                own_steps=[inner_steps] * self.workers,
                batches=batches,
                random=partial(method_generator, RoundKey(self._config.training_seed, 0, 0, self.rounds)),
            ),
            inner=Inner(decay, self._update_shared, self._learning_rate),
            outer=Outer(self._config.learning_rate_for_outer_opt, self._config.outer_momentum, dtype),
            events=self._events,
        )
        own = self._model.parameters.data
        start = self._state.get(COPY, self._shared["parameters"])
        gradient = self._model.gradient if self._method.capabilities.exchanges_gradients else None
        group.local_workers = [LocalWorker(self.index, own, start, gradient, self._state)]
        return group

    @torch.no_grad()
    def _synchronise(self) -> None:
        group = self._round.group
        method = self._method
        group.clock.step = self._round.step
        group.inner.learning_rate = self._learning_rate
        (local,) = group.local_workers
        computed = local.parameters if local.gradient is None else local.gradient
        if not computed.sum(dtype=torch.float32).isfinite():
            what = "parameters" if local.gradient is None else "gradient"
            raise FloatingPointError(f"step: the {what} of worker {self.index} became NaN or infinite")
        if method.keeps == "replica":
            method.exchange(group)
            return
        if local.gradient is not None and method.capabilities.inner_optimizer is None:
            clip(self._model, local.gradient, self._config.gradient_clipping)
        incoming = method.incoming(group)
        incoming.add(local, method.message(local, group))
        method.apply(group, incoming.result())
        self._model.gradient.zero_()
        self._model.load(local.start)

    def _update_shared(self, gradient: torch.Tensor) -> None:
        """Update the shared parameters with the optimizer and this gradient."""
        model = self._model
        model.load(self._shared["parameters"])
        clip(model, model.gradient.copy_(gradient), self._config.gradient_clipping)
        self._optimizer.step()
        self._shared["parameters"].copy_(model.parameters.data)

    def _take_statistics(self, compared: str, examples: int) -> None:
        current = self._round
        if current.vector is None and compared != "nothing":
            gradient = self._model.gradient
            vector = gradient if compared == "gradient" else self._model.sketch(gradient, self.rounds)
            current.vector = vector * (examples / self._scale)
        if self._probes:
            current.samples += (step_estimate(self._probes),)
            self._probes = []

    def _conclude_round(self) -> None:
        """Count what was sent, and ask the batch test for the next request."""
        current = self._round
        samples, between, warning = [], None, None
        if self._control.measures(self.rounds + 1):
            own = WorkerRound(self.index, current.plan, [], [], current.samples, 0.0, self._config.max_batch_size)
            measurement = current.measurement
            vectors = {self.index: current.vector}
            compared = compare_workers(self._group_links(), measurement, {self.index: own}, vectors)
            self.bytes_communicated += measurement.sent_bytes(self.workers, self._model)
            records = dict(enumerate(self._gather(compared[self.index])))
            samples, between, warning = samples_for_test(self._config, records)
        largest = self._config.max_requested_batch or self._examples
        _, problem = self._control.conclude(samples, between, current.batch, 0.0, largest)
        self.warning = warning or problem
        for event in self._events:
            self.bytes_communicated += round(event.bytes_per_worker * self.workers)
            self.communications += event.communicates
        inner_steps = self._config.number_of_inner_steps_between_outers
        self._cursor.advance([current.plan.effective_batch * inner_steps] * self.workers)
        self._values = current.group.values
        self._round = None
        self.rounds += 1

    @torch.no_grad()
    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the run's parameters by name; all workers call this together.

        Between rounds they are those of the model, unless the method's workers keep parameters of their own.
        """
        flat = self._shared["parameters"]
        if self._method.capabilities.averages_copies:
            incoming = self._links.mean(flat)
            incoming.add(self.index, PLAIN.encode(self._state[COPY]))
            flat, _ = incoming.result()
        return {block.name: flat[block.slice].view(block.shape).clone() for block in self._model.blocks}

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the end of a round: tensors, plain numbers and the optimizer's state.

        The tensors are references. Save one state per process, for example with torch.save.

        Raises:
            RuntimeError: a round is in progress.
        """
        if self._round is not None:
            raise RuntimeError("state_dict: a round is in progress; save after a step that ends a round")
        return {
            **self._tensors(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            **self._identity(),
            "worker_index": self.index,
            "workers": self.workers,
            "values": dict(self._values),
            "batch": self._control.state_dict(),
            "examples": self._examples,
            "position": 0 if self._cursor is None else self._cursor.positions[0],
            "counts": {name: getattr(self, name) for name in _COUNTS},
        }

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"shared": dict(self._shared), "worker": {**self._state, "parameters": self._model.parameters.data}}

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._config.training_seed,
            "method": repr(self._method),  # with its parameters
            "model": [[re.sub(_WRAPPERS, "", block.name), list(block.shape)] for block in self._model.blocks],
            "optimizer_type": type(self._optimizer).__name__,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this worker, or, with more workers than before, from that of any other.

        All workers call this together.

        Raises:
            ValueError: the state is of another model, optimizer, method, seed or worker, or the workers' rounds differ.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                differ = "" if name == "model" else f" {value}, got {state.get(name)}"
                raise ValueError(f"load_state_dict: the state must be of a worker with the same {name}{differ}")
        if self.index < state["workers"] and state["worker_index"] != self.index:
            raise ValueError(
                f"load_state_dict: the state must be that of worker {self.index}, got that of {state['worker_index']}; "
                f"save one state per process"
            )
        self._agree("state", [state[name] for name in ("counts", "values", "batch", "examples", "position")])
        self._round = None
        for kind, tensors in self._tensors().items():
            found, own_shapes = (_shapes(each) for each in (state[kind], tensors))
            if found != own_shapes:
                names = ", ".join(sorted(dict(found.items() ^ own_shapes.items())))
                raise ValueError(f"load_state_dict: the state is of another model or method; it differs in {names}")
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would use the state's tensors
        for kind, tensors in self._tensors().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[kind][name])
        self._failed = False
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._values = dict(state["values"])
        if self._config.sampling_method != "none":  # otherwise the batch is that of the argument
            self._control.load_state_dict(state["batch"])
        self._examples = state["examples"]
        self._cursor = None
        if self._examples:
            self._cursor = DataCursor(Subsets(self._config.training_seed, self._examples), [0])
            self._cursor.positions[0] = state["position"]
        for name, count in state["counts"].items():
            setattr(self, name, count)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


_COUNTS = ("steps", "rounds", "communications", "bytes_communicated", "effective_batch")


# The configuration keys of the arguments.
_KEYS = {
    "method": "distributed_algo",
    "parameters": "synchronisation",
    "inner_steps": "number_of_inner_steps_between_outers",
    "outer_learning_rate": "learning_rate_for_outer_opt",
    "statistics": "statistics_estimator",
    "seed": "training_seed",
    "test": "sampling_method",
    "initial": "INITIAL_BATCH_SIZE",
    "max_micro_batch": "max_batch_size",
    "largest": "max_requested_batch",
    "eta": "ETA",
    "theta": "vartheta",
    "smoothing": "statistics_smoothing",
    "confidence": "batch_test_confidence",
    "first_round": "batch_test_start",
    "sample": "statistics_batch_size",
}


# Open passes with statistics, of all workers of this process; and what restores PyTorch's stance after the last one.
_open_passes: list[object] = []
_stance = ExitStack()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled models eagerly: their code would pass over the hooks that take the statistics."""
    if not _open_passes and "torch._dynamo" in sys.modules:  # a compiled model has imported it
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    own = object()
    _open_passes.append(own)
    try:
        yield
    finally:
        _open_passes.remove(own)
        # At the end of the program, after an exception in the loop, restoring would import, and print a second error.
        if not _open_passes and not sys.is_finalizing():
            _stance.close()


def _problems(config: Config) -> list[str]:
    found = method_problems(config)
    if config.max_batch_size is None:  # `python run.py` measures it
        found.append("max_batch_size: must be a positive integer, got None")
    return found


# What an argument may name. The checks of `python run.py` would import its datasets and models, which takes seconds.
_CHECKS = Checks(
    choices={
        "distributed_algo": METHODS,
        "communication_dtype": COMMUNICATION_DTYPES,
        "sampling_method": BATCH_TESTS,
        "statistics_estimator": ("per_example", "across_workers"),
        "switch_mode": SWITCH_MODES,
    },
    problems=(_problems,),
)


def _config(batch: AdaptiveBatch, **arguments: Any) -> Config:
    """Return the arguments as a configuration; errors name the arguments."""
    given = vars(batch) | arguments
    keys = {_KEYS.get(name, name): value for name, value in given.items()} | {"number_of_outer_steps": _NO_END}
    with _naming_arguments():
        return parse_config(keys, checks=_CHECKS)[0]


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Name arguments in errors in place of keys."""
    try:
        yield
    except ConfigError as error:
        names = {key: name for name, key in _KEYS.items()}
        problems = [re.sub(r"\w+", lambda word: names.get(word[0], word[0]), problem) for problem in error.problems]
        raise ConfigError(problems) from None


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}: must be a torch {kind.__name__}, got {value!r}")
    for module in model.modules():
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | FullyShardedDataParallel):
            raise ValueError(
                f"model: must be without {type(module).__name__}, which averages every gradient; give the worker the "
                f"module inside, and call that in the loop"
            )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("model: must not be sharded over devices (DTensor)")
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if optimized != trainable:
        raise ValueError("optimizer: must have exactly the model's trainable parameters")
    if len({parameter.device for parameter in trainable}) != 1:
        raise ValueError("model: all trainable parameters must be on one device")
    if any(parameter.is_complex() for parameter in trainable):
        raise ValueError("model: trainable parameters must be real, not complex")
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad's has step 0 when it is new
        raise ValueError("optimizer: must be new; load its state with Worker.load_state_dict")
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):  # they need a closure, and sparse gradients
        raise ValueError(f"optimizer: {type(optimizer).__name__} cannot be used")
    if problem := shared_state_problem(model):
        raise ValueError(f"model: {problem}")


def _plain_values(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Return the values of each group of parameters that are plain, such as learning rates."""
    kept = (bool, int, float, str, tuple)

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return [
        {name: plain(value) for name, value in group.items() if isinstance(plain(value), kept)}
        for group in optimizer.param_groups
    ]


def _check_layers(model: FlatModel) -> None:
    try:
        model.probe(1, products=False)
    except UnsupportedModuleError as error:
        raise ValueError(f'statistics: {error.problem}; "across_workers" works, with two workers or more') from None


def _check_method(method: Method, name: str, optimizer: torch.optim.Optimizer) -> None:
    able = method.capabilities
    if able.correction or able.inner_optimizer is None:
        group, *others = optimizer.param_groups
        plain = type(optimizer) is torch.optim.SGD and not group["momentum"] and not group["maximize"]
        if not plain or others:
            raise ValueError(
                f"method: {name} needs torch.optim.SGD without momentum or maximize, with one group of parameters"
            )
