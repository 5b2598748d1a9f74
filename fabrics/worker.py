"""A worker: a node's inner optimiser over the working model of its device, and its inner steps of a round.

A worker is handed an assignment and hands back a record. A device without memory, parameters that are not finite and a
node that fails are its business: what it cannot mend is in the record.

A worker's parameters and gradients are reached through its WorkingModel alone, as flat tensors: a worker whose model is
spread over several devices would bring another one of these.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch

from algorithms.across_workers import GradientMoments, sketch
from algorithms.gradient_statistics import SampleEstimate
from algorithms.outer_step import DISTRIBUTED_ALGORITHMS
from algorithms.per_example import step_estimate
from algorithms.switch_mode import ExecutionPlan, in_parts, only_gradient_accumulation
from fabrics.examples import Examples
from fabrics.inner_optimizers import INNER_OPTIMIZERS
from fabrics.passes import accumulate
from fabrics.working_model import WorkingModel
from utils.compression import COMMUNICATION_DTYPES, Encoding
from utils.config import Config
from utils.devices import is_out_of_memory

T = TypeVar("T")


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what would help."""


class NodeFailedError(RuntimeError):
    """A node cannot work any more; its trainer goes on with the others."""


@dataclass(frozen=True)
class Node:
    """A worker slot on a device. max_batch: its largest micro-batch."""

    id: int
    device: torch.device
    max_batch: int


class Place(NamedTuple):
    """Where in a run a worker's round is; `round` counts from 0."""

    seed: int
    trainer: int
    worker: int
    round: int


@dataclass(frozen=True)
class Assignment:
    """What a worker is to do in a round.

    Attributes:
        plan: the micro-batches of an inner step.
        learning_rates: one per inner step, so that there are as many steps.
        examples: all training examples.
        places: from (offset, count) to the indices of the trainer's next examples, counted from where the round begins.
        first_example: where the worker's slice begins among the examples of an inner step of all workers.
        step_examples: examples of an inner step of all workers.
        place: in the run; dropout depends on it and on the inner step alone.
        sample: offset of the examples to take statistics of where an inner step has too few.
        probes: into how many micro-batches at least a step is cut for per-example statistics, which are taken at the
            first inner step, where all workers have the same parameters; 0: none are.
        hands_back: what to hand back of the gradient that the statistics are of: nothing, all of it, or a sketch.
    """

    plan: ExecutionPlan
    learning_rates: Sequence[float]
    examples: Examples
    places: Callable[[int, int], np.ndarray]
    first_example: int
    step_examples: int
    place: Place
    sample: int
    probes: int = 0
    hands_back: Literal["nothing", "gradient", "sketch"] = "nothing"


@dataclass(frozen=True)
class WorkerRound:
    """What one worker reports of a round: small enough to send to everybody.

    plan: that it ended with. losses: none where its node failed on the way. max_batch: of its node, afterwards.
    steady_seconds, steady_examples: of the inner steps but the first, which may compile and fill caches. left_out: why
    its pseudo-gradient is not in the mean, if it is not. failed: its node works no more. statistics: of the samples
    that it took. moments: of the gradient of its largest sample or of a sketch of it, beside the other workers'.
    """

    node: int
    plan: ExecutionPlan
    losses: list[float]
    learning_rates: list[float]
    statistics: tuple[SampleEstimate, ...]
    seconds: float
    max_batch: int
    steady_seconds: float = 0.0
    steady_examples: int = 0
    left_out: str | None = None
    failed: bool = False
    moments: GradientMoments | None = None


def _where_it_fits(work: Callable[..., T], *arguments, **keywords) -> T | None:
    """What it returns, or None where the device has not the memory; whoever asks is out of the error's reach then.

    An error that is looked after keeps the tensors of the pass alive.
    """
    try:
        return work(*arguments, **keywords)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    return None


