"""Training against independent implementations, and against itself: same seed, same run."""

import copy
import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.nodes.policies import MERGE_POLICIES
from algorithms.schedule.limits import RoundSchedule
from fabrics.data.examples import PackedSequences
from fabrics.training.worker import TrainingError
from tests.support.helpers import (
    Recorder,
    bits,
    in_one_type,
    light_cluster,
    make_config,
    make_trainer,
    peek,
    per_example_statistics,
    random_sequences,
    separable_texts,
    subset_of,
    tiny_bert,
    tiny_llama,
    train,
)


@pytest.mark.parametrize(
    ("batch", "max_batch", "plan", "probe"),
    [(8, 4, (4, 4), "norm_test"), (17, 8, (6, 6, 5), "none"), (7, 3, (3, 2, 2), "norm_test")],
)
def test_an_accumulated_step_equals_one_large_batch(batch, max_batch, plan, probe):
    config = make_config(
        INITIAL_BATCH_SIZE=batch,
        switch_mode="only_gradient_accumulation",
        sampling_method=probe,
        max_batch_growth=1.0,
        statistics_batch_size=2,
    )
    examples = PackedSequences(random_sequences(100))
    model = in_one_type(tiny_llama())
    whole = make_trainer(copy.deepcopy(model), config, examples, nodes=1, max_batch=64)
    parts = make_trainer(copy.deepcopy(model), config, examples, nodes=1, max_batch=max_batch)
    assert whole.split_work().plans[0] == ExecutionPlan((batch,))
    assert parts.split_work().plans[0] == ExecutionPlan(plan)
    expected, got = train(whole, 2), train(parts, 2)
    torch.testing.assert_close(parts.parameters, whole.parameters, rtol=1e-9, atol=1e-11)
    assert got[1].workers[0].losses == pytest.approx(expected[1].workers[0].losses, rel=1e-10)
    assert got[0].examples == expected[0].examples == 3 * batch


@pytest.mark.parametrize("test", ["norm_test", "inner_product_test"])
def test_the_statistics_cover_all_micro_batches_of_all_workers(test):
    """Two workers with 7 of 14 examples each, in parts of at most 3: as each of them with all 7 at once."""
    config = make_config(
        INITIAL_BATCH_SIZE=14,
        statistics_batch_size=5,
        switch_mode="only_gradient_accumulation",
        sampling_method=test,
        max_batch_growth=1.0,
    )
    sequences = random_sequences(50)
    model = in_one_type(tiny_llama())
    trainer = make_trainer(copy.deepcopy(model), config, PackedSequences(sequences), nodes=2, max_batch=3)
    expected = []
    for part in np.split(peek(trainer.cursor, 0, 14), 2):
        ids = torch.from_numpy(sequences[part]).long()
        expected.append(per_example_statistics(model, {"input_ids": ids, "labels": ids}))
    (report,) = train(trainer, 1, inner_steps=3)
    assert report.workers[0].plan.micro_batches == (3, 2, 2)
    found = report.statistics
    assert found.examples == 14
    assert found.variance == pytest.approx(np.mean([each.variance for each in expected]), rel=1e-9)
    squared_norms = [each.squared_norm - each.variance / 7 for each in expected]
    assert found.squared_norm == pytest.approx(np.mean(squared_norms), rel=1e-8)
    assert found.squared_norm_error > 0.0
    assert np.isfinite(found.inner_product_variance)


