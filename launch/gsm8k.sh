#!/bin/bash
#SBATCH --job-name=lopa-gsm8k
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# GSM8K's test set, 4-shot.
#
#   sbatch launch/gsm8k.sh                                                   the embedded model, to see that all works
#   sbatch --nodes 2 --gpus-per-node 8 --cpus-per-task=64 --mem-per-gpu=64G launch/gsm8k.sh model=d2f_dream_base decode=lopa parallel.branch=8
#   bash launch/gsm8k.sh --dry-run [overrides]                               what would run
#
# Arguments are Hydra overrides. slurm/prolog.sh says what the environment can change.
ROOT=$(dirname "$0")/..; [ -f "$ROOT/slurm/prolog.sh" ] || ROOT=${SLURM_SUBMIT_DIR:-$PWD} # Slurm runs a copy of this script
[ -f "$ROOT/slurm/prolog.sh" ] || { echo "$ROOT is not a checkout of lopa_dist (no slurm/prolog.sh): cd to one before sbatch" >&2; exit 1; }
source "$ROOT/slurm/prolog.sh"
lopa_launch task=gsm8k -- "$@"
