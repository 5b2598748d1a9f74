"""A trainer's rounds compared with an oracle's: the same model, data and values in both."""

import copy
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from fabrics.data.examples import PackedSequences
from fabrics.training.optimizers import inner_optimizer_of
from fabrics.training.worker import COPY, Node
from tests.support.helpers import CPU, Stack, make_config, make_trainer, peek, random_sequences, train
from tests.support.oracles import History, Problem
from trainers import Trainer

EXAMPLES = PackedSequences(random_sequences(200))


def trainer_of(nodes: int = 4, max_batches: Sequence[int] = (), speeds: Sequence[float] = (), **values) -> Trainer:
    """Return a trainer of a tiny model in float64 with a fixed batch of two examples for each of its workers.

    max_batches: of the nodes, where they differ; a worker whose node holds fewer examples has as many as fit.
    """
    batches = {"INITIAL_BATCH_SIZE": 2 * nodes, "max_requested_batch": 2 * nodes}
    config = make_config(**{"sampling_method": "none"} | batches | values)
    torch.default_generator.manual_seed(0)
    trainer = make_trainer(Stack().double(), config, EXAMPLES, nodes)
    if max_batches or speeds:
        sizes = max_batches or [64] * nodes
        speeds = speeds or [1.0] * nodes
        trainer.assign_nodes(tuple(Node(index, CPU, sizes[index], speeds[index]) for index in range(nodes)))
    return trainer


def problem_of(trainer: Trainer, rounds: int, inner_steps: int, ends: Sequence[Sequence[int]] | None = None) -> Problem:
    """Return the same as a problem of the oracles; gradients come from a copy of the model.

    ends: the inner steps of the run, from 1, with which each worker ends its own; None: it makes all of them.
    """
    model = trainer.worker_group.model
    config = trainer._config
    module = copy.deepcopy(model.module)
    named = dict(module.named_parameters())
    workers = len(trainer.nodes)
    sizes = [trainer.split_work().plans[worker].effective_batch for worker in range(workers)]
    ends = ends or [range(1, rounds * inner_steps + 1)] * workers
    cursor = copy.deepcopy(trainer.cursor)
    # Examples are read in the order in which steps end, and of the workers.
    in_order = sorted((end, worker, step) for worker, own in enumerate(ends) for step, end in enumerate(own))
    firsts = itertools.accumulate((sizes[worker] for _, worker, _ in in_order), initial=0)
    places = {(worker, step): first for (_, worker, step), first in zip(in_order, firsts, strict=False)}

    def gradient(worker: int, step: int, theta: np.ndarray) -> np.ndarray:
        for block in model.blocks:
            named[block.name].data = torch.from_numpy(theta[block.slice].copy()).view(block.shape)
        module.zero_grad()
        batch = EXAMPLES.batch(peek(cursor, places[worker, step], sizes[worker]), CPU)
        labels = batch.pop("labels")[:, 1:]
        logits = module(**batch).logits[:, :-1]  # the module's own loss would be float32
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)).backward()
        found = np.zeros_like(theta)
        for block in model.blocks:
            found[block.slice] = named[block.name].grad.flatten().numpy()
        return found

    return Problem(
        start=trainer.parameters.numpy().copy(),
        workers=workers,
        inner_steps=inner_steps,
        rounds=rounds,
        gradient=gradient,
        weights=sizes,
        ends=ends,
        learning_rate=config.learning_rate_for_inner_opt,
        warmup_steps=config.warmup_steps,
        betas=getattr(inner_optimizer_of(config), "betas", (0.9, 0.99)),
        weight_decay=config.weight_decay,
        clip=config.gradient_clipping,
        shapes=[(block.name, block.start, block.slice.stop, block.shape) for block in model.blocks],
    )


def history_of(trainer: Trainer, rounds: int, inner_steps: int) -> History:
    """Train, and return the rounds as an oracle records them."""
    found = []
    for _ in range(rounds):
        train(trainer, 1, inner_steps)
        trainer.worker_group.refresh()
        shared = trainer.parameters
        workers = [worker.state.get(COPY, shared).numpy().copy() for worker in trainer.local_workers.values()]
        found.append((shared.numpy().copy(), workers))
    return found


def assert_same(found: History, expected: History, tolerance: float = 1e-10) -> None:
    """The parameters of the trainer and of each worker after every round."""
    for (shared, workers), (expected_shared, expected_workers) in zip(found, expected, strict=True):
        np.testing.assert_allclose(shared, expected_shared, rtol=0, atol=tolerance)
        np.testing.assert_allclose(workers, expected_workers, rtol=0, atol=tolerance)


def assert_equals_oracle(
    oracle: Callable[[Problem], History], nodes: int = 4, inner_steps: int = 4, rounds: int = 3, **values
) -> None:
    """A trainer's rounds are those of the oracle."""
    trainer = trainer_of(nodes, number_of_inner_steps_between_outers=inner_steps, **values)
    problem = problem_of(trainer, rounds, inner_steps)
    expected = oracle(problem)
    assert np.abs(expected[-1][0] - problem.start).max() > 1e-3  # something happened
    assert_same(history_of(trainer, rounds, inner_steps), expected)
