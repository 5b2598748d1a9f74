#!/usr/bin/env bash
# Train on two machines over ssh; if one fails, the other ends. Both have this folder at the same path, with the
# environment on PATH, and share log_dir. PROCESSES (default 1) start on each; further arguments are those of run.py.
#   PROCESSES=8 scripts/two_machines.sh 10.0.0.1 10.0.0.2 --config my.yaml
set -euo pipefail

hosts=("$1" "$2")
shift 2
folder=$(cd "$(dirname "$0")/.." && pwd)
arguments=
[ $# -eq 0 ] || arguments=$(printf ' %q' "$@") # without arguments printf would add an empty one
for rank in 0 1; do
    command="cd $(printf %q "$folder") && torchrun --nnodes=2 --node_rank=$rank --nproc_per_node=${PROCESSES:-1} \
--master_addr=${hosts[0]} --master_port=${PORT:-29500} run.py$arguments"
    # -tt: the remote command ends with its connection.
    ssh -tt "${hosts[$rank]}" "$command" </dev/null &
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
wait -n
wait -n
