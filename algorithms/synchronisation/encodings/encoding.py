"""Encodings of the tensors that workers send: exact, rounded to bfloat16, or integers of few bits with scales.

An encoding turns a flat tensor into rows of bytes with a fixed number of elements each. Any range of rows can be sent,
decoded and summed by itself, so the result does not depend on how the sum was distributed. The mean is sent back in
`way_back`. Rounding each element relative to itself (bfloat16) loses nothing for good. With one scale per block, a
small element would lose what it had accumulated in its error.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from algorithms.registry import Registry
from algorithms.synchronisation.encodings.quantisation import pack, unpack


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
        smallest = torch.finfo(torch.float32).tiny  # a block of zeros stays zero
        quotients = blocks.div(scales.clamp_min(smallest)).round_().clamp_(-levels, levels)
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
