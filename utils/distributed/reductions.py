"""The mean of what a trainer's workers give, wherever they are, and the collectives that it is made of.

A mean sums in worker order where it must not depend on who owns what (`in_order`) or where workers send encoded
tensors: every rank gets a part of all workers' tensors, sums it, and sends the part of the mean to all, which costs the
bytes of an all-reduce where a rank has one worker. Otherwise a rank sums its own and one all-reduce joins the ranks.

Workers count by weights: in a step of data-parallel training every example counts the same, so a worker with twice the
batch has twice the weight. Equal weights, whatever they are, give the bits of a plain mean.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from algorithms.synchronisation.encodings.encoding import PLAIN, Encoding
from utils.distributed.heartbeat import Heartbeat

# Its name before PyTorch 2.13 is the second one.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
Given = Iterable[tuple[int, torch.Tensor | None]]

# What a collective works on at a time: it needs a few buffers of this size beside the tensors. In memory (gloo) small
# pieces are as quick as large ones; on GPUs every call costs a launch, and a sum over all ranks is one call anyway.
BUCKET_BYTES = {"cpu": 8 * 1024**2, "cuda": 256 * 1024**2}


class Workers(Protocol):
    """The workers of one trainer, numbered from 0."""

    local_workers: tuple[int, ...]

    def mean(
        self,
        tensors: Given,
        like: torch.Tensor,
        encoding: Encoding = PLAIN,
        weights: Sequence[float] | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Mean over the workers that give a tensor, of the shape and device of `like`, and how many they are.

        `tensors` yields (worker, encoded tensor) for the local workers in order; None leaves the worker out. Only the
        latest tensor has to be valid: a worker may be run when its tensor is asked for, and all may share one buffer.
        Memory of model size is taken before the first is asked for. With nobody left the mean is zero.

        weights: of all workers, by number; None: equal ones.
        """

    def deliver(
        self, messages: Given, size: int, takers: Sequence[Collection[int]], device: torch.device
    ) -> dict[int, torch.Tensor]:
        """Bytes [size] that each worker has for others: by sender, those that came here, and those of local workers.

        Args:
            messages: (worker, uint8 tensor) for the local workers in order, as in `mean`; None leaves the worker out.
            takers: of all workers' messages, by number of the sender; itself left out.
            device: where what comes shall be.
        """


# The arithmetic of every mean. Plain sums and one product, so that their bits do not depend on how it is cut up.


def _shares(weights: Sequence[float] | None, workers: int) -> list[float]:
    """Weights with the largest 1: equal ones are 1 exactly, and multiply without a trace."""
    if weights is None:
        return [1.0] * workers
    largest = max(weights)
    return [weight / largest for weight in weights]


def _add(total: torch.Tensor, rows: torch.Tensor, encoding: Encoding, share: float) -> None:
    total.add_(encoding.decode(rows.to(total.device), total.dtype)[: total.numel()], alpha=share)


def _divided(total: torch.Tensor, shares: float) -> torch.Tensor:
    return total.mul_(1.0 / shares) if shares else total


class LocalWorkers:
    """All workers of a trainer in this process."""

    def __init__(self, count: int):
        self.local_workers = tuple(range(count))

    def mean(
        self,
        tensors: Given,
        like: torch.Tensor,
        encoding: Encoding = PLAIN,
        weights: Sequence[float] | None = None,
    ) -> tuple[torch.Tensor, int]:
        shares = _shares(weights, len(self.local_workers))
        total, present = torch.zeros_like(like), []
        for worker, rows in tensors:
            if rows is not None:
                _add(total, rows, encoding, shares[worker])
                present.append(shares[worker])
            del rows  # before the next one is made
        return encoding.way_back.round_trip(_divided(total, math.fsum(present))), len(present)

    def deliver(
        self, messages: Given, size: int, takers: Sequence[Collection[int]], device: torch.device
    ) -> dict[int, torch.Tensor]:
        return {worker: message.to(device, copy=True) for worker, message in messages if message is not None}


