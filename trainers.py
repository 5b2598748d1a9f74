"""A trainer: one model instance, its workers, their inner steps, and the outer step that joins them.

State (everything else is computed): the flat parameters x and the outer velocity, the requested batch, the
smoothed statistics, the data cursor, counters, and per worker the state of its inner optimiser, which survives
from round to round (DiLoCo, Algorithm 1). Workers pass one after the other through the working model of their
device: no other copy of a model exists.

Every process has every trainer, for its decisions; its tensors are only where its workers are. A round is cut in two
there: `train_round` is work and needs the workers, `conclude_round` is decisions and needs what all of them report.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.calc_batch import (
    BATCH_TESTS,
    BatchTestParameters,
    bounded_request,
    is_decisive,
    scheduled_request,
    smoothed,
)
from algorithms.gradient_statistics import (
    GradientStatistics,
    across_workers_statistics,
    gradient_moments,
)
from algorithms.learning_rate import batch_scaling_factor, eta_during, schedule_factor
from algorithms.outer_step import DISTRIBUTED_ALGORITHMS
from algorithms.switch_mode import SWITCH_MODES, ExecutionPlan, only_gradient_accumulation
from fabrics.data_order import DataCursor
from fabrics.examples import Examples
from fabrics.worker import Node, Worker, backward, probed_backward
from fabrics.working_model import WorkingModel
from training_logs.recording.records import RoundReport, WorkerRound
from utils.compression import COMMUNICATION_DTYPES, PLAIN
from utils.config import Config
from utils.distributed import LocalWorkers, Processes, Workers


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what would help."""


class NodeFailedError(RuntimeError):
    """A node cannot work any more; its trainer goes on with the others."""


# What a device that has broken down raises, and one that has no memory left.
NODE_FAILURES = (NodeFailedError, *([torch.AcceleratorError] if hasattr(torch, "AcceleratorError") else []))
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
# So often may every worker of a trainer diverge, with half the inner learning rate each time, before the run stops.
MAX_HALVINGS = 3


ESTIMATORS = ("per_example", "across_workers")


@dataclass(frozen=True)
class RoundSchedule:
    """What the cluster says about a round: its inner steps, and how much of the run is done before and after."""

    inner_steps: int
    progress_before: float
    progress_after: float


