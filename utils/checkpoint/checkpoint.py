"""Checkpoints of a run: `checkpoints/round_NNNNN/`, complete or not there.

A checkpoint holds safetensors files named by trainer and worker, never by process, `config.yaml`, and `state.json` with
all plain values and the size of every file. Reading one executes nothing.

All processes save together, and training waits: each writes the tensors that it holds into a hidden folder; when all
have said that they succeeded, the main process writes `state.json` and renames the folder. Until then the checkpoints
before are all there is, whoever dies when. With several machines the run folder must be on a file system that they
share.

On resume every process opens the files that it needs. They are mapped into memory, so a device that needs a part of a
tensor reads that part alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from utils.checkpoint.parts import FilePart, whole, write_parts

if TYPE_CHECKING:
    from utils.distributed.processes import Processes

STATE = "state.json"
_NAME = re.compile(r"round_(\d{5,})")


class CheckpointError(ValueError):
    """A checkpoint is damaged, or there is none."""


def check_state(state: Mapping, data: object, parameters: int) -> None:
    """Check that the state of a cluster belongs to this data and model.

    Args:
        state: that of the cluster in the checkpoint.
        data: the fingerprint of this run's data.
        parameters: elements of this run's model.

    Raises:
        CheckpointError: it does not.
    """
    if state["data"] != data:
        raise CheckpointError("the checkpoint is of a run on other data: dataset, tokenizer or documents differ")
    if state["parameters"] != parameters:
        raise CheckpointError(
            f"the checkpoint is of a model with {state['parameters']:,} parameters, this one has {parameters:,}"
        )


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: where it is.
        state: its plain values.
        problems: messages about newer checkpoints, which are damaged and were passed over.
    """

    folder: Path
    state: Mapping[str, Any]
    problems: tuple[str, ...] = ()

    def read(self, group: str, name: str) -> torch.Tensor:
        """One tensor, on the CPU, mapped from its file.

        Raises:
            CheckpointError: it is not in the checkpoint.
        """
        try:
            with safe_open(self.folder / f"{group}.safetensors", framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: cannot read {name} of {group}: {error}") from None


def finished_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def _read_state(path: Path) -> dict:
    """The plain values of a checkpoint; CheckpointError where a file is missing or not whole."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        for name, size in content["files"].items():
            found = (path / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{path}: {name} has {found:,} bytes instead of {size:,}")
        return content["state"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from None


def _newest(folder: Path) -> Checkpoint | str:
    """The newest complete checkpoint, or why there is none. Damaged ones that are newer are renamed."""
    damaged: dict[Path, str] = {}
    for path in reversed(finished_checkpoints(folder)):
        try:
            state = _read_state(path)
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        for other in damaged:  # lest they count among the newest that are kept
            with contextlib.suppress(OSError):
                other.rename(other.with_name(f"damaged_{other.name}"))
        return Checkpoint(path, state, tuple(damaged.values()))
    return f"no checkpoint in {folder}: {'; '.join(damaged.values()) or 'none was written'}"


def newest_checkpoint(folder: Path, processes: Processes) -> Checkpoint:
    """The newest complete checkpoint in a folder, as the main process finds it; all processes call this.

    Raises:
        CheckpointError: there is none; in all processes.
    """
    found = processes.gather(_newest(folder) if processes.is_main else None)[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    return found


class Checkpoints:
    """Writes the checkpoints of one run; all processes call `save` at the same places of the run.

    A checkpoint that cannot be written is a warning, and the checkpoints before stay as they are.

    Args:
        folder: where they are; made when it is needed.
        keep: number of the newest checkpoints that stay.
        minutes: after which one is due; None: never.
        processes: those of the run.
        warn: takes a warning, in the main process.
    """

    def __init__(
        self, folder: Path, keep: int, minutes: float | None, processes: Processes, warn: Callable[[str], None]
    ):
        self._folder = folder
        self._keep = keep
        self._minutes = minutes
        self._processes = processes
        self._warn = warn
        self._last = time.monotonic()
        if processes.is_main:  # what a killed run has left
            for path in folder.glob(".round_*"):
                shutil.rmtree(path, ignore_errors=True)
        processes.gather(None)  # before anybody writes there again

    @property
    def due(self) -> bool:
        """Whether so many minutes have passed by this process's clock."""
        return self._minutes is not None and time.monotonic() - self._last >= 60 * self._minutes

    def save(
        self,
        number: int,
        groups: Mapping[str, Mapping[str, torch.Tensor | FilePart]],
        state: Mapping[str, Any],
        text_files: Mapping[str, str],
    ) -> None:
        """Write a checkpoint.

        Args:
            number: the round after which it is written.
            groups: the tensors that this process holds, or its parts of them, by file and name.
            state: JSON values; those of the main process count.
            text_files: more files to keep with it, likewise.
        """
        temporary = self._folder / f".round_{number:05d}.new"
        own_problem = _problem_of(lambda: self._write_tensors(temporary, groups))
        problems = sorted({problem for problem in self._processes.gather(own_problem) if problem is not None})
        if self._processes.is_main:
            problem = "; ".join(problems) or _problem_of(lambda: self._complete(temporary, state, text_files))
            if problem:
                shutil.rmtree(temporary, ignore_errors=True)
                self._warn(
                    f"no checkpoint after round {number}: {problem}; training goes on, and the checkpoints before are "
                    f"as they were"
                )
        self._last = time.monotonic()

    def _write_tensors(self, temporary: Path, groups: Mapping[str, Mapping[str, torch.Tensor | FilePart]]) -> None:
        temporary.mkdir(parents=True, exist_ok=True)
        for group, tensors in groups.items():
            parts = {name: each if isinstance(each, FilePart) else whole(each) for name, each in tensors.items()}
            write_parts(temporary / f"{group}.safetensors", parts, with_header=self._processes.shard_group.index == 0)

    def _complete(self, temporary: Path, state: Mapping[str, Any], text_files: Mapping[str, str]) -> None:
        for name, text in text_files.items():
            _write_text(temporary / name, text)
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        _write_text(temporary / STATE, json.dumps({"files": files, "state": state}, indent=1) + "\n")
        _sync_folder(temporary)
        final = temporary.with_name(temporary.stem[1:])
        old = temporary.with_suffix(".old")
        if final.exists():  # the same round again, after a resume from an earlier one
            os.replace(final, old)
        os.replace(temporary, final)
        shutil.rmtree(old, ignore_errors=True)
        _sync_folder(self._folder)
        # Newer checkpoints are of a future that a resume has passed over: they do not count, and stay.
        finished = finished_checkpoints(self._folder)
        for path in finished[: finished.index(final) + 1][: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)


def _problem_of(work: Callable[[], None]) -> str | None:
    """What keeps this process from its part of a checkpoint: a disk, or memory for a copy on the host."""
    try:
        work()
    except OSError as error:
        return error.strerror or str(error)
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
