"""What travels between workers, against numpy; and that nothing is lost for good."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.synchronisation.encodings.encoding import (
    BFLOAT16,
    COMMUNICATION_DTYPES,
    INT4,
    INT8,
    PLAIN,
    Integers,
)
from fabrics.data.examples import PackedSequences
from fabrics.training.worker import ERROR
from tests.support.helpers import (
    CPU,
    Recorder,
    light_cluster,
    make_config,
    make_trainer,
    random_sequences,
    recorded_pseudo_gradients,
    tiny_llama,
    train,
)
from utils.distributed.reductions import Mean


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-4, 1, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_is_lossless_and_no_copy(dtype):
    tensor = values(64).to(dtype)
    rows = PLAIN.encode(tensor)
    assert rows.shape == (4, 16 * tensor.element_size())
    assert rows.data_ptr() == tensor.data_ptr()
    assert torch.equal(PLAIN.decode(rows, dtype), tensor)


def blocks_of(tensor: torch.Tensor) -> np.ndarray:
    padded = np.zeros(-(-len(tensor) // 256) * 256, dtype=np.float32)
    padded[: len(tensor)] = tensor.numpy()
    return padded.reshape(-1, 256)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("count", [256, 300, 1000])
def test_integers_equal_numpy(count, bits):
    levels = 2 ** (bits - 1) - 1
    tensor, encoding = values(count), Integers(bits=bits)
    blocks = blocks_of(tensor)
    scales = (np.abs(blocks).max(1, keepdims=True) / np.float32(levels)).astype(np.float32)
    expected = (np.round(blocks / scales) * scales).ravel()[:count]
    np.testing.assert_array_equal(encoding.round_trip(tensor).numpy(), expected)
    assert (encoding.round_trip(tensor) - tensor).abs().max() <= np.abs(blocks).max() / (2 * levels) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_a_byte_for_each_value_and_four_for_the_scale_after_them(dtype):
    tensor = values(600).to(dtype)
    for block, row in zip(tensor.split(256), INT8.encode(tensor), strict=True):
        scale = (block.abs().max() / 127.0).float()
        expected = torch.zeros(256, dtype=torch.int8)
        expected[: len(block)] = (block / scale).round().to(torch.int8)
        assert torch.equal(row[:256], expected.view(torch.uint8))
        assert torch.equal(row[256:], scale[None].view(torch.uint8))


def test_int4_has_two_values_in_a_byte_the_first_in_its_lower_half():
    tensor = torch.tensor([7.0, -7.0, 1.4, -1.0, 0.0, 3.5])
    row = INT4.encode(tensor)[0]
    assert row[:4].tolist() == [0x97, 0xF1, 0x40, 0x00]  # 7 and -7, 1 and -1, 0 and 4, filling
    assert row[128:].view(torch.float32).item() == 1.0
    assert INT4.round_trip(tensor).tolist() == [7.0, -7.0, 1.0, -1.0, 0.0, 4.0]


@pytest.mark.parametrize("encoding", [INT8, INT4, Integers(bits=3)])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_something_that_is_no_number_arrives_without_any(encoding, wrong):
    tensor = values(1000)
    tensor[300] = wrong
    arrived = encoding.round_trip(tensor)
    assert not arrived[256:512].isfinite().any()
    assert torch.equal(arrived[:256], encoding.round_trip(tensor[:256]))
    assert arrived[512:].isfinite().all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_waste_no_bit(bits):
    encoding, levels = Integers(bits=bits), 2 ** (bits - 1) - 1
    assert encoding.encode(values(512)).shape == (2, 256 * bits // 8 + 4)
    tensor = torch.arange(-levels, levels + 1).float()  # every value that these bits can tell
    assert torch.equal(encoding.round_trip(tensor), tensor)


@pytest.mark.parametrize("bits", [1, 9])
def test_integers_of_other_sizes_are_refused(bits):
    with pytest.raises(ValueError, match="from 2 to 8 bits"):
        Integers(bits=bits)


@given(st.integers(1, 900), st.integers(0, 3), st.floats(-30, 30))
def test_encodings_hold_their_error_bounds(count, seed, exponent):
    tensor = values(count, seed) * 10.0**exponent
    assert (BFLOAT16.round_trip(tensor) - tensor).abs().le(tensor.abs() * 2.0**-8).all()
    for encoding, levels in ((INT8, 127), (INT4, 7)):
        for block, arrived in zip(tensor.split(256), encoding.round_trip(tensor).split(256), strict=True):
            assert (arrived - block).abs().max() <= block.abs().max() / (2 * levels) * (1 + 1e-5)


@pytest.mark.parametrize("encoding", [PLAIN, BFLOAT16, INT8, INT4, Integers(bits=5)])
def test_any_range_of_rows_decodes_by_itself(encoding):
    tensor = values(1000)
    rows = encoding.encode(tensor)
    whole = encoding.decode(rows, torch.float32)
    part = encoding.decode(rows[1:3], torch.float32)
    assert torch.equal(part, whole[encoding.block : 3 * encoding.block])
    assert not encoding.decode(encoding.encode(torch.zeros(300)), torch.float32).any()


def test_bytes_on_paper():
    assert PLAIN.sent_bytes(1000, torch.float32) == 4000
    assert PLAIN.sent_bytes(1000, torch.float64) == 8000
    assert BFLOAT16.sent_bytes(1000, torch.float32) == 2000
    assert INT8.sent_bytes(1000, torch.float32) == 1000 + 4 * 4
    assert INT4.sent_bytes(1000, torch.float32) == 500 + 4 * 4
    assert INT4.sent_bytes(1001, torch.float64) == 501 + 4 * 4
    assert Integers(bits=2).sent_bytes(1000, torch.float32) == 250 + 4 * 4
    assert Integers(bits=3).sent_bytes(257, torch.float32) == 97 + 2 * 4  # 771 bits
    assert [encoding.row_bytes(torch.float32) for encoding in (PLAIN, BFLOAT16, INT8, INT4)] == [64, 32, 260, 132]
    assert PLAIN.row_bytes(torch.float64) == 128
    # Of four workers, three parts of each one's tensor go to the others, and three of each mean come back.
    assert PLAIN.reduction_bytes(4, 1000, torch.float32) == 3 * (4000 + 4000)
    assert BFLOAT16.reduction_bytes(4, 1000, torch.float32) == 3 * (2000 + 2000)
    assert INT8.reduction_bytes(4, 1000, torch.float32) == 3 * (1016 + 2000)
    assert INT4.reduction_bytes(4, 1000, torch.float32) == 3 * (516 + 2000)
    assert set(COMMUNICATION_DTYPES) == {"float32", "bfloat16", "int8", "int4"}


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4"])
def test_a_run_counts_what_is_sent(name):
    settings = {
        "sampling_method": "none",
        "number_of_initial_trainers": 1,
        "nodes_per_gpu": 4,
        "number_of_outer_steps": 3,
    }
    cluster = light_cluster(communication_dtype=name, **settings)
    cluster.train(Recorder())
    parameters = sum(p.numel() for p in cluster.models[CPU].module.parameters())
    scales = 4 * -(-parameters // 256)
    one_way = {"bfloat16": 2 * parameters, "int8": parameters + scales, "int4": -(-parameters // 2) + scales}[name]
    assert cluster.counters.bytes_communicated == 3 * 3 * (one_way + 2 * parameters)


@pytest.mark.parametrize(("name", "encoding"), [("int8", INT8), ("int4", INT4)])
def test_what_integers_lose_is_sent_in_the_next_rounds(name, encoding, monkeypatch):
    """Over the rounds a worker sends the sum of its pseudo-gradients, up to the error that it still keeps."""
    config = make_config(communication_dtype=name, sampling_method="none")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(60)), nodes=2)
    found, add, sent = recorded_pseudo_gradients(monkeypatch), Mean.add, torch.zeros_like(trainer.parameters)

    def recording(self, worker, rows):
        if worker == 0:
            sent.add_(encoding.decode(rows, sent.dtype)[: sent.numel()])
        add(self, worker, rows)

    monkeypatch.setattr(Mean, "add", recording)
    train(trainer, 4)
    assert len(found) == 2 * 4
    error = trainer.workers[0].state[ERROR]
    assert error.abs().max() > 0
    torch.testing.assert_close(sent + error, sum(found[::2]), rtol=1e-12, atol=1e-14)


def test_two_workers_with_bfloat16_move_by_the_rounded_mean_of_rounded_pseudo_gradients(monkeypatch):
    config = make_config(communication_dtype="bfloat16", sampling_method="none", distributed_algo="LocalSGD")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(60)), 2)
    before, found = trainer.parameters.clone(), recorded_pseudo_gradients(monkeypatch)
    train(trainer, 1)
    first, second = (own.bfloat16().double() for own in found)
    expected = before - ((first + second) / 2).bfloat16().double()
    torch.testing.assert_close(trainer.parameters, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_single_worker_sends_nothing_and_rounds_nothing(name):
    examples = PackedSequences(random_sequences(60))
    plain, single = (
        make_trainer(tiny_llama(), make_config(sampling_method="none", communication_dtype=dtype), examples, 1)
        for dtype in ("float32", name)
    )
    train(plain, 2)
    reports = train(single, 2)
    assert torch.equal(single.parameters, plain.parameters)
    assert [report.bytes_synchronised for report in reports] == [0, 0]


def test_what_a_worker_lost_before_it_was_the_only_one_is_not_lost_for_good():
    config = make_config(communication_dtype="int8", sampling_method="none", distributed_algo="LocalSGD")
    trainer = make_trainer(tiny_llama(), config, PackedSequences(random_sequences(60)), 2)
    train(trainer, 1)
    trainer.assign_nodes(trainer.nodes[:1])
    before, error = trainer.parameters.clone(), trainer.workers[0].state[ERROR].clone()
    assert error.abs().max() > 0
    train(trainer, 1)
    replica = trainer.workers[0].model  # its buffer holds what was sent: x - x_m + error
    torch.testing.assert_close(before - trainer.parameters, replica.parameters.data, rtol=1e-12, atol=1e-14)
    assert not trainer.workers[0].state[ERROR].any()


def test_a_new_worker_has_the_first_ones_moments_and_no_error_to_send():
    settings = {
        "number_of_initial_trainers": 2,
        "nodes_per_gpu": 4,
        "merge_frequency": 1,
        "communication_dtype": "int8",
    }
    cluster = light_cluster(**settings)
    cluster.run_round(Recorder())
    cluster.assign_nodes()
    (trainer,) = cluster.trainers.values()
    first, _, *new = trainer.workers.values()
    assert len(new) == 2
    assert first.state[ERROR].abs().max() > 0
    for worker in new:
        assert torch.equal(first.state_dict()["exp_avg"], worker.state_dict()["exp_avg"])
        assert not worker.state[ERROR].any()
