"""A safetensors file that several processes write together, each its own elements.

The devices of a node share every model, so that none of them has a whole tensor. The place of every element follows
from the shapes alone: each process writes its elements there, without gathering a tensor or waiting for others. The
library's own writer needs whole tensors in one process; the file is the same to the byte.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.progress import progress_bar

# The format's names, the widest types first: in this order every tensor is aligned.
_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FilePart:
    """The elements of one tensor that this process writes. Elements that no process writes are zero.

    pieces: pairs of a position in the whole flat tensor and the slice of `values` that begins there.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, slice], ...]


def whole(tensor: torch.Tensor) -> FilePart:
    return FilePart(tensor, tuple(tensor.shape), ((0, slice(None)),))


def write_parts(path: Path, parts: Mapping[str, FilePart], with_header: bool = True) -> None:
    """Write this process's parts of a safetensors file to the disk, by the name of the tensor.

    Names and shapes are the same in all these processes; exactly one of them writes the header.
    """
    header, starts, size = _layout(parts)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    own_bytes = sum(part.values.nbytes for part in parts.values())
    bar = progress_bar(desc=f"writing {path}", total=own_bytes, unit="B", unit_scale=True, leave=False, delay=1)
    try:
        os.ftruncate(handle, size)  # no change where it has this size already
        if with_header:
            _write_at(handle, header, 0)
        for name, start in starts.items():
            values = parts[name].values.detach().flatten()
            for position, own in parts[name].pieces:
                piece = values[own].cpu().contiguous().view(torch.uint8)
                _write_at(handle, memoryview(piece.numpy()), start + position * values.element_size())
                bar.update(piece.nbytes)
        os.fsync(handle)
    finally:
        bar.close()
        os.close(handle)


def _layout(parts: Mapping[str, FilePart]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of the file, the position of each tensor, and the size of the file."""
    order = list(_TYPES)
    entries = {}
    end = 0
    for name in sorted(parts, key=lambda name: (order.index(parts[name].values.dtype), name)):
        dtype = parts[name].values.dtype
        start = end
        end = start + math.prod(parts[name].shape) * dtype.itemsize
        entries[name] = {"dtype": _TYPES[dtype], "shape": list(parts[name].shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}
    return header, starts, len(header) + end


def _write_at(handle: int, data: memoryview | bytes, position: int) -> None:
    while len(data):
        written = os.pwrite(handle, data, position)
        data = data[written:]
        position += written
