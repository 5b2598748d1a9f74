"""The first signal is a request, a repeated one is nothing, and a later one ends the program."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

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
def test_the_first_signal_is_kept_and_announced(number, capfd):
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert capfd.readouterr().err.startswith(f"{number.name}: stopping after this round")


def test_a_signal_is_seen_while_the_main_thread_waits_outside_python():
    """There it handles none, as while it waits for a GPU."""
    read, write = os.pipe()
    seen = []

    def look():
        time.sleep(0.3)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        seen.append((stop.arrived(), stop.requested))
        os.close(write)

    with StopRequest(speaks=False) as stop:
        assert not stop.arrived()
        threading.Thread(target=look).start()
        os.read(read, 1)
        assert stop.requested
    os.close(read)
    assert seen == [(True, False)]


def test_nohup_lets_a_run_outlive_its_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested


def test_a_silent_process_keeps_the_signal(capfd):
    with StopRequest(speaks=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert capfd.readouterr().err == ""


def test_a_repeated_signal_counts_once_even_after_the_run(capfd):
    """The agent of torchrun and the user may both send a signal to every process."""
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err.count("stopping") == 1


def test_without_a_signal_the_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    own, _other = socket.socketpair()
    own.setblocking(False)
    signal.set_wakeup_fd(own.fileno())  # as an event loop does
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.set_wakeup_fd(-1) == own.fileno()
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


def test_a_later_signal_ends_the_first_process_of_a_container():
    container = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
    try:
        subprocess.run([*container, "true"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets no user make a namespace for processes")
    assert subprocess.run([*container, sys.executable, "-c", LATER]).returncode == 128 + signal.SIGTERM
