"""A signal reaches all processes of a run, whichever gets it, and a round that takes too long is given up by all."""

import os
import signal
import threading
import time

import pytest
from torch.distributed import HashStore

from utils import signals
from utils.notices import Notices
from utils.signals import StopRequest


class _State:
    """A state that can be written; `written` is set when that was asked for."""

    def __init__(self, held: str):
        self.held, self.names, self.written = held, [], threading.Event()

    def write_held(self, name):
        self.names.append(name)
        self.written.set()


@pytest.fixture
def boards():
    """The notice boards of two processes."""
    store = HashStore()
    return Notices(store, 0, 2), Notices(store, 1, 2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(signals, "_INTERVAL_SECONDS", 0.01)


def until(condition) -> None:
    while not condition():
        time.sleep(0.005)


def test_the_first_signal_is_kept_and_everybody_is_told(boards):
    said, before = [], signal.getsignal(signal.SIGINT)
    with StopRequest(said.append, boards[0], decides=True) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: boards[1].read("stop"))
        until(lambda: said)
        assert stop.requested
        stop.check()
        # The next one is not kept.
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert said == ["SIGTERM: stopping after this round, or within 30 s; once more stops at once"]
    assert boards[1].read("stop") == "SIGTERM"
    assert boards[1].read("give up") is None
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_got_no_signal_is_told(boards):
    said = []
    with StopRequest(said.append, boards[1], decides=False) as stop:
        boards[0].post("stop", "SIGINT")
        until(lambda: said)
        assert stop.requested
        assert said[0].startswith("SIGINT to another process: stopping after this round")
        # One of its own is its first: it does not end it.
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: stop._got_one)
        assert len(said) == 1


def test_a_round_that_takes_too_long_is_given_up_and_what_is_held_is_written(boards, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", 0.05)
    state = _State("checkpoint 3")
    with StopRequest(lambda text: None, boards[0], decides=True) as stop:
        stop.restore(state)
        os.kill(os.getpid(), signal.SIGTERM)
        state.written.wait()
        until(lambda: stop.given_up)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
    assert state.names == ["checkpoint 3"]
    # The others are told which state it is.
    assert boards[1].read("give up") == "checkpoint 3"


def test_only_the_main_process_gives_a_round_up_and_the_others_write_while_they_wait(boards, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", 0.0)
    state, looks = _State("checkpoint 4"), []
    with StopRequest(lambda text: None, boards[1], decides=False) as stop:
        look = stop._look
        stop._look = lambda: (look(), looks.append(1))
        stop.restore(state)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop.requested)
        looks.clear()
        until(lambda: len(looks) > 3)
        stop.check()
        boards[0].post("give up", "checkpoint 3")
        # This thread does nothing, as if it waited in a collective.
        state.written.wait()
        until(lambda: stop.given_up)
    assert state.names == ["checkpoint 3"]


def test_others_are_told_though_the_main_thread_does_not_come_to_the_handler(boards):
    """As when it waits in a collective, and is not in the interpreter."""
    with StopRequest(lambda text: None, boards[0], decides=True) as stop:
        signal.signal(signal.SIGTERM, lambda *arguments: None)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: boards[1].read("stop"))
        until(lambda: stop.requested)


def test_a_board_that_is_gone_ends_the_watch_and_not_the_process(boards):
    def gone(*arguments):
        raise ConnectionError("the first process is gone")

    boards[1].read = gone
    with StopRequest(lambda text: None, boards[1], decides=False) as stop:
        stop._thread.join()
    assert not stop.requested
