"""Writing one checkpoint in the background: a thread in every process, which meet on the notice board alone.

The main process makes a temporary folder; then all write what they have and say so; the main process adds the texts and
the checksums and renames the folder. Until that last step the checkpoints before are all there is, whoever dies when.

The processes of an island write its files together (`utils.checkpoint.parts`), wait for each other, and read a share of
the files each, for their checksums.
"""

import contextlib
import functools
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from utils.checkpoint.files import checksum, finished_checkpoints, sync_folder, write_sums, write_tensors, write_text
from utils.checkpoint.parts import FilePart, write_parts
from utils.distributed.processes import Processes

_POLL_SECONDS = 0.05
# Files that a process writes side by side.
_WRITERS = 2
Groups = Mapping[str, Mapping[str, torch.Tensor | FilePart]]


@dataclass(frozen=True)
class Snapshot:
    """What this process writes of the state after a round, in host memory.

    topic: under which those who write it speak to each other. number: of the round. groups: tensors by file and name;
    of an island's process its part of each. texts: by file, in the main process. problem: why there is nothing to
    write.
    """

    topic: str
    number: int
    groups: Groups
    texts: Mapping[str, str]
    problem: str | None = None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the host; from a GPU through memory that stays in place, in the background."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _copied(tensor: torch.Tensor | FilePart) -> torch.Tensor | FilePart:
    return replace(tensor, values=_copy(tensor.values)) if isinstance(tensor, FilePart) else _copy(tensor)


def copied(topic: str, number: int, groups: Groups, texts: Mapping[str, str]) -> Snapshot:
    """A snapshot of what may change from now on; it needs as much host memory as the tensors."""
    try:
        copies = {group: {name: _copied(tensor) for name, tensor in own.items()} for group, own in groups.items()}
        given = (tensor for own in groups.values() for tensor in own.values())
        for device in {tensor.values.device if isinstance(tensor, FilePart) else tensor.device for tensor in given}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except (MemoryError, RuntimeError) as error:
        # PyTorch has no type for memory of the host; whatever else it was, training will say so.
        return Snapshot(topic, number, {}, texts, f"no memory for a copy of the state: {error}")
    return Snapshot(topic, number, copies, texts)


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"


