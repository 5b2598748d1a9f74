"""Starting processes, and noticing that one has died."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_distributed import torchrun
from tests.test_resume import assert_same_run, report, start
from tests.test_run import write_config
from utils import heartbeat, launch
from utils.config_reading import parse_config
from utils.heartbeat import Heartbeat, PeerLostError, exit_reason
from utils.launch import planned_processes, threads_per_process

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.xdist_group("processes")


def config(**values):
    return parse_config({"number_of_outer_steps": 1} | values)[0]


@pytest.mark.parametrize(
    ("values", "cores", "gpus", "processes", "threads"),
    [
        ({"nodes_per_gpu": 4}, 2, 0, 2, 1),
        ({"nodes_per_gpu": 4}, 16, 0, 4, 4),
        ({"nodes_per_gpu": 1}, 2, 0, 1, 2),
        ({"nodes_per_gpu": 4, "processes": 1}, 2, 0, 1, 1),  # as many threads as with auto: the bits stay the same
        ({"nodes_per_gpu": 4, "processes": 3, "cpu_threads": 5}, 2, 0, 3, 5),
        ({"nodes_per_gpu": 4}, 16, 8, 8, 4),
        ({"nodes_per_gpu": 4, "processes_per_gpu": 2}, 16, 8, 16, 4),
        ({"nodes_per_gpu": 1, "processes_per_gpu": 2}, 16, 2, 2, 16),
        ({"nodes_per_gpu": 2, "devices": ["cuda:1"]}, 16, 8, 1, 8),
        ({"nodes_per_gpu": 2, "devices": ["cpu"]}, 16, 8, 2, 8),
    ],
)
def test_processes_and_threads_of_a_machine(monkeypatch, values, cores, gpus, processes, threads):
    monkeypatch.setattr(launch, "cores", lambda: cores)
    monkeypatch.setattr(launch, "_gpus", lambda: gpus)
    assert planned_processes(config(**values)) == processes
    assert threads_per_process(config(**values)) == threads


@pytest.mark.parametrize("value", ["2.5", "0", "none", "true"])
def test_an_impossible_number_of_processes(value):
    with pytest.raises(ValueError, match="processes: should be auto or a positive integer"):
        parse_config({"number_of_outer_steps": 1}, [f"processes={value}"])


class _Store:
    """What a heartbeat needs of a torch.distributed store."""

    def __init__(self):
        self.values: dict[str, bytes] = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture
def beating(monkeypatch):
    """A function that starts the heartbeats of some ranks, quicker than in earnest; they end with the test."""
    monkeypatch.setattr(heartbeat, "_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "SILENCE_AFTER_FAILURE", 1.5)
    monkeypatch.setattr(heartbeat, "_GRACE_SECONDS", 1000.0)
    started, store = [], _Store()

    def begin(count: int, children: dict | None = None, only: int | None = None) -> list[Heartbeat]:
        chosen = range(count) if only is None else [only]
        started.extend(Heartbeat(store, rank, count, children or {}) for rank in chosen)
        while not all(store.check([f"alive/{rank}"]) for rank in chosen):
            time.sleep(0.01)
        return started

    yield begin
    for rank in started:
        rank.close()


def explained(watcher: Heartbeat) -> str:
    with pytest.raises(PeerLostError) as error, watcher.explaining():
        raise RuntimeError("Connection closed by peer")
    return str(error.value)


def test_who_falls_silent_is_named_to_everybody(beating):
    ranks = beating(3)
    time.sleep(0.2)
    ranks[2]._closing.set()  # as if it were killed: it says nothing any more
    for rank in (0, 1):
        assert re.match(r"rank 2 \(process \d+ on .*\) has not answered for \d+ s", explained(ranks[rank]))


def test_who_ends_in_order_is_not_missed_and_other_errors_stay_what_they_are(beating):
    ranks = beating(2)
    time.sleep(0.2)
    ranks[1].close()
    ranks[0]._silence = 0.1
    time.sleep(0.5)
    assert ranks[0]._lost is None
    with pytest.raises(ValueError, match="of its own"), ranks[0].explaining():
        raise ValueError("of its own")


def test_who_fails_says_why(beating):
    ranks = beating(2)
    ranks[1].failed("ETA: must be positive")
    assert re.match(r"rank 1 \(.*\) ended: ETA: must be positive", explained(ranks[0]))


def test_a_child_that_was_killed_is_named_at_once(beating):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (watcher,) = beating(2, {1: child}, only=0)
    child.kill()
    assert explained(watcher) == "rank 1 was killed (SIGKILL); out of memory?"


def test_exit_reasons():
    assert exit_reason(3) == "ended with status 3"
    assert exit_reason(-signal.SIGSEGV) == "was killed (SIGSEGV)"


# Real processes


def children_of(process: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


def test_a_process_that_dies_ends_the_others_within_a_minute_and_is_named(tmp_path, cache_dir):
    child, folder = start(tmp_path, cache_dir, processes=2, save_weights_every=1, max_requested_batch=16)
    (other,) = children_of(child.pid)
    os.kill(other, signal.SIGKILL)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"error: rank 1 (process {other} on " in output
    assert "was killed (SIGKILL)" in output
    assert f"to go on: python run.py --resume {folder}" in output
    assert "Traceback" not in output


def test_torchrun_goes_on_from_the_last_checkpoint_by_itself(tmp_path, cache_dir):
    values = {"number_of_outer_steps": 8, "save_weights_every": 1, "max_requested_batch": 16}
    configuration = str(write_config(tmp_path, cache_dir, **values))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    process = subprocess.Popen(
        [*command, "run.py", "--config", configuration],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("logs/*/checkpoints/round_*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "resumed after round" in output
    (folder,) = (tmp_path / "logs").iterdir()
    whole = torchrun(2, "run.py", "--config", configuration, f"log_dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    expected = next((tmp_path / "whole").iterdir())
    assert len(report(folder, "training_log.csv")) == len(report(expected, "training_log.csv"))
    assert_same_run(folder, expected)


def processes_of_one_run(overrides: list[list[str]], config: str) -> list[subprocess.CompletedProcess]:
    """What becomes of processes that somebody starts with different arguments, as on different machines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(overrides))}
    shared |= {"LOCAL_WORLD_SIZE": str(len(overrides)), "GROUP_RANK": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, "run.py", "--config", config, *own],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(overrides)
    ]
    outputs = [process.communicate(timeout=200) for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        # The nodes decide how processes connect: nobody waits for anybody all the same.
        (
            ["nodes_per_gpu=2", "ETA=0.5"],
            "error: the processes have different configurations: nodes_per_gpu: 4 on rank 0, 2 on rank 1; "
            "ETA: 0.4 on rank 0, 0.5 on rank 1",
        ),
        (["ETAA=0.5"], "error: rank 1: ETAA: unknown key; did you mean ETA?"),
    ],
)
def test_processes_that_are_not_given_the_same_end_with_one_line_and_nothing_done(
    tmp_path, cache_dir, others, expected
):
    config = str(write_config(tmp_path, cache_dir))
    ended = processes_of_one_run([[], others], config)
    assert [process.returncode for process in ended] == [2, 2]
    assert [line for line in ended[0].stderr.splitlines() if line.startswith("error")] == [expected]
    assert ended[1].stderr.count("Traceback") == 0
    assert not (tmp_path / "logs").exists()
