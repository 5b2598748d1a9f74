"""Validation of several trainers, shared out over their workers, wherever those are."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from fabrics.data.examples import TaskData
from fabrics.pool.eval_tool import METRICS, Evaluation, EvaluationPart, batch_count, begin_batches, combined
from fabrics.training.flat_model import FlatModel
from fabrics.training.worker_group import WorkerGroup


class Validation:
    """Evaluates trainers on the validation examples: each worker takes its share of the batches on its own device.

    Args:
        data: what to evaluate on.
        working: the working model of each device of this process.
        batch_size: examples per batch.
    """

    def __init__(self, data: TaskData, working: Mapping[torch.device, FlatModel], batch_size: int):
        self._data, self._working, self._batch_size = data, working, batch_size
        self._examples = (data.validation, *(data.shares.validation if data.shares else ()))
        self.metric = METRICS[data.task]

    def part(self, worker_group: WorkerGroup, parameters: torch.Tensor | None) -> EvaluationPart | None:
        """What the workers of this process evaluate of a trainer; None where it has none here, or nothing is left.

        parameters: flat, of the trainer.
        """
        size, turn = self._batch_size, 0
        numbers: dict[torch.device, list[list[int]]] = {}  # of the batches of all examples, and of each share's
        for place, examples in enumerate(self._examples):
            for batch in range(batch_count(examples, size)):
                worker = worker_group.local.get(turn % len(worker_group))
                if worker is not None:
                    numbers.setdefault(worker.node.device, [[] for _ in self._examples])[place].append(batch)
                turn += 1
        begun = []
        for device, of_examples in numbers.items():
            working = self._working[device]
            with working.evaluating(parameters) as module:
                batches = []
                for examples, all_batches in zip(self._examples, of_examples, strict=True):
                    own, besides = working.local_batches(all_batches)
                    batches.append(begin_batches(module, examples, size, device, own))
                    if besides:
                        begin_batches(module, examples, size, device, besides)
                begun.append(batches)
        # Devices are waited for when all of them have something to do.
        parts = []
        for device in begun:
            everything, *shares = (batches.wait() for batches in device)
            parts.append(dataclasses.replace(everything, shares=tuple(shares)))
        return EvaluationPart.joined(parts) if parts else None

    def combined(
        self, everybody: Sequence[Mapping[int, EvaluationPart]], trainers: Sequence[int]
    ) -> dict[int, Evaluation]:
        """From what all processes have evaluated, by trainer, to each trainer's evaluation."""
        return {
            trainer: combined((parts[trainer] for parts in everybody if trainer in parts), self._data.task)
            for trainer in trainers
        }

    def best(self, evaluations: Mapping[int, Evaluation]) -> int:
        """The trainer with the best metric; ties go to the smaller id."""
        sign = -1.0 if self.metric.higher_is_better else 1.0
        return min(evaluations, key=lambda trainer: (sign * evaluations[trainer].metric, trainer))
