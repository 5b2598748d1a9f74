"""Values as codes of a few bits: bins with a table of their means, and codes packed into bytes."""

import math

import torch
from torch.nn import functional as F

_RANGE = 6.0  # standard deviations that the bins of `quantise` cover; the outer bins take what is beyond


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
