"""How a tensor travels between workers: as it is, rounded to bfloat16, or as integers of few bits, a scale per block.

An encoding turns a flat tensor into rows of bytes, a fixed number of elements in each, so that any range of rows can be
sent, decoded and summed by itself: what comes out does not depend on how the sum was shared out. The mean travels
back in `way_back`. Rounding it relative to each element (bfloat16) loses nothing for good; one scale for a block, as
on the way there, would lose what an element small beside its block has saved up in its error.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from algorithms.registry import Registry
from algorithms.synchronisation.encodings.quantisation import LARGEST_LEVELS, adaptive_levels, pack, unpack


@dataclass(frozen=True)
class Encoding:
    """One way to write a flat tensor as bytes.

    Attributes:
        block: elements in a row; the last row is filled up with zeros.
        element_bits: from the tensor's type to the bits of an element; those of a row are whole bytes.
        encode: from a tensor [n] to bytes [ceil(n / block), row_bytes]; of a lossless encoding they may be a view.
        decode: from such rows, and the type wanted, to elements [rows * block].
        scale_bytes: of a row, beside its elements.
        lossless: whether decoding gives the same bits.
        keeps_error: whether a worker keeps what the encoding lost and adds it next round (error feedback,
            arXiv 1901.09847).
        to_return: how the mean of what was sent travels back, where that is another way.
        adapted: from the first loss of the run and the loss now to the encoding of a round, where it depends on them;
            it keeps errors, and travels back, like this one.
    """

    block: int
    element_bits: Callable[[torch.dtype], int]
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    scale_bytes: int = 0
    lossless: bool = False
    keeps_error: bool = False
    to_return: "Encoding | None" = None
    adapted: "Callable[[float, float], Encoding] | None" = None

    @property
    def way_back(self) -> "Encoding":
        """How the mean of what was sent travels back; its block divides this one's."""
        return self.to_return or self

    @property
    def adapts(self) -> bool:
        """Whether rounds have encodings of their own."""
        return self.adapted is not None

    def encoding_for(self, first_loss: float, loss: float) -> "Encoding":
        """The encoding of a round; losses: the first of the run, and that of now, the same in all processes."""
        return self.adapted(first_loss, loss) if self.adapted else self

    def rows(self, elements: int) -> int:
        """Rows of so many elements."""
        return -(-elements // self.block)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row."""
        return self.block * self.element_bits(dtype) // 8 + self.scale_bytes

    def sent_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes of so many elements on the way to the sum, without the filling of the last row."""
        return -(-elements * self.element_bits(dtype) // 8) + self.rows(elements) * self.scale_bytes

    def reduction_bytes(self, workers: int, elements: int, dtype: torch.dtype) -> int:
        """Bytes that all workers together send for a mean over them, shared out among them.

        Each sends every other one its part of the sum, and gets the parts of the mean: M - 1 times the size, there
        and back. For float32 that is a ring all-reduce.
        """
        return (workers - 1) * (self.sent_bytes(elements, dtype) + self.way_back.sent_bytes(elements, dtype))

    def round_trip(self, tensor: torch.Tensor) -> torch.Tensor:
        """What arrives of a flat tensor."""
        if self.lossless:
            return tensor
        return self.decode(self.encode(tensor), tensor.dtype)[: tensor.numel()]


def _blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    missing = -tensor.numel() % block
    return (F.pad(tensor, (0, missing)) if missing else tensor).view(-1, block)


def _encode_plain(tensor: torch.Tensor) -> torch.Tensor:
    return _blocks(tensor, 16).view(torch.uint8)


def _decode_plain(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.contiguous().view(dtype).flatten()


def _encode_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return _blocks(tensor.bfloat16(), 16).view(torch.uint8)


def _decode_bfloat16(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.contiguous().view(torch.bfloat16).flatten().to(dtype)


PLAIN = Encoding(16, lambda dtype: 8 * dtype.itemsize, _encode_plain, _decode_plain, lossless=True)
BFLOAT16 = Encoding(16, lambda dtype: 16, _encode_bfloat16, _decode_bfloat16)


# A scale of 4 bytes for as many values: 1.6% more bytes with 8 bits, 3.1% with 4. Blocks of 128 lower the error of 4
# bits on pseudo-gradients of a small Llama by 5 to 10% for 3% more, which is what so many more bits per value would do.
_BLOCK = 256


@functools.cache
def integers_with_levels(levels: int) -> Encoding:
    """Integers from -levels to levels, in as few bits as hold them, with a scale in float32 for every 256.

    Each block is sent as round(x / scale), scale = max |x| / levels, in two's complement, and the scale after it. A
    block of zeros stays one; of one with a NaN or an infinity no element arrives as a finite number.

    Args:
        levels: 1 to 127.
    """
    if not 1 <= levels <= LARGEST_LEVELS:
        raise ValueError(f"levels must be from 1 to {LARGEST_LEVELS}, got {levels}")
    bits = (2 * levels).bit_length()
    width = _BLOCK * bits // 8

    def encode(tensor: torch.Tensor) -> torch.Tensor:
        blocks = _blocks(tensor, _BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / float(levels)).float()
        rows = torch.empty(len(blocks), width + 4, dtype=torch.uint8, device=tensor.device)
        smallest = torch.finfo(torch.float32).tiny  # a block of zeros stays one
        quotients = blocks.div(scales.clamp_min(smallest)).round_().clamp_(-levels, levels)
        codes = quotients.to(torch.int8).view(torch.uint8).bitwise_and_(2**bits - 1)
        rows[:, :width] = pack(codes, bits)
        rows[:, width:] = scales.view(torch.uint8)
        return rows

    def decode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = rows[:, width:].contiguous().view(torch.float32)
        values = unpack(rows[:, :width], bits, _BLOCK).view(torch.int8)
        # To the highest bits and back again: the sign fills those that were not sent.
        values.bitwise_left_shift_(8 - bits).bitwise_right_shift_(8 - bits)
        return values.to(torch.float32).mul_(scales).flatten().to(dtype)

    return Encoding(_BLOCK, lambda dtype: bits, encode, decode, scale_bytes=4, keeps_error=True, to_return=BFLOAT16)


def integers(bits: int) -> Encoding:
    """Integers of 2 to 8 bits with a scale in float32 for every 256, as many on each side of zero."""
    if not 2 <= bits <= 8:
        raise ValueError(f"integers must have from 2 to 8 bits, got {bits}")
    return integers_with_levels(2 ** (bits - 1) - 1)


INT8, INT4 = integers(8), integers(4)

_FIRST_LEVELS = 7
ADAPTIVE = dataclasses.replace(
    integers_with_levels(_FIRST_LEVELS),
    adapted=lambda first_loss, loss: integers_with_levels(adaptive_levels(first_loss, loss, _FIRST_LEVELS)),
)

# How the config names them; float32 stands for the model's own type.
COMMUNICATION_DTYPES = Registry(
    {"float32": PLAIN, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4, "adaptive": ADAPTIVE}
)
