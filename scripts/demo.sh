#!/bin/sh
# Runs the main job on the same held-out problems with six ways of decoding, and prints one table. The masked model uses
# plain decoding, the control (one more token per step, unverified), LoPA as its paper describes it, and verified
# lookahead, its default. The causal model writes one token at a time, and with lossless lookahead; the texts of these
# two are compared.
set -eu
: "${BIN:=.venv/bin}" "${RANKS:=2}"
folder="outputs/demo/$(date +%Y-%m-%d_%H-%M-%S)"
job() {
    name=$1
    shift
    echo
    echo "== $name: $* "
    OMP_NUM_THREADS=1 "$BIN/torchrun" --log-dir "$folder/$name/torchrun" --nproc-per-node "$RANKS" -m lopa_dist \
        "hydra.run.dir=$folder/$name" task.limit=100 "$@"
}
job plain decode=embedded_plain
job control decode=embedded_control
job lopa decode=embedded_lopa
job verified decode=embedded
job one_token model=causal decode.drafts=0
job lossless model=causal
echo
"$BIN/lopa-dist" report "$folder"
echo
"$BIN/python" scripts/same_texts.py "$folder/one_token" "$folder/lossless"
echo
echo "TPF: tokens per forward pass. rows/token: rows of the model computed for a token of the answer; a CPU pays for rows,"
echo "a GPU with few sequences for forwards. Verified lookahead keeps lookahead tokens that the next forward predicts again,"
echo "so it loses about a point of accuracy, less than 100 problems can show, in a third of the forwards and half"
echo "of the rows. The control and LoPA keep tokens that nothing verified. On the causal model lookahead is exact:"
echo "lossless writes the texts of one_token, in a fraction of the forwards."
