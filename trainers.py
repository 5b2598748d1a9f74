"""A trainer: one model instance, its workers, their inner steps, and the outer step that joins them.

State (everything else is computed): the flat parameters x and the outer velocity, the requested batch, the
smoothed statistics, the data cursor, counters, and per worker the state of its inner optimiser, which survives
from round to round (DiLoCo, Algorithm 1). Workers pass one after the other through the working model of their
device: no other copy of a model exists.
"""

import copy
import dataclasses
import math
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
    smoothed,
)
from algorithms.gradient_statistics import (
    GradientStatistics,
    PerExampleProbe,
    across_workers_statistics,
)
from algorithms.learning_rate import batch_scaling_factor, schedule_factor
from algorithms.losses import example_losses
from algorithms.outer_step import DISTRIBUTED_ALGORITHMS
from algorithms.switch_mode import SWITCH_MODES, ExecutionPlan
from fabrics.data_order import DataCursor
from fabrics.examples import Examples
from fabrics.working_model import WorkingModel
from training_logs.records import RoundReport, WorkerRound
from utils.config import Config
from utils.distributed import LocalWorkers, Workers


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what would help."""


@dataclass(frozen=True)
class Node:
    """A worker slot on a device. max_batch: its largest micro-batch."""

    id: int
    device: torch.device
    max_batch: int


class Worker:
    """A node while it works for a trainer: the state of its inner optimiser over the device's working model."""

    def __init__(self, node: Node, working: WorkingModel, config: Config):
        self.node = node
        self.working = working
        kind = DISTRIBUTED_ALGORITHMS[config.distributed_algo].inner_optimizer
        self.optimizer = INNER_OPTIMIZERS[kind](working.parameters, config)

    def state_dict(self) -> dict:
        """The optimiser's state, by reference as PyTorch's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Continue from a copy of `state`: the optimiser alone would keep the very tensors, shared with another."""
        self.optimizer.load_state_dict(copy.deepcopy(state))


# The learning rate is not theirs to know: it is set at every inner step.


def _adamw(parameters: torch.nn.Parameter, config: Config) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameters],
        betas=tuple(config.adam_betas),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _sgd(parameters: torch.nn.Parameter, config: Config) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameters], fused=True)


INNER_OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}
ESTIMATORS = ("per_example", "across_workers")


def backward(working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0) -> torch.Tensor:
    """Add the gradient of `weight` times the mean loss of these examples; that product, detached."""
    batch = examples.batch(indices, working.device)
    labels = batch.pop("labels")
    loss = example_losses(working.module(**batch).logits, labels).mean() * weight
    loss.backward()
    return loss.detach()


