"""Encodings of what workers send, against numpy and on paper; error feedback in trainers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.synchronisation.encodings import (
    BFLOAT16,
    INT4,
    INT8,
    PLAIN,
    Chunks,
    Integers,
    TopK,
    dequantise,
    largest,
    pack,
    packed_bytes,
    quantise,
    unpack,
)
from fabrics.training.worker import ERROR
from tests.support import oracles
from tests.support.helpers import Recorder, light_cluster, recorded_pseudo_gradients, train
from tests.support.synchronising import trainer_of
from utils.distributed.reductions import Mean


def values(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scales = torch.logspace(-4, 1, count, dtype=dtype)
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=dtype) * scales


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


# Dense encodings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_is_lossless_and_no_copy(dtype):
    tensor = values(64, dtype)
    rows = PLAIN.encode(tensor)
    assert rows.shape == (4, 16 * tensor.element_size())
    assert rows.data_ptr() == tensor.data_ptr()
    assert torch.equal(PLAIN.decode(rows, dtype), tensor)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("count", [256, 300, 1000])
def test_integers_equal_numpy(count, bits):
    levels = 2 ** (bits - 1) - 1
    tensor = values(count)
    blocks = np.zeros((-(-count // 256), 256), dtype=np.float32)
    blocks.flat[:count] = tensor.numpy()
    scales = (np.abs(blocks).max(1, keepdims=True) / np.float32(levels)).astype(np.float32)
    expected = (np.round(blocks / scales) * scales).ravel()[:count]
    np.testing.assert_array_equal(Integers(bits=bits).round_trip(tensor).numpy(), expected)


def test_integers_of_tiny_values_have_a_tiny_error():
    tensor = values(256) * 1e-37
    error = (INT8.round_trip(tensor) - tensor).abs().max()
    assert error <= 0.51 * tensor.abs().max() / 127


def test_int4_has_two_values_in_a_byte_the_first_in_its_lower_half():
    tensor = torch.tensor([7.0, -7.0, 1.4, -1.0, 0.0, 3.5])
    row = INT4.encode(tensor)[0]
    assert row[:4].tolist() == [0x97, 0xF1, 0x40, 0x00]  # 7 and -7, 1 and -1, 0 and 4, filling
    assert row[128:].view(torch.float32).item() == 1.0
    assert INT4.round_trip(tensor).tolist() == [7.0, -7.0, 1.0, -1.0, 0.0, 4.0]


@pytest.mark.parametrize("bits", [1, 9])
def test_integers_of_other_sizes_are_refused(bits):
    with pytest.raises(ValueError, match="from 2 to 8 bits"):
        Integers(bits=bits)


@pytest.mark.parametrize("encoding", [INT8, INT4, Integers(bits=3)])
@pytest.mark.parametrize("wrong", NOT_FINITE)
def test_a_block_with_a_value_that_is_not_finite_arrives_without_any_number(encoding, wrong):
    tensor = values(1000)
    tensor[300] = wrong
    arrived = encoding.round_trip(tensor)
    assert not arrived[256:512].isfinite().any()
    assert torch.equal(arrived[:256], encoding.round_trip(tensor[:256]))
    assert arrived[512:].isfinite().all()


@pytest.mark.parametrize("encoding", [PLAIN, BFLOAT16, INT8, INT4, Integers(bits=5)])
def test_any_range_of_rows_decodes_by_itself(encoding):
    rows = encoding.encode(values(1000))
    whole = encoding.decode(rows, torch.float32)
    part = encoding.decode(rows[1:3], torch.float32)
    assert torch.equal(part, whole[encoding.block : 3 * encoding.block])
    assert not encoding.decode(encoding.encode(torch.zeros(300)), torch.float32).any()


def test_bytes_on_paper():
    assert PLAIN.sent_bytes(1000, torch.float64) == 8000
    assert INT4.sent_bytes(1001, torch.float64) == 501 + 4 * 4
    assert Integers(bits=3).sent_bytes(257, torch.float32) == 97 + 2 * 4  # 771 bits
    assert [encoding.row_bytes(torch.float32) for encoding in (PLAIN, BFLOAT16, INT8, INT4)] == [64, 32, 260, 132]
    # Of four workers, three parts of each one's tensor go to the others, and three of each mean come back.
    assert PLAIN.reduction_bytes(4, 1000, torch.float32) == 3 * (4000 + 4000)
    assert BFLOAT16.reduction_bytes(4, 1000, torch.float32) == 3 * (2000 + 2000)
    assert INT8.reduction_bytes(4, 1000, torch.float32) == 3 * (1016 + 2000)
    assert INT4.reduction_bytes(4, 1000, torch.float32) == 3 * (516 + 2000)


# Bins with a table, and packed codes


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_quantised_rows_equal_the_oracle(bits):
    tensor = values(3000, torch.float64).view(3, 1000) * torch.tensor([[1.0], [0.0], [1e-6]])
    codes, tables = quantise(tensor, bits)
    assert codes.shape == tensor.shape
    assert tables.shape == (3, 2**bits)
    expected = [oracles.table_quantised(row, bits) for row in tensor.numpy()]
    np.testing.assert_allclose(dequantise(codes, tables).numpy(), expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(dequantise(codes, tables).sum(1), tensor.sum(1), rtol=1e-9)


@pytest.mark.parametrize("same", [[0.0] * 9, [2.5] * 9, [-1.5]])
def test_equal_values_arrive_exactly(same):
    assert dequantise(*quantise(torch.tensor(same), 2)).tolist() == same


@pytest.mark.parametrize("wrong", NOT_FINITE)
def test_values_that_are_not_all_finite_arrive_as_no_number(wrong):
    tensor = values(100)
    tensor[7] = wrong
    assert not dequantise(*quantise(tensor, 2)).isfinite().any()


@given(st.data(), st.integers(1, 31), st.integers(1, 40), st.integers(1, 3))
def test_packed_codes_come_back_without_waste(data, bits, n, rows):
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=n * rows, max_size=n * rows))
    codes = torch.tensor(numbers, dtype=torch.uint8 if bits <= 8 else torch.int32).view(rows, n)
    packed = pack(codes, bits)
    assert packed.shape == (rows, packed_bytes(n, bits))
    assert math.ceil(n * bits / 8) <= packed_bytes(n, bits) <= math.ceil(n * bits / 8) + (bits % 8).bit_count()
    assert n % 8 or packed_bytes(n, bits) == n * bits // 8
    assert torch.equal(unpack(packed, bits, n), codes)


@pytest.mark.parametrize(
    ("codes", "bits", "expected"),
    [
        ([1, 2, 3, 0, 2], 2, [0b00_11_10_01, 0b10]),
        ([0xA, 0x5, 0xF], 4, [0x5A, 0x0F]),
        ([0b101, 0b010, 0b111], 3, [0b11_10_01, 0b101]),  # the lower two bits of all codes, then the highest of all
        ([0xABC, 0x123], 12, [0xBC, 0x23, 0x1A]),  # 8 and 4
    ],
)
def test_packed_bytes_on_paper(codes, bits, expected):
    assert pack(torch.tensor(codes), bits).tolist() == expected


# The largest elements of rows

CHUNKS = (Chunks(3, 16, 4), Chunks(1, 5, 1))


def random_rows() -> torch.Tensor:
    return torch.randn(2, 53, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@given(st.lists(st.integers(-2, 2), min_size=12, max_size=12), st.integers(1, 6))
def test_of_equal_magnitudes_the_first_are_the_largest(numbers, count):
    rows = torch.tensor(numbers, dtype=torch.float32).view(2, 6)
    expected = [sorted(oracles.largest(row, count).tolist()) for row in rows.numpy()]
    assert largest(rows, count).tolist() == expected


@pytest.mark.parametrize("bits", [2, 5, 32])
def test_a_message_has_each_chunks_largest_elements(bits):
    rows, top_k = random_rows(), TopK(2, CHUNKS, bits)
    message = top_k.encode(rows, torch.float64)
    assert len(message) == top_k.bytes(torch.float64)
    for row, places, arrived in zip(rows, *top_k.decode(message, torch.float64), strict=True):
        expected = []
        for start, kept in ((0, 4), (16, 4), (32, 4), (48, 1)):
            expected += sorted(start + oracles.largest(row[start : start + 16].numpy(), kept))
        assert places.tolist() == expected
        sent = row[places] if bits == 32 else dequantise(*quantise(row[places], bits))
        assert torch.equal(arrived, sent)


def test_the_bytes_of_a_message_on_paper():
    """A chunk of 4,096 of which 64 are sent: 14 bits each, against 4,096 of 32 bits a 146th, and a table of four."""
    sizes = TopK(3, (Chunks(10, 4096, 64),), 2).sizes(torch.float32)
    assert sizes == [3 * 4 * 4, 30 * 64 * 2 // 8, 30 * 64 * 12 // 8]
    assert TopK(1, (Chunks(1, 4097, 8),)).sizes(torch.bfloat16) == [8 * 2, 13]
    assert TopK(1, (Chunks(1, 1, 1),)).sizes(torch.float32) == [4, 1]


@pytest.mark.parametrize(
    ("over_senders", "expected"), [(True, [5.25, 5.0, 0.0, 9.0]), (False, [5.25, 1.25, 0.0, 6.75])]
)
def test_a_mean_is_over_the_senders_of_a_position_or_over_all(over_senders, expected):
    top_k = TopK(1, (Chunks(1, 4, 2),))
    rows = torch.tensor([[[6.0, 0.0, 1.0, 9.0]], [[3.0, 5.0, 0.0, 1.0]]])
    messages = [top_k.encode(row, torch.float32) for row in rows]  # positions 0 and 3; 0 and 1
    mean = top_k.mean(messages, [0.75, 0.25], torch.float32, torch.float32, over_senders)
    assert mean.tolist() == [expected]


# Trainers


@pytest.mark.parametrize(("name", "encoding"), [("int8", INT8), ("int4", INT4)])
def test_what_integers_lose_is_sent_in_later_rounds(name, encoding, monkeypatch):
    """A worker sends the sum of its pseudo-gradients, up to the error that it still keeps."""
    trainer = trainer_of(2, communication_dtype=name)
    found, add, sent = recorded_pseudo_gradients(monkeypatch), Mean.add, torch.zeros_like(trainer.parameters)

    def recording(self, worker, rows):
        if worker == 0:
            sent.add_(encoding.decode(rows, sent.dtype)[: sent.numel()])
        add(self, worker, rows)

    monkeypatch.setattr(Mean, "add", recording)
    train(trainer, 4)
    error = trainer.local_workers[0].state[ERROR]
    assert error.abs().max() > 0
    torch.testing.assert_close(sent + error, sum(found[::2]), rtol=1e-12, atol=1e-14)


def test_workers_with_bfloat16_move_by_the_rounded_mean_of_rounded_pseudo_gradients(monkeypatch):
    trainer = trainer_of(2, communication_dtype="bfloat16", distributed_algo="LocalSGD")
    before, found = trainer.parameters.clone(), recorded_pseudo_gradients(monkeypatch)
    train(trainer, 1)
    first, second = (own.bfloat16().double() for own in found)
    expected = before - ((first + second) / 2).bfloat16().double()
    torch.testing.assert_close(trainer.parameters, expected, rtol=1e-9, atol=1e-12)


def test_a_worker_that_becomes_the_only_one_applies_its_error():
    trainer = trainer_of(2, communication_dtype="int8", distributed_algo="LocalSGD")
    train(trainer, 1)
    trainer.assign_nodes(trainer.nodes[:1])
    before = trainer.parameters.clone()
    assert trainer.local_workers[0].state[ERROR].abs().max() > 0
    train(trainer, 1)
    sent = trainer.local_workers[0].model.parameters.data  # the buffer holds what was sent: x - x_m + error
    torch.testing.assert_close(before - trainer.parameters, sent, rtol=1e-12, atol=1e-14)
    assert not trainer.local_workers[0].state[ERROR].any()


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_lone_participant_keeps_its_progress_unencoded(name):
    trainer = trainer_of(3, communication_dtype=name, distributed_algo="LocalSGD", participants=0.3)
    before = trainer.parameters.clone()
    (report,) = train(trainer, 1)
    (participant,) = report.workers
    moved = trainer.local_workers[participant].model.parameters.data  # the buffer holds x - x_m
    torch.testing.assert_close(before - trainer.parameters, moved, rtol=1e-12, atol=1e-14)
    assert not any(worker.state[ERROR].any() for worker in trainer.local_workers.values() if ERROR in worker.state)
    assert report.bytes_synchronised == 0


def test_a_new_worker_has_the_first_ones_moments_and_no_error():
    values = {"number_of_initial_trainers": 2, "nodes_per_gpu": 4, "merge_frequency": 1}
    cluster = light_cluster(communication_dtype="int8", **values)
    cluster.run_round(Recorder())
    cluster.assign_nodes()
    (trainer,) = cluster.trainers.values()
    first, _, *new = trainer.local_workers.values()
    assert len(new) == 2
    assert first.state[ERROR].abs().max() > 0
    for worker in new:
        assert torch.equal(first.state_dict()["exp_avg"], worker.state_dict()["exp_avg"])
        assert not worker.state[ERROR].any()
