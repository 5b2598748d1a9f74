"""The start of processes, and the detection of lost ones."""

import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import run
from tests.support.runs import summary, write_config
from utils.config.reading import parse_config
from utils.distributed import launch, peers
from utils.distributed.launch import planned_processes, threads_per_process
from utils.distributed.peers import PeerLostError, PeerWatch


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
        ({"nodes_per_gpu": 2, "devices": ["cuda:1"]}, 16, 8, 1, 8),
        ({"nodes_per_gpu": 2, "devices": ["cpu"]}, 16, 8, 2, 8),
        ({"nodes_per_gpu": 4, "devices_per_node": 2}, 2, 0, 2, 1),  # one shard group
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
def test_gpus_are_counted_if_their_driver_can_be_loaded(monkeypatch, driver, gpus):
    """Also in a container without /proc/driver/nvidia. Without a driver PyTorch is not imported."""
    monkeypatch.setattr(launch, "_GPU_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus or pytest.fail("PyTorch was asked"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launch, "cores", lambda: 16)
    assert planned_processes(config(nodes_per_gpu=4)) == (gpus or 4)


@pytest.mark.parametrize("value", ["2.5", "0", "none", "true"])
def test_an_impossible_number_of_processes_is_refused(value):
    with pytest.raises(ValueError, match="processes: should be auto or a positive integer"):
        parse_config({"number_of_outer_steps": 1}, [f"processes={value}"])


@pytest.mark.parametrize("processes", ["auto", "1"])
def test_only_visible_gpus_are_counted(monkeypatch, tmp_path, processes):
    """CUDA reads CUDA_VISIBLE_DEVICES once, when it is used first."""
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


# Lost processes

CLOSED = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")


def explained(watcher: PeerWatch, failure: RuntimeError = CLOSED) -> str:
    with pytest.raises(PeerLostError) as error, watcher.explaining():
        raise failure
    return str(error.value)


def test_a_lost_connection_is_explained_and_other_errors_stay():
    assert "another process of the run is gone" in explained(PeerWatch())
    late = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 43200000ms for recv operation")
    assert explained(PeerWatch(), late) == f"another process did not answer: {late}"
    duplicate = dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77, invalid usage: Duplicate GPU detected")
    assert explained(PeerWatch(), duplicate) == f"GPUs cannot exchange tensors: {duplicate}"
    for error in (ValueError("of its own"), RuntimeError("shapes do not match")):
        with pytest.raises(type(error), match=str(error)), PeerWatch().explaining():
            raise error


def test_a_process_that_ends_by_itself_leaves_the_reason():
    store = HashStore()
    PeerWatch(store=store).failed(1, "ETA: must be positive")
    assert explained(PeerWatch(store=store)) == "rank 1 ended: ETA: must be positive"


@pytest.mark.parametrize(("given", "threads"), [(None, "4"), ("7", "7")])
def test_processes_share_the_cores_for_compiling(given, threads, monkeypatch):
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(launch, "cores", lambda: 8)
    child = f"import os, sys; sys.exit(os.environ['{name}'] != '{threads}')"
    with launch.Launch(2, ["-c", child]) as started:
        assert os.environ[name] == threads
        assert started.processes[1].wait() == 0
    assert os.environ.get(name) == given


def test_one_thread_writes_the_results_and_ends_the_process(monkeypatch):
    """The main thread, or the one that found it waiting; if its collective then fails, the main thread waits on."""
    statuses, reasons = [], []
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=statuses.append))
    came_back, hung = PeerWatch(), PeerWatch()
    came_back.failed(0, "first")
    came_back.end("second")
    assert statuses == []
    hung.finish = reasons.append
    hung.end("stalled")
    assert (statuses, reasons) == ([1], ["stalled"])
    main_thread = threading.Thread(target=explained, args=(hung,), daemon=True)
    main_thread.start()
    main_thread.join(0.2)
    assert main_thread.is_alive()


# Real processes


STARTING = """
from utils.distributed import peers, stall
from utils.distributed.launch import Launch
from utils.distributed.processes import meet
peers.GRACE_SECONDS = 0.0
stall.INTERVAL_SECONDS = 0.1
stall.SHORTEST_SECONDS = 1.0
with Launch(2, ["-c", CHILD]) as launch:
    processes = meet(launch)
    processes.gather(None)
    processes.close()
"""
LATE = """
import time
from utils.distributed.processes import meet
time.sleep(2.5)
processes = meet()
processes.gather(None)
processes.close()
"""


def test_a_process_that_dies_before_it_connects_is_named(programs):
    ended = programs.run("-c", "CHILD = 'import os; os.kill(os.getpid(), 9)'" + STARTING, status=1)
    assert re.search(r"error: rank 1 \(process \d+\) was killed \(SIGKILL\)", ended.stderr)


def test_a_process_that_comes_late_is_waited_for(programs):
    """The first one waits for it in the store, and would have seen no answer of it."""
    programs.run("-c", f"CHILD = {LATE!r}{STARTING}")


LAUNCHING = """
import os, signal
from utils.distributed.launch import Launch
launch = Launch(2, ["-c", "from utils.distributed.processes import meet; meet()"])
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_process_ends_with_its_starter(programs):
    programs.start("-c", LAUNCHING).communicate()  # until no process holds its output


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_process_that_stops_answering_in_a_round_ends_the_run(programs, tmp_path, cache_dir, trainers):
    """The first process waits for it in a mean of their common trainer, or at the end of the round."""
    values = {"number_of_initial_trainers": trainers, "merge_frequency": 99, "collective_timeout_minutes": 0.05}
    config = write_config(tmp_path, cache_dir, processes=2, **values)
    ended = programs.run("tests/support/killed_in_round.py", "SIGSTOP", 1, "--config", config, status=1)
    assert "error: another process did not answer" in ended.stdout + ended.stderr


HANG = """
import os, time
from cluster import Cluster
from fabrics.training import inner_loop
from utils.distributed import reductions, stall

