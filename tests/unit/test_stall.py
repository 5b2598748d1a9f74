"""The threads that end a process whose first machine has vanished, or that waits for one that has ended."""

import queue
import re
import threading
import time
from types import SimpleNamespace

import pytest

from utils.distributed import peers, stall
from utils.distributed.peers import WRONG_CONFIG, PeerWatch
from utils.distributed.signals import STOPPED_IN_ROUND
from utils.distributed.stall import StallWatch

IN_ROUND = (b"in inner step 1 of 2 of round 1|1", b"after its 2 inner steps of round 1|2")
BETWEEN = (b"between rounds", b"closed")


class Store:
    """The store of a process that waits in a collective on GPUs, which does not fail with the other process."""

    def __init__(self, words: tuple[bytes, bytes] = IN_ROUND):
        self.words = words

    def set(self, key, value):
        pass

    def multi_get(self, keys):
        return list(self.words)

    def add(self, key, amount):
        return amount


@pytest.fixture
def watched(monkeypatch):
    """A function that watches with this store and these limits; returns the watch, and the statuses of its process."""
    statuses, watches = queue.Queue(), []
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=statuses.put))

    def watched(store, rank: int = 0, others: PeerWatch | None = None, **seconds: float):
        for name, value in {"INTERVAL_SECONDS": 0.01, **seconds}.items():
            monkeypatch.setattr(stall, name, value)
        watches.append(StallWatch(rank, 2, store, others or PeerWatch()))
        return watches[-1], statuses

    yield watched
    for watch in watches:
        watch.close()


def goes_on(statuses: queue.Queue, seconds: float = 0.3) -> bool:
    """Return whether the process has not been ended within this time, by default 30 intervals of a watch."""
    with pytest.raises(queue.Empty):
        statuses.get(timeout=seconds)
    return True


class Unanswered(Store):
    """Answers a number of times, and then waits as a broken connection does."""

    def __init__(self, answers: int):
        super().__init__((b"between rounds",) * 2)
        self.answers = answers
        self.ends = threading.Event()

    def multi_get(self, keys):
        if self.answers == 0:
            self.ends.wait()
            raise RuntimeError("closed")
        self.answers -= 1
        return super().multi_get(keys)


@pytest.mark.parametrize(("answers", "ends"), [(3, True), (10**9, False)])
def test_a_store_that_does_not_answer_ends_the_process(answers, ends, watched, capsys):
    store = Unanswered(answers)
    _, statuses = watched(store, 1, SHORTEST_SECONDS=0.3)
    try:
        assert statuses.get(timeout=60.0) == 1 if ends else goes_on(statuses, 0.6)
    finally:
        store.ends.set()
    said = capsys.readouterr().err
    assert ("rank 1 got no answer from the machine of the first process for 0 s; --resume" in said) is ends


@pytest.mark.parametrize(
    ("rank", "words", "why", "status"),
    [
        (0, IN_ROUND, STOPPED_IN_ROUND, 130),
        (1, IN_ROUND, STOPPED_IN_ROUND, 0),
        (0, IN_ROUND, "ValueError: of its own", 1),
        (0, BETWEEN, "ValueError: of its own", 1),
        (0, BETWEEN, f"{WRONG_CONFIG}max_batch_size: none fits", 2),
    ],
)
def test_a_process_that_waits_for_one_that_has_ended_ends_with_its_reason(
    rank, words, why, status, watched, monkeypatch, capsys
):
    reason = f"rank {1 - rank} ended: {why}"
    reasons = []
    others = PeerWatch()
    monkeypatch.setattr(others, "left_reason", lambda: reason)
    monkeypatch.setattr(others, "tell", lambda rank, reason: reasons.append((rank, reason)))
    short = dict.fromkeys(("ENDED_SECONDS", "STOPPED_SECONDS", "GRACE_SECONDS"), 0.05)
    watch, statuses = watched(Store(words), rank, others, SPEAKING_SECONDS=0.0, **short)
    watch.waits_for_ever = words == BETWEEN
    assert statuses.get(timeout=60.0) == status
    assert reasons[0] == (rank, reason)
    advice = "" if status == 2 else "; --resume continues from the last checkpoint"
    assert f"error: {reason}{advice}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "waits_for_ever", "short"),
    [
        (BETWEEN, False, ("STOPPED_SECONDS", "ENDED_SECONDS", "GRACE_SECONDS")),
        (BETWEEN, True, ("STOPPED_SECONDS", "ENDED_SECONDS")),
        (IN_ROUND, True, ("STOPPED_SECONDS",)),
    ],
)
def test_a_process_may_work_on_between_rounds_after_another_has_ended(
    words, waits_for_ever, short, watched, monkeypatch
):
    """Over gloo as long as it likes, over nccl for GRACE_SECONDS; in a round for ENDED_SECONDS."""
    others = PeerWatch()
    monkeypatch.setattr(others, "left_reason", lambda: "rank 1 ended: ValueError: of its own")
    watch, statuses = watched(Store(words), 0, others, **dict.fromkeys(short, 0.05))
    watch.waits_for_ever = waits_for_ever
    assert goes_on(statuses)