def test_four_workers_compare_sketches_of_their_gradients():
    """Products between workers, of which there are three times as many as within them, by sketches."""
    config = make_config(INITIAL_BATCH_SIZE=32)
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(50)), nodes=4)
    model, batches = tiny_llama(), np.split(peek(trainer.cursor, 0, 32), 4)
    (report,) = train(trainer, 1, inner_steps=3)
    sums = []
    for part in batches:
        model.zero_grad()
        ids = torch.from_numpy(random_sequences(50)[part]).long()
        F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        sums.append(8 * torch.cat([p.grad.flatten() for p in model.parameters()]))
    between = sum((a @ b).item() for i, a in enumerate(sums) for j, b in enumerate(sums) if i != j)
    within = sum(56 * sample.squared_norm for worker in report.workers.values() for sample in worker.samples)
    # The sketch of 1,024 numbers errs by 1/32 of the gradients' lengths in each of 6 pairs.
    margin = 4 * 2 * 6**0.5 / 32 * max(vector.norm().item() for vector in sums) ** 2
    found = report.statistics.squared_norm * (32 * 31)
    assert abs(found - (between + within)) < margin
    assert abs(found - (between + within)) > 0.0
    alone = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(50)), nodes=3)
    (other,) = train(alone, 1, inner_steps=3)
    assert all(worker.comparison is None for worker in other.workers.values())


def test_a_small_batch_is_probed_on_the_next_examples():
    config = make_config(INITIAL_BATCH_SIZE=2, statistics_batch_size=8)
    sequences = random_sequences(50)
    model = in_one_type(tiny_llama())
    trainer = make_trainer(copy.deepcopy(model), config, PackedSequences(sequences), nodes=1)
    upcoming = sequences[peek(trainer.cursor, 3 * 2, 8)]
    statistics, own = train(trainer, 1, inner_steps=3)[0].workers[0].samples
    ids = torch.from_numpy(upcoming).long()
    expected = per_example_statistics(model, {"input_ids": ids, "labels": ids})
    assert (own.examples, statistics.examples) == (2, 8)
    assert statistics.variance == pytest.approx(expected.variance, rel=1e-7)
    assert statistics.squared_norm == pytest.approx(expected.squared_norm - expected.variance / 8, rel=1e-6)
    assert trainer.cursor.positions[trainer.id] == 3 * 2


@pytest.mark.parametrize(("count", "batch", "sizes"), [(7, 4, ()), (13, 13, (4,))])
def test_a_probe_batch_that_is_not_larger_than_the_step_is_left_out(count, batch, sizes):
    """Four workers could probe one of 7 examples, or three of 13. Sketches are those of the step."""
    config = make_config(INITIAL_BATCH_SIZE=batch, statistics_batch_size=8)
    trainer = make_trainer(tiny_llama(dtype=torch.float32), config, PackedSequences(random_sequences(count)), nodes=4)
    (report,) = train(trainer, 1)
    for worker in report.workers.values():
        assert tuple(sample.examples for sample in worker.samples) == sizes
        assert worker.comparison is not None
    assert (report.statistics is None) == (not sizes)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_probe_batch_does_not_change_the_training(dropout):
    ends = []
    for test in ("none", "norm_test"):
        config = make_config(INITIAL_BATCH_SIZE=2, sampling_method=test, max_batch_growth=1.0)
        trainer = make_trainer(tiny_bert(dropout=dropout), config, separable_texts(40), nodes=1)
        (report,) = train(trainer, 1, inner_steps=3)
        assert len(report.workers[0].samples) == (2 if test == "norm_test" else 0)
        ends.append(trainer.parameters)
    assert torch.equal(*ends)


@pytest.mark.parametrize(("method", "means"), [("DiLoCo", 1), ("Synchronous", 3)])  # Synchronous: DDP-Norm
def test_across_workers_compares_the_first_gradients(method, means):
    config = make_config(INITIAL_BATCH_SIZE=6, statistics_estimator="across_workers", distributed_algo=method, ETA=0.5)
    sequences = random_sequences(50)
    model = in_one_type(tiny_llama())
    trainer = make_trainer(copy.deepcopy(model), config, PackedSequences(sequences), nodes=3)
    gradients = []
    for part in np.split(peek(trainer.cursor, 0, 6), 3):
        model.zero_grad()
        ids = torch.from_numpy(sequences[part]).long()
        F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
    gradients = np.stack(gradients)
    (report,) = train(trainer, 1, inner_steps=3)
    assert report.statistics.variance == pytest.approx(2 * gradients.var(0, ddof=1).sum(), rel=1e-9)
    assert report.statistics.examples == 6
    # The synchronisations, and one all-reduce of the gradients.
    assert report.bytes_synchronised == (means + 1) * 2 * (3 - 1) * trainer.worker_group.parameter_bytes
    # The norm test: V / (eta^2 |g|^2), where g is the mean of the workers' gradients.
    asked = 2 * gradients.var(0, ddof=1).sum() / (0.5**2 * (gradients.mean(0) ** 2).sum())
    assert trainer.requested_batch == max(6, min(np.ceil(asked), trainer.largest_request))
    assert trainer.requested_batch > 6