stall.INTERVAL_SECONDS = 0.1
stall.FACTOR = 2.0
accumulate = inner_loop.accumulate_gradients
result = reductions._OrderedMean.result
train = Cluster._train
hangs = [False]

def train_or_hang(self, *arguments):
    if self.counters.outer_steps == 2:
        stall.SHORTEST_SECONDS = 1.0  # rounds before may take longer on a busy machine
        hangs[0] = os.environ["RANK"] == "1"
    return train(self, *arguments)

def sleep(*arguments):
    if hangs[0]:
        time.sleep(600.0)
    return accumulate(*arguments)

def skip(self):
    return (self._mean.zero_(), 0) if hangs[0] else result(self)

Cluster._train = train_or_hang
"""
HANGS = {
    "sleeps in a step": "inner_loop.accumulate_gradients = sleep",
    "skips a collective": "reductions._OrderedMean.result = skip",
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_run_without_progress_ends_and_says_where_each_process_is(programs, tmp_path, cache_dir, hang):
    (tmp_path / "hang.py").write_text(HANG + HANGS[hang])
    config = write_config(
        tmp_path, cache_dir, processes=2, number_of_initial_trainers=1, plugins=[str(tmp_path / "hang.py")]
    )
    ended = programs.run("run.py", "--config", config, status=1)
    said = ended.stdout + ended.stderr
    assert "error: no process has made progress for" in said
    assert "rank 0 is after its" in said
    place = "in inner step 1 of" if hang == "sleeps in a step" else "after its"
    assert f"rank 1 is {place}" in said
    assert "of round 3" in said
    (folder,) = (tmp_path / "logs").iterdir()
    for line in ("error: ", "failed after 2 rounds", f"to resume: python run.py --resume {folder}"):
        assert said.count(line) == 1
    found = summary(folder)
    assert found["status"] == "failed"
    assert found["error"].startswith("no process has made progress for")


UNFIT = """
import os
import cluster
from utils.config.schema import ConfigError
def check(config, model):
    if os.environ["RANK"] == "1":
        raise ConfigError("model_config.name: is not on this machine")
cluster.check_model = check
"""


def test_a_configuration_that_does_not_fit_another_process_is_wrong(programs, tmp_path, cache_dir):
    (tmp_path / "unfit.py").write_text(UNFIT)
    config = write_config(tmp_path, cache_dir, processes=2, plugins=[str(tmp_path / "unfit.py")])
    ended = programs.run("run.py", "--config", config, status=2)
    problem = "rank 1 ended: the configuration is wrong: model_config.name: is not on this machine"
    assert ended.stderr.splitlines() == [f"error: {problem}"]


SLOW_LINK = """
exchange = reductions.Transport.exchange
reductions.PIECE_BYTES["cpu"] = 2**15

def slowly(*arguments):
    time.sleep(0.2 * hangs[0])
    exchange(*arguments)

reductions.Transport.exchange = slowly
"""


def test_a_mean_over_a_slow_link_is_progress(programs, tmp_path, cache_dir):
    """No round before had one so slow, for instance because a single worker trained alone."""
    (tmp_path / "slow.py").write_text(HANG + SLOW_LINK)
    values = {"number_of_initial_trainers": 1, "number_of_outer_steps": 3, "plugins": [str(tmp_path / "slow.py")]}
    programs.run("run.py", "--config", write_config(tmp_path, cache_dir, processes=2, **values))


SLOW_DISK = """
import os, time
from utils.checkpoint import checkpoint

write = checkpoint.write_parts

def slowly(*arguments, **keywords):
    checkpoint.write_parts = write
    if os.environ["RANK"] == "1":
        time.sleep(4.0)
    write(*arguments, **keywords)

checkpoint.write_parts = slowly
"""


def test_a_checkpoint_may_take_longer_than_a_collective_within_a_round(programs, tmp_path, cache_dir):
    (tmp_path / "slow.py").write_text(SLOW_DISK)
    values = {"save_weights_every": 1, "number_of_outer_steps": 1, "collective_timeout_minutes": 0.05}
    config = write_config(tmp_path, cache_dir, processes=2, plugins=[str(tmp_path / "slow.py")], **values)
    programs.run("run.py", "--config", config)


DIFFERENT = """
import os, sys
sys.path.insert(0, os.getcwd())
import run
own = [[], ["nodes_per_gpu=2", "ETA=0.5"]]
status = run.main([*sys.argv[1:], *own[int(os.environ["RANK"])]])
sys.stdout.write(f"status {status}\\n")  # at once, as both processes write to one pipe
"""


def test_processes_with_different_arguments_end_with_one_line_before_training(programs, tmp_path, cache_dir):
    """Processes that connect in different ways, as different nodes make them, do not wait forever."""
    config = write_config(tmp_path, cache_dir)
    (tmp_path / "different.py").write_text(DIFFERENT)
    done = programs.torchrun(2, tmp_path / "different.py", "--config", config)
    assert done.stdout.count("status 2") == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
        "error: the processes have different configurations: ETA: 0.4 on rank 0, 0.5 on rank 1; "
        "nodes_per_gpu: 4 on rank 0, 2 on rank 1"
    ]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "logs").exists()
