#!/bin/sh
# Installs torch with the given pip, in the given version or the usual one: the CPU build unless an NVIDIA GPU is there.
# pip's default index may only hold the CUDA build (2 GB, and it runs on CPUs too); TORCH_INDEX_URL, set to PyTorch's CPU
# wheel index, avoids it.
set -eu
pip=$1
python="$(dirname "$pip")/python"
if "$python" -c 'import torch' 2>/dev/null; then exit 0; fi
install="$pip install --quiet --disable-pip-version-check ${2:-torch==2.13.0}"
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    exec $install
fi
exec $install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
