"""Starting processes, and noticing that one has died."""

import math
import os
import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import run
from tests.support.programs import LIMIT_SECONDS, Popen, Programs, wait_until
from tests.support.runs import assert_same_run, kill_the_second_process, report, write_config
from utils.config.reading import parse_config
from utils.distributed import heartbeat, launch
from utils.distributed.heartbeat import Heartbeat, PeerLostError, exit_reason
from utils.distributed.launch import planned_processes, threads_per_process


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
        ({"nodes_per_gpu": 4, "devices_per_node": 2}, 2, 0, 2, 1),  # one island
        ({"nodes_per_gpu": 2, "devices_per_node": 4}, 2, 0, 4, 1),  # with less than a core each
        ({"nodes_per_gpu": 2, "devices_per_node": 2}, 16, 0, 4, 4),
        ({"nodes_per_gpu": 4, "devices_per_node": 4}, 16, 8, 8, 1),
        ({"nodes_per_gpu": 4, "devices_per_node": 3}, 16, 8, 6, 1),
    ],
)
def test_processes_and_threads_of_a_machine(monkeypatch, values, cores, gpus, processes, threads):
    monkeypatch.setattr(launch, "cores", lambda: cores)
    monkeypatch.setattr(launch, "_gpus", lambda: gpus)
    assert planned_processes(config(**values)) == processes
    assert threads_per_process(config(**values)) == threads