def test_a_first_round_without_progress_ends_as_well(watched, capsys):
    _, statuses = watched(Store(), FIRST_ROUND_SECONDS=0.1)
    assert statuses.get(timeout=60.0) == 1
    places = "rank 0 is in inner step 1 of 2 of round 1; rank 1 is after its 2 inner steps of round 1"
    assert f"no process has made progress for 0 s: {places}; --resume continues" in capsys.readouterr().err


class Rounds(Store):
    """The store of a process whose first round has a long pause, the later ones short ones until it stands still."""

    def __init__(self):
        self.looks = 0

    def multi_get(self, keys):
        self.looks += 1
        if self.looks == 100:  # the first round had a pause of 100 looks
            self.watch.end_round()
            self.watch.begin_round(2, 5, lambda: 0)
        moves = 1 if self.looks < 100 else min(self.looks, 120)
        return [f"in inner step {moves} of 200 of round 2|{moves}".encode()] * len(keys)


def test_the_first_round_counts_less_for_the_limit_of_later_ones(watched, capsys):
    store = Rounds()
    store.watch, statuses = watched(store, SHORTEST_SECONDS=0.5)
    store.watch.begin_round(1, 5, lambda: 0)
    assert statuses.get(timeout=60.0) == 1
    (seconds,) = re.findall(r"no process has made progress for (\d+) s", capsys.readouterr().err)
    assert 3 <= int(seconds) <= 7  # three times a pause of 1 to 2 s


class SilentPeer(Store):
    """The store of two processes between rounds, of which the second one publishes the same word for ever."""

    own = b""

    def set(self, key, value):
        self.own = value.encode()

    def multi_get(self, keys):
        return [self.own, self.words]


@pytest.mark.parametrize(("word", "ends"), [(b"between rounds#7", True), (b"closed", False)])
def test_a_process_that_publishes_nothing_more_ends_the_run(word, ends, watched, capsys):
    store = SilentPeer(word)
    watch, statuses = watched(store, SILENT_SECONDS=0.1)
    assert statuses.get(timeout=60.0) == 1 if ends else goes_on(statuses)
    said = capsys.readouterr().err
    assert ("error: rank 1 has been silent for 0 s; --resume continues" in said) is ends
    watch.close()
    for _ in range(1000):
        if store.own == b"closed":
            break
        time.sleep(0.01)
    assert store.own == b"closed"


@pytest.mark.parametrize("signalled", [True, False])
def test_after_a_signal_a_process_that_publishes_nothing_more_ends_the_run_soon(signalled, watched, capsys):
    watch, statuses = watched(SilentPeer(b"between rounds#7"), SIGNALLED_SILENT_SECONDS=0.1)
    watch.signalled = lambda: signalled
    assert statuses.get(timeout=60.0) == 1 if signalled else goes_on(statuses)
    assert ("error: rank 1 has been silent for 0 s; --resume continues" in capsys.readouterr().err) is signalled
