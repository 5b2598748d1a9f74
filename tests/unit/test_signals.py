"""A signal reaches all processes of a run, whichever gets it, and a round that takes too long is given up by all."""

import os
import signal
import threading
import time

import pytest
from torch.distributed import HashStore

from utils.distributed import signals
from utils.distributed.kv_store import Notices
from utils.distributed.signals import StopRequest


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
    """And a test that got a signal leaves no handlers."""
    monkeypatch.setattr(signals, "_INTERVAL_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in signals._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def until(condition) -> None:
    while not condition():
        time.sleep(0.005)


def test_the_first_signal_is_kept_and_everybody_is_told(boards, monkeypatch):
    said = []
    with StopRequest(said.append, boards[0], decides=True, patience_seconds=10.0) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: boards[1].read("stop"))
        until(lambda: said)
        assert stop.requested
        stop.check()
    assert said == ["SIGTERM: stopping after this round, or within 10 s; once more, after 5 s, stops at once"]
    assert boards[1].read("stop") == "SIGTERM"
    assert boards[1].read("give up") is None
    # When it can no more be the same one, what was there before gets it.
    monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)
    got = []
    stop._before[signal.SIGINT] = lambda *arguments: got.append(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert got == [signal.SIGINT]


def test_a_signal_that_comes_twice_is_one_also_when_the_run_is_over(boards, monkeypatch):
    """As when both the agent of torchrun and who stops the job send it to every process."""
    monkeypatch.setattr(signals, "_SAME_SECONDS", 1e6)
    said, before = [], []
    signal.signal(signal.SIGTERM, lambda *arguments: before.append("ended"))
    with StopRequest(said.append, boards[0], decides=True, patience_seconds=10.0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop.requested)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    assert (len(said), before) == (1, [])


def test_no_signal_leaves_no_trace(boards):
    before = signal.getsignal(signal.SIGINT)
    with StopRequest([].append, boards[0], decides=True, patience_seconds=10.0):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_ends_a_process_that_does_not_come_to_its_handlers(programs):
    """The main thread is in a call that Python does not get out of, and the board does not answer."""
    done = programs.run("-c", BLOCKED, status=-signal.SIGTERM)
    assert done.stdout == "the first\nthe same\n"


BLOCKED = """
import ctypes, os, signal, threading, time
from torch.distributed import HashStore
from utils.distributed import signals
from utils.distributed.kv_store import Notices

signals._SAME_SECONDS = 0.5
board, asked = Notices(HashStore()), threading.Event()

def silent(*arguments):
    asked.set()
    threading.Event().wait()

def stop_again_and_again():
    for what in ("the first", "the same"):
        print(what, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

board.post = silent
with signals.StopRequest(print, board, True, 10.0):
    threading.Thread(target=stop_again_and_again).start()
    libc = ctypes.CDLL(None)
    while True:
        libc.pause()
"""


def test_a_process_that_got_no_signal_is_told(boards):
    said = []
    with StopRequest(said.append, boards[1], decides=False, patience_seconds=10.0) as stop:
        boards[0].post("stop", "SIGINT")
        until(lambda: said)
        assert stop.requested
        assert said[0].startswith("SIGINT to another process: stopping after this round")
        # One of its own is its first: it does not end it.
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: stop._told)
        assert len(said) == 1


def test_a_round_that_takes_too_long_is_given_up_and_what_is_held_is_written(boards):
    state = _State("checkpoint 3")
    with StopRequest(lambda text: None, boards[0], decides=True, patience_seconds=0.05) as stop:
        stop.restore(state)
        os.kill(os.getpid(), signal.SIGTERM)
        state.written.wait()
        until(lambda: stop.given_up)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
    assert state.names == ["checkpoint 3"]
    # The others are told which state it is.
    assert boards[1].read("give up") == "checkpoint 3"


def test_only_the_main_process_gives_a_round_up_and_the_others_write_while_they_wait(boards):
    state, looks = _State("checkpoint 4"), []
    with StopRequest(lambda text: None, boards[1], decides=False, patience_seconds=0.0) as stop:
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
    with StopRequest(lambda text: None, boards[0], decides=True, patience_seconds=10.0) as stop:
        signal.signal(signal.SIGTERM, lambda *arguments: None)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: boards[1].read("stop"))
        until(lambda: stop.requested)


def test_a_board_that_is_gone_ends_the_watch_and_not_the_process(boards):
    def gone(*arguments):
        raise ConnectionError("the first process is gone")

    boards[1].read = gone
    with StopRequest(lambda text: None, boards[1], decides=False, patience_seconds=10.0) as stop:
        stop._threads[1].join()
    assert not stop.requested
