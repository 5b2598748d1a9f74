"""Bins with a table of means against numpy, and packed codes against the sum of their bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.synchronisation.encodings.quantisation import (
    dequantise,
    pack,
    packed_bytes,
    quantise,
    unpack,
)
from tests.support.oracles import table_quantised


def values(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3.0 + 1.0


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_each_row_arrives_as_an_independent_implementation_has_it(bits):
    tensor = values(3000, dtype=torch.float64).view(3, 1000) * torch.tensor([[1.0], [0.0], [1e-6]])
    codes, tables = quantise(tensor, bits)
    assert codes.shape == tensor.shape
    assert tables.shape == (3, 2**bits)
    expected = [table_quantised(row, bits) for row in tensor.numpy()]
    np.testing.assert_allclose(dequantise(codes, tables).numpy(), expected, rtol=1e-12, atol=1e-15)


def test_five_values_on_paper():
    """Mean 0 and standard deviation 2: the scale is 6 * 2 / 4 = 3, so that +-2 round to bins one from the middle."""
    codes, table = quantise(torch.tensor([-2.0, -2.0, 0.0, 2.0, 2.0]), 2)
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [1, 1, 2, 3, 3]
    assert table.tolist() == [0.0, -2.0, 0.0, 2.0]


@given(st.integers(1, 300), st.integers(0, 3), st.sampled_from([1, 2, 4]), st.floats(-20, 20))
def test_the_sum_of_all_values_arrives(count, seed, bits, exponent):
    tensor = values(count, seed) * 10.0**exponent
    arrived = dequantise(*quantise(tensor, bits))
    assert arrived.double().sum().item() == pytest.approx(
        tensor.double().sum().item(), abs=1e-6 * tensor.abs().sum().item()
    )


@pytest.mark.parametrize("same", [[0.0] * 9, [2.5] * 9, [-1.5]])
def test_equal_values_arrive_as_they_are(same):
    assert dequantise(*quantise(torch.tensor(same), 2)).tolist() == same


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_of_values_that_are_not_all_finite_no_number_arrives(wrong):
    tensor = values(100)
    tensor[7] = wrong
    assert not dequantise(*quantise(tensor, 2)).isfinite().any()


@given(st.data(), st.integers(1, 31), st.integers(1, 40), st.integers(1, 3))
def test_packed_codes_come_back_without_waste(data, bits, n, rows):
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=n * rows, max_size=n * rows))
    codes = torch.tensor(numbers, dtype=torch.uint8 if bits <= 8 else torch.int32).view(rows, n)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_bytes(n, bits))
    assert math.ceil(n * bits / 8) <= packed_bytes(n, bits) <= math.ceil(n * bits / 8) + (bits % 8).bit_count()
    assert n % 8 or packed_bytes(n, bits) == n * bits // 8
    assert torch.equal(unpack(packed, bits, n), codes)


def test_packed_bytes_on_paper():
    assert pack(torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01, 0b10]
    assert pack(torch.tensor([0xA, 0x5, 0xF], dtype=torch.uint8), 4).tolist() == [0x5A, 0x0F]
    # 3 bits are 2 and 1: the lower two of all codes, then the highest of all.
    assert pack(torch.tensor([0b101, 0b010, 0b111], dtype=torch.uint8), 3).tolist() == [0b11_10_01, 0b101]
    assert pack(torch.tensor([200, 3], dtype=torch.uint8), 8).tolist() == [200, 3]
    # 12 bits are 8 and 4.
    assert pack(torch.tensor([0xABC, 0x123]), 12).tolist() == [0xBC, 0x23, 0x1A]
