"""The inner steps of a worker's round, in as many goes as the synchronisation cuts the round into.

A device without memory, parameters that are not finite and a node that fails are a worker's business: what it cannot
mend is in the record that it hands back.
"""

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from algorithms.batch.per_example import PerExampleProbe
from algorithms.batch.switch_mode import ExecutionPlan, in_parts, only_gradient_accumulation
from fabrics.training.flat_model import WorkingModel
from fabrics.training.forward_backward import accumulate
from fabrics.training.worker import Assignment, NodeFailedError, TrainingError, Worker, WorkerRound


def clip(working: WorkingModel, gradient: torch.Tensor, largest: float | None) -> None:
    """Scale a flat gradient of the model down to this norm, in place; nothing waits for the device."""
    if largest is not None:
        norm = working.norm(gradient)
        gradient.mul_((largest / (norm + 1e-6)).clamp(max=1.0))


class InnerSteps:
    """A worker's round.

    Args:
        worker: who works; its node's max batch may shrink on the way.
        assignment: what it is to do.
        on_step: called after every inner step.

    Attributes:
        done: inner steps made.
        left_out: why the worker is in no mean any more, if it is not.
        vector: what the assignment asks to hand back: the sum of the gradients of a step's examples, flat, or a sketch
            of it.
    """

    def __init__(self, worker: Worker, assignment: Assignment, on_step: Callable[[], None]):
        self.worker = worker
        self.done = 0
        self.left_out: str | None = None
        self.vector: torch.Tensor | None = None
        self._assignment, self._on_step = assignment, on_step
        self._plan = assignment.plan
        self._statistics: list = []
        self._failed = False
        self._seconds, self._first_step_seconds = 0.0, 0.0
        working = worker.working
        # Memory of model size is taken while it can be, not after the steps.
        self._room = torch.empty_like(working.gradient) if assignment.hands_back == "gradient" else None
        self._losses = torch.zeros(len(assignment.turns), dtype=working.parameters.dtype, device=working.device)

    @property
    def _working(self) -> WorkingModel:
        return self.worker.working

    def due(self, until: int) -> int:
        """How many of its own inner steps it has to have made when so many of the round's are over."""
        return bisect_left(self._assignment.turns, until)

    def go(self, parameters: torch.Tensor, until: int) -> None:
        """So many inner steps in all, from these flat parameters; the replica is left in the working model.

        Raises:
            TrainingError: not even one example fits into the device's memory.
        """
        self._work(parameters, until, self._update)

    def gradient(self, parameters: torch.Tensor) -> None:
        """The gradient of the next step's examples at these flat parameters, left in the working model.

        Raises:
            TrainingError: as in `go`.
        """
        self._work(parameters, self.done + 1, None)

    def _work(self, parameters: torch.Tensor, until: int, update: Callable[[float], None] | None) -> None:
        """update: what becomes of a step's gradient; None: it stays."""
        if self.left_out is not None:
            return
        device, island = self.worker.node.device, self._working.island
        first, started = self.done, time.perf_counter()
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
                self._steps(parameters, until, update, started)
            island.sum(self._losses[first:until])
            made = self._working.gradient if update is None else self._working.parameters
            finite = torch.isfinite(self._losses[:until]).all() & torch.isfinite(made.sum())
            if island.sum((~finite).int()).item():
                what = "gradient" if update is None else "parameters"
                self.left_out = f"its loss or {what} became NaN or infinite"
        except NodeFailedError as error:
            if island.size > 1:  # the others are in the middle of a pass, and have no more than parts of models
                raise TrainingError(
                    f"node {self.worker.node.id} is lost with device {island.index} of its island, {device}: {error}; "
                    f"--resume goes on from the last checkpoint, on what is left with processes and devices_per_node"
                ) from error
            self.left_out, self._failed = f"node {self.worker.node.id} failed: {error}", True
        self._seconds += time.perf_counter() - started

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

    def _steps(
        self, parameters: torch.Tensor, until: int, update: Callable[[float], None] | None, started: float
    ) -> None:
        working, assignment = self._working, self._assignment
        self.worker.begin_turn()
        working.load(parameters)
        working.gradient.zero_()
        too_few = self._plan.effective_batch < self.worker.config.statistics_batch_size and not working.within_island
        if self.done == 0 and assignment.probes and too_few:
            self._seed(len(assignment.learning_rates))
            self._probe_batch()
        self._seed(self.done)
        while self.done < until:
            # Where all workers stand at the same parameters; one example alone has no variance.
            probe = self.done == 0 and assignment.probes > 0 and self._plan.effective_batch > 1
            probes = self._step(probe)
            if self.done == 0:
                if self.vector is None:  # otherwise it is that of the probe batch, which is larger
                    self.vector = self._handed_back(self._plan.effective_batch)
                self._statistics += [working.estimate(probes, self._plan.effective_batch)] if probe else []
            if update is not None:
                update(assignment.learning_rates[assignment.turns[self.done]])
            if self.done == 0:
                self._first_step_seconds = time.perf_counter() - started
            self.done += 1
            self._on_step()

    def _step(self, probe: bool) -> list[PerExampleProbe]:
        """Gradient and loss of the next step, in parts as small as they have to be."""
        assignment = self._assignment
        first = assignment.first_examples[self.done]
        while True:
            plan = in_parts(self._plan, assignment.probes) if probe else self._plan
            indices = assignment.places(first, plan.effective_batch)
            passes = self._passes(plan, indices, probe)
            if passes is not None:
                self._losses[self.done], probes = passes
                return probes
            # Nothing of this step has reached parameters or moments: it is made again, in smaller parts.
            self._plan = self._smaller_plan(plan)
            self._working.gradient.zero_()
            self._seed(self.done)

    def _passes(
        self, plan: ExecutionPlan, indices: np.ndarray, probe: bool
    ) -> tuple[torch.Tensor, list[PerExampleProbe]] | None:
        """See `accumulate`; None where memory was too small."""
        working, examples = self._working, self._assignment.examples
        return working.attempt(lambda: accumulate(working, examples, plan, indices, probe))

    def _probe_batch(self) -> None:
        """Statistics of the examples that come next in the trainer's stream; they are looked at, not used up."""
        assignment, size = self._assignment, self.worker.config.statistics_batch_size
        sample = assignment.places(assignment.sample, size)
        while True:
            plan = in_parts(only_gradient_accumulation(size, self.worker.node.max_batch), assignment.probes)
            passes = self._passes(plan, sample, probe=True)
            if passes is not None:
                self.vector = self._handed_back(size)
                self._statistics.append(self._working.estimate(passes[1], size))
            self._working.gradient.zero_()
            if passes is not None:
                return
            self._smaller_plan(plan)

    def _handed_back(self, examples: int) -> torch.Tensor | None:
        """What the assignment asks for of the sum of these examples' gradients, whose mean the gradient holds."""
        gradient, asked = self._working.gradient, self._assignment.hands_back
        if asked == "gradient":
            return torch.mul(gradient, examples, out=self._room)
        if asked == "sketch":
            return self._working.sketch(gradient, self._assignment.place.round) * examples
        return None

    def _seed(self, step: int) -> None:
        """Dropout, where a model has it, depends on the place in the run alone.

        Not torch.manual_seed: for every kind of accelerator that is not in use it keeps a trace of the stack, which
        takes longer than a small model's step.
        """
        lane = self._working.island.index  # its devices have other examples
        sequence = np.random.SeedSequence([*self._assignment.place, step], spawn_key=(lane,) if lane else ())
        seed, device = int(sequence.generate_state(1, np.uint64)[0]), self.worker.node.device
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)

    def _smaller_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Half the node's max batch, for good, and the same examples in parts of at most that."""
        node, devices = self.worker.node, self._working.island.size
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
        gradient, correction = self._working.gradient, self.worker.correction
        clip(self._working, gradient, self.worker.config.gradient_clipping)
        if correction is not None:
            gradient.add_(correction)
        self.worker.optimizer.step(learning_rate)
        gradient.zero_()
