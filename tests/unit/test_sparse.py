"""The largest numbers of rows against a stable sort, and their messages against what went in."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.synchronisation.encodings.quantisation import dequantise, quantise
from algorithms.synchronisation.encodings.sparse import Chunks, TopK, add_at, largest
from tests.support import oracles

# Chunks of 16, and what is left of a row.
CHUNKS = (Chunks(3, 16, 4), Chunks(1, 5, 1))


@given(st.lists(st.integers(-2, 2), min_size=12, max_size=12), st.integers(1, 6))
def test_of_equal_magnitudes_the_first_are_the_largest(numbers, count):
    rows = torch.tensor(numbers, dtype=torch.float32).view(2, 6)
    expected = [sorted(oracles.largest(row, count).tolist()) for row in rows.numpy()]
    assert largest(rows, count).tolist() == expected


def random_rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 53, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 5, 32])
def test_a_message_brings_each_chunks_largest_numbers(bits):
    rows, top_k = random_rows(), TopK(2, CHUNKS, bits)
    message = top_k.encode(rows, torch.float64)
    assert [len(message)] == [top_k.bytes(torch.float64)]
    places, values = top_k.decode(message, torch.float64)
    starts = [0, 16, 32, 48]
    for row, found, arrived in zip(rows, places, values, strict=True):
        chunks = [row[start : start + 16].numpy() for start in starts]
        kept = [4, 4, 4, 1]
        expected = np.concatenate(
            [
                start + np.sort(oracles.largest(chunk, count))
                for start, chunk, count in zip(starts, chunks, kept, strict=True)
            ]
        )
        assert found.tolist() == expected.tolist()
        sent = row[found] if bits == 32 else dequantise(*quantise(row[found], bits))
        assert torch.equal(arrived, sent)


def test_a_message_is_as_large_as_its_numbers_on_paper():
    """A chunk of 4,096 of which 64 are sent: 14 bits each, against 4,096 of 32 bits a 146th, and a table of four."""
    assert TopK(3, (Chunks(10, 4096, 64),), 2).sizes(torch.float32) == [3 * 4 * 4, 30 * 64 * 2 // 8, 30 * 64 * 12 // 8]
    assert TopK(1, (Chunks(1, 4097, 8),)).sizes(torch.bfloat16) == [8 * 2, 13]
    assert TopK(1, (Chunks(1, 1, 1),)).sizes(torch.float32) == [4, 1]


@pytest.mark.parametrize("over_senders", [False, True])
def test_a_mean_weights_those_who_sent_a_place_or_all(over_senders):
    top_k = TopK(1, (Chunks(1, 4, 2),))
    rows = torch.tensor([[[6.0, 0.0, 1.0, 9.0]], [[3.0, 5.0, 0.0, 1.0]]])
    messages = [top_k.encode(row, torch.float32) for row in rows]  # places 0 and 3; 0 and 1
    mean = top_k.mean(messages, [0.75, 0.25], torch.float32, torch.float32, over_senders)
    assert mean.tolist() == [[5.25, 5.0, 0.0, 9.0] if over_senders else [5.25, 1.25, 0.0, 6.75]]


def test_what_was_sent_and_what_is_left_are_what_there_was():
    rows, top_k = random_rows(), TopK(2, CHUNKS, 2)
    sent = top_k.decode(top_k.encode(rows, torch.float64), torch.float64)
    left = add_at(rows.clone(), sent, -1.0)
    torch.testing.assert_close(add_at(left.clone(), sent), rows, rtol=0, atol=1e-15)
    assert (left != rows).sum() == 2 * 13
