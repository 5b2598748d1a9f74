"""One round of a trainer on the workers of this process (Algorithm 1): inner steps, messages, the outer step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from algorithms.nodes.traffic import Event
from algorithms.synchronisation.group import Clock, Group, Inner, LocalWorker
from fabrics.training.inner_loop import InnerLoop, clip
from fabrics.training.optimizers import WorkerOptimizer
from fabrics.training.work_split import WorkSplit, draw_lost_messages
from fabrics.training.worker import COPY, Assignment, RoundKey, WorkerRound, local_worker, method_generator
from fabrics.training.worker_group import WorkerGroup
from utils.config.schema import Config


class OuterRound:
    """One round of a trainer.

    Args:
        worker_group: the trainer's workers and tensors; the shared tensors change in place.

    Attributes:
        group: the workers as the method sees them.
        events: what the workers have sent each other.
        lost_messages: numbers of the workers whose messages are lost in this round.
        loops: the inner steps of the local participants, by number.
    """

    def __init__(
        self,
        config: Config,
        worker_group: WorkerGroup,
        split: WorkSplit,
        key: RoundKey,
        assignments: Mapping[int, Assignment],
        on_step: Callable[[], None],
    ):
        first = next(iter(assignments.values()))
        inner_steps = len(first.learning_rates)
        examples = split.examples_each(inner_steps)
        self._config = config
        self._worker_group = worker_group
        self._method = worker_group.method
        self._key = key
        self._learning_rates = first.learning_rates
        self._optimizer: WorkerOptimizer | None = None
        self.events: list[Event] = []
        self.lost_messages = draw_lost_messages(config.message_loss, key, split.participants)
        self.group = Group(
            workers=worker_group,
            shared=worker_group.shared,
            values=dict(worker_group.values),
            weights=[own / sum(examples) for own in examples],
            clock=self._clock(split, inner_steps, examples),
            inner=Inner(config.weight_decay, self._update_shared, first.learning_rates[0]),
            outer=worker_group.outer,
            events=self.events,
        )
        self.loops: dict[int, InnerLoop] = {}
        self._local: dict[int, LocalWorker] = {}
        parameters = worker_group.shared["parameters"]
        for index, worker in worker_group.local.items():
            if index in assignments:
                start = worker.state.get(COPY, parameters)
                # A worker whose message is lost continues from its own parameters.
                keeps_end = self._method.keeps == "replica" or index in self.lost_messages
                self.loops[index] = InnerLoop(worker, assignments[index], start, keeps_end, on_step)
                self._local[index] = local_worker(index, worker, parameters, self._method)

    @torch.no_grad()
    def run(self) -> None:
        """Run the inner steps of all local workers, and bring the workers together at every stop of the method."""
        method = self._method
        group = self.group
        group.local_workers = self._in_mean()  # the method's stops may depend on them
        for stop in self._stops():
            group.clock.step = stop
            group.inner.learning_rate = self._learning_rates[stop - 1]
            incoming = None if method.keeps == "replica" else method.incoming(group)
            for index, loop in self.loops.items():
                loop.run(until=stop)
                if incoming is not None and self._sends(index):
                    incoming.add(self._local[index], self._message(index))
            group.local_workers = self._in_mean()
            if incoming is None:
                method.exchange(group)
                continue
            result = incoming.result()
            if result is not None and len(result):  # otherwise no worker is in the mean
                method.apply(group, result)
        if self._config.message_loss:  # a lost message takes its answer along
            for index, worker in self._worker_group.local.items():
                if index not in self.lost_messages:
                    worker.state[COPY].copy_(group.shared["parameters"])

    def records(self) -> dict[int, WorkerRound]:
        """Return the reports of the local participants, by number."""
        return {index: loop.record(index in self.lost_messages) for index, loop in self.loops.items()}

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

    def _in_mean(self) -> list[LocalWorker]:
        return [worker for index, worker in self._local.items() if self._sends(index)]

    def _sends(self, index: int) -> bool:
        return self.loops[index].left_out is None and index not in self.lost_messages

    def _message(self, index: int) -> Any:
        worker = self._local[index]
        if worker.gradient is not None and self._method.capabilities.inner_optimizer is None:
            clip(self._worker_group.local[index].model, worker.gradient, self._config.gradient_clipping)
        return self._method.message(worker, self.group)

    def _update_shared(self, gradient: torch.Tensor) -> None:
        """Update the shared parameters with the inner optimizer and this gradient, which is clipped."""
        model = self._worker_group.model
        parameters = self.group.shared["parameters"]
        if self._optimizer is None:
            self._optimizer = WorkerOptimizer(model, self._config, self.group.shared)
        model.load(parameters)
        clip(model, model.gradient.copy_(gradient), self._config.gradient_clipping)
        self._optimizer.step(self.group.inner.learning_rate)
        model.gradient.zero_()
        parameters.copy_(model.parameters)

    def _clock(self, split: WorkSplit, inner_steps: int, examples: Sequence[int]) -> Clock:
        seconds = [0.0] * len(examples)
        own_steps = [0] * len(examples)
        batches = [0] * len(examples)
        for worker, steps in split.steps_in_time(inner_steps).items():
            own_steps[worker] = steps
            batches[worker] = split.plans[worker].effective_batch
            if self._config.node_speeds is not None:
                seconds[worker] = examples[worker] / split.speeds[worker]
        server_seconds = self._worker_group.server_seconds
        random = partial(method_generator, self._key)
        return Clock(inner_steps, seconds, own_steps, batches, split.step_seconds, server_seconds, random)
