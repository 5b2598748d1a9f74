"""Encodings of the tensors that workers send: exact, rounded to bfloat16, or integers of few bits with scales.

An encoding turns a flat tensor into rows of bytes with a fixed number of elements each. Any range of rows can be sent,
decoded and summed by itself, so the result does not depend on how the sum was distributed. The mean is sent back in
`way_back`. Rounding each element relative to itself (bfloat16) loses nothing for good. With one scale per block, a
small element would lose what it had accumulated in its error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from algorithms.registry import Registry

_RANGE = 6.0  # standard deviations that the bins of `quantise` cover; the outer bins take what is beyond


@dataclass(frozen=True)
class Encoding:
    """A way to write a flat tensor as bytes.

    Attributes:
        block: elements of a row; the last row is filled up with zeros.
        scale_bytes: bytes of a row besides its elements.
        lossless: decoding gives the same bits.
        keeps_error: a worker keeps what the encoding lost and adds it next round (error feedback, arXiv 1901.09847).
    """

    block: int = 16
    scale_bytes: int = 0
    lossless: bool = False
    keeps_error: bool = False

    @property
    def way_back(self) -> "Encoding":
        """The encoding of the mean that is sent back; its block divides this one's."""
        return self

    def element_bits(self, dtype: torch.dtype) -> int:
        """Return the bits of an element of a tensor of this type; those of a row are whole bytes."""
        raise NotImplementedError

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor [n] as bytes [ceil(n / block), row_bytes]; a view of it if lossless."""
        raise NotImplementedError

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements [rows * block] of such rows in this type."""
        raise NotImplementedError

    def rows(self, elements: int) -> int:
        return -(-elements // self.block)

    def row_bytes(self, dtype: torch.dtype) -> int:
        return self.block * self.element_bits(dtype) // 8 + self.scale_bytes

    def sent_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Return the bytes of n elements on the way to the sum, without the zeros that fill the last row."""
        return -(-elements * self.element_bits(dtype) // 8) + self.rows(elements) * self.scale_bytes

    def reduction_bytes(self, workers: int, elements: int, dtype: torch.dtype) -> int:
        """Return the bytes that all M workers together send for a mean over them, as in a ring all-reduce.

        Each sends every other one its part of the sum, and receives the parts of the mean: M - 1 times the size, there
        and back.
        """
        return (workers - 1) * (self.sent_bytes(elements, dtype) + self.way_back.sent_bytes(elements, dtype))

    def round_trip(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor as it arrives."""
        if self.lossless:
            return tensor
        return self.decode(self.encode(tensor), tensor.dtype)[: tensor.numel()]

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        missing = -tensor.numel() % self.block
        return (F.pad(tensor, (0, missing)) if missing else tensor).view(-1, self.block)


@dataclass(frozen=True)
class Floats(Encoding):
    """Elements rounded to a floating-point type; None: the tensor's own bytes, without loss."""

    dtype: torch.dtype | None = None

    def element_bits(self, dtype: torch.dtype) -> int:
        return 8 * (self.dtype or dtype).itemsize

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._blocks(tensor.to(self.dtype or tensor.dtype)).view(torch.uint8)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows.contiguous().view(self.dtype or dtype).flatten().to(dtype)


@dataclass(frozen=True)
class Integers(Encoding):
    """Integers from -levels to levels with a float32 scale for each block, levels = 2^(bits - 1) - 1.

    A block is sent as round(x / scale), scale = max |x| / levels, in two's complement, followed by the scale. A block
    of zeros stays zero; of a block with a NaN or an infinity no element arrives as a finite number. The mean is sent
    back in bfloat16.

    bits: of an element, 2 to 8.
    """

    block: int = 256
    scale_bytes: int = 4
    keeps_error: bool = True
    bits: int = 8

    def __post_init__(self):
        if not 2 <= self.bits <= 8:
            raise ValueError(f"integers must have from 2 to 8 bits, got {self.bits}")

    @property
    def way_back(self) -> Encoding:
        return BFLOAT16

    def element_bits(self, dtype: torch.dtype) -> int:
        return self.bits

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        levels = 2 ** (self.bits - 1) - 1
        blocks = self._blocks(tensor)
        scales = (blocks.abs().amax(1, keepdim=True) / float(levels)).float()
        divisors = scales.where(scales > 0.0, 1.0)  # a block of zeros stays zero
        quotients = blocks.div(divisors).round_().clamp_(-levels, levels)
        codes = quotients.to(torch.int8).view(torch.uint8).bitwise_and_(2**self.bits - 1)
        return torch.cat([pack(codes, self.bits), scales.view(torch.uint8)], 1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = rows[:, -4:].contiguous().view(torch.float32)
        values = unpack(rows[:, :-4], self.bits, self.block).view(torch.int8)
        # Shifted to the highest bits and back: the sign fills the bits that were not sent.
        values.bitwise_left_shift_(8 - self.bits).bitwise_right_shift_(8 - self.bits)
        return values.to(torch.float32).mul_(scales).flatten().to(dtype)


PLAIN = Floats(lossless=True)
BFLOAT16 = Floats(dtype=torch.bfloat16)
INT8 = Integers(bits=8)
INT4 = Integers(bits=4)

# The values of communication_dtype; float32 stands for the model's own type.
COMMUNICATION_DTYPES: Registry[Encoding] = Registry(
    {"float32": PLAIN, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
)


# Codes of a few bits: bins with a table of their means, and codes packed into bytes


def quantise(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of values [..., n] to bins with a table (SparseLoCo, arXiv 2508.15706, as its published code).

    code = round((x - mean) / scale) + 2**bits / 2, clamped, with scale = 6 * standard deviation / 2**bits. A bin stands
    for the mean of its members, which is sent along, so that the sum of all values arrives. If a value is not finite,
    none arrives as a number.

    Returns:
        Codes, uint8 [..., n], and tables [..., 2**bits] in the values' type; a bin without members has 0.
    """
    bins = 2**bits
    shift = values.mean(-1, keepdim=True)
    centred = values - shift
    deviation = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) / math.sqrt(max(values.shape[-1] - 1, 1))
    scale = torch.where(deviation > 0.0, _RANGE * deviation / bins, 1.0)  # equal values are one bin
    codes = (centred / scale).round_().add_(bins // 2).clamp_(0, bins - 1).nan_to_num_(0.0).to(torch.uint8)
    rows = shift.numel()
    places = (codes.view(rows, -1) + bins * torch.arange(rows, device=values.device)[:, None]).flatten()
    # In double precision: a bin may have millions of members.
    sums = torch.zeros(rows * bins, dtype=torch.float64, device=values.device)
    sums.index_add_(0, places, centred.double().flatten())
    members = torch.bincount(places, minlength=rows * bins)
    means = (sums / members).view(*values.shape[:-1], bins) + shift.double()
    return codes, torch.where(members.view_as(means) > 0, means, 0.0).to(values.dtype)


def dequantise(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the values [..., n] that these codes stand for."""
    return table.gather(-1, codes.long())


# A number of bits is a sum of widths of which a byte holds several: 5 = 4 + 1, 12 = 8 + 4. The lowest bits of all codes
# come first, in the widest width, then the next ones: so packing is arithmetic on bytes.


def _widths(bits: int) -> list[int]:
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def packed_bytes(n: int, bits: int) -> int:
    """Return the bytes of n packed codes: n * bits / 8 if n is a multiple of 8, else at most a byte per width more."""
    return sum(-(-n * width // 8) for width in _widths(bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes below 2**bits, integers [..., n], into bytes [..., packed_bytes(n, bits)]; bits from 1 to 31."""
    parts = []
    shift = 0
    for width in _widths(bits):
        count = 8 // width
        part = (codes if width == bits else (codes >> shift) & (2**width - 1)).to(torch.uint8)
        part = F.pad(part, (0, -part.shape[-1] % count)).unflatten(-1, (-1, count))
        packed = part[..., 0]
        for place in range(1, count):
            packed = packed | (part[..., place] << place * width)
        parts.append(packed)
        shift += width
    return torch.cat(parts, -1)


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Return the codes [..., n] that `pack` made these bytes of: uint8 up to 8 bits, else int32."""
    widths = _widths(bits)
    dtype = torch.uint8 if bits <= 8 else torch.int32
    codes = torch.zeros(*packed.shape[:-1], n, dtype=dtype, device=packed.device)
    shift = 0
    for width, part in zip(widths, packed.split([packed_bytes(n, width) for width in widths], -1), strict=True):
        places = torch.empty(*part.shape, 8 // width, dtype=torch.uint8, device=packed.device)
        for place in range(8 // width):
            torch.bitwise_and(part >> place * width, 2**width - 1, out=places[..., place])
        codes |= places.flatten(-2)[..., :n].to(dtype) << shift
        shift += width
    return codes


# Messages of the largest elements of rows, and the mean of the messages of several workers


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
