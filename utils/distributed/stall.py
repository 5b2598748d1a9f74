"""Detection of a run in which no process makes progress: a hung device or driver, or a collective that one skipped.

A dead process is noticed at once (`utils.distributed.peers`), a hung one is not: its connections stay open. The time
limit of collectives ends such a run late, and does not name the place. Here a thread of every process publishes the
process's progress and looks at that of all others. The limit adapts to the run, and a process that works between
rounds, for instance on a checkpoint, counts as progress. The first round compiles, and has a longer limit. Once a
process has ended by itself, no progress for a short time is enough: on GPUs the others would wait for it. Between
rounds they may also work, so that they get more time.

A machine that vanishes without closing its connections publishes nothing more, in a round or between rounds. So every
word has a number that grows while the process lives.

The store is on another machine, which may vanish without closing its connections. Then the thread that looks waits for
ever. So a second thread, which uses nothing but the clock, ends the process if the store has not answered for long.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from utils.distributed.peers import GRACE_SECONDS, WRONG_CONFIG, PeerWatch
from utils.distributed.signals import STATUS_INTERRUPTED, STOPPED_IN_ROUND

if TYPE_CHECKING:
    from torch.distributed import Store

INTERVAL_SECONDS = 1.0
# The run ends without progress for this long, and for FACTOR times the longest such time in earlier rounds; also
# without an answer of the store for the former. The first round compiles, and counts less.
SHORTEST_SECONDS = 120.0
FIRST_ROUND_SECONDS = 600.0
FIRST_ROUND_FACTOR = 3.0
# Once a process has ended by itself, no progress in a round for this long is enough, and for less if a signal asked for
# it: torchrun kills the others 30 s after the signal, of which `signals.ROUND_SECONDS` have passed.
ENDED_SECONDS = 10.0
STOPPED_SECONDS = 3.0
# The run ends if a process publishes nothing for this long, and for less after a signal: over nccl the others wait for
# ever for a process that was killed, and torchrun's agent sends them the signal 30 s before it kills them.
SILENT_SECONDS = 300.0
SIGNALLED_SILENT_SECONDS = 8.0
FACTOR = 10.0
# Time for the first process, which writes the results, to say why the run ends; then another one does.
SPEAKING_SECONDS = 5.0

_BETWEEN_ROUNDS = "between rounds"
_CLOSED = "closed"


class StallWatch:
    """Ends this process if no process of the run makes progress within a round, or if the store does not answer.

    Args:
        count: number of processes; a single one is not watched.
        peers: knows why another process has ended, and ends this one.

    Attributes:
        waits_for_ever: collectives do not fail when another process ends, as over nccl.
        signalled: returns whether a signal has asked this process to stop.
    """

    def __init__(self, rank: int, count: int, store: "Store | None", peers: PeerWatch):
        self._rank = rank
        self._keys = [f"progress of {other}" for other in range(count)]
        self._store = store
        self._peers = peers
        self.waits_for_ever = False
        self.signalled: Callable[[], bool] = lambda: False
        self._progress: Callable[[], int] | None = None
        self._round = 0
        self._steps = 0
        self._done = 0
        self._rounds = 0
        self._looks = 0
        self._closing = threading.Event()
        if count > 1 and store is not None:
            store.set(self._keys[rank], _BETWEEN_ROUNDS)
            threading.Thread(target=self._watch, name="stall", daemon=True).start()
            threading.Thread(target=self._watch_store, name="store", daemon=True).start()

    def begin_round(self, number: int, steps: int, progress: Callable[[], int]) -> None:
        """Watch a round of these inner steps; progress: a number that changes whenever this process does something."""
        self._round = number
        self._steps = steps
        self._done = 0
        self._progress = progress

    def step(self) -> None:
        """Count an inner step of this process."""
        self._done += 1

    def end_round(self) -> None:
        """Stop watching until the next round."""
        if self._progress is not None:
            self._rounds += 1
        self._progress = None

    def close(self) -> None:
        """End the threads."""
        self._closing.set()

    def _position(self) -> str:
        progress = self._progress
        if progress is None:
            return _BETWEEN_ROUNDS
        if self._done < self._steps:
            place = f"in inner step {self._done + 1} of {self._steps}"
        else:
            place = f"after its {self._steps} inner steps"
        return f"{place} of round {self._round}|{progress()}"

    def _watch(self) -> None:
        limit = 0.0
        factor = FIRST_ROUND_FACTOR
        idle = 0.0  # seconds in a round without progress
        still = 0.0  # also between rounds
        before: list[str] = []
        words: list[str] = [""] * len(self._keys)
        silent = [0.0] * len(self._keys)
        looked = time.monotonic()
        while not self._closing.wait(INTERVAL_SECONDS):
            try:
                self._store.set(self._keys[self._rank], f"{self._position()}#{self._looks}")
                words_before = words
                words = [value.decode() for value in self._store.multi_get(self._keys)]
            except RuntimeError:  # the process that keeps the store is gone
                self._closing.set()
                return
            self._looks += 1
            now = time.monotonic()
            # A process that was stopped for a while has not waited.
            passed = min(now - looked, 2.0 * INTERVAL_SECONDS)
            looked = now
            for rank, (word, word_before) in enumerate(zip(words, words_before, strict=True)):
                silent[rank] = silent[rank] + passed if word == word_before != _CLOSED else 0.0
            if max(silent) > (SIGNALLED_SILENT_SECONDS if self.signalled() else SILENT_SECONDS):
                self._end(f"rank {silent.index(max(silent))} has been silent for {max(silent):.0f} s")
            positions = [word.partition("#")[0] for word in words]
            still = still + passed if positions == before else 0.0
            if still and _BETWEEN_ROUNDS not in positions:
                idle += passed
            else:
                limit = max(limit, factor * idle)
                factor = FACTOR if self._rounds > 0 else FIRST_ROUND_FACTOR
                idle = 0.0
            before = positions
            left_reason = self._peers.left_reason() if still > STOPPED_SECONDS else None
            if left_reason is not None and self._waited_enough(left_reason, idle, still):
                self._end(left_reason)
            elif idle > max(SHORTEST_SECONDS if self._rounds > 0 else FIRST_ROUND_SECONDS, limit):
                places = "; ".join(f"rank {rank} is {where.split('|')[0]}" for rank, where in enumerate(positions))
                self._end(f"no process has made progress for {idle:.0f} s: {places}")
        with contextlib.suppress(RuntimeError):
            self._store.set(self._keys[self._rank], _CLOSED)

    def _waited_enough(self, reason: str, idle: float, still: float) -> bool:
        if idle > (STOPPED_SECONDS if reason.endswith(STOPPED_IN_ROUND) else ENDED_SECONDS):
            return True
        return self.waits_for_ever and still > GRACE_SECONDS

    def _watch_store(self) -> None:
        """End this process if `_watch` waits for the store; nothing here may wait for it as well."""
        silent = 0
        looks = 0
        while not self._closing.wait(INTERVAL_SECONDS):
            silent = silent + 1 if looks == self._looks else 0
            looks = self._looks
            if silent * INTERVAL_SECONDS > SHORTEST_SECONDS:
                seconds = f"{SHORTEST_SECONDS:.0f} s"
                self._peers.end(f"rank {self._rank} got no answer from the machine of the first process for {seconds}")

    def _end(self, reason: str) -> None:
        self._closing.set()
        speaks = self._rank == 0
        with contextlib.suppress(RuntimeError):
            if speaks:
                self._store.add("the first process speaks", 1)
            else:
                time.sleep(SPEAKING_SECONDS)
                speaks = self._store.add("the first process speaks", 0) == 0 and self._store.add("spoken", 1) == 1
        self._peers.tell(self._rank, reason)
        status = 1
        if reason.endswith(STOPPED_IN_ROUND):
            status = STATUS_INTERRUPTED if self._rank == 0 else 0
        elif WRONG_CONFIG in reason:
            status = 2
        self._peers.end(reason, status, speaks)
