"""Checkpoints of a run: `checkpoints/round_NNNNN/`, whole or not there, and known to be undamaged when they are read.

A checkpoint is state.json, safetensors files named by trainer and worker (never by process), and SHA256SUMS over all of
them, which `sha256sum -c` checks as well. Every process writes the tensors that it has, or its parts of them where an
island shares them, so that with several machines the run folder must be on a file system that they share.

Training goes on while a checkpoint is written: it waits for a copy of the state in host memory, which a thread of each
process writes (`utils.checkpoint.writer`) and which is freed then. The same on the way back: every process verifies a
share of the files.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from utils.checkpoint.files import damage, finished_checkpoints, read_sums, set_aside
from utils.checkpoint.writer import Groups, Snapshot, Writing, copied
from utils.distributed.processes import Processes

STATE = "state.json"
_SECONDS_FOR_THE_LOST = 5.0


class CheckpointError(ValueError):
    """A checkpoint is damaged, or there is none."""


def check_state(state: Mapping, data: object, parameters: int) -> None:
    """Raise CheckpointError where a cluster's state is of another model or of other data; data: their fingerprint."""
    if state["data"] != data:
        raise CheckpointError("the checkpoint is of a run on other data: dataset, tokenizer or documents differ")
    if state["parameters"] != parameters:
        raise CheckpointError(
            f"the checkpoint is of a model with {state['parameters']:,} parameters, this one has {parameters:,}"
        )


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


def newest_checkpoint(folder: Path, processes: Processes) -> Checkpoint:
    """The newest whole checkpoint in a folder; all processes call this, and verify a share of the files each.

    Damaged ones that are passed over get another name, lest they count among the newest that are kept.

    Raises:
        CheckpointError: there is none; in all processes.
    """
    damaged: dict[Path, str] = {}
    for path in processes.gather(list(reversed(finished_checkpoints(folder))))[0]:
        checkpoint, problem = _verified(path, processes)
        if checkpoint is not None:
            problems = _passed_over(damaged) if processes.is_main else ()
            return Checkpoint(path, checkpoint, processes.gather(problems)[0])
        damaged[path] = problem
    found = "; ".join(f"{path}: {problem}" for path, problem in damaged.items()) or "none was written"
    raise CheckpointError(f"no checkpoint in {folder}: {found}")


def _passed_over(damaged: Mapping[Path, str]) -> tuple[str, ...]:
    """Set damaged checkpoints aside; what to say of each."""
    said = []
    for path, problem in damaged.items():
        try:
            kept = f"kept as {set_aside(path).name}"
        except OSError as error:
            kept = f"and it cannot be renamed: {error.strerror}"
        said.append(f"{path}: {problem}; {kept}")
    return tuple(said)


def _verified(path: Path, processes: Processes) -> tuple[dict | None, str | None]:
    """The state in a checkpoint, or what is wrong with it; what the main process reads of it holds for all."""
    sums, state, problem = {}, None, None
    if processes.is_main:
        try:
            sums = read_sums(path)
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            problem = None if STATE in sums else f"the list of files does not name {STATE}"
        except (OSError, ValueError) as error:
            problem = " ".join(str(error).split())
    sums, state, problem = processes.gather((sums, state, problem))[0]
    if problem is None:
        found = damage(path, {name: sums[name] for name in processes.share(list(sums))})
        problem = next((each for each in processes.gather(found) if each is not None), None)
    return (None, problem) if problem else (state, None)


