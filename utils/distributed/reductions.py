"""Means and messages over the workers of a trainer, wherever they are, and the collectives they are made of.

A reduction is an accumulator: `add` a worker's tensor when it is there, then ask for the `result`. Memory of model size
is taken when the accumulator is made, and only one worker's tensor needs to be alive at a time.

A mean sums in worker order if its bits must not depend on the number of processes (`in_order`) or if workers send
encoded tensors. Every rank then receives one part of all workers' tensors, sums it, and sends its part of the mean to
all; with one worker per rank this costs the bytes of an all-reduce. Otherwise each rank sums its own workers and one
all-reduce joins the ranks.

Workers have weights: in a step of data-parallel training every example counts the same, so a worker with twice the
batch has twice the weight. Equal weights of any size give the bits of a plain mean.
"""

import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from algorithms.synchronisation.encodings.encoding import PLAIN, Encoding
from utils.distributed.peers import PeerWatch

# Before PyTorch 2.13 its name was the second one.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

# The size of the pieces a collective works on; it needs a few buffers of this size beside the tensors. In memory (gloo)
# small pieces are as fast as large ones; on GPUs each call costs a launch.
BUCKET_BYTES = {"cpu": 8 * 1024**2, "cuda": 256 * 1024**2}


def _relative(weights: Sequence[float] | None, workers: int) -> list[float]:
    """Return the weights divided by the largest: equal weights become exactly 1 and change no bits."""
    if weights is None:
        return [1.0] * workers
    largest = max(weights)
    return [weight / largest for weight in weights]


# The arithmetic of every mean: sums and one product, so that the bits do not depend on how the tensor is cut up.


def _add(total: torch.Tensor, rows: torch.Tensor, encoding: Encoding, weight: float) -> None:
    total.add_(encoding.decode(rows.to(total.device), total.dtype)[: total.numel()], alpha=weight)


def _divide(total: torch.Tensor, weights: float) -> torch.Tensor:
    return total.mul_(1.0 / weights) if weights else total


class Mean:
    """The weighted mean of one tensor per worker; here all workers are in this process.

    Args:
        like: a tensor of the mean's shape, type and device.
        encoding: how the added tensors are encoded.
        weights: of all workers, by number.
    """

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


class Messages:
    """One message of `size` bytes per worker for other workers; here all workers are in this process.

    Args:
        device: where the messages are delivered.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._own: dict[int, torch.Tensor] = {}

    def add(self, worker: int, message: torch.Tensor) -> None:
        """Add a worker's message, uint8 [size], which may be overwritten afterwards. Workers come in order."""
        self._own[worker] = message.to(self._device, copy=True)

    def result(self) -> dict[int, torch.Tensor]:
        """Return by sender the messages of local workers and those that came to this process."""
        return self._own


class LocalWorkers:
    """The workers of a trainer, numbered from 0, all of them in this process."""

    def __init__(self, count: int):
        self.local_workers = tuple(range(count))

    def mean(self, like: torch.Tensor, encoding: Encoding = PLAIN, weights: Sequence[float] | None = None) -> Mean:
        """Start a mean over all workers; weights: of all workers, by number (None: equal)."""
        return Mean(like, encoding, _relative(weights, len(self.local_workers)))

    def messages(self, size: int, takers: Sequence[Collection[int]], device: torch.device) -> Messages:
        """Start an exchange of messages.

        Args:
            size: bytes of each message.
            takers: the receivers of each worker's message, by number of the sender, without the sender.
            device: where the messages are delivered.
        """
        return Messages(device)


