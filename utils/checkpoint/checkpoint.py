"""Checkpoints of a run: `checkpoints/round_NNNNN/`, complete or not there.

A checkpoint holds safetensors files named by trainer and worker, never by process; `config.yaml`; and `state.json` with
all plain values and the checksum of every file. All processes save together, each its own tensors, into a hidden
folder. When all have succeeded, the main process writes `state.json` and renames the folder, so that a process may die
at any time. Reading executes no code, and maps files into memory: a device that needs a part of a tensor reads that
part alone. With several machines the run folder must be on a file system that they share.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from utils.config.schema import ConfigError
from utils.progress import progress_bar

if TYPE_CHECKING:
    from utils.distributed.processes import Processes

STATE = "state.json"
_BLOCK_BYTES = 1 << 20
KEPT = 2  # newest checkpoints that are not removed
_NAME = re.compile(r"round_(\d{5,})")


class CheckpointError(ConfigError):
    """A checkpoint is damaged, missing, or of another run."""


# Reading


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. problems: messages about newer checkpoints, which are damaged."""

    folder: Path
    state: Mapping[str, Any]
    problems: tuple[str, ...] = ()

    def read(self, group: str, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, memory-mapped from its file; CheckpointError: it is not in the checkpoint."""
        try:
            with safe_open(self.folder / f"{group}.safetensors", framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: cannot read {name} of {group}: {error}") from None

    @contextlib.contextmanager
    def of_this_version(self) -> Iterator[None]:
        """Raise a CheckpointError in place of the errors that a state from another version causes."""
        try:
            yield
        except ConfigError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.folder}: not a checkpoint of this version: {reason}") from error


def check_state(state: Mapping, data: object, parameters: int) -> None:
    """Check that the state of a cluster belongs to this data and model; CheckpointError: it does not."""
    if state["data"] != data:
        raise CheckpointError(
            "the checkpoint is of a run on other data: dataset, tokenizer, documents or shares differ (with "
            "data_split_over workers, data_shares: null makes as many shares as there are nodes)"
        )
    if state["parameters"] != parameters:
        raise CheckpointError(
            f"the checkpoint is of a model with {state['parameters']:,} parameters, this one has {parameters:,}"
        )


def newest_checkpoint(folder: Path, processes: Processes) -> Checkpoint:
    """Return the newest complete checkpoint in a folder, as the main process finds it, or raise a CheckpointError."""
    found = processes.gather(_newest(folder) if processes.is_main else None)[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    return found


def _newest(folder: Path) -> Checkpoint | str:
    """Return the newest complete checkpoint, or why there is none. Newer ones, which are damaged, are renamed."""
    damaged: dict[Path, str] = {}
    for path in reversed(_finished_checkpoints(folder)):
        try:
            state = _read_state(path)
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        for other in damaged:  # so that they do not count as the newest that are kept
            with contextlib.suppress(OSError):
                other.rename(other.with_name(f"damaged_{other.name}"))
        return Checkpoint(path, state, tuple(damaged.values()))
    none = "none was written; remove the run folder and start the run again, or start it with --resume auto"
    return f"no checkpoint in {folder}: {'; '.join(damaged.values()) or none}"


def _finished_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def _read_state(path: Path) -> dict:
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        if content.pop("crc32") != _text_crc32(content):
            raise CheckpointError(f"{path}: {STATE} has changed since it was written")
        for name, written in content["files"].items():
            if _crc32(path / name) != written:
                raise CheckpointError(f"{path}: {name} has changed since it was written")
        return content["state"]
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {STATE}: {error}") from None


def _crc32(path: Path) -> int:
    checksum = 0
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        progress_bar(desc=f"checking {path}", total=size, unit="B", unit_scale=True, leave=False, delay=1) as bar,
    ):
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            bar.update(len(block))
    return checksum


def _text_crc32(content: Mapping) -> int:
    return zlib.crc32(json.dumps(content).encode())


# Writing


class Checkpoints:
    """Writes the checkpoints of one run; all processes call `save` at the same places of the run.

    A checkpoint that cannot be written is a warning. Earlier checkpoints stay as they are.

    Args:
        minutes: age of the last checkpoint at which the next one is due; None: never.
        warn: takes a warning, in the main process.
    """

    def __init__(self, folder: Path, minutes: float | None, processes: Processes, warn: Callable[[str], None]):
        self._folder = folder
        self._minutes = minutes
        self._processes = processes
        self._warn = warn
        self._saved_at = time.monotonic()
        if processes.is_main:  # remains of a run that was killed
            for path in folder.glob(".round_*"):
                shutil.rmtree(path, ignore_errors=True)
        processes.gather(None)  # no process writes before that is done

    @property
    def due(self) -> bool:
        """Return whether the last checkpoint is old enough, by the clock of this process."""
        return self._minutes is not None and time.monotonic() - self._saved_at >= 60 * self._minutes

    def save(
        self,
        number: int,
        groups: Mapping[str, Mapping[str, torch.Tensor | FilePart]],
        state: Mapping[str, Any],
        text_files: Mapping[str, str],
    ) -> None:
        """Write a checkpoint: this process's tensors by file and name, and the main process's JSON values."""
        temporary = self._folder / f".round_{number:05d}.new"
        problem, _ = self._together(lambda: self._write_tensors(temporary, groups))
        checksums = []
        if not problem:  # all files are complete
            problem, checksums = self._together(lambda: self._checksums(temporary, groups))
        if self._processes.is_main:
            if not problem:
                problem, _ = _attempt(lambda: self._complete(temporary, checksums, state, text_files))
            if problem:
                shutil.rmtree(temporary, ignore_errors=True)
                self._warn(f"no checkpoint after round {number}: {problem}; training continues")
        self._saved_at = time.monotonic()

    def _write_tensors(self, temporary: Path, groups: Mapping[str, Mapping[str, torch.Tensor | FilePart]]) -> None:
        temporary.mkdir(parents=True, exist_ok=True)
        for group, tensors in groups.items():
            parts = {name: each if isinstance(each, FilePart) else whole(each) for name, each in tensors.items()}
            write_parts(temporary / f"{group}.safetensors", parts, with_header=self._processes.shard_group.index == 0)

    def _checksums(self, temporary: Path, groups: Iterable[str]) -> dict[str, int]:
        """Return the checksums of the files to which this process wrote the headers."""
        if self._processes.shard_group.index:
            return {}
        return {f"{group}.safetensors": _crc32(temporary / f"{group}.safetensors") for group in groups}

    def _together(self, work: Callable[[], Any]) -> tuple[str, list]:
        """Let all processes work; return their problems, and their results by rank."""
        problems, results = zip(*self._processes.gather(_attempt(work)), strict=True)
        return "; ".join(sorted({problem for problem in problems if problem})), list(results)

    def _complete(self, temporary: Path, checksums: Sequence[Mapping], state: Mapping, text_files: Mapping) -> None:
        for name, text in text_files.items():
            _write_text(temporary / name, text)
        files = {name: checksum for own in checksums for name, checksum in own.items()}
        files |= {name: _crc32(temporary / name) for name in text_files}
        content = json.loads(json.dumps({"files": files, "state": state}))
        content["crc32"] = _text_crc32(content)
        _write_text(temporary / STATE, json.dumps(content, indent=1) + "\n")
        _sync_folder(temporary)
        final = temporary.with_name(temporary.stem[1:])
        old = temporary.with_suffix(".old")
        if final.exists():  # the same round again, after a resume from an earlier one
            os.replace(final, old)
        os.replace(temporary, final)
        shutil.rmtree(old, ignore_errors=True)
        _sync_folder(self._folder)
        # Checkpoints of later rounds, before which a resume began, neither count nor are removed.
        finished = _finished_checkpoints(self._folder)
        for path in finished[: finished.index(final) + 1][:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)


def _attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """Return why this process cannot write (the disk, or memory for a copy on the host), or "" and the result."""
    try:
        return "", work()
    except OSError as error:
        return error.strerror or str(error), None
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", None


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# A safetensors file that several processes write together, each its own elements
#
# The devices of a node share every model, so that none of them has a whole tensor. The place of every element follows
# from the shapes alone: each process writes its elements there, without gathering a tensor or waiting for others. The
# library's own writer needs whole tensors in one process; the file is the same to the byte.


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