@pytest.mark.parametrize(("driver", "gpus"), [(None, 3), ("libnowhere.so.1", 0)])
def test_gpus_are_counted_wherever_their_driver_can_be_loaded(monkeypatch, driver, gpus):
    """Also in a container without /proc/driver/nvidia; PyTorch is not asked where there is no driver."""
    monkeypatch.setattr(launch, "_GPU_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus or pytest.fail("PyTorch was asked"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launch, "cores", lambda: 16)
    assert planned_processes(config(nodes_per_gpu=4, processes_per_gpu=2)) == (2 * gpus or 4)


@pytest.mark.parametrize("value", ["2.5", "0", "none", "true"])
def test_an_impossible_number_of_processes(value):
    with pytest.raises(ValueError, match="processes: should be auto or a positive integer"):
        parse_config({"number_of_outer_steps": 1}, [f"processes={value}"])


@pytest.mark.parametrize("processes", ["auto", "1"])
def test_gpus_are_counted_among_those_that_the_configuration_leaves_visible(monkeypatch, tmp_path, processes):
    """CUDA reads what is visible once, when it is first asked."""
    seen, started = [], []

    def gpus() -> int:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return len(seen[-1].split(","))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(launch, "_gpus", gpus)
    monkeypatch.setattr(launch, "Launch", lambda count, program: started.append(count))
    path = tmp_path / "config.yaml"
    path.write_text(f"{{number_of_outer_steps: 1, processes: {processes}, CUDA_VISIBLE_DEVICES: '2,3'}}")
    launch.start_processes(path, [], ["run.py"])
    assert set(seen) == {"2,3"}
    assert started == ([2] if processes == "auto" else [])


def test_more_processes_than_nodes_are_not_started(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launch, "_gpus", lambda: 0)
    monkeypatch.setattr(launch, "Launch", lambda count, program: pytest.fail(f"{count} processes were started"))
    path = tmp_path / "config.yaml"
    path.write_text("{number_of_outer_steps: 1, nodes_per_gpu: 4}")
    assert run.main(["--config", str(path), "processes=99"]) == 2
    assert capsys.readouterr().err == (
        "error: processes: 99 processes on a machine with 4 nodes; every process needs one\n"
    )


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

    def beats(self, rank: int) -> float:
        said = self.values.get(f"alive/{rank}", b"0").decode()
        return float(said) if said.isdigit() else math.inf


class _Ranks:
    """Heartbeats of some ranks, which beat quicker than in earnest, on a clock that stands still unless it is moved."""

    def __init__(self, monkeypatch):
        self.now, self.store, self.ranks = 0.0, _Store(), {}
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(heartbeat, "_INTERVAL_SECONDS", 0.01)
        monkeypatch.setattr(heartbeat, "_GRACE_SECONDS", LIMIT_SECONDS)

    def begin(self, count: int, only: int | None = None, children: dict | None = None) -> list[Heartbeat]:
        for rank in range(count) if only is None else [only]:
            self.ranks[rank] = Heartbeat(self.store, rank, count, children or {})
        self.all_have_looked()
        return list(self.ranks.values())

    def all_have_looked(self) -> None:
        """Every rank that still beats has seen what there was to see when this was called."""
        before = {rank: self.store.beats(rank) for rank in self.ranks}
        for rank, beating in self.ranks.items():
            # One more may have looked before, and two more have not.
            wait_until(
                lambda beating=beating, rank=rank: (
                    beating._found.is_set()
                    or not beating._thread.is_alive()
                    or self.store.beats(rank) > before[rank] + 1
                ),
                f"beats of rank {rank}",
            )

    def silence(self, rank: int) -> None:
        """As if it were killed: it says nothing any more."""
        self.ranks[rank]._closing.set()
        self.ranks[rank]._thread.join()
        self.all_have_looked()

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.all_have_looked()


@pytest.fixture
def beating(monkeypatch):
    ranks = _Ranks(monkeypatch)
    yield ranks
    for rank in ranks.ranks.values():
        rank.close()


def explained(watcher: Heartbeat) -> str:
    with pytest.raises(PeerLostError) as error, watcher.explaining():
        raise RuntimeError("Connection closed by peer")
    return str(error.value)


def test_who_falls_silent_is_named_to_everybody(beating):
    ranks = beating.begin(3)
    beating.silence(2)
    beating.pass_seconds(int(heartbeat.SILENCE_SECONDS))
    assert [rank._lost for rank in ranks] == [None, None, None]
    beating.pass_seconds(1)
    for rank in (0, 1):
        assert re.match(r"rank 2 \(process \d+ on .*\) has not answered for 21 s", explained(ranks[rank]))


def test_a_failed_collective_makes_impatient(beating):
    ranks = beating.begin(2)
    beating.silence(1)
    beating.pass_seconds(int(heartbeat.SILENCE_AFTER_FAILURE) + 1)
    assert ranks[0]._lost is None
    assert re.match(r"rank 1 \(.*\) has not answered for \d s", explained(ranks[0]))


def test_who_dies_before_its_first_beat_is_missed_like_others(beating, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Heartbeat, "_run", lambda killed: None)
        Heartbeat(beating.store, 1, 2, {})
    (watcher,) = beating.begin(2, only=0)
    beating.pass_seconds(int(heartbeat.SILENCE_SECONDS))
    assert watcher._lost is None
    beating.pass_seconds(1)
    assert re.match(r"rank 1 \(process \d+ on .*\) has not answered for 21 s", explained(watcher))


def test_who_never_begins_is_given_up(beating):
    (watcher,) = beating.begin(2, only=0)
    beating.now = heartbeat.STARTING_SECONDS
    beating.all_have_looked()
    assert watcher._lost is None
    beating.pass_seconds(1)
    assert explained(watcher) == "rank 1 has not answered for 601 s"


def test_who_ends_in_order_is_not_missed_and_other_errors_stay_what_they_are(beating):
    ranks = beating.begin(2)
    ranks[1].close()
    beating.pass_seconds(2 * int(heartbeat.SILENCE_SECONDS))
    assert ranks[0]._lost is None
    with pytest.raises(ValueError, match="of its own"), ranks[0].explaining():
        raise ValueError("of its own")


def test_who_fails_says_why(beating):
    ranks = beating.begin(2)
    ranks[1].failed("ETA: must be positive")
    assert re.match(r"rank 1 \(.*\) ended: ETA: must be positive", explained(ranks[0]))


def test_a_child_that_was_killed_is_named_at_once(programs, beating):
    child = programs.start("-c", "import time; time.sleep(10_000)")
    (watcher,) = beating.begin(2, only=0, children={1: child})
    child.kill()
    assert explained(watcher) == "rank 1 was killed (SIGKILL); out of memory?"


def test_exit_reasons():
    assert exit_reason(3) == "ended with status 3"
    assert exit_reason(-signal.SIGSEGV) == "was killed (SIGSEGV)"


# Real processes


LAUNCHING = """
import os, signal
from utils.distributed.launch import Launch
launch = Launch(2, ["-c", "from utils.distributed.processes import meet; meet()"])
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_who_waits_for_a_process_that_died_before_they_met_ends_with_it(programs):
    output, _ = programs.start("-c", LAUNCHING).communicate()  # until nobody holds its output any more
    assert "the process that started this one is gone" in output


def test_a_process_that_dies_ends_the_others_within_a_minute_and_is_named(programs, tmp_path, cache_dir):
    output, _ = kill_the_second_process(programs, tmp_path, cache_dir)
    assert "was killed (SIGKILL)" in output


def test_torchrun_goes_on_from_the_last_checkpoint_by_itself(programs, tmp_path, cache_dir):
    values = {"number_of_outer_steps": 8, "save_weights_every": 1, "max_requested_batch": 16}
    configuration = write_config(tmp_path, cache_dir, **values)
    killed = ["tests/support/killed.py", tmp_path / "logs", 400, 0, "run.py"]  # in the third or fourth round
    ended = programs.torchrun(2, *killed, "--config", configuration, options=["--max-restarts=1"])
    assert "resumed after round" in ended.stdout
    (folder,) = (tmp_path / "logs").iterdir()
    programs.torchrun(2, "run.py", "--config", configuration, f"log_dir={tmp_path / 'whole'}")
    expected = next((tmp_path / "whole").iterdir())
    assert len(report(folder, "training_log.csv")) == len(report(expected, "training_log.csv"))
    assert_same_run(folder, expected)


def processes_of_one_run(programs: Programs, overrides: list[list[str]], config: Path) -> list[tuple[Popen, str, str]]:
    """Processes that somebody starts with different arguments, as on different machines, when all have ended.

    Each with its output and its errors.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(overrides))}
    shared |= {"LOCAL_WORLD_SIZE": str(len(overrides)), "GROUP_RANK": "0"}
    started = [
        programs.start("run.py", "--config", config, *own, env=os.environ | shared | ranks, apart=True)
        for ranks, own in [({"RANK": str(rank), "LOCAL_RANK": str(rank)}, own) for rank, own in enumerate(overrides)]
    ]
    return [(process, *process.communicate()) for process in started]


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
    programs, tmp_path, cache_dir, others, expected
):
    ended = processes_of_one_run(programs, [[], others], write_config(tmp_path, cache_dir))
    assert [process.returncode for process, _, _ in ended] == [2, 2]
    (_, _, errors), (_, _, others_errors) = ended
    assert [line for line in errors.splitlines() if line.startswith("error")] == [expected]
    assert "Traceback" not in others_errors
    assert not (tmp_path / "logs").exists()
