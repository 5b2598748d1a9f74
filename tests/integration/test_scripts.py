"""The scripts start what they should. Slurm, ssh, torchrun and Python are stand-ins that say how they are called."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import command

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def stand_ins(tmp_path):
    """Makes programs that precede all others; returns the environment."""

    def make(**sources: str) -> dict[str, str]:
        for name, source in sources.items():
            path = tmp_path / name
            path.write_text(f"#!/usr/bin/env bash\n{source}\n")
            path.chmod(0o755)
        return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return make


SLURM = {
    "scontrol": 'case $1 in show) printf "a\\nb\\n" ;; *) echo "scontrol $*" ;; esac',
    # Two nodes of two tasks.
    "srun": """shift
export SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) "$@" || exit 7
done""",
}
ENVIRONMENT = {"SLURM_JOB_NODELIST": "[a,b]", "SLURM_JOB_ID": "42"}


def test_a_slurm_job_gives_each_task_its_place(stand_ins):
    shown = 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR:$MASTER_PORT $*"'
    environment = stand_ins(**SLURM, python=shown) | ENVIRONMENT
    result = command("bash", SCRIPTS / "slurm.sh", "--config", "my file.yaml", env=environment)
    told = "a:20042 run.py --resume auto run_name=slurm_42 --config my file.yaml"
    assert result.stdout.splitlines() == [
        f"0/4 0/2 0 {told}",
        f"1/4 1/2 0 {told}",
        f"2/4 0/2 1 {told}",
        f"3/4 1/2 1 {told}",
    ]
    assert result.returncode == 0


def test_a_slurm_job_that_fails_is_not_queued_again(stand_ins):
    result = command("bash", SCRIPTS / "slurm.sh", env=stand_ins(**SLURM, python="exit 1") | ENVIRONMENT)
    assert (result.returncode, result.stdout) == (7, "")


@pytest.mark.parametrize(("status", "queued"), [(130, True), (0, False), (1, False)])
def test_a_slurm_job_whose_time_ends_stops_and_is_queued_again(stand_ins, status, queued):
    """Unless it completes, or fails, before it stops. A signal for srun kills its tasks, instead of reaching them."""
    srun = f"""echo $$ > "$0.pid"
trap 'echo killed; exit 137' TERM  # of srun
trap 'echo stopped; exit {status}' USR2  # of the tasks
kill -USR1 $PPID
for _ in {{1..600}}; do sleep 0.1; done"""
    scancel = 'echo "scancel $*"; kill -USR2 "$(cat "${0%scancel}srun.pid")"'
    environment = stand_ins(**SLURM | {"srun": srun, "scancel": scancel}) | ENVIRONMENT
    result = command("bash", SCRIPTS / "slurm.sh", env=environment)
    told = ["scancel --signal=TERM 42", "stopped"] + ["scontrol requeue 42"] * queued
    assert (result.returncode, result.stdout.splitlines()) == (0 if queued else status, told)


def test_two_machines_get_the_same_command(stand_ins):
    environment = stand_ins(ssh='echo "$2"; bash -c "$3"', torchrun='echo "$(printf "%s|" "$@"; pwd)"') | {
        "PROCESSES": "8"
    }
    result = command("bash", SCRIPTS / "two_machines.sh", "10.0.0.1", "10.0.0.2", "a b", env=environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert {"10.0.0.1", "10.0.0.2"} <= {*lines}
    for rank in (0, 1):
        options = f"--nnodes=2|--node_rank={rank}|--nproc_per_node=8|--master_addr=10.0.0.1|--master_port=29500"
        assert f"{options}|run.py|a b|{SCRIPTS.parent}" in lines


def test_two_machines_fail_together(stand_ins):
    waits = "case $2 in one) exit 3 ;; *) for _ in {1..600}; do sleep 0.1; done ;; esac"
    assert command("bash", SCRIPTS / "two_machines.sh", "one", "two", env=stand_ins(ssh=waits)).returncode == 3


def test_the_scripts_have_no_problem_that_shellcheck_knows():
    result = command(Path(sys.executable).parent / "shellcheck", *SCRIPTS.glob("*.sh"))
    assert (result.returncode, result.stdout) == (0, "")
