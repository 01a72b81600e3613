#!/bin/bash
# A sweep: one job for every combination, then one table and the speed-accuracy plot.
#
#   launch/sweep.sh decode.drafts=4,8,12,16 decode.tau_conf=0.8,0.9,0.95
#   launch/sweep.sh launcher=slurm hydra.launcher.partition=gpu hydra.launcher.gpus_per_node=8 \
#       hydra.launcher.tasks_per_node=8 hydra.launcher.cpus_per_task=8 hydra.launcher.mem_per_gpu=64G \
#       model=d2f_dream_base task=gsm8k decode=lopa decode.branches=0,3,7,15
#   launch/sweep.sh --dry-run ...
#
# Every point's settings are checked before the first starts. Where a cluster answers, jobs go through Slurm
# (launcher=slurm); else they run here, one after the other, as with launcher=local. Run it again with the same FOLDER to
# go on with a sweep that was interrupted: what is finished is not run again. Points that Slurm already has go on meanwhile;
# `scancel --name=lopa-sweep` ends it. Relative paths are relative to the checkout.
set -euo pipefail
SCRIPT=$(readlink -f "$0") # it may be called by a link
cd "$(dirname "$SCRIPT")/.."
[ -f slurm/prolog.sh ] || { echo "$PWD is not a checkout of lopa_dist (no slurm/prolog.sh). Run this script itself, not by sbatch: it gives Slurm a job for each point" >&2; exit 2; }
BIN=${BIN:-.venv/bin}
FOLDER=${FOLDER:-multirun/$(date +%Y-%m-%d/%H-%M-%S)}
for argument; do
    case $argument in
        hydra.sweep.dir=*) echo "$argument: here FOLDER=${argument#*=} names the folder of a sweep and of its report" >&2; exit 2 ;;
        -h | --help) sed -n '2,$ { /^#/! q; s/^# \{0,1\}//p }' "$SCRIPT"; exit ;;
    esac
done

launcher=()
case " $* " in
    *" launcher="* | *" hydra/launcher="*) ;;
    *)
        if command -v sinfo >/dev/null && timeout 10 sinfo >/dev/null 2>&1; then
            launcher=(launcher=slurm)
        else
            echo "no Slurm cluster answers: the jobs run here, one after the other" >&2
        fi
        ;;
esac
dry=0 overrides=()
for argument; do if [ "$argument" = --dry-run ]; then dry=1; else overrides+=("$argument"); fi; done
place=$FOLDER
[[ $place =~ ^[A-Za-z0-9_./:@%+-]*$ ]] || place="'${FOLDER//\'/\\\'}'" # in quotes, which Hydra needs
command=("$BIN/lopa-dist" --multirun "${launcher[@]}" "hydra.sweep.dir=$place" "${overrides[@]}")
if [ "$dry" = 1 ]; then
    printf '%q ' "${command[@]}"
    printf '&& %q report %q\n' "$BIN/lopa-dist" "$FOLDER"
    exit
fi
[ -x "$BIN/lopa-dist" ] || { echo "$BIN/lopa-dist not found: run 'make install', or set BIN to your environment's bin" >&2; exit 1; }
# Points that a sweep has given to Slurm go on when it is interrupted: submitted again, they would run twice.
if [ -d "$FOLDER/.submitit" ] && command -v squeue >/dev/null; then
    for job in $(squeue --noheader --me --array --format %A 2>/dev/null || true); do
        case $(scontrol --oneliner show job "$job" 2>/dev/null) in
            *"StdOut=$(cd "$FOLDER" && pwd -P)/.submitit/"*)
                echo "jobs of this sweep run or wait in Slurm's queue (job $job): let them end, or scancel them; then again" >&2
                exit 2
                ;;
        esac
    done
fi
# Ctrl-C reaches the sweep by itself, and is none of this shell's business: bash loses the status of a child that ends
# while a SIGINT interrupts `wait`. What `kill` or a closed terminal tells this shell is passed on.
signals=0 sweep= goes_on="what Slurm has of this sweep goes on; scancel --name=lopa-sweep ends it"
pass_on() { signals=$((signals + 1)); echo "told to stop: $goes_on" >&2; [ -z "$sweep" ] || kill -TERM "$sweep" 2>/dev/null || true; }
trap '' INT
trap pass_on TERM HUP
(trap - INT; exec "${command[@]}") <&0 & # in the background, for a shell answers no signal while it waits in front
sweep=$! before=-1
[ "$signals" = 0 ] || kill -TERM "$sweep" 2>/dev/null || true # told before it was known
while [ "$before" != "$signals" ]; do # a signal ends `wait`, not the sweep, whose status is still to come
    before=$signals status=0
    wait "$sweep" || status=$?
done
[ "$status" != 130 ] || echo "interrupted: $goes_on" >&2
trap - INT TERM HUP
[ ! -d "$FOLDER" ] || "$BIN/lopa-dist" report "$FOLDER" || true # of what is finished, also where one of the jobs failed
exit "$status"
