"""Which device has which tensor whole; and that all of them get back what they gave, in threads that play devices."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from algorithms.synchronisation.demo import DeMo
from algorithms.synchronisation.group import LocalWorker
from algorithms.synchronisation.method import Outer
from algorithms.synchronisation.sparse_loco import SparseLoCo
from fabrics.sharding.shard_layout import Layout
from fabrics.sharding.whole_tensors import WholeTensors, most_whole, shared_out
from tests.support.programs import LIMIT_SECONDS
from utils.distributed.reductions import Messages
from utils.distributed.shard_groups import Island

SHAPES = {"embedding": (7, 3), "norm": (4,), "matrix": (2, 5), "bias": (1,), "cube": (3, 2, 2)}


def test_the_largest_tensors_are_shared_out_first():
    assert shared_out([5, 9, 4, 4, 2], 2) == [[1, 3], [0, 2, 4]]  # 9 | 5, 4, then 4 and 2: 13 and 11
    assert shared_out([3, 3], 3) == [[0], [1], []]
    assert (most_whole([5, 9, 4, 4, 2], 2), most_whole([1, 100, 1], 8), most_whole([], 4)) == (13, 100, 0)


class Thread(Island):
    """A device that is a thread of this process; `tables` is where all of them put what they send."""

    def __init__(self, index: int, tables: list, barrier: threading.Barrier):
        self.size, self.index, self._tables, self._barrier = len(tables), index, tables, barrier

    def trade(self, tensor, given, taken):
        self._tables[self.index] = tensor.split(given)
        self._barrier.wait()
        came = [table[self.index] for table in self._tables]
        self._barrier.wait()
        assert [len(part) for part in came] == list(taken)
        return torch.cat(came)


def lengths(devices: int) -> list[int]:
    """As FSDP2 cuts tensors: as many rows in each device, the last ones' filled up."""
    return [-(-shape[0] // devices) * math.prod(shape[1:]) for shape in SHAPES.values()]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("numbers", [range(5), (1, 2, 4), (3,)])
def test_tensors_are_whole_in_one_device_each_and_go_back_to_all(devices, numbers):
    layout = Layout.of(SHAPES, lengths(devices)).among(numbers)
    names, barrier, tables = list(SHAPES), threading.Barrier(devices), [()] * devices
    whole_flat = torch.zeros(layout.whole_size, dtype=torch.float64)
    for block in layout.wholes:
        whole_flat[block.start : block.start + block.size] = torch.rand(block.size, dtype=torch.float64) + 1

    def device(index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        wholes, flat = WholeTensors(layout, Thread(index, tables, barrier)), layout.part(whole_flat, index)
        whole, doubled = wholes.gather(flat), torch.zeros_like(flat)
        found = {b.name: whole[b.start : b.start + b.size].view(b.shape) for b in wholes.blocks}
        assert len(whole) == (wholes.blocks[-1].stop if wholes.blocks else 0)
        wholes.spread(2 * whole, doubled)
        assert torch.equal(doubled, 2 * flat)
        return found, flat

    with ThreadPoolExecutor(devices) as pool:
        results = list(pool.map(device, range(devices)))
    found = [(name, tensor) for tensors, _ in results for name, tensor in tensors.items()]
    assert sorted(name for name, _ in found) == sorted(names[number] for number in numbers)
    expected = {b.name: whole_flat[b.start : b.start + b.size].view(b.shape) for b in layout.wholes}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found)
    assert sum(flat.sum() for _, flat in results).item() == pytest.approx(whole_flat.sum().item())  # each number once


class _Group:
    """One device's workers, all of them in this process; they send nothing to others.

    exchanged: bytes of a message from here, and of all devices' together.
    """

    learning_rate, message_dtype, weights = 0.1, torch.float32, (0.25, 0.75)

    def __init__(self, wholes: WholeTensors, shared: torch.Tensor, local: list):
        self.model, self.shared, self.local = SimpleNamespace(wholes=wholes), {"parameters": shared}, local

    def messages(self, size, counted):
        self.exchanged = size, counted
        return Messages(torch.device("cpu"))


EXCHANGING = {
    DeMo: (DeMo.Settings(chunk=4, top_k=2), "momentum"),
    SparseLoCo: (SparseLoCo.Settings(chunk=4, density=0.3, bits=2), "unsent"),
}


def _exchanged(method: type, devices: int) -> tuple[list[dict[str, torch.Tensor]], list[tuple[int, int]], list[int]]:
    """What an exchange leaves of the shared parameters and of the workers' state, tensor by tensor."""
    settings, name = EXCHANGING[method]
    layout, barrier, tables = (
        Layout.of(SHAPES, lengths(devices)),
        threading.Barrier(devices, timeout=LIMIT_SECONDS),
        [()] * devices,
    )
    generator = torch.Generator().manual_seed(4)
    tensors = [[torch.randn(shape, generator=generator) for shape in SHAPES.values()] for _ in range(7)]
    flats = [torch.zeros(layout.whole_size) for _ in tensors]
    for flat, values in zip(flats, tensors, strict=True):
        for block, tensor in zip(layout.wholes, values, strict=True):
            flat[block.start : block.start + block.size] = tensor.flatten()

    def device(index: int):
        wholes = WholeTensors(layout, Thread(index, tables, barrier))
        shared, *own = (layout.part(flat, index).clone() for flat in flats)
        members = [
            LocalWorker(number, parameters=a, start=shared, gradient=b, state={name: c})
            for number, (a, b, c) in enumerate((own[:3], own[3:]))
        ]
        group = _Group(wholes, shared, members)
        own_method = method(settings, Outer(0.7, 0.0, 0.01), layout.wholes)
        incoming = own_method.incoming(group)
        for member in members:
            message = own_method.message(member, group)
            assert len(message) == group.exchanged[0]
            incoming.add(member.index, message)
        own_method.apply(group, incoming.result())
        found = [wholes.gather(flat) for flat in (shared, *(member.state[name] for member in members))]
        by_name = [{b.name: flat[b.start : b.start + b.size].view(b.shape) for b in wholes.blocks} for flat in found]
        return by_name, group.exchanged, len(wholes.blocks)

    with ThreadPoolExecutor(devices) as pool:
        results = list(pool.map(device, range(devices)))
    found = [{name: tensor for flats, _, _ in results for name, tensor in flats[number].items()} for number in range(3)]
    return found, [exchanged for _, exchanged, _ in results], [blocks for _, _, blocks in results]


@pytest.mark.parametrize("method", EXCHANGING)
def test_a_device_without_a_tensor_exchanges_with_the_others(method):
    """Of 8 devices 3 have none of 5 tensors: the numbers of one device, and nothing to send."""
    expected, ((size, counted),), _ = _exchanged(method, 1)
    found, exchanged, blocks = _exchanged(method, 8)
    assert size == counted
    assert blocks == [1] * 5 + [0] * 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert [each for each, _ in exchanged][5:] == [0] * 3
    assert all(all_devices == counted for _, all_devices in exchanged)
