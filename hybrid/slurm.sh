#!/usr/bin/env bash
# The hybrid on two machines of a Slurm cluster: sbatch hybrid/slurm.sh [flags]
#
# Slurm starts one launcher a machine; each starts that machine's ranks. It expects the lab, and the environment that
# ./launch.sh has prepared, in a folder that all machines share. (Written after Slurm's manual; not run under Slurm.)
#SBATCH --job-name=hybrid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=6
#SBATCH --time=01:00:00
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"  # the lab: Slurm runs a copy of this script, from elsewhere

# Node 0's address, as the other machines reach it; a job's own port, since several jobs may share a machine.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export LAB_ADDR LAB_PORT LAB_OUT
LAB_ADDR=$(getent ahostsv4 "$first" | awk '!/^127\./ && !found++ { print $1 }')  # some machines call themselves 127.0.1.1
if [ -z "$LAB_ADDR" ]; then
    LAB_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' | head -n 1)
fi
LAB_PORT=$((20000 + SLURM_JOB_ID % 10000))
LAB_OUT=runs/slurm-$SLURM_JOB_ID

# Slurm numbers the tasks as the machines, from 0. When one launcher fails, the others hear of it and end; so does srun.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 bash -c '
    exec ./launch.sh hybrid --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
        --master-addr "$LAB_ADDR" --master-port "$LAB_PORT" --out "$LAB_OUT" "$@"
' launch "$@"
