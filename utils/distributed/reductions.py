"""Means and messages over the workers of a trainer, and how they travel between processes.

A reduction is an accumulator: `add` each local worker's tensor when it is ready, then ask for the `result`. Its
model-sized memory is allocated when it is made, and only one worker's tensor needs to be alive at a time.

`torch.distributed` sums in an order that depends on the number of processes. A sum in worker order is needed by runs
whose bits must not depend on it (`deterministic`), and for tensors that travel encoded. Each process then receives one
part of every worker's tensor, sums it, and sends its part of the mean to the others. With one worker per process this
costs the bytes of an all-reduce, which is what every other mean is.

Workers have weights, such as their batches. Equal weights of any size give the bits of a plain mean.
"""

import math
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from algorithms.synchronisation.encodings import PLAIN, Encoding
from utils.distributed.devices import share_of
from utils.distributed.peers import PeerWatch

# Large tensors travel in pieces, which bounds the memory beside them. In host memory (gloo) small pieces are as fast as
# large ones; on GPUs (nccl) each piece costs a launch.
PIECE_BYTES = {"cpu": 8 * 1024**2, "cuda": 256 * 1024**2}

# A tensor and the rank that it goes to or comes from.
Parcel = tuple[int, torch.Tensor]


class Transport:
    """Moves tensors between processes through one communicator that is made at the start of a run.

    The workers of a trainer are in some of the processes, and redistribution changes in which. A communicator for each
    such set would be made in the middle of the run, when a GPU's memory may be full. So tensors go directly from
    process to process; only a sum over all processes is a collective.

    Args:
        device: where its tensors live: a GPU (nccl), or the CPU (gloo).

    Attributes:
        moved: the number of exchanges and sums so far.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        communicator: dist.ProcessGroup,
        device: torch.device,
        peers: PeerWatch,
    ):
        self.rank = rank
        self.ranks = tuple(ranks)
        self.device = device
        self.piece_bytes = PIECE_BYTES[device.type]
        self.moved = 0
        self._communicator = communicator
        self._peers = peers

    def exchange(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> None:
        """Send tensors to other processes and fill tensors with what they send, all at once.

        Tensors between two processes arrive in the order in which they are sent. Both sides know their sizes.
        """
        operations = [
            dist.P2POp(dist.isend, tensor.to(self.device), rank, self._communicator)
            for rank, tensor in sent
            if tensor.numel()
        ]
        arriving = []
        for rank, tensor in received:
            if tensor.numel():
                staged = tensor if tensor.device == self.device else torch.empty_like(tensor, device=self.device)
                arriving.append((tensor, staged))
                operations.append(dist.P2POp(dist.irecv, staged, rank, self._communicator))
        if not operations:
            return
        with self._peers.explaining():
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for tensor, staged in arriving:
            if staged is not tensor:
                tensor.copy_(staged)
        self.moved += 1

    def meet_all(self) -> None:
        """Exchange a number with every other process; nccl takes memory for each one with the first message."""
        others = [rank for rank in self.ranks if rank != self.rank]
        number = torch.zeros(1, device=self.device)
        self.exchange([(rank, number) for rank in others], [(rank, torch.empty_like(number)) for rank in others])

    def copy(self, tensors: Sequence[torch.Tensor], source: int, takers: Collection[int]) -> None:
        """Copy contiguous tensors of any device from the process `source` into those of the processes `takers`."""
        for tensor in tensors:
            # As bytes: nccl does not know all types.
            for piece in self._pieces(tensor.view(-1).view(torch.uint8)):
                if self.rank == source:
                    self.exchange([(taker, piece) for taker in sorted(takers)], [])
                elif self.rank in takers:
                    self.exchange([], [(source, piece)])

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor of any device over all processes, in place."""
        for piece in self._pieces(tensor):
            staged = piece.to(self.device)
            with self._peers.explaining():
                dist.all_reduce(staged, group=self._communicator)
            if staged is not piece:
                piece.copy_(staged)
            self.moved += 1

    def _pieces(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return tensor.view(-1).split(self.piece_bytes // tensor.element_size())


# The arithmetic of every mean: sums and one product, so that the bits do not depend on how the tensor is cut up.


def _add(total: torch.Tensor, rows: torch.Tensor, encoding: Encoding, weight: float) -> None:
    total.add_(encoding.decode(rows.to(total.device), total.dtype)[: total.numel()], alpha=weight)


def _divide(total: torch.Tensor, weights: float) -> torch.Tensor:
    return total.mul_(1.0 / weights) if weights else total


class Mean:
    """The weighted mean of one tensor per worker, all of them in this process."""

    def __init__(self, like: torch.Tensor, encoding: Encoding, weights: Sequence[float]):
        self._encoding = encoding
        self._weights = weights
        self._total = torch.zeros_like(like)
        self._present: list[float] = []

    def add(self, worker: int, rows: torch.Tensor) -> None:
        """Add a worker's encoded tensor, which may be overwritten afterwards. Workers come in order."""
        _add(self._total, rows, self._encoding, self._weights[worker])
        self._present.append(self._weights[worker])

    def result(self) -> tuple[torch.Tensor, int]:
        """Return the mean over the workers that were added, zero if there is none, and their number."""
        mean = _divide(self._total, math.fsum(self._present))
        return self._encoding.way_back.round_trip(mean), len(self._present)


class Workers:
    """The workers of a trainer, numbered from 0, wherever they are.

    Args:
        owners: the rank of each worker.
        transport: connects the processes; None: there is one.
        in_order: sum every mean in worker order.
    """

    def __init__(
        self, owners: Sequence[int] = (), rank: int = 0, transport: Transport | None = None, in_order: bool = True
    ):
        self.local_workers = tuple(worker for worker, owner in enumerate(owners) if owner == rank)
        self._owners = owners
        self._transport = transport
        self._in_order = in_order

    @property
    def _in_one_process(self) -> bool:
        return len(set(self._owners)) <= 1

    def mean(self, like: torch.Tensor, encoding: Encoding = PLAIN, weights: Sequence[float] | None = None) -> Mean:
        """Start a mean over all workers."""
        weights = weights or [1.0] * len(self._owners)
        largest = max(weights)
        relative = [weight / largest for weight in weights]  # equal ones become exactly 1 and change no bits
        if self._in_one_process:
            return Mean(like, encoding, relative)
        everywhere = set(self._owners) == set(self._transport.ranks)
        if everywhere and encoding.lossless and not self._in_order:
            return _SummedMean(self._transport, like, encoding, relative)
        return _OrderedMean(self._transport, self._owners, self.local_workers, like, encoding, relative)

    def messages(self, size: int, takers: Sequence[Collection[int]], device: torch.device) -> "Messages":
        """Start an exchange of messages."""
        transport = None if self._in_one_process else self._transport
        return Messages(transport, self._owners, size, takers, device)


class _SummedMean(Mean):
    """A mean by one all-reduce over all processes. Two more elements carry the sum of weights and the worker count."""

    def __init__(self, transport: Transport, like: torch.Tensor, encoding: Encoding, weights: Sequence[float]):
        self._transport = transport
        self._encoding = encoding
        self._weights = weights
        self._joined = torch.zeros(like.numel() + 2, dtype=like.dtype, device=like.device)
        self._total = self._joined[:-2]

    def add(self, worker: int, rows: torch.Tensor) -> None:
        _add(self._total, rows, self._encoding, self._weights[worker])
        self._joined[-2] += self._weights[worker]
        self._joined[-1] += 1.0

    def result(self) -> tuple[torch.Tensor, int]:
        self._transport.all_reduce(self._joined)
        weights, count = self._joined[-2:].tolist()
        return _divide(self._total, weights), round(count)


def _present_workers(transport: Transport, owners: Sequence[int], own: Collection[int]) -> list[int]:
    """Tell the owners which local workers were added, and return those of all processes, in order."""
    others = sorted(set(owners) - {transport.rank})
    flags = torch.zeros(len(owners), dtype=torch.uint8, device=transport.device)
    flags[list(own)] = 1
    theirs = {rank: torch.empty_like(flags) for rank in others}
    transport.exchange([(rank, flags) for rank in others], list(theirs.items()))
    for other in theirs.values():
        flags += other
    return flags.nonzero().flatten().tolist()


class _OrderedMean(Mean):
    """A mean summed in worker order, piece by piece: each process sums its part of a piece over all workers."""

    def __init__(
        self,
        transport: Transport,
        owners: Sequence[int],
        local: Sequence[int],
        like: torch.Tensor,
        encoding: Encoding,
        weights: Sequence[float],
    ):
        self._transport = transport
        self._owners = owners
        self._encoding = encoding
        self._weights = weights
        self._rows = encoding.rows(like.numel())
        self._row_bytes = encoding.row_bytes(like.dtype)
        # Local tensors wait here, encoded, until the last worker is done. A lossless encoding may be a view of a buffer
        # that the next worker overwrites; others are tensors of their own.
        copies = len(local) if encoding.lossless else 0
        waiting = torch.empty(copies, self._rows, self._row_bytes, dtype=torch.uint8, device=like.device)
        self._copies = dict(zip(local, waiting, strict=False))
        self._own: dict[int, torch.Tensor] = {}
        self._mean = torch.empty_like(like)

    def add(self, worker: int, rows: torch.Tensor) -> None:
        self._own[worker] = self._copies[worker].copy_(rows) if self._encoding.lossless else rows

    def result(self) -> tuple[torch.Tensor, int]:
        present = _present_workers(self._transport, self._owners, self._own)
        divisor = math.fsum(self._weights[worker] for worker in present)
        for parts in self._pieces():
            total = self._sum(parts, present)
            self._collect(parts, _divide(total, divisor))
        return self._mean, len(present)

    def _pieces(self) -> Iterator[dict[int, slice]]:
        """The rows that each rank sums, piece by piece."""
        ranks = sorted(set(self._owners))
        step = max(len(ranks), self._transport.piece_bytes // self._row_bytes)
        for first in range(0, self._rows, step):
            piece = range(first, min(first + step, self._rows))
            shares = [share_of(piece, index, len(ranks)) for index in range(len(ranks))]
            yield {rank: slice(share.start, share.stop) for rank, share in zip(ranks, shares, strict=True)}

    def _sum(self, parts: dict[int, slice], present: Sequence[int]) -> torch.Tensor:
        """Send other processes their parts of local tensors, and sum this process's part over all workers."""
        here = self._transport.rank
        rows = parts[here].stop - parts[here].start
        device = self._transport.device
        sent = []
        received = []
        part_of = {}
        for worker in present:
            if self._owners[worker] == here:
                part_of[worker] = self._own[worker][parts[here]]
                sent += [(rank, self._own[worker][part]) for rank, part in parts.items() if rank != here]
            else:
                part_of[worker] = torch.empty(rows, self._row_bytes, dtype=torch.uint8, device=device)
                received.append((self._owners[worker], part_of[worker]))
        self._transport.exchange(sent, received)
        total = torch.zeros(rows * self._encoding.block, dtype=self._mean.dtype, device=device)
        for worker, part in part_of.items():
            _add(total, part, self._encoding, self._weights[worker])
        return total

    def _collect(self, parts: dict[int, slice], own: torch.Tensor) -> None:
        """Send this process's part of the mean to the others, and fill in all parts."""
        back = self._encoding.way_back
        width = back.row_bytes(self._mean.dtype)
        encoded = {}
        for rank, part in parts.items():
            rows = back.rows((part.stop - part.start) * self._encoding.block)
            encoded[rank] = torch.empty(rows, width, dtype=torch.uint8, device=own.device)
        here = encoded.pop(self._transport.rank).copy_(back.encode(own))
        self._transport.exchange([(rank, here) for rank in encoded], list(encoded.items()))
        encoded[self._transport.rank] = here
        for rank, part in parts.items():
            place = self._mean[part.start * self._encoding.block : part.stop * self._encoding.block]
            place.copy_(back.decode(encoded[rank], place.dtype)[: len(place)])


class Messages:
    """One message of a fixed size per worker for other workers.

    Each goes once to every process that has a taker of it.

    Args:
        transport: connects the processes; None: all workers are in this one.
        size: bytes of a message.
        takers: the receivers of each worker's message, without the worker itself.
        device: of the result.
    """

    def __init__(
        self,
        transport: Transport | None,
        owners: Sequence[int],
        size: int,
        takers: Sequence[Collection[int]],
        device: torch.device,
    ):
        self._transport = transport
        self._owners = owners
        self._size = size
        self._takers = takers
        self._device = device
        self._messages: dict[int, torch.Tensor] = {}

    def add(self, worker: int, message: torch.Tensor) -> None:
        """Add a worker's message, uint8 [size], which may be overwritten afterwards. Workers come in order."""
        device = self._device if self._transport is None else self._transport.device
        self._messages[worker] = message.to(device, copy=True)

    def result(self) -> dict[int, torch.Tensor]:
        """Return the messages of local workers and those delivered to this process, by sender."""
        if self._transport is not None:
            self._exchange(self._transport)
        return {worker: self._messages[worker].to(self._device) for worker in sorted(self._messages)}

    def _exchange(self, transport: Transport) -> None:
        own = dict(self._messages)
        sent = []
        received = []
        for worker in _present_workers(transport, self._owners, own):
            destinations = {self._owners[taker] for taker in self._takers[worker]} - {self._owners[worker]}
            if worker in own:
                sent += [(rank, own[worker]) for rank in sorted(destinations)]
            elif transport.rank in destinations:
                self._messages[worker] = torch.empty(self._size, dtype=torch.uint8, device=transport.device)
                received.append((self._owners[worker], self._messages[worker]))
        transport.exchange(sent, received)
