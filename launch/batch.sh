#!/bin/bash
#SBATCH --job-name=lopa-batch
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Your own prompts: CSV, JSONL, Parquet, OpenAI Batch lines or a Hugging Face dataset.
#
#   sbatch --gpus-per-node 8 --cpus-per-task=64 --mem-per-gpu=64G launch/batch.sh model=dream_instruct task.input=prompts.jsonl
#   sbatch --array=0-7 --output=%x-%A_%a.log --gpus-per-node 1 --cpus-per-task=8 --mem-per-gpu=64G launch/batch.sh \
#     model=dream_instruct task.input=prompts.jsonl
#                                                     8 jobs, each its share, with logs named by array and task;
#   lopa-dist merge outputs/slurm-<job>               then one file in input order
#   bash launch/batch.sh --dry-run [overrides]                                           what would run
#
# Arguments are Hydra overrides. slurm/prolog.sh says what the environment can change.
ROOT=$(dirname "$0")/..; [ -f "$ROOT/slurm/prolog.sh" ] || ROOT=${SLURM_SUBMIT_DIR:-$PWD} # Slurm runs a copy of this script
[ -f "$ROOT/slurm/prolog.sh" ] || { echo "$ROOT is not a checkout of lopa_dist (no slurm/prolog.sh): cd to one before sbatch" >&2; exit 1; }
source "$ROOT/slurm/prolog.sh"
lopa_launch task=batch -- "$@"
