#!/bin/sh
# The main job three times over the same held-out problems, and one table: plain decoding, the control (one more token
# a step, unverified) and LoPA with the embedded model's default setting.
set -eu
: "${BIN:=.venv/bin}" "${RANKS:=2}"
folder="outputs/demo/$(date +%Y-%m-%d_%H-%M-%S)"
job() {
    name=$1
    shift
    echo
    echo "== $name: $* "
    OMP_NUM_THREADS=1 "$BIN/torchrun" --log-dir "$folder/$name/torchrun" --nproc-per-node "$RANKS" -m lopa_dist \
        "hydra.run.dir=$folder/$name" "$@"
}
job plain decode=embedded_plain
job control decode=embedded_control
job lopa decode=embedded
echo
"$BIN/lopa-dist" report "$folder"