def test_seesaw_doubles_the_batch_and_divides_the_learning_rate_by_the_root_of_two():
    config = make_config(
        learning_rate_for_inner_opt=0.1,
        learning_rate_schedule="cosine",
        minimum_learning_rate_ratio=0.0,
        sampling_method="none",
        batch_schedule="seesaw",
        INITIAL_BATCH_SIZE=2,
    )
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(40)), nodes=1)
    rates = []
    for schedule in (RoundSchedule(2, 0.0, 0.6), RoundSchedule(2, 0.6, 0.7)):  # the cosine is at 1/2 in the middle
        split = trainer.split_work()
        trained = trainer.train_round(split, schedule, lambda: None)
        rates.append((trainer.requested_batch, *trained.records[0].learning_rates))
        trainer.conclude_round(split, schedule, [trained])
    assert rates == [(2, 0.1, 0.1), (4, *[pytest.approx(0.1 / np.sqrt(2))] * 2)]


def test_the_batch_test_starts_in_the_configured_round():
    settings = {"ETA": 0.05, "max_batch_growth": 2.0, "number_of_initial_trainers": 1, "number_of_outer_steps": 5}
    cluster, recorder = light_cluster(batch_test_start=3, **settings), Recorder()
    cluster.train(recorder)
    reports = [result.reports[0] for result in recorder.rounds]
    assert [report.requested_batch for report in reports] == [4, 4, 4, 8, 16]
    assert [report.statistics is None for report in reports] == [True, True, False, False, False]
    assert not any(worker.samples for report in reports[:2] for worker in report.workers.values())


def test_dropout_depends_only_on_the_place_in_the_run():
    config = make_config(INITIAL_BATCH_SIZE=4, sampling_method="none")
    results = []
    for burnt in (0, 100):
        torch.manual_seed(burnt)
        trainer = make_trainer(tiny_bert(dropout=0.3).train(), config, separable_texts(40), nodes=2)
        torch.rand(burnt)
        before = torch.get_rng_state()
        train(trainer, 2)
        assert torch.equal(torch.get_rng_state(), before)
        results.append(trainer.parameters)
    assert torch.equal(*results)


def test_a_merge_averages_parameters_and_momentum_and_unites_the_data():
    cluster = light_cluster(number_of_initial_trainers=3, nodes_per_gpu=3, merge_frequency=100)
    for _ in range(2):
        cluster.run_round(Recorder())
    trainers = cluster.trainers
    for trainer, request in ((0, 6), (1, 2), (2, 9)):
        trainers[trainer].batch_control.requested_batch = request
    x = 0.75 * trainers[0].parameters + 0.25 * trainers[1].parameters
    v = 0.75 * trainers[0].shared["velocity"] + 0.25 * trainers[1].shared["velocity"]
    assert v.abs().max() > 0.0
    moment = trainers[0].local_workers[0].state_dict()["exp_avg"].clone()
    data = set(subset_of(trainers[0].cursor)) | set(subset_of(trainers[1].cursor))
    bytes_before = cluster.counters.bytes_merged
    communications_before = cluster.counters.communications
    merge, _ = cluster._merge()
    assert merge.representative == 0
    assert sorted(cluster.trainers) == [0, 2]
    torch.testing.assert_close(trainers[0].parameters, x)
    torch.testing.assert_close(trainers[0].shared["velocity"], v)
    assert torch.equal(trainers[0].local_workers[0].state_dict()["exp_avg"], moment)
    assert set(subset_of(trainers[0].cursor)) == data
    assert trainers[0].requested_batch == 6
    assert cluster.counters.bytes_merged - bytes_before == 2 * trainers[0].worker_group.parameter_bytes
    assert cluster.counters.communications - communications_before == 1


