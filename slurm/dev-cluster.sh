#!/usr/bin/env bash
# A throw-away Slurm cluster on this machine, for tests: slurm/dev-cluster.sh start|stop|status|env
#
# Everything lives under one folder ($LOPA_SLURM_DIR, default a folder of this checkout's in the temporary directory).
# Nodes are several slurmd on one host. Needs root and Debian's slurmctld, slurmd and slurm-client; no systemd, no munge.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
D=${LOPA_SLURM_DIR:-${TMPDIR:-/tmp}/lopa-slurm-$(printf %s "$here" | cksum | cut -d' ' -f1)}
NODES=${LOPA_SLURM_NODES:-2}
CPUS=${LOPA_SLURM_CPUS:-4} # of a node; may exceed what the machine has
export SLURM_CONF=$D/slurm.conf

configure() {
    local host first
    host=$(hostname -s)
    first=$(python3 -c 'import random; print(random.randrange(20000, 29000))')
    mkdir -p "$D"/{state,spool,run,log}
    cat >"$D/slurm.conf" <<CONF
ClusterName=dev
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$first
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MinJobAge=3600
KillWait=5
SlurmdTimeout=30
SlurmctldTimeout=30
InactiveLimit=0
Waittime=0
MailProg=/bin/true
DefMemPerCPU=500
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
CONF
    for i in $(seq "$NODES"); do
        echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((first + i)) CPUs=$CPUS Sockets=1" \
            "CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN" >>"$D/slurm.conf"
    done
    echo "PartitionName=dev Nodes=n[1-$NODES] Default=YES MaxTime=INFINITE DefaultTime=00:10:00 State=UP" >>"$D/slurm.conf"
    echo "CgroupPlugin=cgroup/v1" >"$D/cgroup.conf"
    mkdir -p "$D/bin"
    cat >"$D/bin/sacct" <<'SHIM'
#!/usr/bin/env bash
# There is no accounting here: what submitit asks sacct for is answered from squeue.
ids=()
while (($#)); do
    case $1 in
        -j) ids+=("$2"); shift ;;
        -j*) ids+=("${1#-j}") ;;
    esac
    shift
done
echo 'JobID|State|NodeList'
for job in "${ids[@]}"; do squeue -h -a -r -t all -j "$job" -o '%i|%T|%N' 2>/dev/null; done | sort -u
SHIM
    chmod +x "$D/bin/sacct"
}

# A daemon's process, unless it is gone or a zombie (an init that does not reap keeps those).
alive() {
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 1
    case $(ps -o stat= -p "$pid" 2>/dev/null) in "" | Z*) return 1 ;; esac
}

start() {
    for tool in slurmctld slurmd sinfo; do
        command -v $tool >/dev/null || { echo "$tool not found: apt-get install slurmctld slurmd slurm-client" >&2; exit 1; }
    done
    [ "$(id -u)" = 0 ] || { echo "the cluster needs root" >&2; exit 1; }
    alive "$D/run/slurmctld.pid" && { echo "already running"; return; }
    rm -rf "$D"
    configure
    slurmctld -c
    for i in $(seq "$NODES"); do slurmd -N "n$i"; done
    for _ in $(seq 100); do
        [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = "$NODES" ] && { echo "$NODES nodes are idle"; return; }
        sleep 0.1
    done
    echo "the nodes did not come up; see $D/log" >&2
    sinfo >&2 || true
    exit 1
}

# Slurm's processes that watch over the steps of this cluster's jobs: they outlive the daemons and do not give up.
steps() {
    local pid
    for pid in $(pgrep -x slurmstepd); do
        [ "$(readlink "/proc/$pid/cwd")" = "$(readlink -f "$D")/log" ] && echo "$pid"
    done
    true
}

stop() {
    [ -d "$D" ] || return 0
    scancel --user root 2>/dev/null || true
    for _ in $(seq 100); do # twice KillWait; only a daemon that runs ends its steps
        [ -z "$(steps)" ] && break
        sleep 0.1
    done
    for pid in "$D"/run/*.pid; do alive "$pid" && kill "$(cat "$pid")"; done
    for _ in $(seq 50); do
        local left=0
        for pid in "$D"/run/*.pid; do alive "$pid" && left=1; done
        [ "$left" = 0 ] && break
        sleep 0.1
    done
    for pid in $(steps); do
        for child in $(pgrep -P "$pid"); do kill -KILL -- "-$child" 2>/dev/null || kill -KILL "$child" 2>/dev/null || true; done
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$D"
}

case ${1:-} in
    start) start ;;
    stop) stop ;;
    status) sinfo && squeue ;;
    env) echo "export SLURM_CONF=$SLURM_CONF PATH=$D/bin:\$PATH" ;;
    *) echo "usage: $0 start|stop|status|env" >&2; exit 2 ;;
esac