class ProcessGroup:
    """Some ranks and their collectives: on GPUs (nccl), or in memory (gloo)."""

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup, device: torch.device, peers: PeerWatch):
        self.ranks = ranks
        self.device = device
        self.bucket_bytes = BUCKET_BYTES[device.type]
        self._handle = handle
        self._peers = peers

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a flat tensor of any device in place."""
        if tensor.device.type == self.device.type == "cuda":
            parts = [tensor]
        else:
            parts = tensor.split(self.bucket_bytes // tensor.element_size())
        for part in parts:
            staged = part.to(self.device)
            with self._peers.explaining():
                dist.all_reduce(staged, group=self._handle)
            if staged is not part:
                part.copy_(staged)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, receive: list[int], send: list[int]) -> None:
        """Send `send[r]` elements of a flat tensor to rank r and receive `receive[r]` elements from it."""
        with self._peers.explaining():
            dist.all_to_all_single(received, sent, receive, send, group=self._handle)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Concatenate the flat tensors of all ranks."""
        with self._peers.explaining():
            getattr(dist, ALL_GATHER)(received, sent, group=self._handle)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Copy contiguous tensors of any device from the rank `source` into those of the other ranks.

        Tensors on the group's device travel together, others one at a time through that device: nccl has one
        communicator per device, and ranks that used different ones would wait for each other forever.
        """
        parts = [
            part for tensor in tensors for part in tensor.view(-1).split(self.bucket_bytes // tensor.element_size())
        ]
        under_way = []
        with self._peers.explaining():
            for part in parts:
                direct = part.device == self.device
                staged = part if direct else part.to(self.device)
                work = dist.broadcast(staged, source, self._handle, async_op=True)
                if direct:
                    under_way.append(work)
                else:
                    work.wait()
                    part.copy_(staged)
            for work in under_way:
                work.wait()

    def close(self) -> None:
        """Free the communicator; all ranks of the group call this together."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self._peers.explaining():
            dist.destroy_process_group(self._handle)


class _SummedMean(Mean):
    """A mean by one all-reduce; two more elements hold the weights in it and the number of workers."""

    def __init__(self, group: ProcessGroup, like: torch.Tensor, encoding: Encoding, weights: Sequence[float]):
        self._group = group
        self._encoding = encoding
        self._weights = weights
        self._joined = torch.zeros(like.numel() + 2, dtype=like.dtype, device=like.device)
        self._total = self._joined[:-2]

    def add(self, worker: int, rows: torch.Tensor) -> None:
        _add(self._total, rows, self._encoding, self._weights[worker])
        self._joined[-2] += self._weights[worker]
        self._joined[-1] += 1.0

    def result(self) -> tuple[torch.Tensor, int]:
        self._group.all_reduce(self._joined)
        weights, count = self._joined[-2:].tolist()
        return _divide(self._total, weights), round(count)


