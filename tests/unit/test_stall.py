"""The thread that watches the store of a run whose first machine has vanished."""

import threading
from types import SimpleNamespace

import pytest

from utils.distributed import stall
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
    monkeypatch.setattr(stall, "os", SimpleNamespace(_exit=lambda code: code == 1 and ended.set()))
    store = Store(answers)
    watch = StallWatch(1, 2, store, lambda reason: None)
    try:
        assert ended.wait(20.0 if status else 1.0) is bool(status)
    finally:
        watch.close()
        store.ends.set()
    assert store.broken.is_set() is bool(status)
    said = capsys.readouterr().err
    assert ("rank 1 got no answer from the machine of the first process for 0 s; --resume" in said) is bool(status)
