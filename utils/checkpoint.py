"""Checkpoints of a run: `checkpoints/round_NNNNN/`, whole or not there, and known to be undamaged when they are read.

A checkpoint is state.json, safetensors files named by trainer and worker (never by process), and SHA256SUMS over all of
them, which `sha256sum -c` checks as well. Every process writes the tensors that it has, so that with several machines
the run folder must be on a file system that they share. All files go to a temporary folder, are synced to the disk, and
the folder is then renamed.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_NAME = re.compile(r"round_(\d{5,})")
_STATE, _SUMS = "state.json", "SHA256SUMS"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or there is none."""


class _Gathers(Protocol):
    is_main: bool

    def gather(self, value: Any) -> list:
        """Everybody's value, everywhere."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. state: its plain values. problems: of newer ones, which were passed over."""

    folder: Path
    state: Mapping[str, Any]
    problems: tuple[str, ...] = ()

    def read(self, group: str, name: str) -> torch.Tensor:
        """One tensor, on the CPU.

        Raises:
            CheckpointError: it is not in the checkpoint.
        """
        try:
            with safe_open(self.folder / f"{group}.safetensors", framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: cannot read {name} of {group}: {error}") from None


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write a safetensors file to the disk; its checksum, of what is really there."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    _sync(path)
    return _sum(path)


def _write_text(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    _sync(path)
    return _sum(path)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        lines = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
        expected = dict(reversed(line.split("  ", 1)) for line in lines)
        if _STATE not in expected:
            return f"{_SUMS} does not name {_STATE}"
        for name, digest in expected.items():
            if _sum(folder / name) != digest:
                return f"{name} is damaged (its checksum is not that in {_SUMS})"
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())
    return None


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when it is needed.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self._keep = folder, keep

    def _all(self) -> list[Path]:
        """The finished ones, oldest first."""
        if not self.folder.is_dir():
            return []
        named = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(named)]

    def save(
        self,
        processes: _Gathers,
        number: int,
        groups: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        text_files: Mapping[str, str],
    ) -> Path:
        """Write a checkpoint, together with all processes.

        Args:
            number: of the round after which it is written.
            groups: the tensors that this process is to write, a file each.
            state: JSON values, those of the main process count.
            text_files: more files to keep with it, likewise.

        Raises:
            OSError: in every process, if one cannot write; what was written before is as it was.
        """
        final = self.folder / f"round_{number:05d}"
        temporary = self.folder / f".{final.name}.new"
        try:
            self._together(processes, lambda: self._begin(temporary) if processes.is_main else None)
            parts = self._together(
                processes,
                lambda: {
                    f"{name}.safetensors": _write_tensors(temporary / f"{name}.safetensors", tensors)
                    for name, tensors in groups.items()
                },
            )
            sums = {name: digest for part in parts for name, digest in part.items()}
            self._together(
                processes,
                lambda: self._complete(temporary, final, sums, state, text_files) if processes.is_main else None,
            )
        except OSError:
            if processes.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    @staticmethod
    def _together(processes: _Gathers, work) -> list:
        """What each process's part of the work gives; OSError everywhere if one fails."""
        result, failure = None, None
        try:
            result = work()
        except (OSError, SafetensorError) as error:
            failure = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        answers = processes.gather((result, failure))
        failures = sorted({failure for _, failure in answers if failure is not None})
        if failures:
            raise OSError("; ".join(failures))
        return [result for result, _ in answers]

    def _begin(self, temporary: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(".round_*"):
            shutil.rmtree(left_over)
        temporary.mkdir()

    def _complete(
        self, temporary: Path, final: Path, sums: dict[str, str], state: Mapping, text_files: Mapping[str, str]
    ) -> None:
        for name, text in text_files.items():
            sums[name] = _write_text(temporary / name, text)
        sums[_STATE] = _write_text(temporary / _STATE, json.dumps(state, indent=1) + "\n")
        _write_text(temporary / _SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        _sync(temporary)
        if final.exists():
            # The same round again, after a resume from an earlier one.
            old = temporary.with_suffix(".old")
            os.replace(final, old)
            os.replace(temporary, final)
            shutil.rmtree(old)
        else:
            os.replace(temporary, final)
        _sync(self.folder)
        for path in self._all()[: -self._keep]:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)

    def newest(self) -> Checkpoint:
        """The newest whole checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        problems = []
        for path in reversed(self._all()):
            problem = damage(path)
            if problem is None:
                state = json.loads((path / _STATE).read_text(encoding="utf-8"))
                return Checkpoint(path, state, tuple(problems))
            problems.append(f"{path}: {problem}")
        found = "; ".join(problems) if problems else "none was written"
        raise CheckpointError(f"no checkpoint in {self.folder}: {found}")
