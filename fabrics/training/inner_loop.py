"""The inner steps of one worker in a round: forward, backward, clip, optimizer step.

Two problems concern one worker only. If its device is out of memory, it makes the step again in smaller micro-batches.
If its parameters are not finite, it reports why it is left out of the round.
"""

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from algorithms.batch.per_example import PerExampleProbe, compared_micro_batches
from algorithms.batch.switch_mode import ExecutionPlan, in_parts, only_gradient_accumulation
from fabrics.data.examples import Examples
from fabrics.models.attention import unmasked
from fabrics.training.flat_model import FlatModel
from fabrics.training.worker import Assignment, TrainingError, Worker, WorkerRound
from utils.distributed.devices import wait_for


def clip(model: FlatModel, gradient: torch.Tensor, largest: float | None) -> None:
    """Scale a flat gradient down to this norm, in place and without waiting for the device; None: leave it."""
    if largest is not None:
        norm = model.norm(gradient)
        gradient.mul_((largest / (norm + 1e-6)).clamp(max=1.0))


def accumulate_gradients(
    model: FlatModel, examples: Examples, plan: ExecutionPlan, indices: np.ndarray, probe: bool
) -> tuple[torch.Tensor, list[PerExampleProbe]]:
    """Add the gradient of the mean loss of these examples, computed in the plan's micro-batches.

    Return the mean loss, and with `probe`, before which the gradient must be zero, the probe of every micro-batch.
    """
    total = 0.0
    probes = []
    start = 0
    with_products = compared_micro_batches(plan.micro_batches)
    for number, size in enumerate(plan.micro_batches):
        micro_batch = indices[start : start + size]
        weight = size / plan.effective_batch
        probing = model.probe(size, products=number in with_products) if probe else nullcontext()
        with probing as micro_batch_probe:
            total = total + backward(model, examples, micro_batch, weight, eager=probe)
        if probe:
            probes.append(micro_batch_probe)
        start += size
    return total, probes


def backward(
    model: FlatModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, eager: bool = False
) -> torch.Tensor:
    """Add the gradient of `weight` times the mean loss of these examples; return that product, detached.

    Devices that share the model divide the examples, and the loss.

    eager: run the module uncompiled, as its layers have hooks.
    """
    own, share = model.local_slice(len(indices))
    batch = examples.batch(indices[own], model.device)
    labels = batch.pop("labels")
    with unmasked(model.module, batch):
        loss = model.example_losses(batch, labels, eager).mean() * (weight * share)
        with model.shard_group.explaining():
            loss.backward()
    return loss.detach()


