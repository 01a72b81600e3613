#!/bin/sh
# Compiles the kernels with another version of Triton than the environment's: scripts/test-triton.sh [VERSION]. The
# default is the version that comes with torch 2.13's CUDA build. This Triton is installed into its own folder. VENV is
# the environment (default .venv).
set -eu
cd "$(dirname "$0")/.."
version=${1:-3.7.1} venv=${VENV:-.venv}
folder=$venv/triton-$version
[ -d "$folder" ] || "$venv/bin/python" -m pip install --quiet --no-deps --target "$folder" "triton==$version"
export PYTHONPATH="$PWD:$folder"
"$venv/bin/python" -c 'import triton; print("Triton", triton.__version__)'
exec "$venv/bin/python" -m pytest -q tests/kernels -k "cross_compiled or compiled_once"
