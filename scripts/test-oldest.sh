#!/bin/sh
# Runs the suite with the oldest torch and Triton that pyproject.toml allows, in an environment of its own, .venv-oldest.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-oldest
test -x $venv/bin/pip || "${PYTHON:-python3}" -m venv $venv
sed -nE 's/^ *"(torch|triton)>=([0-9.]+).*/\1==\2.*/p' pyproject.toml >$venv/oldest.txt
sh scripts/install-torch.sh $venv/bin/pip "$(grep ^torch $venv/oldest.txt)"
$venv/bin/pip install --quiet --disable-pip-version-check -c $venv/oldest.txt -e '.[dev]'
exec $venv/bin/python -m pytest "$@"