class Worker:
    """A node while it works for a trainer: the state of its inner optimiser over the device's working model.

    With an encoding that keeps errors, also what the last pseudo-gradient lost on its way.
    """

    def __init__(self, node: Node, working: WorkingModel, config: Config):
        self.node = node
        self.working = working
        self._config = config
        kind = DISTRIBUTED_ALGORITHMS[config.distributed_algo].inner_optimizer
        self.optimizer = INNER_OPTIMIZERS[kind].build(working.parameters, config)
        keeps_error = COMMUNICATION_DTYPES[config.communication_dtype].keeps_error
        self.error = torch.zeros_like(working.parameters.data) if keeps_error else None

    # State

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The optimiser's state and the error, by reference."""
        state = dict(self.optimizer.state[self.working.parameters])
        return state if self.error is None else state | {"error": self.error}

    def reset(self) -> None:
        """Let the optimiser begin anew: moments and step count are zero."""
        for tensor in self.optimizer.state[self.working.parameters].values():
            tensor.zero_()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a copy of `state`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

    # A round

    def run(
        self, parameters: torch.Tensor, assignment: Assignment, on_step: Callable[[], None]
    ) -> tuple[WorkerRound, torch.Tensor | None]:
        """H inner steps from these parameters; the replica is left in the working model.

        Args:
            parameters: flat, of the trainer.
            on_step: called after every inner step.

        Returns:
            The record, and what the assignment asks to hand back: the sum of the gradients of a step's examples, flat,
            or a sketch of it.

        Raises:
            TrainingError: not even one example fits into the device's memory.
        """
        started, gradient, ends = time.perf_counter(), None, []

        def step_done() -> None:
            if not ends:
                ends.append(time.perf_counter())
            on_step()

        cuda = [self.node.device] if self.node.device.type == "cuda" else []
        run = WorkerRound(
            self.node.id, assignment.plan, [], list(assignment.learning_rates), (), 0.0, self.node.max_batch
        )
        try:
            with torch.random.fork_rng(devices=cuda):
                losses, run, gradient = self._inner_steps(parameters, assignment, run, step_done)
            finite = torch.isfinite(losses).all() & torch.isfinite(self.working.parameters.sum())
            left_out = None if finite.item() else "its loss or parameters became NaN or infinite"
            losses = losses.tolist()
        except NodeFailedError as error:
            left_out, losses = f"node {self.node.id} failed: {error}", []
            run = dataclasses.replace(run, failed=True, statistics=())
        ended = time.perf_counter()
        run = dataclasses.replace(run, losses=losses, left_out=left_out, seconds=ended - started)
        if len(losses) > 1:
            # The host has waited for the device by now, and compiling keeps the host itself.
            steady = run.plan.effective_batch * (len(losses) - 1)
            run = dataclasses.replace(run, steady_seconds=ended - ends[0], steady_examples=steady)
        return run, None if left_out else gradient

    def _inner_steps(
        self, parameters: torch.Tensor, assignment: Assignment, run: WorkerRound, on_step: Callable[[], None]
    ) -> tuple[torch.Tensor, WorkerRound, torch.Tensor | None]:
        """The losses [H] on the device, `run` with the plan that it ended with and the statistics, and the vector."""
        working, examples = self.working, assignment.examples
        plan, inner_steps, step = run.plan, len(run.learning_rates), 0
        statistics, vector = [], None
        # Memory of model size is taken while it can be, not after the steps.
        room = torch.empty_like(working.gradient) if assignment.hands_back == "gradient" else None
        losses = torch.zeros(inner_steps, dtype=working.parameters.dtype, device=working.device)
        working.load(parameters)
        working.gradient.zero_()
        if assignment.probes and plan.effective_batch < self._config.statistics_batch_size:
            self._seed(assignment, inner_steps)
            estimate, vector = self._probe_batch(assignment, room)
            statistics.append(estimate)
        self._seed(assignment, 0)
        while step < inner_steps:
            # Where all workers stand at the same parameters; one example alone has no variance.
            probe = step == 0 and assignment.probes > 0 and plan.effective_batch > 1
            step_plan = in_parts(plan, assignment.probes) if probe else plan
            indices = assignment.places(
                step * assignment.step_examples + assignment.first_example, plan.effective_batch
            )
            passes = _where_it_fits(accumulate, working, examples, step_plan, indices, probe)
            if passes is None:
                # Nothing of this step has reached parameters or moments: it is made again, in smaller parts.
                plan = self._smaller_plan(step_plan)
                working.gradient.zero_()
                self._seed(assignment, step)
                continue
            losses[step], probes = passes
            if step == 0:
                if vector is None:  # otherwise it is that of the probe batch, which is larger
                    vector = self._handed_back(assignment, plan.effective_batch, room)
                statistics += [step_estimate(probes)] if probe else []
            self._update(run.learning_rates[step])
            on_step()
            step += 1
        run = dataclasses.replace(run, plan=plan, statistics=tuple(statistics), max_batch=self.node.max_batch)
        return losses, run, vector

    def _probe_batch(
        self, assignment: Assignment, room: torch.Tensor | None
    ) -> tuple[SampleEstimate, torch.Tensor | None]:
        """What the examples that come next in the trainer's stream say; they are looked at, not used up."""
        size = self._config.statistics_batch_size
        sample = assignment.places(assignment.sample, size)
        while True:
            plan = in_parts(only_gradient_accumulation(size, self.node.max_batch), assignment.probes)
            passes = _where_it_fits(accumulate, self.working, assignment.examples, plan, sample, probe=True)
            if passes is not None:
                vector = self._handed_back(assignment, size, room)
                self.working.gradient.zero_()
                return step_estimate(passes[1]), vector
            self.working.gradient.zero_()
            self._smaller_plan(plan)

    def _handed_back(self, assignment: Assignment, examples: int, room: torch.Tensor | None) -> torch.Tensor | None:
        """What the assignment asks for of the sum of these examples' gradients, whose mean the gradient holds."""
        gradient = self.working.gradient
        if assignment.hands_back == "gradient":
            return torch.mul(gradient, examples, out=room)
        if assignment.hands_back == "sketch":
            return sketch(gradient, seed=assignment.place.round) * examples
        return None

    def _seed(self, assignment: Assignment, step: int) -> None:
        """Dropout, where a model has it, depends on the place in the run alone.

        Not torch.manual_seed: for every kind of accelerator that is not in use it keeps a trace of the stack, which
        takes longer than a small model's step.
        """
        sequence = np.random.SeedSequence([*assignment.place, step])
        seed, device = int(sequence.generate_state(1, np.uint64)[0]), self.node.device
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)

    def _smaller_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Half the node's max batch, for good, and the same examples in parts of at most that."""
        if self.node.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max(plan.micro_batches)
        if largest == 1:
            raise TrainingError(
                f"node {self.node.id}: one example does not fit into the memory of {self.node.device}; "
                f"use a smaller model or sequence_length"
            )
        max_batch = self.node.max_batch
        while max_batch >= largest:
            max_batch //= 2
        self.node = dataclasses.replace(self.node, max_batch=max_batch)
        return only_gradient_accumulation(plan.effective_batch, max_batch)

    def _update(self, learning_rate: float) -> None:
        """Clip the gradient, make the optimiser's step, and clear the gradient: nothing waits for the device."""
        gradient = self.working.gradient
        if self._config.gradient_clipping is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_((self._config.gradient_clipping / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        gradient.zero_()

    def encoded_pseudo_gradient(self, parameters: torch.Tensor, encoding: Encoding) -> torch.Tensor:
        """What the worker sends: x - x_m, with the error of the last one; the new error stays.

        parameters: x, flat, from which the round began. encoding: how it travels; a lossless one leaves no error.
        """
        # In the working buffer itself: the next replica overwrites it anyway.
        tensor = self.working.parameters.data
        tensor.neg_().add_(parameters.to(tensor.device))
        if self.error is None:
            return encoding.encode(tensor)
        encoded = encoding.encode(tensor.add_(self.error))
        arriving = encoding.decode(encoded, tensor.dtype)[: tensor.numel()]
        torch.sub(tensor, arriving, out=self.error)
        return encoded