def probed_backward(
    working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0
) -> tuple[torch.Tensor, GradientStatistics]:
    """As `backward`, into a gradient that holds nothing yet, with the statistics of these examples."""
    with PerExampleProbe(working.module, batch_size=len(indices)) as probe:
        loss = backward(working, examples, indices, weight)
    return loss, probe.statistics(loss_weight=weight)


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
        parameters: flat initial parameters x; they become the trainer's own.
        cursor: its walk through its own data.
        examples: all training examples.
        working: the working model of each device.
    """

    def __init__(
        self,
        trainer_id: int,
        config: Config,
        parameters: torch.Tensor,
        cursor: DataCursor,
        examples: Examples,
        working: Mapping[torch.device, WorkingModel],
    ):
        self.id = trainer_id
        self.parameters = parameters
        self.cursor = cursor
        self.requested_batch = config.INITIAL_BATCH_SIZE
        self.inner_steps = 0
        self.rounds = 0
        self.reference_batch: int | None = None
        self.statistics: GradientStatistics | None = None
        self.workers: dict[int, Worker] = {}
        self._config = config
        self._examples = examples
        self._working = working
        self._algorithm = DISTRIBUTED_ALGORITHMS[config.distributed_algo]
        self.velocity = torch.zeros_like(parameters) if self._algorithm.has_velocity else None
        self._group: Workers = LocalWorkers(0)
        self.parameter_bytes = next(iter(working.values())).parameter_count * parameters.element_size()

    # Workers

    def assign_nodes(self, nodes: tuple[Node, ...]) -> None:
        """Let these nodes work for the trainer from now on.

        Workers keep their state as far as there are nodes for them; a new one starts with a copy of the first
        worker's. Surplus workers end.
        """
        workers: dict[int, Worker] = {}
        for index, node in enumerate(nodes):
            old = self.workers.get(index)
            if old is not None and old.node.device == node.device:
                old.node = node
                workers[index] = old
                continue
            worker = Worker(node, self._working[node.device], self._config)
            source = old or self.workers.get(0)
            if source is not None:
                worker.load_state_dict(source.state_dict())
            workers[index] = worker
        self.workers = workers
        self._group = LocalWorkers(len(nodes))

    def execution_plans(self) -> dict[int, ExecutionPlan]:
        """Each worker's plan for the requested batch: ceil(B / M) examples through the switch mode."""
        per_worker = -(-self.requested_batch // len(self.workers))
        decide = SWITCH_MODES[self._config.switch_mode]
        return {
            index: decide(per_worker, worker.node.max_batch, self._config.switch_multiplier)
            for index, worker in self.workers.items()
        }

    def examples_per_inner_step(self) -> int:
        """Examples of one inner step over all workers."""
        return sum(plan.effective_batch for plan in self.execution_plans().values())

    def tokens_per_inner_step(self) -> int:
        """Tokens of the next inner step over all workers."""
        count = self.examples_per_inner_step()
        return self._examples.tokens(self.cursor.peek(0, count))

    # A round

    def train_round(self, schedule: RoundSchedule, on_step: Callable[[], None]) -> RoundReport:
        """H inner steps on every worker, the outer step, and the batch test (AdLoCo, section 3, steps 1 to 6).

        Args:
            on_step: called after every inner step of every worker.

        Raises:
            TrainingError: a loss or a pseudo-gradient is not finite.
        """
        started = time.perf_counter()
        config, plans = self._config, self.execution_plans()
        if self.reference_batch is None:
            self.reference_batch = plans[0].effective_batch
        first, step_examples = {}, 0
        for index, plan in plans.items():
            first[index] = step_examples
            step_examples += plan.effective_batch
        local: dict[int, WorkerRound] = {}
        gradients: dict[int, torch.Tensor] = {}

        def pseudo_gradients() -> Iterator[tuple[int, torch.Tensor]]:
            for index in self._group.local_workers:
                local[index] = self._train_worker(
                    index, plans[index], schedule, first[index], step_examples, gradients, on_step
                )
                # x - x_m, in the working buffer itself: the next replica overwrites it anyway.
                replica = self.workers[index].working.parameters.data
                yield index, replica.neg_().add_(self.parameters.to(replica.device))

        weights = {index: 1.0 / len(self.workers) for index in self.workers}
        pseudo_gradient = self._group.weighted_sum(pseudo_gradients(), weights, self.parameters)
        if not math.isfinite(pseudo_gradient.sum().item()):
            raise TrainingError(
                f"trainer {self.id}: the parameters became non-finite in round {self.rounds + 1}; "
                f"lower learning_rate_for_inner_opt or set gradient_clipping"
            )
        workers = self._group.gather(local)
        self._algorithm.outer_step(
            self.parameters,
            pseudo_gradient,
            self.velocity,
            config.learning_rate_for_outer_opt,
            config.outer_momentum,
        )
        requested = self.requested_batch
        statistics, warnings = self._batch_test(workers, gradients, step_examples)
        self.cursor.advance(schedule.inner_steps * step_examples)
        self.inner_steps += schedule.inner_steps
        self.rounds += 1
        synchronisations = 0
        if len(self.workers) > 1:
            gradients_sent = config.statistics_estimator == "across_workers" and self._adapts
            synchronisations = 2 if gradients_sent else 1
        return RoundReport(
            trainer=self.id,
            requested_batch=requested,
            next_requested_batch=self.requested_batch,
            workers=workers,
            statistics=statistics,
            examples=schedule.inner_steps * step_examples,
            tokens=sum(worker.tokens for worker in workers.values()),
            communications=min(synchronisations, 1),
            # A ring all-reduce: each of M workers sends and receives 2 (M - 1) / M times the parameters.
            bytes_communicated=synchronisations * 2 * (len(self.workers) - 1) * self.parameter_bytes,
            seconds=time.perf_counter() - started,
            warnings=warnings,
        )

    @property
    def _adapts(self) -> bool:
        return BATCH_TESTS[self._config.sampling_method] is not None

    def _learning_rate(self, step: int, schedule: RoundSchedule, plan: ExecutionPlan) -> float:
        config = self._config
        base = config.learning_rate_for_inner_opt
        if self._algorithm.inner_optimizer == "sgd":
            base = config.lr_sgd or base
        share = step / schedule.inner_steps
        progress = schedule.progress_before + share * (schedule.progress_after - schedule.progress_before)
        return (
            base
            * batch_scaling_factor(config.learning_rate_scaling, plan.effective_batch, self.reference_batch)
            * schedule_factor(
                config.learning_rate_schedule,
                progress,
                self.inner_steps + step,
                config.warmup_steps,
                config.minimum_learning_rate_ratio,
            )
        )

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
        config, worker = self._config, self.workers[index]
        working, device = worker.working, worker.node.device
        per_example = self._adapts and config.statistics_estimator == "per_example"
        # A probe batch is no larger than a node can run.
        sample_size = min(config.statistics_batch_size, worker.node.max_batch)
        in_step = per_example and plan.micro_batches[0] >= sample_size
        statistics, tokens, learning_rates = None, 0, []
        losses = torch.zeros(schedule.inner_steps, dtype=working.parameters.dtype, device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # Dropout, where a model has it, depends on the place in the run alone.
            place_in_run = [config.training_seed, self.id, index, self.rounds]
            torch.manual_seed(int(np.random.SeedSequence(place_in_run).generate_state(1, np.uint64)[0]))
            working.load(self.parameters)
            working.gradient.zero_()
            for step in range(schedule.inner_steps):
                last = step == schedule.inner_steps - 1
                indices = self.cursor.peek(step * step_examples + first_example, plan.effective_batch)
                tokens += self._examples.tokens(indices)
                losses[step], statistics = self._accumulate(working, plan, indices, probe=last and in_step)
                if last and self._adapts and not per_example:
                    gradients[index] = working.gradient.clone()
                learning_rates.append(self._learning_rate(step, schedule, plan))
                self._update(worker, learning_rates[-1])
                on_step()
            if per_example and not in_step:
                # The examples that come next in the trainer's stream; they are looked at, not used up.
                ahead = schedule.inner_steps * step_examples + index * config.statistics_batch_size
                upcoming = self.cursor.peek(ahead, sample_size)
                _, statistics = probed_backward(working, self._examples, upcoming)
                working.gradient.zero_()
        step_losses = losses.tolist()
        bad = next((step for step, loss in enumerate(step_losses) if not math.isfinite(loss)), None)
        if bad is not None:
            raise TrainingError(
                f"trainer {self.id}, worker {index}: the loss became {step_losses[bad]} at inner step {bad + 1} of "
                f"round {self.rounds + 1}; lower learning_rate_for_inner_opt or set gradient_clipping"
            )
        return WorkerRound(worker.node.id, plan, step_losses, learning_rates, tokens, statistics)

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

    def _batch_test(
        self, workers: dict[int, WorkerRound], gradients: dict[int, torch.Tensor], step_examples: int
    ) -> tuple[GradientStatistics | None, tuple[str, ...]]:
        """Turn the round's statistics into the next requested batch; the statistics and what to warn of."""
        config = self._config
        test = BATCH_TESTS[config.sampling_method]
        if test is None:
            return None, ()
        if config.statistics_estimator == "per_example":
            statistics = [worker.statistics for worker in workers.values()]
        elif len(gradients) < 2:
            return None, ("across_workers needs two workers: a trainer with one leaves its batch as it is",)
        else:
            batch = min(worker.plan.effective_batch for worker in workers.values())
            flat = [gradients[index].to(self.parameters.device) for index in sorted(gradients)]
            statistics = [across_workers_statistics(flat, batch)]
        if not is_decisive(statistics):
            warning = "gradient statistics are zero or not finite: the requested batch stays as it is"
            return smoothed(None, statistics, 0.0), (warning,)
        self.statistics = smoothed(self.statistics, statistics, config.statistics_smoothing)
        parameters = BatchTestParameters(config.ETA, config.vartheta, config.nu, config.debias)
        self.requested_batch = bounded_request(
            self.requested_batch,
            test([self.statistics], parameters, step_examples),
            config.max_batch_growth,
            config.max_requested_batch or len(self.cursor.subset),
        )
        return self.statistics, ()

    # Merging and state

    @torch.no_grad()
    def absorb(self, others: list["Trainer"], weights: Mapping[int, float]) -> None:
        """Become the merge of this trainer, the representative, with others (AdLoCo, section 3, step 7).

        Parameters and outer velocity become the weighted averages, data subsets are united; requested batch,
        statistics and workers stay the representative's.
        """
        averaged = [(self.parameters, [other.parameters for other in others])]
        if self.velocity is not None:
            averaged.append((self.velocity, [other.velocity for other in others]))
        for own, theirs in averaged:
            own.mul_(weights[self.id])
            for other, tensor in zip(others, theirs, strict=True):
                own.add_(tensor, alpha=weights[other.id])
        self.cursor.unite([other.cursor for other in others])

    def state_dict(self) -> dict:
        """Everything that the trainer's future depends on, by reference: write it or copy it before going on."""
        return {
            "id": self.id,
            "parameters": self.parameters,
            "velocity": self.velocity,
            "requested_batch": self.requested_batch,
            "reference_batch": self.reference_batch,
            "inner_steps": self.inner_steps,
            "rounds": self.rounds,
            "statistics": None if self.statistics is None else dataclasses.asdict(self.statistics),
            "cursor": self.cursor.state_dict(),
            "workers": {index: worker.state_dict() for index, worker in self.workers.items()},
        }

    def load_state_dict(self, state: dict, nodes: tuple[Node, ...]) -> None:
        """Continue from a copy of `state` with its workers on these nodes, one for each."""
        if len(nodes) != len(state["workers"]):
            raise ValueError(f"trainer {self.id} has {len(state['workers'])} workers, got {len(nodes)} nodes")
        self.parameters.copy_(state["parameters"])
        if self.velocity is not None:
            self.velocity.copy_(state["velocity"])
        self.requested_batch = state["requested_batch"]
        self.reference_batch = state["reference_batch"]
        self.inner_steps = state["inner_steps"]
        self.rounds = state["rounds"]
        statistics = state["statistics"]
        self.statistics = None if statistics is None else GradientStatistics(**statistics)
        self.cursor.load_state_dict(state["cursor"])
        self.workers = {}
        self.assign_nodes(nodes)
        for index, worker in self.workers.items():
            worker.load_state_dict(state["workers"][index])
