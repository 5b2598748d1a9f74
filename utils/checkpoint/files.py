"""The files of a checkpoint: safetensors and texts, hashed while they are written, and checked against `SHA256SUMS`."""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SUMS = "SHA256SUMS"
_NAME = re.compile(r"round_(\d{5,})")
# What is hashed and written at a time; both let other threads run meanwhile.
_BLOCK_BYTES = 1 << 22
# Files of a process that are hashed side by side.
_READERS = 4
# In the order of the tensors in a file: the wider ones first, so that all are aligned.
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


def safetensors_places(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int], int]:
    """Where everything is in a safetensors file of tensors with these types and shapes.

    The format is that of https://github.com/huggingface/safetensors.

    Returns:
        The file's beginning, which is the length of the header and the header as JSON; where each tensor's bytes begin,
        in their order; the file's size.
    """
    order = list(_TYPES)
    header, start = {}, 0
    for name in sorted(tensors, key=lambda name: (order.index(tensors[name][0]), name)):
        dtype, shape = tensors[name]
        end = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    beginning = len(encoded).to_bytes(8, "little") + encoded
    starts = {name: len(beginning) + entry["data_offsets"][0] for name, entry in header.items()}
    return beginning, starts, len(beginning) + start


def blocks_of_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor on the CPU, which are not copied where it is contiguous."""
    data = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
    for begin in range(0, len(data), _BLOCK_BYTES):
        yield data[begin : begin + _BLOCK_BYTES]


def _safetensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview | bytes]:
    """A safetensors file in blocks; nothing is copied.

    The library's own writer leaves no way to hash what it writes but to read the file again.
    """
    beginning, starts, _ = safetensors_places({name: (each.dtype, each.shape) for name, each in tensors.items()})
    yield beginning
    for name in starts:
        yield from blocks_of_bytes(tensors[name])


def _write(path: Path, blocks: Iterable[memoryview | bytes]) -> str:
    """Write a file to the disk; its checksum, of what was handed over."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write a safetensors file of tensors on the CPU; its checksum."""
    return _write(path, _safetensors(tensors))


def write_text(path: Path, text: str) -> str:
    """Write a text; its checksum."""
    return _write(path, [text.encode("utf-8")])


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write down the checksums of all files, as `sha256sum -c` reads them."""
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_sums(folder: Path) -> dict[str, str]:
    """The checksums of a checkpoint's files by name, the largest files first.

    Raises:
        OSError: a file is not there.
        ValueError: the list of them is damaged.
    """
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    sums = dict(reversed(line.split("  ", 1)) for line in lines)
    return dict(sorted(sums.items(), key=lambda entry: -(folder / entry[0]).stat().st_size))


def checksum(path: Path) -> str:
    """That of what a file has."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _damage(path: Path, expected: str) -> str | None:
    try:
        found = checksum(path)
    except OSError as error:
        return " ".join(str(error).split())
    return None if found == expected else f"{path.name} is damaged (its checksum is not that in {SUMS})"


def damage(folder: Path, sums: Mapping[str, str]) -> str | None:
    """What is wrong with these files of a checkpoint, or None; several are read side by side."""
    with ThreadPoolExecutor(_READERS) as readers:
        problems = readers.map(lambda entry: _damage(folder / entry[0], entry[1]), sums.items())
        return next((problem for problem in problems if problem is not None), None)


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name under which it is none, and nothing is lost; its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    name = f"damaged_{path.name}"
    taken = {entry.name for entry in path.parent.iterdir()}
    names = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(2)))
    free = next(each for each in names if each not in taken)
    return path.rename(path.with_name(free))


def finished_checkpoints(folder: Path) -> list[Path]:
    """Those in a folder, oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]