def test_after_a_merge_the_outer_step_moves_the_merged_parameters():
    cluster = light_cluster(number_of_initial_trainers=2, merge_frequency=1, number_of_outer_steps=2)
    cluster.run_round(Recorder())
    cluster.assign_nodes()
    (trainer,) = cluster.trainers.values()
    merged = trainer.parameters.clone()
    velocity = trainer.shared["velocity"].clone()
    for worker in trainer.local_workers.values():
        worker.optimizer.step = lambda learning_rate: None
    cluster.run_round(Recorder())
    torch.testing.assert_close(trainer.parameters, merged - 0.7 * 0.81 * velocity, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chosen", [[0, 7], [0, 0], None])
def test_a_policy_that_chooses_no_two_trainers_is_an_error(monkeypatch, chosen):
    monkeypatch.setitem(MERGE_POLICIES, "own", lambda requests, count: chosen)
    cluster = light_cluster(number_of_initial_trainers=2, merge_frequency=1, merging_policy="own")
    with pytest.raises(TrainingError, match="merging_policy: own"):
        cluster.train(Recorder())


def test_one_node_can_serve_several_trainers():
    """One node serves three trainers in turn, and gives what three nodes would: workers own the state."""
    results = []
    for nodes in (1, 3):
        cluster = light_cluster(number_of_initial_trainers=3, nodes_per_gpu=nodes, merge_frequency=100)
        cluster.train(Recorder())
        results.append(bits(cluster))
    assert results[0] == results[1]


def test_trainers_start_from_different_or_equal_weights():
    apart = light_cluster()
    together = light_cluster(identical_initialisation=True)
    assert len(set(bits(apart).values())) == 4
    assert len(set(bits(together).values())) == 1
    subsets = [set(subset_of(trainer.cursor)) for trainer in apart.trainers.values()]
    assert sum(len(subset) for subset in subsets) == len(set.union(*subsets)) == 96


def test_no_other_tensor_of_model_size_lives_between_rounds():
    """Two buffers per device, two tensors per trainer, two per worker: nothing else of model size lives on."""
    cluster = light_cluster(nodes_per_gpu=6, number_of_initial_trainers=4, merge_frequency=100)
    cluster.run_round(Recorder())
    working = cluster.model
    expected = {working.parameters.data_ptr(), working.gradient.data_ptr()}
    for trainer in cluster.trainers.values():
        expected |= {trainer.parameters.data_ptr(), trainer.shared["velocity"].data_ptr()}
        for worker in trainer.local_workers.values():
            state = worker.optimizer.state_dict()
            expected |= {state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()}
    assert len(expected) == 2 + 2 * 4 + 2 * 6
    gc.collect()
    found = {
        entry.data_ptr()
        for entry in gc.get_objects()
        if type(entry) in (torch.Tensor, torch.nn.Parameter)
        and not entry.is_meta
        and entry.numel() >= working.parameter_count
    }
    assert found == expected


@pytest.mark.parametrize(("batch", "said"), [(10, 1), (8, 0)])
def test_a_fixed_batch_that_runs_in_part_is_warned_of_once(batch, said):
    """Between the max batch and twice as much, threshold_switch_mode runs the max batch."""
    values = {"sampling_method": "none", "INITIAL_BATCH_SIZE": batch, "max_requested_batch": batch, "max_batch_size": 8}
    cluster = light_cluster(number_of_initial_trainers=1, nodes_per_gpu=1, **values)
    recorder = Recorder()
    cluster.train(recorder)
    expected = "switch_mode: threshold_switch_mode runs 8 of the 10 requested examples"
    assert sum(expected in warning for warning in recorder.warnings) == said
