"""Validation is divided among the workers, and changes no training."""

import copy

import pytest
import torch

from fabrics.data.sampler import DataCursor, Subsets
from fabrics.pool import eval_tool
from fabrics.pool.eval_tool import Validation
from fabrics.training.flat_model import FlatModel
from fabrics.training.worker import Node
from tests.support.helpers import (
    CPU,
    LocalProcesses,
    Recorder,
    evaluate,
    light_cluster,
    make_config,
    tiny_data,
    tiny_llama,
)
from trainers import Trainer


def test_every_device_evaluates_the_batches_of_its_workers(monkeypatch):
    """The two devices are the same CPU under two names."""
    data, module, elsewhere = tiny_data(validation=40), tiny_llama(vocab_size=300), torch.device("cpu", 0)
    working = {CPU: FlatModel(copy.deepcopy(module), CPU), elsewhere: FlatModel(copy.deepcopy(module), elsewhere)}
    config, begun = make_config(), []
    begin = eval_tool.begin_batches

    def recorded(model, examples, size, batches):
        begun.append((model, list(batches)))
        return begin(model, examples, size, batches)

    monkeypatch.setattr(eval_tool, "begin_batches", recorded)
    parameters = working[CPU].parameters.detach().clone().mul_(1.5)
    processes = LocalProcesses([CPU, elsewhere], 2)
    cursor = DataCursor(Subsets(1, len(data.train)), [0])
    trainer = Trainer(0, config, parameters, cursor, data.train, working, processes)
    trainer.assign_nodes((Node(0, CPU, 8), Node(1, elsewhere, 8), Node(2, CPU, 8)))
    judge = Validation(data, working, batch_size=6)  # seven batches
    part = judge.part(trainer.worker_group)
    assert begun == [(working[CPU], [0, 2, 3, 5, 6]), (working[elsewhere], [1, 4])]
    found = judge.combine([{0: part}], [0])[0]
    working[CPU].load(parameters)
    expected = evaluate(working[CPU].module, data.validation, data.task, 6)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)


def test_merged_trainers_are_evaluated_if_the_round_is_and_train_alike():
    values = {"number_of_initial_trainers": 3, "merge_frequency": 1, "number_of_outer_steps": 3}
    evaluated = light_cluster(**values)
    recorder = Recorder()
    final = evaluated.train(recorder)
    first, second, _ = recorder.rounds
    rest = light_cluster(**values, eval_every=3)
    rest.train(silent := Recorder())
    assert [result.merged is None for result in recorder.rounds] == [False, False, True]
    assert [result.merged for result in silent.rounds] == [None] * 3
    assert first.merge_exchange.sent == first.counters.bytes_merged > 0
    assert second.merge_exchange.sent == second.counters.bytes_merged - first.merge_exchange.sent
    (survivor,) = evaluated.trainers
    assert torch.equal(evaluated.trainers[survivor].parameters, rest.trainers[survivor].parameters)
    assert evaluated.evaluate() == final
    again = light_cluster(**values | {"number_of_outer_steps": 2})
    assert again.train(Recorder())[survivor] == second.merged
    assert again.evaluate()[survivor] == second.merged
