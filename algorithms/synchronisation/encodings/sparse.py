"""Messages of the largest elements of rows, and the mean of the messages of several workers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.encodings.encoding import dequantise, pack, packed_bytes, quantise, unpack

PLAIN_BITS = 32  # of a value that is sent as a floating-point number, whatever its type

# Positions [..., k], distinct within a row, and values [..., k].
Sparse = tuple[torch.Tensor, torch.Tensor]


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of each row's largest magnitudes, int64 [..., count], ascending; the first of equal ones.

    torch.topk promises nothing about equal ones: rows in which they compete for the last place are sorted.
    """
    magnitudes = values.abs()
    greatest, places = magnitudes.topk(count)
    tied = (magnitudes >= greatest[..., -1:]).sum(-1) > count
    places[tied] = magnitudes[tied].sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return places.sort(-1).values


def add_at(rows: torch.Tensor, sparse: Sparse, factor: float = 1.0) -> torch.Tensor:
    """Add factor * values to rows [..., n], in place.

    A call writes every element at most once, so that a sum of several calls has their order, on GPUs as well.
    """
    places, values = sparse
    return rows.scatter_(-1, places, rows.gather(-1, places).add_(values, alpha=factor))


@dataclass(frozen=True)
class Chunks:
    """Equal chunks of a row, one after the other. kept: largest elements of each chunk that are sent."""

    number: int
    length: int
    kept: int

    @property
    def elements(self) -> int:
        return self.number * self.length

    @property
    def position_bits(self) -> int:
        return max(1, (self.length - 1).bit_length())


@dataclass(frozen=True)
class TopK:
    """Messages of the largest elements of rows, each cut into chunks.

    Attributes:
        chunks: of a row, one kind after the other.
        bits: of a value; PLAIN_BITS: exact, else the bin of the row's values, with a table (`quantise`).
    """

    rows: int
    chunks: tuple[Chunks, ...]
    bits: int = PLAIN_BITS

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """Return the bytes of a message's parts: values, or tables and bins; then positions in each kind of chunk."""
        kept = self.rows * sum(each.number * each.kept for each in self.chunks)
        if self.bits == PLAIN_BITS:
            values = [kept * dtype.itemsize]
        else:
            values = [self.rows * 2**self.bits * dtype.itemsize, packed_bytes(kept, self.bits)]
        positions = [packed_bytes(self.rows * each.number * each.kept, each.position_bits) for each in self.chunks]
        return values + positions

    def bytes(self, dtype: torch.dtype) -> int:
        return sum(self.sizes(dtype))

    def encode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the message, uint8 [bytes], of rows [rows, n], whose values are sent in this type."""
        parts = rows.split([each.elements for each in self.chunks], 1)
        positions = [
            largest(part.unflatten(1, (each.number, each.length)), each.kept)
            for part, each in zip(parts, self.chunks, strict=True)
        ]
        values = rows.gather(1, self._in_rows(positions))
        packed = [pack(own.flatten(), each.position_bits) for own, each in zip(positions, self.chunks, strict=True)]
        if self.bits == PLAIN_BITS:
            return torch.cat([values.to(dtype).flatten().view(torch.uint8), *packed])
        bins, tables = quantise(values, self.bits)
        return torch.cat([tables.to(dtype).flatten().view(torch.uint8), pack(bins.flatten(), self.bits), *packed])

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> Sparse:
        """Return the positions in rows and the values of a message, whose values were sent in this type."""
        first, *rest = message.split(self.sizes(dtype))
        values = first.clone().view(dtype).view(self.rows, -1)  # a view needs the alignment of its own storage
        positions = []
        for packed, each in zip(rest[-len(self.chunks) :], self.chunks, strict=True):
            own = unpack(packed, each.position_bits, self.rows * each.number * each.kept)
            positions.append(own.long().view(self.rows, each.number, each.kept))
        places = self._in_rows(positions)
        if self.bits == PLAIN_BITS:
            return places, values
        return places, dequantise(unpack(rest[0], self.bits, places.numel()).view_as(places), values)

    def mean(
        self,
        messages: Sequence[torch.Tensor],
        weights: Sequence[float],
        sent_as: torch.dtype,
        dtype: torch.dtype,
        over_senders: bool,
    ) -> torch.Tensor:
        """Return the weighted mean of at least one worker's message, [rows, n]; workers are summed in this order.

        over_senders: at each position over those who sent it, and 0 if none did; else over all these workers, of whom
            the others sent 0.
        """
        shares = [weight / max(weights) for weight in weights]  # equal weights leave no rounding error
        shape = (self.rows, sum(each.elements for each in self.chunks))
        total = torch.zeros(shape, dtype=dtype, device=messages[0].device)
        senders = torch.zeros_like(total) if over_senders else None
        for message, share in zip(messages, shares, strict=True):
            places, values = self.decode(message, sent_as)
            add_at(total, (places, values), share)
            if over_senders:
                add_at(senders, (places, torch.ones_like(values)), share)
        if over_senders:
            return total.mul_(senders.add_(senders == 0.0).reciprocal_())
        return total.mul_(1.0 / math.fsum(shares))

    def _in_rows(self, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Turn positions in chunks, [rows, number, kept] for each kind, into positions in rows, [rows, k]."""
        found = []
        start = 0
        for own, each in zip(positions, self.chunks, strict=True):
            starts = torch.arange(start, start + each.elements, each.length, device=own.device)
            found.append((own + starts[:, None]).flatten(1))
            start += each.elements
        return torch.cat(found, 1)