class Trainer:
    """One model instance.

    Args:
        trainer_id: its identity, kept through merges in which it is the representative.
        config: the run's configuration.
        parameters: flat initial parameters x, which become the trainer's own; None in a process without a worker.
        cursor: its walk through its own data.
        examples: all training examples.
        working: the working model of each device of this process, the first of which keeps the trainer's tensors.
        processes: those of the run.
    """

    def __init__(
        self,
        trainer_id: int,
        config: Config,
        parameters: torch.Tensor | None,
        cursor: DataCursor,
        examples: Examples,
        working: Mapping[torch.device, WorkingModel],
        processes: Processes,
    ):
        self.id = trainer_id
        self.parameters = parameters
        self.cursor = cursor
        self.requested_batch = config.INITIAL_BATCH_SIZE
        self.inner_steps = 0
        self.rounds = 0
        self.halvings = 0
        self.reference_batch: int | None = None
        self.statistics: GradientStatistics | None = None
        self.nodes: tuple[Node, ...] = ()
        self.workers: dict[int, Worker] = {}
        self._config = config
        self._examples = examples
        self._working = working
        self._processes = processes
        self._algorithm = DISTRIBUTED_ALGORITHMS[config.distributed_algo]
        self._encoding = COMMUNICATION_DTYPES[config.communication_dtype]
        self._like = next(iter(working.values())).parameters.data
        self.velocity = None
        if self._algorithm.has_velocity and parameters is not None:
            self.velocity = torch.zeros_like(parameters)
        self._group: Workers = LocalWorkers(0)
        self._lost: frozenset[int] = frozenset()
        self._parameter_count = next(iter(working.values())).parameter_count
        self.parameter_bytes = self._parameter_count * self._like.element_size()

    # Workers

    def assign_nodes(self, nodes: tuple[Node, ...]) -> None:
        """Let these nodes work for the trainer from now on.

        Workers keep their state as far as there are nodes for them, wherever those are; a new one, and one whose state
        is lost, starts with a copy of that of the first worker that has one. Surplus workers end.
        """
        old, lost = self.nodes, self._lost
        self.nodes, self._lost = nodes, frozenset()
        if [node.id for node in nodes] == [node.id for node in old] and not lost:
            for index, worker in self.workers.items():
                worker.node = nodes[index]
            return
        self._group = self._processes.workers([node.id for node in nodes])
        if old:
            self.parameters = self._provide(self.parameters, old, nodes)
            if self._algorithm.has_velocity:
                self.velocity = self._provide(self.velocity, old, nodes)
        before, self.workers = self.workers, {}
        healthy = [index for index in range(len(old)) if index not in lost]
        for index, node in enumerate(nodes):
            source = index if index in healthy else healthy[0] if healthy else None
            stays = source == index and self._processes.owns(node.id) and index in before
            if stays and before[index].node.device == node.device:
                self.workers[index] = before[index]
                self.workers[index].node = node
                continue
            worker = Worker(node, self._working[node.device], self._config) if self._processes.owns(node.id) else None
            if source is not None:
                self._hand_over(before.get(source), worker, old[source], node, with_error=source == index)
            if worker is not None:
                self.workers[index] = worker

    def _provide(
        self,
        tensor: torch.Tensor | None,
        old: tuple[Node, ...],
        new: tuple[Node, ...],
        like: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        like = self._like if like is None else like
        return self._processes.provide(tensor, [node.id for node in old], [node.id for node in new], like)

    def parameters_for(self, node: Node) -> torch.Tensor | None:
        """The parameters in the process that owns the node, None elsewhere; all processes ask together."""
        return self._provide(self.parameters, self.nodes, (node,))

    def _hand_over(self, source: Worker | None, target: Worker | None, old: Node, new: Node, with_error: bool) -> None:
        """Copy a worker's state to another, wherever both are: None is one that is not in this process."""
        if not (self._processes.owns(old.id) or self._processes.owns(new.id)):
            return
        states = (source or target).state_dict()
        received = {
            name: self._provide(tensor if source is not None else None, (old,), (new,), tensor)
            for name, tensor in states.items()
            if with_error or name != "error"
        }
        if target is not None:
            target.load_state_dict(target.state_dict() | received)

    def execution_plans(self) -> dict[int, ExecutionPlan]:
        """Each worker's plan for the requested batch: ceil(B / M) examples through the switch mode."""
        per_worker = -(-self.requested_batch // len(self.nodes))
        decide = SWITCH_MODES[self._config.switch_mode]
        return {
            index: decide(per_worker, node.max_batch, self._config.switch_multiplier)
            for index, node in enumerate(self.nodes)
        }

    def examples_per_inner_step(self) -> int:
        """Examples of one inner step over all workers."""
        return sum(plan.effective_batch for plan in self.execution_plans().values())

    def tokens_ahead(self, inner_steps: int) -> int:
        """Tokens of the next inner steps over all workers."""
        return self._examples.tokens(self.cursor.peek(0, inner_steps * self.examples_per_inner_step()))

    # A round

    def train_round(self, schedule: RoundSchedule, on_step: Callable[[], None]) -> dict[int, WorkerRound]:
        """H inner steps on every worker of this process, and the outer step (AdLoCo, section 3, steps 1 to 5).

        Every process that owns a worker takes part. Workers whose parameters became NaN or infinite, and those whose
        node failed, are left out of the mean; with nobody left the trainer keeps its parameters.

        Args:
            on_step: called after every inner step of every worker.

        Returns:
            What the workers of this process report.

        Raises:
            TrainingError: not even one example fits into a device's memory.
        """
        config, plans = self._config, self.execution_plans()
        first, step_examples = {}, 0
        for index, plan in plans.items():
            first[index] = step_examples
            step_examples += plan.effective_batch
        local: dict[int, WorkerRound] = {}
        gradients: dict[int, torch.Tensor] = {}

        def pseudo_gradients() -> Iterator[tuple[int, torch.Tensor | None]]:
            for index in self._group.local_workers:
                local[index] = self._train_worker(
                    index, plans[index], schedule, first[index], step_examples, gradients, on_step
                )
                yield index, None if local[index].left_out else self._encoded_pseudo_gradient(self.workers[index])

        pseudo_gradient, count = self._group.mean(pseudo_gradients(), self.parameters, self._encoding)
        if count:
            self._algorithm.outer_step(
                self.parameters,
                pseudo_gradient,
                self.velocity,
                config.learning_rate_for_outer_opt,
                config.outer_momentum,
            )
        if self._compares_workers and len(self.nodes) > 1:
            del pseudo_gradient  # the mean gradient takes its place
            tensors = ((index, self._plain(gradients.get(index))) for index in self._group.local_workers)
            mean, _ = self._group.mean(tensors, self.parameters)
            for index, gradient in gradients.items():
                moments = gradient_moments(gradient.to(mean.device), mean)
                local[index] = dataclasses.replace(local[index], moments=moments)
        return local

    @staticmethod
    def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else PLAIN.encode(tensor)

    def _encoded_pseudo_gradient(self, worker: Worker) -> torch.Tensor:
        """What the worker sends: x - x_m, with the error of the last one; the new error stays."""
        # In the working buffer itself: the next replica overwrites it anyway.
        tensor = worker.working.parameters.data
        tensor.neg_().add_(self.parameters.to(tensor.device))
        if worker.error is None:
            return self._encoding.encode(tensor)
        encoded = self._encoding.encode(tensor.add_(worker.error))
        arriving = self._encoding.decode(encoded, tensor.dtype)[: tensor.numel()]
        torch.sub(tensor, arriving, out=worker.error)
        return encoded

    @property
    def _adapts(self) -> bool:
        """Whether the round that is at hand ends with a batch test."""
        config = self._config
        return BATCH_TESTS[config.sampling_method] is not None and self.rounds + 1 >= config.batch_test_start

    @property
    def _compares_workers(self) -> bool:
        return self._adapts and self._config.statistics_estimator == "across_workers"

    def _learning_rates(self, schedule: RoundSchedule, plan: ExecutionPlan) -> list[float]:
        """Of the inner steps of a worker's round."""
        config = self._config
        base = config.learning_rate_for_inner_opt
        if self._algorithm.inner_optimizer == "sgd":
            base = config.lr_sgd or base
        reference = self.reference_batch or self.execution_plans()[0].effective_batch
        base *= 0.5**self.halvings * batch_scaling_factor(config.learning_rate_scaling, plan.effective_batch, reference)
        length = schedule.progress_after - schedule.progress_before
        return [
            base
            * schedule_factor(
                config.learning_rate_schedule,
                schedule.progress_before + step / schedule.inner_steps * length,
                self.inner_steps + step,
                config.warmup_steps,
                config.minimum_learning_rate_ratio,
            )
            for step in range(schedule.inner_steps)
        ]

    def _seed(self, index: int, step: int) -> int:
        """Dropout, where a model has it, depends on the place in the run alone."""
        place_in_run = [self._config.training_seed, self.id, index, self.rounds, step]
        return int(np.random.SeedSequence(place_in_run).generate_state(1, np.uint64)[0])

    def _train_worker(
        self,
        index: int,
        plan: ExecutionPlan,
        schedule: RoundSchedule,
        first_example: int,
        step_examples: int,
        gradients: dict[int, torch.Tensor],
        on_step: Callable[[], None],
    ) -> WorkerRound:
        """H inner steps of one worker; its replica is left in the working model.

        first_example: where its slice begins among the `step_examples` examples of an inner step of all workers.
        gradients: receives a copy of the last gradient where the across-workers estimator needs it.
        """
        worker, started = self.workers[index], time.perf_counter()
        device = worker.node.device
        learning_rates = self._learning_rates(schedule, plan)
        run = WorkerRound(worker.node.id, plan, [], learning_rates, None, 0.0, worker.node.max_batch)
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                losses, run = self._inner_steps(worker, index, run, first_example, step_examples, gradients, on_step)
            finite = torch.isfinite(losses).all() & torch.isfinite(worker.working.parameters.sum())
            left_out = None if finite.item() else "its loss or parameters became NaN or infinite"
            losses = losses.tolist()
        except NODE_FAILURES as error:
            left_out, losses = f"node {worker.node.id} failed: {error}", []
            run = dataclasses.replace(run, failed=True, statistics=None)
        if left_out:
            gradients.pop(index, None)
        seconds = time.perf_counter() - started
        return dataclasses.replace(run, losses=losses, left_out=left_out, seconds=seconds)

    def _inner_steps(
        self,
        worker: Worker,
        index: int,
        run: WorkerRound,
        first_example: int,
        step_examples: int,
        gradients: dict[int, torch.Tensor],
        on_step: Callable[[], None],
    ) -> tuple[torch.Tensor, WorkerRound]:
        """The losses [H] on the worker's device, and `run` with the plan that it ended with and the statistics."""
        config, working = self._config, worker.working
        plan, inner_steps, statistics, step = run.plan, len(run.learning_rates), None, 0
        losses = torch.zeros(inner_steps, dtype=working.parameters.dtype, device=working.device)
        working.load(self.parameters)
        working.gradient.zero_()
        torch.manual_seed(self._seed(index, 0))
        per_example = self._adapts and config.statistics_estimator == "per_example"
        while step < inner_steps:
            last = step == inner_steps - 1
            # A probe batch is no larger than a node can run.
            sample_size = min(config.statistics_batch_size, worker.node.max_batch)
            in_step = per_example and plan.micro_batches[0] >= sample_size
            indices = self.cursor.peek(step * step_examples + first_example, plan.effective_batch)
            fits = True
            try:
                losses[step], statistics = self._accumulate(working, plan, indices, probe=last and in_step)
            except OUT_OF_MEMORY:
                fits = False  # looked after below, where the error does not keep its tensors alive any more
            if not fits:
                # Nothing of this step has reached parameters or moments: it is made again, in smaller parts.
                plan = self._smaller_plan(worker, plan)
                working.gradient.zero_()
                torch.manual_seed(self._seed(index, step))
                continue
            if last and self._compares_workers:
                gradients[index] = working.gradient.clone()
            self._update(worker, run.learning_rates[step])
            on_step()
            step += 1
        while per_example and statistics is None:
            # The examples that come next in the trainer's stream; they are looked at, not used up.
            ahead = inner_steps * step_examples + index * config.statistics_batch_size
            sample = self.cursor.peek(ahead, min(config.statistics_batch_size, worker.node.max_batch))
            try:
                _, statistics = probed_backward(working, self._examples, sample)
            except OUT_OF_MEMORY:
                self._smaller_plan(worker, ExecutionPlan((len(sample),)))
            working.gradient.zero_()
        return losses, dataclasses.replace(run, plan=plan, statistics=statistics, max_batch=worker.node.max_batch)

    def _smaller_plan(self, worker: Worker, plan: ExecutionPlan) -> ExecutionPlan:
        """Half the node's max batch, for good, and the same examples in parts of at most that."""
        if worker.node.device.type == "cuda":
            torch.cuda.empty_cache()
        largest = max(plan.micro_batches)
        if largest == 1:
            raise TrainingError(
                f"trainer {self.id}: one example does not fit into the memory of {worker.node.device}; "
                f"use a smaller model or sequence_length"
            )
        max_batch = worker.node.max_batch
        while max_batch >= largest:
            max_batch //= 2
        worker.node = dataclasses.replace(worker.node, max_batch=max_batch)
        return only_gradient_accumulation(plan.effective_batch, worker.node.max_batch)

    def _accumulate(
        self, working: WorkingModel, plan: ExecutionPlan, indices: np.ndarray, probe: bool
    ) -> tuple[torch.Tensor, GradientStatistics | None]:
        """Gradient of the mean loss over these examples, in the plan's micro-batches; the loss, and statistics.

        Only the first micro-batch can be probed: the probe needs the gradient to hold nothing else.
        """
        total, statistics, start = 0.0, None, 0
        for size in plan.micro_batches:
            part, weight = indices[start : start + size], size / plan.effective_batch
            if probe and start == 0:
                loss, statistics = probed_backward(working, self._examples, part, weight)
            else:
                loss = backward(working, self._examples, part, weight)
            total, start = total + loss, start + size
        return total, statistics

    def _update(self, worker: Worker, learning_rate: float) -> None:
        """Clip the gradient, make the optimiser's step, and clear the gradient: nothing waits for the device."""
        gradient = worker.working.gradient
        if self._config.gradient_clipping is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_((self._config.gradient_clipping / (norm + 1e-6)).clamp(max=1.0))
        worker.optimizer.param_groups[0]["lr"] = learning_rate
        worker.optimizer.step()
        gradient.zero_()

    # Decisions, the same in every process

    def conclude_round(
        self, schedule: RoundSchedule, workers: dict[int, WorkerRound], tokens: int, seconds: float
    ) -> RoundReport:
        """Advance, and turn the statistics into the next requested batch (AdLoCo, section 3, step 6).

        Args:
            workers: what all workers of the trainer report.
            tokens: of the round, over all workers.
            seconds: that the round took.

        Raises:
            TrainingError: all workers diverged once more than the learning rate may be halved.
        """
        config, workers = self._config, dict(sorted(workers.items()))
        step_examples = sum(worker.plan.effective_batch for worker in workers.values())
        if self.reference_batch is None:
            self.reference_batch = workers[0].plan.effective_batch
        warnings = self._look_after(workers)
        requested = self.requested_batch
        statistics, more = self._batch_test(workers, step_examples, schedule.progress_after)
        if config.batch_schedule:
            scheduled = scheduled_request(config.batch_schedule, schedule.progress_after, self.requested_batch)
            self.requested_batch = min(scheduled, self._largest_request)
        self.cursor.advance(schedule.inner_steps * step_examples)
        self.inner_steps += schedule.inner_steps
        bytes_sent = 0
        if len(workers) > 1:
            bytes_sent = self._encoding.reduction_bytes(len(workers), self._parameter_count, self._like.dtype)
            if self._compares_workers:
                bytes_sent += PLAIN.reduction_bytes(len(workers), self._parameter_count, self._like.dtype)
        self.rounds += 1
        return RoundReport(
            trainer=self.id,
            requested_batch=requested,
            next_requested_batch=self.requested_batch,
            workers=workers,
            statistics=statistics,
            inner_steps=schedule.inner_steps,
            examples=schedule.inner_steps * step_examples,
            tokens=tokens,
            communications=int(len(workers) > 1),
            bytes_communicated=bytes_sent,
            seconds=seconds,
            warnings=(*warnings, *more),
        )

    def _look_after(self, workers: Mapping[int, WorkerRound]) -> list[str]:
        """Remember whose state is lost, and halve the learning rate if nobody's is not; what to warn of."""
        self._lost = frozenset(index for index, worker in workers.items() if worker.left_out)
        place = f"round {self.rounds + 1}"
        warnings = [
            f"{place}: worker {index} is left out of the average: {workers[index].left_out}"
            for index in sorted(self._lost)
        ]
        for index, worker in workers.items():
            if worker.max_batch < self.nodes[index].max_batch:
                warnings.append(
                    f"{place}: node {worker.node} ran out of memory; its max batch is {worker.max_batch} from now on, "
                    f"and worker {index} ran the same examples in smaller parts"
                )
        if len(self._lost) < len(workers) or all(worker.failed for worker in workers.values()):
            return warnings
        if self.halvings == MAX_HALVINGS:
            raise TrainingError(
                f"trainer {self.id}: the loss or the parameters of every worker became NaN or infinite in {place}, "
                f"after its inner learning rate was halved {MAX_HALVINGS} times; "
                f"lower learning_rate_for_inner_opt or set gradient_clipping"
            )
        self.halvings += 1
        warnings.append(
            f"{place}: all workers diverged; the parameters stay, and the inner learning rate is "
            f"{0.5**self.halvings} of what it was at first"
        )
        return warnings

    def _batch_test(
        self, workers: Mapping[int, WorkerRound], step_examples: int, progress: float
    ) -> tuple[GradientStatistics | None, tuple[str, ...]]:
        """Turn the round's statistics into the next requested batch; the statistics and what to warn of."""
        config = self._config
        test = BATCH_TESTS[config.sampling_method]
        present = [worker for worker in workers.values() if not worker.left_out]
        if not (self._adapts and present):
            return None, ()
        if config.statistics_estimator == "per_example":
            statistics = [worker.statistics for worker in present]
        elif len(present) < 2:
            return None, ("across_workers needs two workers: a trainer with one leaves its batch as it is",)
        else:
            batch = min(worker.plan.effective_batch for worker in present)
            statistics = [across_workers_statistics([worker.moments for worker in present], batch)]
        if not is_decisive(statistics):
            warning = "gradient statistics are zero or not finite: the requested batch stays as it is"
            return smoothed(None, statistics, 0.0), (warning,)
        self.statistics = smoothed(self.statistics, statistics, config.statistics_smoothing)
        eta = eta_during(config.ETA, config.ETA_at_end, progress)
        parameters = BatchTestParameters(eta, config.vartheta, config.nu, config.debias)
        self.requested_batch = bounded_request(
            self.requested_batch,
            test([self.statistics], parameters, step_examples),
            config.max_batch_growth,
            self._largest_request,
        )
        return self.statistics, ()

    @property
    def _largest_request(self) -> int:
        return self._config.max_requested_batch or len(self.cursor.subset)

    # Merging and state

    @torch.no_grad()
    def absorb(self, others: list["Trainer"], weights: Mapping[int, float]) -> None:
        """Become the merge of this trainer, the representative, with others (AdLoCo, section 3, step 7).

        Parameters and outer velocity become the weighted averages, data subsets are united; requested batch,
        statistics and workers stay the representative's. The config may have velocity and moments begin anew.
        """
        config = self._config
        for name in ("parameters", "velocity") if self._algorithm.has_velocity else ("parameters",):
            own = getattr(self, name)
            if own is not None:
                own.mul_(weights[self.id])
            for other in others:
                theirs = self._provide(getattr(other, name), other.nodes, self.nodes)
                if own is not None:
                    own.add_(theirs, alpha=weights[other.id])
        if config.outer_momentum_at_merge == "reset" and self.velocity is not None:
            self.velocity.zero_()
        if config.inner_state_at_merge == "reset":
            for worker in self.workers.values():
                worker.reset()
        self.cursor.unite([other.cursor for other in others])

    def state_dict(self) -> dict:
        """What the trainer's future depends on, besides its tensors, as plain values."""
        return {
            "requested_batch": self.requested_batch,
            "reference_batch": self.reference_batch,
            "inner_steps": self.inner_steps,
            "rounds": self.rounds,
            "halvings": self.halvings,
            "statistics": None if self.statistics is None else dataclasses.asdict(self.statistics),
            "cursor": self.cursor.state_dict(),
            "workers": len(self.nodes),
            "lost": sorted(self._lost),
        }

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Its tensors, by reference, in groups named by trainer and worker; each group in one process only."""
        groups = {f"trainer_{self.id}_worker_{index}": worker.state_dict() for index, worker in self.workers.items()}
        if 0 in self.workers:
            own = {"parameters": self.parameters, "subset": torch.from_numpy(self.cursor.subset)}
            groups[f"trainer_{self.id}"] = own if self.velocity is None else own | {"velocity": self.velocity}
        return groups

    def load_state_dict(self, state: Mapping, read: Callable[[str, str], torch.Tensor]) -> None:
        """Continue from a state on the nodes that the trainer has.

        As many workers as there were have their state back; others begin as new workers do.

        Args:
            read: from the name of a group and of a tensor to that tensor.
        """
        self.requested_batch = state["requested_batch"]
        self.reference_batch = state["reference_batch"]
        self.inner_steps = state["inner_steps"]
        self.rounds = state["rounds"]
        self.halvings = state["halvings"]
        statistics = state["statistics"]
        self.statistics = None if statistics is None else GradientStatistics(**statistics)
        group = f"trainer_{self.id}"
        self.cursor.load_state_dict(state["cursor"], read(group, "subset").numpy())
        if self.workers:
            self.parameters.copy_(read(group, "parameters"))
            if self.velocity is not None:
                self.velocity.copy_(read(group, "velocity"))
        healthy = [index for index in range(state["workers"]) if index not in state["lost"]]
        for index, worker in self.workers.items():
            if not healthy:
                continue
            source = index if index in healthy else healthy[0]
            names = [name for name in worker.state_dict() if name != "error" or source == index]
            loaded = {name: read(f"{group}_worker_{source}", name) for name in names}
            worker.load_state_dict(worker.state_dict() | loaded)