class _OrderedMean(Mean):
    """A mean summed in worker order: every rank sums one part of each bucket over all workers, and sends it to all.

    owners: the rank of each worker. local: the workers of this process.
    """

    def __init__(
        self,
        group: ProcessGroup,
        owners: Sequence[int],
        local: Sequence[int],
        like: torch.Tensor,
        encoding: Encoding,
        weights: Sequence[float],
    ):
        self._group = group
        self._owners = owners
        self._encoding = encoding
        self._weights = weights
        back = encoding.way_back
        ranks = len(group.ranks)
        self._row_bytes = encoding.row_bytes(like.dtype)
        rows = encoding.rows(like.numel())
        self._buckets = max(1, -(-rows * self._row_bytes // group.bucket_bytes))
        self._chunk = -(-rows // (self._buckets * ranks))  # rows in one rank's part of a bucket
        self._part_bytes = self._chunk * self._row_bytes
        elements = self._chunk * encoding.block
        # Messages arrive by rank, and within a rank by worker.
        self._order = [worker for rank in group.ranks for worker, owner in enumerate(owners) if owner == rank]
        self._index = {worker: index for index, worker in enumerate(local)}
        # Local tensors wait here, encoded, until the last worker is done. A lossless encoding may be a view of a buffer
        # that the next worker overwrites; others are tensors of their own.
        waiting = len(local) if encoding.lossless else 0
        self._waiting = torch.empty(waiting, rows * self._row_bytes, dtype=torch.uint8, device=like.device)
        self._held: list[tuple[int, torch.Tensor]] = []
        device = group.device
        self._present = torch.zeros(len(owners), dtype=torch.int32, device=device)
        self._message = torch.zeros(ranks, len(local), self._part_bytes, dtype=torch.uint8, device=device)
        self._received = torch.empty(len(owners), self._part_bytes, dtype=torch.uint8, device=device)
        self._total = torch.empty(elements, dtype=like.dtype, device=device)
        gathered_rows = ranks * back.rows(elements)
        self._gathered = torch.empty(gathered_rows, back.row_bytes(like.dtype), dtype=torch.uint8, device=device)
        self._mean = torch.empty_like(like)

    def add(self, worker: int, rows: torch.Tensor) -> None:
        index = self._index[worker]
        rows = rows.flatten()
        self._held.append((index, self._waiting[index].copy_(rows) if self._encoding.lossless else rows))
        self._present[worker] = 1

    def result(self) -> tuple[torch.Tensor, int]:
        self._group.all_reduce(self._present)
        present = self._present.tolist()
        divisor = math.fsum(weight for weight, here in zip(self._weights, present, strict=True) if here)
        for bucket in range(self._buckets):
            self._trade(bucket)
            self._sum(present)
            self._collect(bucket, divisor)
        return self._mean, sum(present)

    def _trade(self, bucket: int) -> None:
        """Send each rank its part of the bucket of all local tensors, and receive this rank's part of all others."""
        ranks, local, size = self._message.shape
        for index, tensor in self._held:
            own = tensor[bucket * ranks * size : (bucket + 1) * ranks * size]
            whole = len(own) // size  # the last bucket may be smaller; what its parts hold beyond is never read
            self._message[:whole, index] = own[: whole * size].view(whole, size)
            self._message[whole : whole + 1, index, : len(own) % size] = own[whole * size :]
        receive = [self._owners.count(rank) * size for rank in self._group.ranks]
        self._group.all_to_all(self._received.view(-1), self._message.view(-1), receive, [local * size] * ranks)

    def _sum(self, present: Sequence[int]) -> None:
        self._total.zero_()
        for worker, index in sorted((worker, index) for index, worker in enumerate(self._order)):
            if present[worker]:
                rows = self._received[index].view(self._chunk, self._row_bytes)
                _add(self._total, rows, self._encoding, self._weights[worker])

    def _collect(self, bucket: int, divisor: float) -> None:
        """Gather all ranks' parts of the mean of a bucket."""
        back = self._encoding.way_back
        self._group.all_gather(self._gathered, back.encode(_divide(self._total, divisor)).contiguous())
        first = bucket * len(self._group.ranks) * len(self._total)
        decoded = back.decode(self._gathered, self._mean.dtype)[: max(0, self._mean.numel() - first)]
        self._mean[first : first + len(decoded)] = decoded


class _RankMessages(Messages):
    """Messages between ranks: each goes once to every rank that has a taker of it."""

    def __init__(
        self,
        group: ProcessGroup,
        owners: Sequence[int],
        rank: int,
        size: int,
        takers: Sequence[Collection[int]],
        device: torch.device,
    ):
        super().__init__(group.device)
        self._group = group
        self._owners = owners
        self._rank = rank
        self._size = size
        self._takers = takers
        self._to = device

    def result(self) -> dict[int, torch.Tensor]:
        group, owners = self._group, self._owners
        present = torch.zeros(len(owners), dtype=torch.int32, device=group.device)
        present[list(self._own)] = 1
        group.all_reduce(present)
        here = present.tolist()
        to = [
            {owners[taker] for taker in self._takers[worker]} - {owner} if here[worker] else set()
            for worker, owner in enumerate(owners)
        ]
        sent = [[self._own[worker] for worker in self._own if rank in to[worker]] for rank in group.ranks]
        coming = [
            [w for w, owner in enumerate(owners) if owner == rank and self._rank in to[w]] for rank in group.ranks
        ]
        senders = [worker for part in coming for worker in part]
        received = torch.empty(len(senders), self._size, dtype=torch.uint8, device=group.device)
        empty = torch.empty(0, dtype=torch.uint8, device=group.device)
        group.all_to_all(
            received.view(-1),
            torch.cat([empty, *(message for part in sent for message in part)]),
            [len(part) * self._size for part in coming],
            [len(part) * self._size for part in sent],
        )
        arrived = self._own | dict(zip(senders, received, strict=True))
        return {worker: arrived[worker].to(self._to) for worker in sorted(arrived)}


class DistributedWorkers(LocalWorkers):
    """The workers of a trainer on several ranks.

    Args:
        owners: the rank of each worker.
        rank: this process.
        group: all owners.
        in_order: sum in worker order with every encoding.
    """

    def __init__(self, owners: tuple[int, ...], rank: int, group: ProcessGroup, in_order: bool):
        self._owners = owners
        self._rank = rank
        self._group = group
        self._in_order = in_order
        self.local_workers = tuple(worker for worker, owner in enumerate(owners) if owner == rank)

    def mean(self, like: torch.Tensor, encoding: Encoding = PLAIN, weights: Sequence[float] | None = None) -> Mean:
        relative = _relative(weights, len(self._owners))
        if self._in_order or not encoding.lossless:
            return _OrderedMean(self._group, self._owners, self.local_workers, like, encoding, relative)
        return _SummedMean(self._group, like, encoding, relative)

    def messages(self, size: int, takers: Sequence[Collection[int]], device: torch.device) -> Messages:
        return _RankMessages(self._group, self._owners, self._rank, size, takers, device)
