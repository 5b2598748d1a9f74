"""The first signal is a request, the same one once more is nothing, and a later one ends the program."""

import os
import signal

import pytest

from utils.distributed import signals
from utils.distributed.signals import StopRequest


@pytest.fixture(autouse=True)
def _handlers_are_restored():
    before = {number: signal.getsignal(number) for number in signals._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", signals._SIGNALS)
def test_the_first_signal_is_kept_and_said(number, capfd):
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert capfd.readouterr().err.startswith(f"{number.name}: stopping after this round")


def test_a_process_that_does_not_speak_keeps_it_too(capfd):
    with StopRequest(speaks=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert capfd.readouterr().err == ""


def test_a_signal_that_comes_twice_is_one_also_when_the_run_is_over(capfd):
    """As when both the agent of torchrun and who stops the job send it to every process."""
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err.count("stopping") == 1


def test_no_signal_leaves_no_trace():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before


LATER = """
import os, signal, time
from utils.distributed import signals

with signals.StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    signals._SAME_SECONDS = 0.0
    time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_later_signal_ends_the_program(programs):
    programs.run("-c", LATER, status=-signal.SIGTERM)
