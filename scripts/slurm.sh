#!/usr/bin/env bash
# Train on one or several nodes of a Slurm cluster. Five minutes before its time ends, the job stops as after SIGTERM
# (docs/faults.md), is queued again, and resumes: so --time must be well above five minutes. A preempted job is queued
# again by Slurm, or with a grace time only if PreemptParameters has send_user_signal. log_dir must be on a file system
# that all nodes share. Arguments are those of run.py. Each task has the cores that --cpus-per-task gives, or one.
#   sbatch --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 scripts/slurm.sh --config my.yaml   a node of 8 GPUs
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 scripts/slurm.sh --config my.yaml   four
#SBATCH --job-name=adloco
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

ends=no
# scancel sends the signal to the tasks. srun would kill them if it got it.
trap 'ends=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# Each task is a process of the run: torchrun would kill it 30 seconds after the signal, even while it writes.
# shellcheck disable=SC2016  # the tasks expand these
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
    export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
    exec python run.py "$@"' adloco --resume auto "run_name=slurm_$SLURM_JOB_ID" "$@" &
run=$!

status=0
wait "$run" || status=$?
if [ "$status" -eq $((128 + $(kill -l USR1))) ]; then # the signal ended the wait, not the run
    status=0
    wait "$run" || status=$?
fi
if [ "$ends" = yes ] && [ "$status" -ge 128 ]; then # interrupted: neither complete nor failed
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
