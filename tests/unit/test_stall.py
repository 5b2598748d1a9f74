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


class Store:
    """Answers a number of times, and then waits as a broken connection does."""

    def __init__(self, answers: int):
        self.answers = answers
        self.broken = threading.Event()
        self.ends = threading.Event()

    def set(self, key, value):
        pass

    def multi_get(self, keys):
        if self.answers == 0:
            self.broken.set()
            self.ends.wait()
            raise RuntimeError("closed")
        self.answers -= 1
        return [b"between rounds" for _ in keys]


@pytest.mark.parametrize(("answers", "status"), [(3, 1), (10**9, None)])
def test_a_store_that_does_not_answer_ends_the_process(answers, status, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(stall, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(stall, "SHORTEST_SECONDS", 0.3)
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=lambda code: code == 1 and ended.set()))
    store = Store(answers)
    watch = StallWatch(1, 2, store, PeerWatch())
    try:
        assert ended.wait(20.0 if status else 1.0) is bool(status)
    finally:
        watch.close()
        store.ends.set()
    assert store.broken.is_set() is bool(status)
    said = capsys.readouterr().err
    assert ("rank 1 got no answer from the machine of the first process for 0 s; --resume" in said) is bool(status)


IN_ROUND = (b"in inner step 1 of 2 of round 1|1", b"after its 2 inner steps of round 1|2")


class EndedPeer:
    """The store of a process that waits in a collective on GPUs, which does not fail with the other process."""

    def __init__(self, words: tuple[bytes, bytes] = IN_ROUND):
        self.words = words

    def set(self, key, value):
        pass

    def multi_get(self, keys):
        return list(self.words)

    def add(self, key, amount):
        return amount


@pytest.mark.parametrize(
    ("rank", "words", "why", "status"),
    [
        (0, IN_ROUND, STOPPED_IN_ROUND, 130),
        (1, IN_ROUND, STOPPED_IN_ROUND, 0),
        (0, IN_ROUND, "ValueError: of its own", 1),
        (0, (b"between rounds", b"closed"), "ValueError: of its own", 1),
        (0, (b"between rounds", b"closed"), f"{WRONG_CONFIG}max_batch_size: none fits", 2),
    ],
)
def test_a_process_that_waits_for_one_that_has_ended_ends_with_its_reason(
    rank, words, why, status, monkeypatch, capsys
):
    statuses = queue.Queue()
    monkeypatch.setattr(stall, "INTERVAL_SECONDS", 0.01)
    for name in ("ENDED_SECONDS", "STOPPED_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(stall, name, 0.05)
    monkeypatch.setattr(stall, "SPEAKING_SECONDS", 0.0)
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=statuses.put))
    reason = f"rank {1 - rank} ended: {why}"
    reasons = []
    others = PeerWatch()
    monkeypatch.setattr(others, "left_reason", lambda: reason)
    monkeypatch.setattr(others, "tell", lambda rank, reason: reasons.append((rank, reason)))
    watch = StallWatch(rank, 2, EndedPeer(words), others)
    watch.waits_for_ever = b"closed" in words
    try:
        assert statuses.get(timeout=60.0) == status
    finally:
        watch.close()
    assert reasons[0] == (rank, reason)
    advice = "" if status == 2 else "; --resume continues from the last checkpoint"
    assert f"error: {reason}{advice}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "waits_for_ever", "short"),
    [
        (
            (b"between rounds", b"closed"),
            False,
            {"STOPPED_SECONDS": 0.05, "ENDED_SECONDS": 0.05, "GRACE_SECONDS": 0.05},
        ),
        ((b"between rounds", b"closed"), True, {"STOPPED_SECONDS": 0.05, "ENDED_SECONDS": 0.05}),
        (IN_ROUND, True, {"STOPPED_SECONDS": 0.05}),
    ],
)
def test_a_process_may_work_on_between_rounds_after_another_has_ended(words, waits_for_ever, short, monkeypatch):
    """Over gloo as long as it likes, over nccl for GRACE_SECONDS; in a round for ENDED_SECONDS."""
    statuses = queue.Queue()
    monkeypatch.setattr(stall, "INTERVAL_SECONDS", 0.01)
    for name in short:
        monkeypatch.setattr(stall, name, 0.05)
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=statuses.put))
    others = PeerWatch()
    monkeypatch.setattr(others, "left_reason", lambda: "rank 1 ended: ValueError: of its own")
    watch = StallWatch(0, 2, EndedPeer(words), others)
    watch.waits_for_ever = waits_for_ever
    try:
        with pytest.raises(queue.Empty):
            statuses.get(timeout=0.5)
    finally:
        watch.close()