class InnerLoop:
    """A worker's inner steps in a round.

    Args:
        start: the flat parameters from which it starts, at the beginning of the round and after each stop.
        keeps_end: write the worker's parameters back to `start` after each `run`.

    Attributes:
        left_out: why the worker is left out of the mean; None if it is in it.
        compared: the sum of the gradients of the examples behind its statistics, flat, or a sketch of it, if the
            assignment asks for one.
    """

    def __init__(
        self,
        worker: Worker,
        assignment: Assignment,
        start: torch.Tensor,
        keeps_end: bool,
        on_step: Callable[[], None],
    ):
        self.worker = worker
        self.done = 0
        self.left_out: str | None = None
        self.compared: torch.Tensor | None = None
        self._model = worker.model
        self._assignment = assignment
        self._start = start
        self._keeps_end = keeps_end
        self._on_step = on_step
        self._plan = assignment.plan
        self._samples: list = []
        self._started = 0.0
        self._seconds = 0.0
        self._first_step_seconds = 0.0
        # Model-sized memory is allocated before the steps, which may use all that is left.
        compares_gradients = assignment.measurement.compared == "gradient"
        self._vector_memory = torch.empty_like(self._model.gradient) if compares_gradients else None
        steps = len(assignment.active_steps)
        self._losses = torch.zeros(steps, dtype=self._model.parameters.dtype, device=self._model.device)

    def run(self, until: int) -> None:
        """Make this worker's inner steps up to step `until` of the round, unless there are none or it is left out.

        Its parameters are in the model afterwards; without an optimizer, the gradient of its one step.
        """
        first = self.done
        end = bisect_left(self._assignment.active_steps, until)  # of the steps that this worker makes
        if self.left_out is not None or first >= end:
            return
        device = self.worker.node.device
        self._started = time.perf_counter()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            self._model.load(self._start)
            self._model.gradient.zero_()
            if first == 0 and self._needs_probe_batch():
                self._take_probe_batch()
            self._seed_dropout(first)
            with self.worker.optimizer.steps() if self.worker.optimizer else nullcontext():
                while self.done < end:
                    self._step()
        self._check_finite(first, end)
        self._seconds += time.perf_counter() - self._started
        if self._keeps_end and self.left_out is None:
            self._start.copy_(self._model.parameters)

    def _step(self) -> None:
        """Make one inner step: the gradient over all micro-batches, its statistics in the first step, the update."""
        assignment = self._assignment
        # Workers with a shared start have the same parameters in the first step only. One example has no variance.
        probe = self.done == 0 and assignment.measurement.probed_parts > 0 and self._plan.effective_batch > 1
        indices = assignment.read(assignment.offsets[self.done], self._plan.effective_batch)
        self._plan, loss, probes = self._accumulate(self._plan, indices, probe, self.done)
        self._losses[self.done] = loss
        if self.done == 0:
            self._take_statistics(self._plan.effective_batch, probes)
        if self.worker.optimizer is not None:
            self._update(assignment.learning_rates[assignment.active_steps[self.done]])
        if self.done == 0:
            wait_for(self.worker.node.device)  # otherwise its time for this step would count for the other ones
            self._first_step_seconds = time.perf_counter() - self._started
        self.done += 1
        self._on_step()

    def _accumulate(
        self, plan: ExecutionPlan, indices: np.ndarray, probe: bool, step: int
    ) -> tuple[ExecutionPlan, torch.Tensor, list[PerExampleProbe]]:
        """Add the gradient of these examples to the model's; return the plan to go on with, mean loss and probes.

        step: seeds dropout if the pass is made again.
        """
        assignment = self._assignment
        while True:
            parts = in_parts(plan, assignment.measurement.probed_parts) if probe else plan
            work = partial(accumulate_gradients, self._model, assignment.examples, parts, indices, probe)
            result = self._model.attempt(work)
            if result is not None:
                return plan, *result
            # Parameters and moments are untouched: the step is made again.
            plan = self._smaller_plan(parts)
            self._model.gradient.zero_()
            self._seed_dropout(step)

    def _update(self, learning_rate: float) -> None:
        gradient = self._model.gradient
        clip(self._model, gradient, self.worker.config.gradient_clipping)
        if self.worker.correction is not None:
            gradient.add_(self.worker.correction)
        self.worker.optimizer.step(learning_rate)
        gradient.zero_()

    # Statistics of the round's first inner step

    def _needs_probe_batch(self) -> bool:
        few = self._plan.effective_batch < self.worker.config.statistics_batch_size
        return few and self._assignment.measurement.probed_parts > 0 and not self._model.compares_devices

    def _take_probe_batch(self) -> None:
        """Take statistics of the trainer's next examples, without training on them or moving on."""
        step = len(self._assignment.learning_rates)  # that no inner step of the round has
        self._seed_dropout(step)
        indices = self._assignment.probe_indices()
        if len(indices) <= self._plan.effective_batch:  # of few data the step itself has as many
            return
        plan = only_gradient_accumulation(len(indices), self.worker.node.max_batch)
        _, _, probes = self._accumulate(plan, indices, True, step)
        self._take_statistics(len(indices), probes)
        self._model.gradient.zero_()

    def _take_statistics(self, examples: int, probes: list[PerExampleProbe]) -> None:
        if self.compared is None:  # otherwise it is that of the probe batch, which is larger
            self.compared = self._compared_vector(examples)
        if probes:
            self._samples.append(self._model.estimate(probes, examples))

    def _compared_vector(self, examples: int) -> torch.Tensor | None:
        """Return the sum of the gradients of these examples, whose mean the model has, or its sketch."""
        gradient = self._model.gradient
        if self._assignment.measurement.compared == "gradient":
            return torch.mul(gradient, examples, out=self._vector_memory)
        if self._assignment.measurement.compared == "sketch":
            return self._model.sketch(gradient, self._assignment.key.round) * examples
        return None

    # Problems of one worker

    def _smaller_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan of the same examples in smaller micro-batches; TrainingError: one example does not fit.

        The node's max batch is halved, for good, until it is below the largest micro-batch of `plan`.
        """
        node = self.worker.node
        devices = self._model.shard_group.size
        if node.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max(plan.micro_batches)
        if largest <= devices:  # each device has one example at most
            what = f"{node.device}" if devices == 1 else f"each of its {devices} devices"
            raise TrainingError(
                f"node {node.id}: one example does not fit into the memory of {what}; "
                f"use a smaller model or sequence_length{' or more devices_per_node' if devices > 1 else ''}"
            )
        max_batch = node.max_batch
        while max_batch >= largest:
            max_batch //= 2
        self.worker.node = dataclasses.replace(node, max_batch=max_batch)
        return only_gradient_accumulation(plan.effective_batch, max_batch)

    def _check_finite(self, first: int, end: int) -> None:
        shard_group = self._model.shard_group
        shard_group.sum(self._losses[first:end])
        updates = self.worker.optimizer is not None
        computed = self._model.parameters if updates else self._model.gradient
        finite = torch.isfinite(self._losses[:end]).all() & torch.isfinite(computed.sum())
        if shard_group.sum((~finite).int()).item():
            what = "parameters" if updates else "gradient"
            self.left_out = f"its loss or {what} became NaN or infinite"

    # Report

    def record(self, message_lost: bool) -> WorkerRound:
        assignment = self._assignment
        losses = self._losses[: self.done].tolist()
        steady = len(losses) > 1
        return WorkerRound(
            node=self.worker.node.id,
            plan=self._plan,
            losses=losses,
            learning_rates=[assignment.learning_rates[step] for step in assignment.active_steps],
            samples=tuple(self._samples),
            seconds=self._seconds,
            max_batch=self.worker.node.max_batch,
            steady_seconds=self._seconds - self._first_step_seconds if steady else 0.0,
            steady_examples=self._plan.effective_batch * (len(losses) - 1) if steady else 0,
            left_out=self.left_out,
            message_lost=message_lost,
            active_steps=assignment.active_steps if len(losses) < len(assignment.learning_rates) else None,
        )

    def _seed_dropout(self, step: int) -> None:
        """Seed dropout by the place in the run alone.

        torch.manual_seed is avoided: it records a stack trace for every unused kind of accelerator, which takes longer
        than a small model's step.
        """
        shard = self._model.shard_group.index  # the devices of a node have different examples
        sequence = np.random.SeedSequence([*self._assignment.key, step], spawn_key=(shard,) if shard else ())
        seed = int(sequence.generate_state(1, np.uint64)[0])
        device = self.worker.node.device
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
