"""Machines that come and go under torchrun: agents are started and killed, and the run continues with the others."""

import csv
import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.support.programs import LIMIT_SECONDS, TORCHRUN, Popen, Programs, wait_until
from tests.support.runs import PAGE, write_config

# Seconds that an agent waits for others before it starts its processes. The interval of its heartbeats stays as it is:
# each one cancels the change that another agent has begun, and on a busy machine short ones would keep it out.
_QUICK = "last_call_timeout=3"
# With a shared store the first agent would not tell a new one where the processes meet (torch 2.13).
_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def rows(folder: Path) -> list[dict]:
    """Read the training log of the only run in a folder, while it is written."""
    logs = list(folder.glob("*/model_training_report/training_log.csv"))
    assert len(logs) < 2, "another run was started"
    if not logs:
        return []
    with logs[0].open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["wall_seconds"]]


def kill_machine(agent: Popen) -> None:
    """Kill an agent and all processes that it has started."""
    for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
        process.send_signal(signal.SIGKILL)
    agent.wait()


@pytest.fixture
def agents_said(tmp_path):
    """A folder for the output of agents, which is shown if the test fails; a pipe would fill up."""
    yield tmp_path
    for file in sorted(tmp_path.glob("*.txt")):
        print(f"{file.stem}:\n{file.read_text()}")


def test_a_run_continues_with_an_agent_that_joins_and_without_it_when_it_is_killed(
    programs: Programs, agents_said, tmp_path, cache_dir
):
    config = write_config(
        tmp_path, cache_dir, **PAGE, number_of_outer_steps=100_000, number_of_initial_trainers=1, nodes_per_gpu=2,
        INITIAL_BATCH_SIZE=8, sampling_method="none", checkpoint_every_minutes=1e-9, eval_every=1000,
        compile_model=False,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_backend=c10d", "--rdzv_id=pool"]
    options.append(f"--rdzv_endpoint=127.0.0.1:{port}")

    def agent(name: str) -> Popen:
        # The first agent keeps the store of the rendezvous.
        conf = f"--rdzv_conf={_QUICK},is_host={int(name == 'first')}"
        words = (TORCHRUN, *options, conf, "run.py", "--config", config, "--resume", "auto", "run_name=pool")
        with (agents_said / f"{name}.txt").open("w") as said:
            return programs.start(*words, stdout=said, stderr=said, env=os.environ | _ENVIRONMENT)

    def rounds_with(nodes: int, after: int, *agents: Popen) -> int:
        """Wait for a round with n nodes after a round, and return its number."""

        def found() -> int:
            last = [row for row in rows(tmp_path / "logs") if int(row["outer_step"]) > after][-1:]
            return next((int(row["outer_step"]) for row in last if row["nodes"] == str(nodes)), 0)

        return wait_until(found, f"rounds with {nodes} nodes", *agents)

    first = agent("first")
    # Wait for a checkpoint before the second agent starts.
    alone = rounds_with(2, 0, first)
    second = agent("second")
    both = rounds_with(4, alone, first, second)
    kill_machine(second)
    alone_again = rounds_with(2, both, first)
    first.send_signal(signal.SIGTERM)
    first.wait(LIMIT_SECONDS)
    (folder,) = (tmp_path / "logs").iterdir()
    steps = [int(row["outer_step"]) for row in rows(tmp_path / "logs")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= alone_again
    said = (folder / "training_log.log").read_text(encoding="utf-8")
    # More than two if the second agent missed the last call: the first restarts alone, and once more with it.
    resumed = [int(number) for number in re.findall(r"resumed after round (\d+)", said)]
    # Joining costs nothing. A kill costs the unfinished round, and one whose checkpoint was being written.
    assert resumed[0] >= alone
    assert resumed[-1] >= both - 2
