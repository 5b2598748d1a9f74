"""Defects of the published AdLoCo code, each with a test that would catch its return."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from algorithms.batch.calc_batch import BatchTestParameters, inner_product_test
from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.batch.losses import example_losses
from fabrics.data.examples import PackedSequences
from fabrics.pool.eval_tool import evaluate
from tests.support import published
from tests.support.helpers import (
    CPU,
    Recorder,
    light_cluster,
    make_config,
    make_trainer,
    padded,
    per_example_statistics,
    random_sequences,
    tiny_cluster,
    tiny_llama,
    train,
)
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

# 1. Labels are shifted by hand and again by the model.


def test_the_model_learns_to_predict_the_next_token_not_the_one_after():
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    knows_next = F.one_hot(ids.roll(-1, 1), 8).double() * 50.0
    knows_second_next = F.one_hot(ids.roll(-2, 1), 8).double() * 50.0
    assert example_losses(knows_next, ids).item() < 1e-6
    assert example_losses(knows_second_next, ids).item() > 1.0


# 2. Micro-batches are not the plan; an accumulated micro-batch counts as an inner step.


def test_each_accumulation_of_planned_micro_batches_is_one_inner_step():
    config = make_config(INITIAL_BATCH_SIZE=17, sampling_method="none", switch_mode="only_gradient_accumulation")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(100)), nodes=1, max_batch=8)
    seen = []
    module = trainer.workers[0].model.module
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True)
    (report,) = train(trainer, 1, inner_steps=4)
    assert seen == [6, 6, 5] * 4
    state = trainer.workers[0].optimizer.state_dict()
    assert state["step"].item() == 4
    assert len(report.workers[0].losses) == 4
    assert report.examples == 4 * 17


# 3. The switch mode is ignored until one trainer is left.


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


# 4. Inner state is thrown away every round; no outer momentum; stale after a merge.


def test_inner_optimisers_survive_from_round_to_round():
    config = make_config(sampling_method="none")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(60)), nodes=2)
    train(trainer, 3)
    for worker in trainer.workers.values():
        assert worker.optimizer.state_dict()["step"].item() == 9


def test_the_outer_step_has_nesterov_momentum():
    """Without an inner change the second round moves by momentum alone: x falls by lr * momentum^2 * v."""
    config = make_config(sampling_method="none")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(60)), nodes=1)
    train(trainer, 1)
    velocity, before = trainer.shared["velocity"].clone(), trainer.parameters.clone()
    trainer.workers[0].optimizer.step = lambda learning_rate: None
    train(trainer, 1)
    expected = before - 0.7 * 0.9 * 0.9 * velocity
    torch.testing.assert_close(trainer.parameters, expected, rtol=1e-9, atol=1e-12)
    assert velocity.abs().max() > 0.0


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


# 5. One node per trainer never adapts; the orthogonality term is no trace; vartheta is never used.


def test_the_batch_adapts_with_one_node_per_trainer():
    cluster, recorder = light_cluster(ETA=0.3, merge_frequency=100), Recorder()
    cluster.train(recorder)
    assert all(len(report.workers) == 1 for report in recorder.rounds[0].reports.values())
    assert all(trainer.requested_batch > 4 for trainer in cluster.trainers.values())


def test_the_orthogonal_variance_is_a_trace():
    """It grows with the number of parameters, as a trace does; the variance over all entries would not."""
    results = {}
    for width in (8, 32):
        model = tiny_llama(hidden_size=width, intermediate_size=2 * width)
        ids = torch.from_numpy(random_sequences(6)).long()
        results[width] = per_example_statistics(model, {"input_ids": ids, "labels": ids})
    for statistics in results.values():
        # V = O + the variance along g, which is P / ||g||^2.
        along = statistics.inner_product_variance / statistics.squared_norm
        assert statistics.variance == pytest.approx(statistics.orthogonal_variance + along, rel=1e-9)


def test_vartheta_decides():
    statistics = GradientStatistics(examples=8, squared_norm=2.0, variance=8.0, inner_product_variance=6.0, overlap=4.0)
    assert inner_product_test(statistics, BatchTestParameters(theta=0.1, debias=True), 4) == 150
    requests = []
    for theta in (0.05, 50.0):
        cluster = light_cluster(sampling_method="inner_product_test", vartheta=theta, merge_frequency=100)
        cluster.train(Recorder())
        requests.append(cluster.trainers[0].requested_batch)
    assert requests[0] > requests[1] == 4


# 6. A failed node is only logged.


def test_a_failing_worker_stops_the_run():
    cluster = light_cluster()

    def fail(*_):
        raise RuntimeError("the device is gone")

    cluster.models[CPU].module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        cluster.run_round(Recorder())


# 7. The max batch is shrunk by the smallest shard; too little data skips the node.


def test_the_max_batch_is_not_shrunk_by_small_subsets():
    cluster = light_cluster(max_batch_size=50)
    assert all(len(trainer.cursor) == 24 for trainer in cluster.trainers.values())
    cluster.train(Recorder())
    assert {node.max_batch for node in cluster.nodes} == {50}


def test_too_little_data_for_a_batch_is_an_error():
    with pytest.raises(ConfigError, match=r"INITIAL_BATCH_SIZE: must be at most the 24 examples .* got 25"):
        light_cluster(INITIAL_BATCH_SIZE=25)


def test_every_worker_runs_every_step_although_its_share_of_the_data_is_small():
    """13 examples, batches of 8: the walk goes on into the next epoch, and nothing is skipped."""
    config = make_config(INITIAL_BATCH_SIZE=8, sampling_method="none")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(13)), nodes=2)
    (report,) = train(trainer, 1, inner_steps=5)
    assert [len(worker.losses) for worker in report.workers.values()] == [5, 5]
    assert report.examples == 40


# 8. Padding counts in loss and perplexity; evaluation runs one example at a time.


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
        result = evaluate(model, padded(texts), "causal_lm", batch_size, CPU)
        assert result.loss == pytest.approx(total / count, rel=1e-6)
        assert result.metric == pytest.approx(math.exp(total / count), rel=1e-5)


def test_evaluation_runs_in_batches():
    model, sizes = tiny_llama().eval(), []
    model.register_forward_pre_hook(lambda m, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    evaluate(model, PackedSequences(random_sequences(20)), "causal_lm", 8, CPU)
    assert sizes == [8, 8, 4]


# 9. No weights are ever saved.


def test_saved_weights_are_the_trainers_and_load_again(tmp_path):
    from transformers import AutoModelForCausalLM

    cluster = tiny_cluster(number_of_outer_steps=1)
    cluster.train(Recorder())
    paths = cluster.save_models(tmp_path, Recorder())
    assert sorted(paths) == [0, 1, 2, 3]
    for trainer, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path)
        cluster.models[CPU].load(cluster.trainers[trainer].parameters)
        for name, parameter in cluster.models[CPU].module.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


def test_a_failure_to_save_is_not_swallowed(tmp_path):
    cluster = light_cluster()
    (tmp_path / "taken").write_text("a file where the folder should be")
    recorder = Recorder()
    assert cluster.save_models(tmp_path / "taken", recorder) == {}
    assert "taken" in recorder.warnings[0]


# 10. Its own config.yaml is not what it seems; its max-batch search refuses a CPU.


def test_the_published_config_gives_typed_values():
    config, warnings = parse_config(yaml.safe_load(published.CONFIG))
    assert config.model_config == {"name": "keeeeenw/MicroLlama", "pretrained": True}
    assert any("pretrained=True" in warning for warning in warnings)
    assert (config.learning_rate_for_inner_opt, config.learning_rate_for_outer_opt) == (2e-5, 0.5)
    assert (config.number_of_outer_steps, config.number_of_inner_steps_between_outers) == (20, 200)
    assert (config.number_of_initial_trainers, config.INITIAL_BATCH_SIZE) == (4, 1)
    assert (config.c4_language, config.lr_sgd, config.nu) == ("en", 2e-5, 0.3)


def test_the_max_batch_is_found_on_a_cpu():
    cluster = light_cluster(max_batch_size=None)
    assert all(node.max_batch >= 2 for node in cluster.nodes)


# 11. Data is a list of tuples, reshuffled every round.


def test_examples_are_read_by_index_from_one_array():
    tokens = random_sequences(50)
    examples = PackedSequences(tokens)
    assert np.shares_memory(examples._tokens, tokens)
    batch = examples.batch([4, 2], CPU)
    assert batch["input_ids"].tolist() == tokens[[4, 2]].tolist()
