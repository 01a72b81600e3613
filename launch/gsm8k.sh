#!/bin/bash
#SBATCH --job-name=lopa-gsm8k
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.log
# sbatch launch/gsm8k.sh [overrides]      e.g. sbatch --gpus-per-node 8 launch/gsm8k.sh \
#     model=local model.path=... decode=lopa
#
# Without a model path there is nothing to solve GSM8K with, so the embedded model runs on its own problems.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
BIN=${BIN:-.venv/bin}
[ -x "$BIN/torchrun" ] || { echo "$BIN/torchrun not found: run 'make install', or set BIN to your environment's bin"; exit 1; }

case " $* " in
    *" task="*) ;;
    *" model.path="*) set -- task=gsm8k "$@" ;;
    *) echo "no model.path given: running the embedded model on its own word problems" ;;
esac

# ranks of a node: its GPUs, or RANKS processes on CPUs
per_node=${SLURM_GPUS_ON_NODE:-${RANKS:-2}}
nodes=${SLURM_JOB_NUM_NODES:-1}
host=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | head -n 1 || true)
getent hosts "${host:-localhost}" >/dev/null || host=127.0.0.1 # one-machine clusters have names that do not resolve
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
step=()
[ -n "${SLURM_JOB_ID:-}" ] && step=(srun --ntasks "$nodes" --ntasks-per-node 1 --cpus-per-task "${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1)

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${step[@]}" "$BIN/torchrun" --nnodes "$nodes" --nproc-per-node "$per_node" \
    --rdzv-id "${SLURM_JOB_ID:-local}" --rdzv-backend c10d --rdzv-endpoint "${host:-127.0.0.1}:$port" \
    -m lopa_dist "$@"
