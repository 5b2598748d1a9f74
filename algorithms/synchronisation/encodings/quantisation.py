"""Numbers as codes of a few bits: bins with a table of their means, levels that follow the loss, codes as bytes."""

import math

import torch
from torch.nn import functional as F

LARGEST_LEVELS = 127  # on each side of zero: what 8 bits hold
_RANGE = 6.0  # standard deviations that the bins of `quantise` cover; the outer ones take what is beyond


def quantise(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each value's bin, and what a row's bins stand for (SparseLoCo, arXiv 2508.15706, as its published code has it).

    code = round((x - mean) / scale) + 2**bits / 2, clamped, with scale = 6 * standard deviation / 2**bits. A bin stands
    for the mean of its members, which is sent along, so that the sum of all values arrives. Of values that are not all
    finite nothing arrives as a number.

    Args:
        values: [..., n], each row by itself.

    Returns:
        Codes, uint8 [..., n], and tables [..., 2**bits] in the values' type; a bin without members has 0, which nobody
        reads.
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
    """What arrives of the values of these codes, [..., n]."""
    return table.gather(-1, codes.long())


def adaptive_levels(first_loss: float, loss: float, first_levels: int) -> int:
    """Levels on each side of zero that a falling loss asks for (AdaQuantFL, arXiv 2102.04487).

    s_k = s_0 * sqrt(F(w_0) / F(w_k)), here rounded up, at least 1 and at most 127. A loss that is not finite says
    nothing: the levels are the first ones.
    """
    if not (math.isfinite(first_loss) and math.isfinite(loss)):
        return first_levels
    if loss <= 0.0:
        return LARGEST_LEVELS
    levels = first_levels * math.sqrt(max(first_loss, 0.0) / loss)
    return max(1, math.ceil(min(levels, LARGEST_LEVELS)))


# A number of bits is a sum of widths of which a byte holds several whole ones: 5 = 4 + 1, 12 = 8 + 4. The lowest bits
# of all codes come first, in the widest of them, then the next ones: so all of it is arithmetic of bytes.


def _widths(bits: int) -> list[int]:
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of so many packed codes: n * bits / 8 where n is a multiple of 8, and at most a byte per width more."""
    return sum(-(-n * width // 8) for width in _widths(bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes below 2**bits, integers [..., n], as bytes [..., packed_bytes(n, bits)]; bits from 1 to 31."""
    parts, shift = [], 0
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
    """The codes, [..., n], of which `pack` made these bytes: uint8 up to 8 bits, int32 beyond."""
    widths, shift, kind = _widths(bits), 0, torch.uint8 if bits <= 8 else torch.int32
    codes = torch.zeros(*packed.shape[:-1], n, dtype=kind, device=packed.device)
    for width, part in zip(widths, packed.split([packed_bytes(n, width) for width in widths], -1), strict=True):
        places = torch.empty(*part.shape, 8 // width, dtype=torch.uint8, device=packed.device)
        for place in range(8 // width):
            torch.bitwise_and(part >> place * width, 2**width - 1, out=places[..., place])
        codes |= places.flatten(-2)[..., :n].to(kind) << shift
        shift += width
    return codes
