"""One round of a trainer on the workers of this process (Algorithm 1): inner steps, messages, the outer step."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from algorithms.synchronisation.encodings.encoding import BFLOAT16
from algorithms.synchronisation.group import Clock, Event, Group, Inner, LocalWorker, Outer
from fabrics.training.inner_loop import InnerLoop, clip
from fabrics.training.optimizers import INNER_OPTIMIZERS, InnerOptimizer, inner_optimizer_name
from fabrics.training.work_split import lost_messages
from fabrics.training.worker import COPY, Assignment
from fabrics.training.worker_group import WorkerGroup
from utils.config.schema import Config


class OuterRound:
    """One round of a trainer.

    Args:
        config: the run's configuration.
        workers: the trainer's workers, and its method.
        shared: the trainer's tensors by name, which change in place.
        values: the method's plain values, which change in place.
        assignments: what each participating worker is to do; the others rest.
        on_step: called after every inner step of every worker of this process.

    Attributes:
        events: all that the workers have sent each other.
        group: the workers as the method sees them.
        loops: the inner loop of each participating local worker, by number.
        unheard: workers whose messages are lost in this round.
    """

    def __init__(
        self,
        config: Config,
        workers: WorkerGroup,
        shared: dict[str, torch.Tensor],
        values: dict[str, float],
        assignments: Mapping[int, Assignment],
        on_step: Callable[[], None],
    ):
        first = next(iter(assignments.values()))
        self._config = config
        self._workers = workers
        self._method = workers.method
        self._place = first.place
        self._optimizer: InnerOptimizer | None = None
        self.unheard = lost_messages(config.message_loss, first.place, assignments)
        self.events: list[Event] = []
        self._learning_rates = first.learning_rates
        self.group = Group(
            workers=workers,
            model=workers.first_model,
            shared=shared,
            values=values,
            weights=_weights(assignments, len(workers)),
            clock=_clock(config, workers, assignments),
            inner=Inner(config.weight_decay, self._update),
            outer=_outer(config, workers),
            generator=self._generator,
            events=self.events,
        )
        self.loops: dict[int, InnerLoop] = {}
        self._local: dict[int, LocalWorker] = {}
        for index, worker in workers.local.items():
            if index in assignments:
                start = worker.state.get(COPY, shared["parameters"])
                replica = self._method.keeps == "replica"
                keeps_end = replica or index in self.unheard
                self.loops[index] = InnerLoop(worker, assignments[index], start, keeps_end, on_step)
                self._local[index] = LocalWorker(
                    index=index,
                    parameters=start if replica else worker.model.parameters.data,
                    # With message_loss a worker starts elsewhere, and is still compared with the shared parameters.
                    start=shared["parameters"] if self._method.keeps == "shared" else start,
                    gradient=worker.model.gradient if self._method.capabilities.exchanges_gradients else None,
                    state=worker.state,
                )

    @torch.no_grad()
    def run(self) -> None:
        """Run the inner steps of all local workers, and bring the workers together at every stop of the method.

        Raises:
            TrainingError: not even one example fits into a device's memory.
        """
        method = self._method
        group = self.group
        group.local_workers = self._well()
        for stop in self._stops():
            group.clock.step = stop
            group.inner.learning_rate = self._learning_rates[stop - 1]
            if method.keeps == "replica":
                for loop in self.loops.values():
                    loop.run(until=stop)
                group.local_workers = self._well()
                method.exchange(group)
                continue
            incoming = method.incoming(group)
            for index, loop in self.loops.items():
                loop.run(until=stop)
                if loop.left_out is None and index not in self.unheard:
                    incoming.add(self._local[index], self._message(index))
            result = incoming.result()
            group.local_workers = self._well()
            if result is not None and len(result):
                method.apply(group, result)
        if self._config.message_loss:
            for index, worker in self._workers.local.items():
                if index not in self.unheard:
                    worker.state[COPY].copy_(group.shared["parameters"])

    def _stops(self) -> Sequence[int]:
        method = self._method
        inner_steps = self.group.clock.inner_steps
        if method.capabilities.exchanges_gradients:
            return range(1, inner_steps + 1)
        stops = method.stops(self.group)
        if stops[-1] != inner_steps or (len(stops) > 1 and method.keeps != "replica"):
            raise ValueError(
                f"{type(method).__name__}: the last stop must be the round's last inner step, and the only one where "
                f"workers keep no replicas, got {list(stops)} of {inner_steps}"
            )
        return stops

    def _well(self) -> list[LocalWorker]:
        return [
            worker
            for index, worker in self._local.items()
            if self.loops[index].left_out is None and index not in self.unheard
        ]

    def _message(self, index: int):
        worker = self._local[index]
        if worker.gradient is not None and self._method.capabilities.inner_optimizer is None:
            clip(self._workers.local[index].model, worker.gradient, self._config.gradient_clipping)
        return self._method.message(worker, self.group)

    def _update(self, gradient: torch.Tensor) -> None:
        """Make the inner optimizer's step of the shared parameters with this gradient, which is clipped."""
        model = self._workers.first_model
        parameters = self.group.shared["parameters"]
        if self._optimizer is None:
            kind = INNER_OPTIMIZERS[inner_optimizer_name(self._config)]
            self._optimizer = kind.build(model, self._config, self.group.shared)
        model.load(parameters)
        clip(model, model.gradient.copy_(gradient), self._config.gradient_clipping)
        self._optimizer.step(self.group.inner.learning_rate)
        model.gradient.zero_()
        parameters.copy_(model.parameters)

    def _generator(self, step: int) -> torch.Generator:
        place = [self._place.seed, self._place.trainer, self._place.round, step]
        seed = int(np.random.SeedSequence(place, spawn_key=(1,)).generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(seed)


def _weights(assignments: Mapping[int, Assignment], workers: int) -> list[float]:
    """The weight of each worker in a mean, by number: by default that of its examples in the round."""
    weights = [0.0] * workers
    for worker, own in assignments.items():
        weights[worker] = own.round_examples if own.weight is None or not own.round_examples else own.weight
    total = sum(weights)
    return [weight / total for weight in weights]


def _outer(config: Config, workers: WorkerGroup) -> Outer:
    dtype = torch.bfloat16 if workers.encoding is BFLOAT16 else workers.dtype
    return Outer(config.learning_rate_for_outer_opt, config.outer_momentum, dtype)


def _clock(config: Config, workers: WorkerGroup, assignments: Mapping[int, Assignment]) -> Clock:
    speeds = [node.speed if config.node_speeds else math.inf for node in workers.nodes]
    seconds = [0.0] * len(workers)
    own_steps = [0] * len(workers)
    batches = [0] * len(workers)
    for worker, own in assignments.items():
        seconds[worker] = own.round_examples / speeds[worker]
        own_steps[worker] = own.pace
        batches[worker] = own.plan.effective_batch
    return Clock(
        inner_steps=len(next(iter(assignments.values())).learning_rates),
        seconds=seconds,
        own_steps=own_steps,
        batches=batches,
        step_seconds=min(batches[worker] / speeds[worker] for worker in assignments),
        server_seconds=workers.server_seconds,
    )
