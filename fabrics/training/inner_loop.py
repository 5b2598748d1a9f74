"""The inner steps of a worker in a round, in as many parts as the method's stops cut the round into.

A device out of memory, parameters that are not finite and a node that fails concern one worker only: what cannot be
mended is in the record that the worker returns.
"""

import dataclasses
import functools
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from algorithms.batch.per_example import PerExampleProbe
from algorithms.batch.switch_mode import ExecutionPlan, in_parts, only_gradient_accumulation
from fabrics.training.flat_model import FlatModel
from fabrics.training.forward_backward import accumulate_gradients
from fabrics.training.worker import Assignment, NodeFailedError, TrainingError, Worker, WorkerRound


def clip(model: FlatModel, gradient: torch.Tensor, largest: float | None) -> None:
    """Scale a flat gradient down to this norm, in place and without waiting for the device; None: leave it."""
    if largest is not None:
        norm = model.norm(gradient)
        gradient.mul_((largest / (norm + 1e-6)).clamp(max=1.0))


class InnerLoop:
    """A worker's inner steps in a round.

    Args:
        worker: its node's max batch may shrink on the way.
        assignment: what it is to do.
        start: the flat parameters it begins with, where it goes on after each stop.
        keeps_end: write its parameters back to `start` after each `run`: it has a replica, or keeps them for itself.
        on_step: called after every inner step.

    Attributes:
        done: inner steps made.
        left_out: why the worker is in no mean any more; None if it is.
        vector: what the assignment asks it to return of its gradient: the sum over a step's examples, flat, or its
            sketch.
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
        self.vector: torch.Tensor | None = None
        self._assignment = assignment
        self._start = start
        self._keeps_end = keeps_end
        self._on_step = on_step
        self._plan = assignment.plan
        self._statistics: list = []
        self._failed = False
        self._began = 0.0
        self._seconds = 0.0
        self._first_step_seconds = 0.0
        model = worker.model
        # Memory of model size is allocated before the steps, not after them.
        self._room = torch.empty_like(model.gradient) if assignment.hands_back == "gradient" else None
        self._losses = torch.zeros(len(assignment.turns), dtype=model.parameters.dtype, device=model.device)

    @property
    def _model(self) -> FlatModel:
        return self.worker.model

    def local_steps_until(self, step: int) -> int:
        """Return how many of its own inner steps the worker has made after this inner step of the round."""
        return bisect_left(self._assignment.turns, step)

    def run(self, until: int) -> None:
        """Make this worker's inner steps up to an inner step of the round; leave its parameters in the model.

        A worker without an optimizer of its own computes the gradient of one step, and leaves that in the model.

        Raises:
            TrainingError: not even one example fits into the device's memory.
        """
        first = self.done
        last = self.local_steps_until(until)
        if self.left_out is not None or first >= last:
            return
        device = self.worker.node.device
        shard_group = self._model.shard_group
        self._began = time.perf_counter()
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
                self._steps(last)
            shard_group.sum(self._losses[first:last])
            updates = self.worker.optimizer is not None
            made = self._model.parameters if updates else self._model.gradient
            finite = torch.isfinite(self._losses[:last]).all() & torch.isfinite(made.sum())
            if shard_group.sum((~finite).int()).item():
                what = "parameters" if updates else "gradient"
                self.left_out = f"its loss or {what} became NaN or infinite"
        except NodeFailedError as error:
            if shard_group.size > 1:  # the other devices are in the middle of a pass, with parts of the model only
                raise TrainingError(
                    f"node {self.worker.node.id} is lost with device {shard_group.index} of its shard group, {device}: "
                    f"{error}; "
                    f"--resume goes on from the last checkpoint, on what is left with processes and devices_per_node"
                ) from error
            self.left_out = f"node {self.worker.node.id} failed: {error}"
            self._failed = True
        self._seconds += time.perf_counter() - self._began
        if self._keeps_end and self.left_out is None:
            self._start.copy_(self._model.parameters)

    def record(self) -> WorkerRound:
        """What the worker reports of the round."""
        if self.left_out is not None:
            self.vector = None
        losses = [] if self._failed else self._losses[: self.done].tolist()
        steady = len(losses) > 1  # the host has waited for the device by now, and compiling keeps the host itself
        return WorkerRound(
            node=self.worker.node.id,
            plan=self._plan,
            losses=losses,
            learning_rates=[self._assignment.learning_rates[turn] for turn in self._assignment.turns],
            statistics=() if self._failed else tuple(self._statistics),
            seconds=self._seconds,
            max_batch=self.worker.node.max_batch,
            steady_seconds=self._seconds - self._first_step_seconds if steady else 0.0,
            steady_examples=self._plan.effective_batch * (len(losses) - 1) if steady else 0,
            left_out=self.left_out,
            failed=self._failed,
            turns=self._assignment.turns if len(losses) < len(self._assignment.learning_rates) else None,
        )

    def _steps(self, last: int) -> None:
        model = self._model
        assignment = self._assignment
        self.worker.begin_turn()
        model.load(self._start)
        model.gradient.zero_()
        too_few = self._plan.effective_batch < self.worker.config.statistics_batch_size and not model.compares_devices
        if self.done == 0 and assignment.probes and too_few:
            self._seed(len(assignment.learning_rates))
            self._probe_batch()
        self._seed(self.done)
        while self.done < last:
            # All workers are at the same parameters in the first step; one example alone has no variance.
            probe = self.done == 0 and assignment.probes > 0 and self._plan.effective_batch > 1
            probes = self._step(probe)
            if self.done == 0:
                if self.vector is None:  # otherwise it is that of the probe batch, which is larger
                    self.vector = self._handed_back(self._plan.effective_batch)
                if probe:
                    self._statistics.append(model.estimate(probes, self._plan.effective_batch))
            if self.worker.optimizer is not None:
                self._update(assignment.learning_rates[assignment.turns[self.done]])
            if self.done == 0:
                self._first_step_seconds = time.perf_counter() - self._began
            self.done += 1
            self._on_step()

    def _step(self, probe: bool) -> list[PerExampleProbe]:
        """Compute gradient and loss of the next step, in parts as small as memory needs; return the probes."""
        assignment = self._assignment
        first = assignment.first_examples[self.done]
        while True:
            plan = in_parts(self._plan, assignment.probes) if probe else self._plan
            indices = assignment.places(first, plan.effective_batch)
            attempt = functools.partial(accumulate_gradients, self._model, assignment.examples, plan, indices, probe)
            found = self._model.attempt(attempt)
            if found is not None:
                self._losses[self.done], probes = found
                return probes
            # Nothing of this step has reached parameters or moments: it is made again, in smaller parts.
            self._plan = self._smaller_plan(plan)
            self._model.gradient.zero_()
            self._seed(self.done)

    def _probe_batch(self) -> None:
        """Statistics of the examples that come next in the trainer's stream; they are looked at, not used up."""
        assignment, size = self._assignment, self.worker.config.statistics_batch_size
        sample = assignment.places(assignment.sample, size)
        while True:
            plan = in_parts(only_gradient_accumulation(size, self.worker.node.max_batch), assignment.probes)
            attempt = functools.partial(accumulate_gradients, self._model, assignment.examples, plan, sample, True)
            found = self._model.attempt(attempt)
            if found is not None:
                self.vector = self._handed_back(size)
                self._statistics.append(self._model.estimate(found[1], size))
            self._model.gradient.zero_()
            if found is not None:
                return
            self._smaller_plan(plan)

    def _handed_back(self, examples: int) -> torch.Tensor | None:
        """What the assignment asks for of the sum of these examples' gradients, whose mean the gradient holds."""
        gradient, asked = self._model.gradient, self._assignment.hands_back
        if asked == "gradient":
            return torch.mul(gradient, examples, out=self._room)
        if asked == "sketch":
            return self._model.sketch(gradient, self._assignment.place.round) * examples
        return None

    def _seed(self, step: int) -> None:
        """Dropout, where a model has it, depends on the place in the run alone.

        Not torch.manual_seed: for every kind of accelerator that is not in use it keeps a trace of the stack, which
        takes longer than a small model's step.
        """
        lane = self._model.shard_group.index  # its devices have other examples
        sequence = np.random.SeedSequence([*self._assignment.place, step], spawn_key=(lane,) if lane else ())
        seed, device = int(sequence.generate_state(1, np.uint64)[0]), self.worker.node.device
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)

    def _smaller_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Half the node's max batch, for good, and the same examples in parts of at most that."""
        node, devices = self.worker.node, self._model.shard_group.size
        if node.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max(plan.micro_batches)
        if largest <= devices:  # every device has one at most
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

    def _update(self, learning_rate: float) -> None:
        """The optimiser's step with the clipped and corrected gradient, which is cleared."""
        gradient, correction = self._model.gradient, self.worker.correction
        clip(self._model, gradient, self.worker.config.gradient_clipping)
        if correction is not None:
            gradient.add_(correction)
        self.worker.optimizer.step(learning_rate)
        gradient.zero_()
