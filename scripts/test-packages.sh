#!/bin/sh
# Installs the system packages that some tests need, if run as root on a Debian system. Without them, these tests skip.
set -u
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || exit 0
packages=""
command -v slurmctld >/dev/null 2>&1 || packages="slurmctld slurmd slurm-client procps"
command -v bwrap >/dev/null 2>&1 || packages="$packages bubblewrap"
command -v ip >/dev/null 2>&1 || packages="$packages iproute2"
[ -z "$packages" ] && exit 0
echo "installing $packages"
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; } \
    >/dev/null 2>&1 || echo "could not install $packages: the tests that need them will skip"
