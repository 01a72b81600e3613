#!/bin/bash
#SBATCH --job-name=lopa-dist
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Any job. gsm8k.sh and batch.sh are this script with a task of their own.
#
#   sbatch --gpus-per-node 8 --cpus-per-task=64 --mem-per-gpu=64G launch/job.sh model=d2f_dream_base task=math
#   sbatch --gpus-per-node 8 --cpus-per-task=64 --mem-per-gpu=64G launch/job.sh model=dream_coder_instruct task=humaneval task.allow_code_execution=true
#   sbatch --gpus-per-node 8 --cpus-per-task=64 --mem-per-gpu=64G launch/job.sh --doctor model=d2f_dream_base         whether it would run, on every node
#   bash launch/job.sh --dry-run [overrides]                                     what would run
#
# Arguments are Hydra overrides. slurm/prolog.sh says what the environment can change.
ROOT=$(dirname "$0")/..; [ -f "$ROOT/slurm/prolog.sh" ] || ROOT=${SLURM_SUBMIT_DIR:-$PWD} # Slurm runs a copy of this script
[ -f "$ROOT/slurm/prolog.sh" ] || { echo "$ROOT is not a checkout of lopa_dist (no slurm/prolog.sh): cd to one before sbatch" >&2; exit 1; }
source "$ROOT/slurm/prolog.sh"
lopa_launch -- "$@"