class Group:
    """Some ranks, and how they communicate: on GPUs (nccl), or in memory (gloo)."""

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup, device: torch.device, heartbeat: Heartbeat):
        self.ranks, self.device = ranks, device
        self.bucket_bytes = BUCKET_BYTES[device.type]
        self._handle, self._heartbeat = handle, heartbeat

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a flat tensor of any device in place."""
        if tensor.device.type == self.device.type == "cuda":
            parts = [tensor]
        else:
            parts = tensor.split(self.bucket_bytes // tensor.element_size())
        for part in parts:
            staged = part.to(self.device)
            with self._heartbeat.explaining():
                dist.all_reduce(staged, group=self._handle)
            if staged is not part:
                part.copy_(staged)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, receive: list[int], send: list[int]) -> None:
        """To every rank so many elements of a flat tensor, and from every rank."""
        with self._heartbeat.explaining():
            dist.all_to_all_single(received, sent, receive, send, group=self._handle)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Everybody's flat tensor, one after the other."""
        with self._heartbeat.explaining():
            getattr(dist, ALL_GATHER)(received, sent, group=self._handle)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Contiguous tensors of any device from the rank `source`, in place for the others.

        Those of the group's device go all at once, others one after the other through it: nccl has communicators of
        each device, and ranks that used different ones would wait for each other for ever.
        """
        parts = [
            part for tensor in tensors for part in tensor.view(-1).split(self.bucket_bytes // tensor.element_size())
        ]
        under_way = []
        with self._heartbeat.explaining():
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
        """Free what the communication holds; all ranks of the group do so together."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self._heartbeat.explaining():
            dist.destroy_process_group(self._handle)


