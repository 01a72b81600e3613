#!/bin/sh
# Installs packages into a virtual environment, with uv if it is installed, and otherwise with pip. If there is no
# environment, it is made first.
#
#   scripts/install.sh VENV TORCH WHAT...        e.g. scripts/install.sh .venv torch==2.13.0 -e '.[dev]'
#
# TORCH is installed first: the CPU build, unless there is an NVIDIA GPU. The default package index may have only the
# CUDA build (2 GB; it also runs on CPUs). uv gets the CPU build from PyTorch's own index; for pip, set TORCH_INDEX_URL
# to PyTorch's index of CPU wheels. PYTHON is the interpreter (default python3).
set -eu
venv=$1 torch=$2
shift 2
python=${PYTHON:-python3}
uv=$(command -v uv || true)
tool=$(basename "${uv:-pip}")

say() { echo "$(date +%H:%M:%S) $*"; }

# pip shows only errors: its warnings are about the machine's indexes and the packages of other projects. It would compile
# all modules, one after the other; `compiled` does so with all cores.
add() {
    if [ -n "$uv" ]; then "$uv" pip install --python "$venv/bin/python" "$@"
    else "$venv/bin/python" -m pip install --quiet --quiet --no-compile --disable-pip-version-check "$@"; fi
}

# All but tests and what no job imports. Without it, jobs of users who cannot write there, or who have set
# PYTHONDONTWRITEBYTECODE, would each compile what they import. Templates that are not Python are passed over.
compiled() {
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$venv/bin/python" -m compileall -q -j 0 -x '/(tests?|testing|_inductor|transformers/models)/' "$packages" >/dev/null 2>&1 || true
}

add_torch() {
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then add "$torch"
    elif [ -n "${TORCH_INDEX_URL:-}" ]; then add --index-url "$TORCH_INDEX_URL" "$torch"
    elif [ -n "$uv" ]; then
        add --torch-backend cpu "$torch" || { say "PyTorch's own index gives no torch: taking it from the usual one"; add "$torch"; }
    else add "$torch"; fi
}

if [ ! -x "$venv/bin/python" ]; then
    say "making the virtual environment $venv"
    if [ -n "$uv" ]; then "$uv" venv --quiet --seed --python "$python" "$venv"
    else
        [ -e "$venv" ] || made=yes
        "$python" -m venv "$venv" || {
            [ -z "${made:-}" ] || rm -rf "$venv"  # a folder that was there may hold anything
            echo "python3 -m venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2
            exit 1
        }
    fi
fi
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "installing $torch with $tool (the largest package: a minute or more)"
    add_torch
fi
say "installing $* with $tool (some 150 packages: a minute or two)"
add "$@"
compiled
say "installed in $venv"