def test_a_first_round_without_progress_ends_as_well(monkeypatch, capsys):
    statuses = queue.Queue()
    monkeypatch.setattr(stall, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(stall, "FIRST_ROUND_SECONDS", 0.1)
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=statuses.put))
    watch = StallWatch(0, 2, EndedPeer(), PeerWatch())
    try:
        assert statuses.get(timeout=60.0) == 1
    finally:
        watch.close()
    places = "rank 0 is in inner step 1 of 2 of round 1; rank 1 is after its 2 inner steps of round 1"
    assert f"no process has made progress for 0 s: {places}; --resume continues" in capsys.readouterr().err


class Rounds:
    """The store of a process whose first round has a long pause, the later ones short ones until it stands still."""

    def __init__(self, watches: list):
        self.looks = 0
        self.watches = watches  # of one, as soon as it exists

    def set(self, key, value):
        pass

    def add(self, key, amount):
        return amount

    def multi_get(self, keys):
        self.looks += 1
        if self.looks == 100:  # the first round had a pause of 100 looks
            (watch,) = self.watches
            watch.end_round()
            watch.begin_round(2, 5, lambda: 0)
        moves = 1 if self.looks < 100 else min(self.looks, 120)
        return [f"in inner step {moves} of 200 of round 2|{moves}".encode()] * len(keys)


def test_the_first_round_counts_less_for_the_limit_of_later_ones(monkeypatch, capsys):
    statuses = queue.Queue()
    watches = []
    monkeypatch.setattr(stall, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(stall, "SHORTEST_SECONDS", 0.5)
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=statuses.put))
    store = Rounds(watches)
    watch = StallWatch(0, 2, store, PeerWatch())
    watches.append(watch)
    watch.begin_round(1, 5, lambda: 0)
    try:
        assert statuses.get(timeout=60.0) == 1
    finally:
        watch.close()
    (seconds,) = re.findall(r"no process has made progress for (\d+) s", capsys.readouterr().err)
    assert 3 <= int(seconds) <= 7  # three times a pause of 1 to 2 s


class SilentPeer:
    """The store of two processes between rounds, of which the second one publishes the same word for ever."""

    def __init__(self, word: bytes):
        self.word = word
        self.own = b""

    def set(self, key, value):
        self.own = value.encode()

    def multi_get(self, keys):
        return [self.own, self.word]

    def add(self, key, amount):
        return amount


@pytest.mark.parametrize(("word", "status"), [(b"between rounds#7", 1), (b"closed", None)])
def test_a_process_that_publishes_nothing_more_ends_the_run(word, status, monkeypatch, capsys):
    statuses = queue.Queue()
    monkeypatch.setattr(stall, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(stall, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=statuses.put))
    store = SilentPeer(word)
    watch = StallWatch(0, 2, store, PeerWatch())
    try:
        if status is None:
            with pytest.raises(queue.Empty):
                statuses.get(timeout=1.0)
        else:
            assert statuses.get(timeout=60.0) == status
            assert "error: rank 1 has been silent for 0 s; --resume continues" in capsys.readouterr().err
    finally:
        watch.close()
    for _ in range(1000):
        if store.own == b"closed":
            break
        time.sleep(0.01)
    assert store.own == b"closed"
