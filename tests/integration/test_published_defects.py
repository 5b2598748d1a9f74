"""Defects of the published AdLoCo code whose return no test of a part would catch."""

import math

import pytest
import torch
import torch.nn.functional as F

from fabrics.data.examples import PackedSequences
from tests.support.helpers import (
    Recorder,
    evaluate,
    light_cluster,
    make_config,
    make_trainer,
    padded,
    random_sequences,
    tiny_llama,
    train,
)

# The switch mode is ignored until one trainer is left.


def test_the_switch_mode_is_in_force_while_several_trainers_live():
    steps = {}
    for mode in ("threshold_switch_mode", "only_gradient_accumulation", "only_data_loader"):
        cluster = light_cluster(switch_mode=mode, INITIAL_BATCH_SIZE=6, max_batch_size=4)
        recorder = Recorder()
        recorder.rounds.append(cluster.run_round(recorder))
        assert len(recorder.rounds[0].reports) == 4
        steps[mode] = [report.workers[0].plan.micro_batches for report in recorder.rounds[0].reports.values()]
    assert steps["threshold_switch_mode"] == [(4,)] * 4
    assert steps["only_gradient_accumulation"] == [(3, 3)] * 4
    assert steps["only_data_loader"] == [(4,)] * 4


# The outer optimizer's state is stale after a merge.


def test_after_a_merge_the_outer_step_moves_the_merged_parameters():
    cluster = light_cluster(number_of_initial_trainers=2, merge_frequency=1, number_of_outer_steps=2)
    cluster.run_round(Recorder())
    cluster.assign_nodes()
    (trainer,) = cluster.trainers.values()
    merged, velocity = trainer.parameters.clone(), trainer.shared["velocity"].clone()
    for worker in trainer.workers.values():
        worker.optimizer.step = lambda learning_rate: None
    cluster.run_round(Recorder())
    torch.testing.assert_close(trainer.parameters, merged - 0.7 * 0.81 * velocity, rtol=1e-4, atol=1e-6)


# One node per trainer never adapts.


def test_the_batch_adapts_with_one_node_per_trainer():
    cluster, recorder = light_cluster(ETA=0.3, merge_frequency=100), Recorder()
    cluster.train(recorder)
    assert all(len(report.workers) == 1 for report in recorder.rounds[0].reports.values())
    assert all(trainer.requested_batch > 4 for trainer in cluster.trainers.values())


# The max batch is shrunk by the smallest shard; too little data skips the node.


def test_the_max_batch_is_not_shrunk_by_small_subsets():
    cluster = light_cluster(max_batch_size=50)
    assert all(len(trainer.cursor) == 24 for trainer in cluster.trainers.values())
    cluster.train(Recorder())
    assert {node.max_batch for node in cluster.nodes} == {50}


def test_every_worker_runs_every_step_although_its_share_of_the_data_is_small():
    """13 examples, batches of 8: the walk goes on into the next epoch, and nothing is skipped."""
    config = make_config(INITIAL_BATCH_SIZE=8, sampling_method="none")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(13)), nodes=2)
    (report,) = train(trainer, 1, inner_steps=5)
    assert [len(worker.losses) for worker in report.workers.values()] == [5, 5]
    assert report.examples == 40


# Padding counts in loss and perplexity; evaluation runs one example at a time.


def test_padding_counts_neither_in_loss_nor_in_perplexity():
    model = tiny_llama(dtype=torch.float32).eval()
    texts = [random_sequences(1, length, seed=length)[0] for length in (9, 4, 6)]

    total = count = 0.0
    with torch.no_grad():
        for text in texts:
            ids = torch.from_numpy(text).long().unsqueeze(0)
            logits = model(input_ids=ids).logits
            total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
            count += len(text) - 1
    for batch_size in (1, 2, 3):
        result = evaluate(model, padded(texts), "causal_lm", batch_size)
        assert result.loss == pytest.approx(total / count, rel=1e-6)
        assert result.metric == pytest.approx(math.exp(total / count), rel=1e-5)


def test_evaluation_runs_in_batches():
    model, sizes = tiny_llama().eval(), []
    model.register_forward_pre_hook(lambda m, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    evaluate(model, PackedSequences(random_sequences(20)), "causal_lm", 8)
    assert sizes == [8, 8, 4]
