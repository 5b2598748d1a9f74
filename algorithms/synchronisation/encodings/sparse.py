"""The largest numbers of rows: which they are, how they travel, and the mean of what several workers sent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.encodings.quantisation import dequantise, pack, packed_bytes, quantise, unpack

PLAIN_BITS = 32  # of a value that travels as a floating-point number, whatever its type
Sent = tuple[torch.Tensor, torch.Tensor]  # places [..., k], different ones in a row, and values [..., k]


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Places of each row's largest magnitudes, int64 [..., count], ascending; of equal ones the first are taken.

    torch.topk promises nothing about equal ones: rows where they compete for the last place are sorted.
    """
    magnitudes = values.abs()
    greatest, places = magnitudes.topk(count)
    tied = (magnitudes >= greatest[..., -1:]).sum(-1) > count
    places[tied] = magnitudes[tied].sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return places.sort(-1).values


def add_at(rows: torch.Tensor, sent: Sent, factor: float = 1.0) -> torch.Tensor:
    """Add factor * values to rows [..., n], in place.

    A call writes every number once, so that a sum of several has their order, on GPUs as well.
    """
    places, values = sent
    return rows.scatter_(-1, places, rows.gather(-1, places).add_(values, alpha=factor))


@dataclass(frozen=True)
class TopK:
    """Messages of the largest numbers of so many rows, each cut into chunks.

    Attributes:
        rows: how many.
        pieces: of a row, one after another: (chunks, length of each, largest numbers that are sent of each).
        bits: of a value; PLAIN_BITS: as it is, else as the bin of the row's values, with a table (`quantise`).
    """

    rows: int
    pieces: tuple[tuple[int, int, int], ...]
    bits: int = PLAIN_BITS

    def sizes(self, sent_as: torch.dtype) -> list[int]:
        """Bytes of the parts of a message: values, or tables and bins; then the places in each piece's chunks."""
        kept = self.rows * sum(chunks * count for chunks, _, count in self.pieces)
        values = [kept * sent_as.itemsize]
        if self.bits != PLAIN_BITS:
            values = [self.rows * 2**self.bits * sent_as.itemsize, packed_bytes(kept, self.bits)]
        places = [packed_bytes(self.rows * chunks * count, _bits(length)) for chunks, length, count in self.pieces]
        return values + places

    def encode(self, values: torch.Tensor, sent_as: torch.dtype) -> torch.Tensor:
        """The message of these rows [rows, n], whose numbers travel in this type."""
        split = values.split([chunks * length for chunks, length, _ in self.pieces], 1)
        chosen = [
            largest(part.unflatten(1, (chunks, length)), count)
            for part, (chunks, length, count) in zip(split, self.pieces, strict=True)
        ]
        numbers = values.gather(1, self._in_row(chosen))
        places = [pack(own.flatten(), _bits(length)) for own, (_, length, _) in zip(chosen, self.pieces, strict=True)]
        if self.bits == PLAIN_BITS:
            return torch.cat([numbers.to(sent_as).flatten().view(torch.uint8), *places])
        bins, tables = quantise(numbers, self.bits)
        return torch.cat([tables.to(sent_as).flatten().view(torch.uint8), pack(bins.flatten(), self.bits), *places])

    def decode(self, message: torch.Tensor, sent_as: torch.dtype) -> Sent:
        """What arrives of a message, whose numbers travelled in this type."""
        first, *others = message.split(self.sizes(sent_as))
        numbers = first.clone().view(sent_as).view(self.rows, -1)  # only where it begins by itself can it be viewed so
        chosen = []
        for packed, (chunks, length, count) in zip(others[-len(self.pieces) :], self.pieces, strict=True):
            places = unpack(packed, _bits(length), self.rows * chunks * count)
            chosen.append(places.long().view(self.rows, chunks, count))
        places = self._in_row(chosen)
        if self.bits == PLAIN_BITS:
            return places, numbers
        return places, dequantise(unpack(others[0], self.bits, places.numel()).view_as(places), numbers)

    def mean(
        self,
        messages: Sequence[torch.Tensor],
        weights: Sequence[float],
        sent_as: torch.dtype,
        dtype: torch.dtype,
        over_senders: bool,
    ) -> torch.Tensor:
        """The weighted mean of at least one worker's message, as rows [rows, n]; workers are summed in this order.

        over_senders: at each place over those who sent it, and 0 where nobody did; else over all these workers, of whom
            the others sent 0.
        """
        shares = [weight / max(weights) for weight in weights]  # equal ones leave no trace
        shape = self.rows, sum(chunks * length for chunks, length, _ in self.pieces)
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

    def _in_row(self, chosen: Sequence[torch.Tensor]) -> torch.Tensor:
        """Places in chunks, [rows, chunks, count] of each piece, as places in rows, [rows, k]."""
        found, begin = [], 0
        for places, (chunks, length, _) in zip(chosen, self.pieces, strict=True):
            starts = torch.arange(begin, begin + chunks * length, length, device=places.device)
            found.append((places + starts[:, None]).flatten(1))
            begin += chunks * length
        return torch.cat(found, 1)


def _bits(length: int) -> int:
    """Of a place in a chunk of this length."""
    return max(1, (length - 1).bit_length())
