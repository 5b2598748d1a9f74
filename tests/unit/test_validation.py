"""Validation is divided among the workers, and does not depend on who evaluates what."""

import copy

import pytest
import torch

from fabrics.data.sampler import DataCursor, Subsets
from fabrics.pool import eval_tool
from fabrics.pool.eval_tool import Validation, evaluate
from fabrics.training.flat_model import FlatModel
from fabrics.training.worker import Node
from tests.support.helpers import CPU, make_config, tiny_data, tiny_llama
from trainers import Trainer
from utils.distributed.processes import LocalProcesses


def test_every_device_evaluates_the_batches_of_its_workers(monkeypatch):
    """The two devices are the same CPU under two names."""
    data, module, elsewhere = tiny_data(validation=40), tiny_llama(vocab_size=300), torch.device("cpu", 0)
    working = {CPU: FlatModel(copy.deepcopy(module), CPU), elsewhere: FlatModel(copy.deepcopy(module), elsewhere)}
    config, begun = make_config(), []
    begin = eval_tool.begin_batches

    def recorded(module, examples, size, device, batches):
        begun.append((module, str(device), list(batches)))
        return begin(module, examples, size, device, batches)

    monkeypatch.setattr(eval_tool, "begin_batches", recorded)
    parameters = working[CPU].parameters.detach().clone().mul_(1.5)
    processes = LocalProcesses([CPU, elsewhere], 2)
    cursor = DataCursor(Subsets(1, len(data.train)), [0])
    trainer = Trainer(0, config, parameters, cursor, data.train, working, processes)
    trainer.assign_nodes((Node(0, CPU, 8), Node(1, elsewhere, 8), Node(2, CPU, 8)))
    judge = Validation(data, working, batch_size=6)  # seven batches
    part = judge.part(trainer.worker_group, trainer.parameters)
    assert [entry[1:] for entry in begun] == [("cpu", [0, 2, 3, 5, 6]), ("cpu:0", [1, 4])]
    assert begun[0][0] is working[CPU].module
    assert begun[1][0] is working[elsewhere].module
    found = judge.combine([{0: part}], [0])[0]
    working[CPU].load(parameters)
    expected = evaluate(working[CPU].module.eval(), data.validation, data.task, 6, CPU)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