class Checkpoints:
    """Writes the checkpoints of one run, one at a time, while it goes on.

    All processes call `save`, `hold` and `finish` at the same places of the run. What cannot be written is a warning.

    Args:
        folder: where they are; made when it is needed.
        keep: how many of the newest stay.
        minutes: after which one is due; None: never.
        processes: those of the run.
        warn: what to do with a warning, in the main process.
    """

    def __init__(
        self, folder: Path, keep: int, minutes: float | None, processes: Processes, warn: Callable[[str], None]
    ):
        self._folder, self._keep, self._minutes = folder, keep, minutes
        self._processes, self._warn = processes, warn
        # Of what the thread that hears of signals changes as well.
        self._lock = threading.Lock()
        self._held: Snapshot | None = None
        self._writing: Writing | None = None
        # What there has been since the last `finish`: the same in all processes, while `_writing` may not be.
        self._may_be_written, self._is_written = False, False
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether a state should be saved again, by this process's clock."""
        return self._minutes is not None and time.monotonic() - self._last >= 60 * self._minutes

    def save(
        self,
        number: int,
        groups: Groups,
        state: Mapping[str, Any],
        text_files: Mapping[str, str],
    ) -> None:
        """Begin to write a checkpoint; all of it has been copied when this returns.

        Args:
            number: of the round after which it is written.
            groups: the tensors that this process is to write, a file each, or on islands its parts of them.
            state: JSON values, those of the main process count.
            text_files: more files to keep with it, likewise.
        """
        self.hold(number, groups, state, text_files)
        self._last = time.monotonic()
        self._is_written = True
        self.write_held(self.held)

    def hold(
        self,
        number: int,
        groups: Groups,
        state: Mapping[str, Any],
        text_files: Mapping[str, str],
    ) -> None:
        """As `save`, but only keep the copy, in place of the last, for `write_held`.

        Where that came for the last copy while the round ended, the new one is written in its place.
        """
        came_late = self.finish()
        texts = {**text_files, STATE: json.dumps(state, indent=1) + "\n"} if self._processes.is_main else {}
        topic = self._processes.notices.new_topic("checkpoint")
        snapshot = copied(topic, number, groups, texts)
        with self._lock:
            self._held = snapshot
        self._may_be_written = True
        if came_late:
            self._is_written = True
            self.write_held(topic)

    @property
    def held(self) -> str:
        """A name for what is held, the same in all processes; empty: nothing is."""
        held = self._held
        return held.topic if held is not None else ""

    def write_held(self, name: str) -> None:
        """Begin to write what is held, if it has this name; from any thread, and without the others' being here.

        All processes must do so; none waits for another but in the thread that writes.
        """
        with self._lock:
            if self._held is not None and self._held.topic == name:
                self._writing = Writing(self._held, self._folder, self._keep, self._processes)
                self._held = None

    def finish(self) -> bool:
        """Wait, with all processes, until the checkpoint that is being written is there, or warn that it is not.

        What is held is let go of. Some processes may have begun to write it while others came here first: then nobody
        does, because what those wait for on the board does not come.

        Returns:
            Whether `write_held` began with a copy that was only kept, in any process.
        """
        if not self._may_be_written:
            return False
        with self._lock:  # from here on nothing begins
            self._held, writing = None, self._writing
        begun = [True] if self._is_written else self._processes.gather(writing is not None)
        if all(begun):
            self._conclude(writing)
        elif any(begun):
            if writing is not None:
                writing.settle(0.0)
            self._processes.gather(None)  # nobody writes into the folder any more
        came_late = any(begun) and not self._is_written
        self._writing, self._may_be_written, self._is_written = None, False, False
        return came_late

    def _conclude(self, writing: Writing) -> None:
        failures = self._processes.gather(writing.own_failure())
        if self._processes.island.size > 1 and not any(failures):  # otherwise some may wait for others in vain
            failures = self._processes.gather(writing.failure_of_sums())
        problem = writing.outcome(failures)
        if problem is not None and self._processes.is_main:
            self._warn(
                f"no checkpoint after round {writing.number}: {problem}; training goes on, and what was written before "
                f"is as it was"
            )

    def settle(self, somebody_is_lost: bool = False) -> None:
        """Let the checkpoint that is being written be completed, without the others' being here.

        Nothing is being written any more when this returns: a thread that waits for the board must not be there when
        the interpreter ends.

        somebody_is_lost: wait for parts that others have written and not said so yet, and no longer.
        """
        with self._lock:
            self._held = None
        if self._writing is not None:
            self._writing.settle(_SECONDS_FOR_THE_LOST if somebody_is_lost else None)
