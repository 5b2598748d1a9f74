"""Files of a checkpoint that the processes of an island write together, each the numbers that it has.

They are the same files as those of one process: where everything is follows from the shapes, so that nobody waits for
another to write, and nobody has more than its own in memory. A checksum goes over all of a file, which is read for it
when everybody has written.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.checkpoint.files import blocks_of_bytes, safetensors_places


@dataclass(frozen=True)
class FilePart:
    """What this process writes of a tensor.

    values: numbers that it has. shape: of the whole tensor. pieces: from where on in the whole tensor, which is flat
    there, slices of the flat values are. What nobody writes is zero.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, slice], ...]


def _put(handle: int, data: memoryview | bytes, at: int) -> None:
    """Write all of it at a place of a file."""
    while len(data):
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written


def write_parts(path: Path, parts: Mapping[str, FilePart], is_first: bool) -> None:
    """Write to the disk what this process has of a safetensors file; is_first: and the file's beginning.

    Everybody gives the file its size, which changes nothing where it has it.
    """
    of = {name: (part.values.dtype, part.shape) for name, part in parts.items()}
    beginning, starts, size = safetensors_places(of)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(handle, size)
        if is_first:
            _put(handle, beginning, 0)
        for name, start in starts.items():
            values = parts[name].values.flatten()
            for place, own in parts[name].pieces:
                at = start + place * values.element_size()
                for block in blocks_of_bytes(values[own]):
                    _put(handle, block, at)
                    at += len(block)
        os.fsync(handle)
    finally:
        os.close(handle)
