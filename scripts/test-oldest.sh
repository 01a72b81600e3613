#!/bin/sh
# Runs the tests with the oldest torch and Triton that pyproject.toml allows, in their own environment, .venv-oldest.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-oldest
mkdir -p $venv
sed -nE 's/^ *"(torch|triton)>=([0-9.]+).*/\1==\2.*/p' pyproject.toml >$venv/oldest.txt
sh scripts/install.sh $venv "$(grep ^torch $venv/oldest.txt)" -c $venv/oldest.txt -e '.[dev]'
exec $venv/bin/python -m pytest "$@"
