"""The evaluation of merged trainers, and that it changes no training."""

import torch

from tests.support.helpers import (
    Recorder,
    light_cluster,
)


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