class DistributedWorkers:
    """The workers of a trainer on several ranks.

    Args:
        owners: the rank of each worker.
        rank: this one.
        group: of all owners.
        in_order: sum in worker order whatever the encoding.
    """

    def __init__(self, owners: tuple[int, ...], rank: int, group: Group, in_order: bool):
        self._owners, self._rank, self._group, self._in_order = owners, rank, group, in_order
        self.local_workers = tuple(worker for worker, owner in enumerate(owners) if owner == rank)

    def mean(
        self,
        tensors: Given,
        like: torch.Tensor,
        encoding: Encoding = PLAIN,
        weights: Sequence[float] | None = None,
    ) -> tuple[torch.Tensor, int]:
        shares = _shares(weights, len(self._owners))
        if self._in_order or not encoding.lossless:
            return self._mean_in_order(tensors, like, encoding, shares)
        return self._mean_of_sums(tensors, like, encoding, shares)

    def _mean_of_sums(
        self, tensors: Given, like: torch.Tensor, encoding: Encoding, shares: list[float]
    ) -> tuple[torch.Tensor, int]:
        """One all-reduce; two elements more are the shares in it, and the workers."""
        joined = torch.zeros(like.numel() + 2, dtype=like.dtype, device=like.device)
        total = joined[:-2]
        for worker, rows in tensors:
            if rows is not None:
                _add(total, rows, encoding, shares[worker])
                joined[-2] += shares[worker]
                joined[-1] += 1.0
            del rows
        self._group.all_reduce(joined)
        present, count = joined[-2:].tolist()
        return _divided(total, present), round(count)

    def _mean_in_order(
        self, tensors: Given, like: torch.Tensor, encoding: Encoding, shares: list[float]
    ) -> tuple[torch.Tensor, int]:
        """Every rank sums a part of each bucket over all workers, and sends that part of the mean to all."""
        group, device, dtype, back = self._group, self._group.device, like.dtype, encoding.way_back
        ranks, local, row_bytes = len(group.ranks), len(self.local_workers), encoding.row_bytes(dtype)
        rows = encoding.rows(like.numel())
        buckets = max(1, -(-rows * row_bytes // group.bucket_bytes))
        chunk = -(-rows // (buckets * ranks))  # rows of a rank's part of a bucket
        elements, part_bytes = chunk * encoding.block, chunk * row_bytes
        # Messages come by rank, and within that by worker.
        order = [worker for rank in group.ranks for worker, owner in enumerate(self._owners) if owner == rank]
        # Until the last worker is done, the others' tensors wait: one of them each, in its encoding.
        waiting = torch.empty(
            local if encoding.lossless else 0, rows * row_bytes, dtype=torch.uint8, device=like.device
        )
        message = torch.zeros(ranks, local, part_bytes, dtype=torch.uint8, device=device)
        received = torch.empty(len(order), part_bytes, dtype=torch.uint8, device=device)
        total = torch.empty(elements, dtype=dtype, device=device)
        gathered = torch.empty(ranks * back.rows(elements), back.row_bytes(dtype), dtype=torch.uint8, device=device)
        mean = torch.empty_like(like)
        present, held = torch.zeros(len(order), dtype=torch.int32, device=device), []
        for index, (worker, tensor) in enumerate(tensors):
            if tensor is not None:
                tensor = tensor.flatten()
                held.append((index, waiting[index].copy_(tensor) if encoding.lossless else tensor))
                present[worker] = 1
        group.all_reduce(present)
        takes_part = present.tolist()
        divisor = math.fsum(share for share, takes in zip(shares, takes_part, strict=True) if takes)
        arrived = [
            (worker, index)
            for worker, index in sorted(zip(order, range(len(order)), strict=True))
            if takes_part[worker]
        ]
        sent_bytes = [local * part_bytes] * ranks
        received_bytes = [self._owners.count(rank) * part_bytes for rank in group.ranks]
        for bucket in range(buckets):
            for index, tensor in held:
                own = tensor[bucket * ranks * part_bytes : (bucket + 1) * ranks * part_bytes]
                whole = len(own) // part_bytes  # the last bucket may be smaller; what is left in its parts is nobody's
                message[:whole, index] = own[: whole * part_bytes].view(whole, part_bytes)
                message[whole : whole + 1, index, : len(own) % part_bytes] = own[whole * part_bytes :]
            group.all_to_all(received.view(-1), message.view(-1), received_bytes, sent_bytes)
            total.zero_()
            for worker, index in arrived:
                _add(total, received[index].view(chunk, row_bytes), encoding, shares[worker])
            group.all_gather(gathered, back.encode(_divided(total, divisor)).contiguous())
            first = bucket * ranks * elements
            decoded = back.decode(gathered, dtype)[: max(0, like.numel() - first)]
            mean[first : first + len(decoded)] = decoded
        return mean, sum(takes_part)

    def deliver(
        self, messages: Given, size: int, takers: Sequence[Collection[int]], device: torch.device
    ) -> dict[int, torch.Tensor]:
        group, me, owners = self._group, self._rank, self._owners
        own = {worker: message.to(group.device, copy=True) for worker, message in messages if message is not None}
        present = torch.zeros(len(owners), dtype=torch.int32, device=group.device)
        present[list(own)] = 1
        group.all_reduce(present)
        here = present.tolist()
        # A message goes once to every rank that has a taker of it.
        to = [
            {owners[taker] for taker in takers[worker]} - {owner} if here[worker] else set()
            for worker, owner in enumerate(owners)
        ]
        sent = [[own[worker] for worker in own if rank in to[worker]] for rank in group.ranks]
        coming = [[w for w, owner in enumerate(owners) if owner == rank and me in to[w]] for rank in group.ranks]
        empty = torch.empty(0, dtype=torch.uint8, device=group.device)
        senders = [worker for part in coming for worker in part]
        received = torch.empty(len(senders), size, dtype=torch.uint8, device=group.device)
        group.all_to_all(
            received.view(-1),
            torch.cat([empty, *(message for part in sent for message in part)]),
            [len(part) * size for part in coming],
            [len(part) * size for part in sent],
        )
        arrived = own | dict(zip(senders, received, strict=True))
        return {worker: arrived[worker].to(device) for worker in sorted(arrived)}