class Writing:
    """A checkpoint that is being written, from its making.

    Attributes:
        number: the round after which it is.

    Args:
        snapshot: what to write; let go of when it is written.
        folder: where the checkpoints are.
        keep: how many of the newest stay.
        processes: those of the run, all of which make one of these.
    """

    def __init__(self, snapshot: Snapshot, folder: Path, keep: int, processes: Processes):
        self.number = snapshot.number
        self._folder, self._keep = folder, keep
        self._final = folder / f"round_{snapshot.number:05d}"
        self._temporary = folder / f".{self._final.name}.new"
        self._notices, self._is_main = processes.notices, processes.is_main
        self._topic, self._island = snapshot.topic, processes.island
        self._own_failure: str | None = None
        self._problem: str | None = None
        self._written, self._summed, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._snapshot: Snapshot | None = snapshot
        self._thread = threading.Thread(target=self._run, name=self._topic, daemon=True)
        self._thread.start()

    def own_failure(self) -> str | None:
        """What went wrong with this process's part, when it is written; nobody of the island is waited for."""
        self._written.wait()
        return self._own_failure

    def failure_of_sums(self) -> str | None:
        """What went wrong with its share of the island's checksums besides, when all have written their parts."""
        self._summed.wait()
        return self._own_failure

    def outcome(self, failures: Sequence[str | None]) -> str | None:
        """When it is over: in the main process, why there is no checkpoint, or None.

        failures: of all processes' parts, also of those that could not say so on the board.
        """
        found = sorted({failure for failure in failures if failure is not None})
        if found:
            self._given_up.set()
        self._thread.join()
        return "; ".join(found) or self._problem

    def settle(self, seconds: float | None) -> None:
        """Wait until it is over, for others' parts no longer than so many seconds."""
        self._thread.join(seconds)
        self._given_up.set()
        self._thread.join()

    def _run(self) -> None:
        texts, files, sums = self._snapshot.texts, [self._path(group) for group in self._snapshot.groups], {}
        with self._noting_failure():
            sums = self._write_part(self._snapshot)
        self._snapshot = None
        if self._island.size > 1:
            with self._noting_failure():
                self._notices.post_own(f"{self._topic} rows", self._own_failure or "")
            self._written.set()
            with self._noting_failure():
                sums = {} if self._own_failure else self._island_sums(files)
        with self._noting_failure():
            self._notices.post_own(f"{self._topic} part", json.dumps([sums, self._own_failure]))
        self._written.set()
        self._summed.set()
        try:
            if self._is_main:
                self._complete(texts)
                self._notices.post(f"{self._topic} over", "")
            else:
                self._await_notice("over")
        except Exception as error:
            self._problem = _said(error)
            if self._is_main:
                shutil.rmtree(self._temporary, ignore_errors=True)
                with contextlib.suppress(ConnectionError):
                    self._notices.post(f"{self._topic} over", "")

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is: nobody sees what a thread raises
            self._own_failure = self._own_failure or _said(error)

    def _await_notice(self, what: str) -> str:
        while (text := self._notices.read(f"{self._topic} {what}")) is None:
            self._pause()
        return text

    def _pause(self) -> None:
        """Raise OSError where there is nothing to wait for any more."""
        if self._given_up.wait(_POLL_SECONDS):
            raise OSError("a process could not write its part")

    def _write_part(self, snapshot: Snapshot) -> dict[str, str]:
        """The checksums of the files that this process has written, by name."""
        if self._is_main:
            self._begin()
        elif problem := self._await_notice("begun"):
            raise OSError(problem)
        if snapshot.problem:
            raise OSError(snapshot.problem)
        write = write_tensors
        if self._island.size > 1:
            write = functools.partial(write_parts, is_first=self._island.index == 0)
        paths = [self._path(group) for group in snapshot.groups]
        with ThreadPoolExecutor(_WRITERS) as writers:  # while one waits for the disk, another one hashes
            digests = writers.map(write, paths, snapshot.groups.values())
            return {path.name: digest for path, digest in zip(paths, digests, strict=True)}

    def _path(self, group: str) -> Path:
        return self._temporary / f"{group}.safetensors"

    def _island_sums(self, files: Sequence[Path]) -> dict[str, str]:
        """The checksums of this process's share of the files of its island, when all of it have written their parts.

        Raises:
            OSError: one could not.
        """
        first = self._notices.rank - self._island.index
        said = [self._await_notice(f"rows/{rank}") for rank in range(first, first + self._island.size)]
        if failures := sorted({failure for failure in said if failure}):
            raise OSError("; ".join(failures))
        own = sorted(files)[self._island.index :: self._island.size]
        with ThreadPoolExecutor(_WRITERS) as readers:
            return {path.name: digest for path, digest in zip(own, readers.map(checksum, own), strict=True)}

    def _begin(self) -> None:
        problem = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left_over in self._folder.glob(".round_*"):
                shutil.rmtree(left_over)
            self._temporary.mkdir()
        except OSError as error:
            problem = _said(error)
            raise
        finally:
            self._notices.post(f"{self._topic} begun", problem)

    def _parts(self) -> dict[str, str]:
        """The checksums of all processes' files, when all have written them.

        Raises:
            OSError: one could not.
        """
        while True:
            parts = [json.loads(part) for part in self._notices.read_all(f"{self._topic} part") if part is not None]
            if len(parts) == self._notices.count:  # nobody writes any more
                break
            self._pause()
        if failures := sorted({failure for _, failure in parts if failure is not None}):
            raise OSError("; ".join(failures))
        return {name: digest for sums, _ in parts for name, digest in sums.items()}

    def _complete(self, texts: Mapping[str, str]) -> None:
        sums = self._parts()
        sums |= {name: write_text(self._temporary / name, text) for name, text in texts.items()}
        write_sums(self._temporary, sums)
        sync_folder(self._temporary)
        if self._final.exists():
            # The same round again, after a resume from an earlier one.
            old = self._temporary.with_suffix(".old")
            os.replace(self._final, old)
            os.replace(self._temporary, self._final)
            shutil.rmtree(old)
        else:
            os.replace(self._temporary, self._final)
        sync_folder(self._folder)
        # Newer ones are of a future that a resume has passed over: they do not count, and are not ours to delete.
        finished = finished_checkpoints(self._folder)
        for path in finished[: finished.index(self._final) + 1][: -self._keep]:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
