# What every launch script does first: sourced by launch/*.sh, in a batch job, in an allocation or on a plain machine.
#
#   lopa_launch TASK_OVERRIDES -- USER_OVERRIDES       one job, on all nodes of the allocation; with --doctor among the
#                                                      overrides, what it would meet there (lopa-dist doctor)
#
# Environment: BIN (folder of the programs, default .venv/bin), RANKS (processes a node where there are no GPUs, default 2),
# LAUNCH=torchrun|srun|mpirun (default srun in a job of Slurm's on one node, else torchrun), MPIRUN (the program), RESTARTS (torchrun's, default 0), OMP_NUM_THREADS, SCRATCH (node-local
# folder for temporary files). The job goes on where it was when Slurm requeues it: its run folder bears the job's number,
# and has a link to the log, slurm-<job id>.log. A dry run checks what the job would; it believes that a node has RANKS ranks.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPT=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cd "$ROOT"
BIN=${BIN:-.venv/bin}
DRY=0 DOCTOR=() STEP=lopa-$$

say() { echo "[$(date +%H:%M:%S)] $*"; }

# The value of KEY= among overrides, or nothing; without the quotes around it, in which Hydra takes a text as it is.
value_of() {
    local key=$1 argument value=
    shift
    for argument; do # as in Hydra, the last one counts
        case $argument in "$key="* | "+$key="* | "++$key="*)
            value=${argument#*=}
            case $value in \'*\' | \"*\") value=${value#?} value=${value%?} ;; esac ;;
        esac
    done
    [ -z "$value" ] || echo "$value"
}

# Whether a port of this machine is free is known only when it is bound: so it is chosen by the machine itself.
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

first_host() {
    local host
    host=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | head -n 1 || true)
    # one-machine clusters have node names that do not resolve
    if [ -n "$host" ] && getent hosts "$host" >/dev/null; then echo "$host"; else echo "${SLURM_LAUNCH_NODE_IPADDR:-127.0.0.1}"; fi
}

# sbatch passes its environment on. From within another job, that has variables of the outer job, which stay where this job
# has nothing of the kind. So they are compared with what Slurm says of this job, if it says anything.
forget_outer_job() {
    local kinds="${SLURM_MEM_PER_CPU:+c}${SLURM_MEM_PER_GPU:+g}${SLURM_MEM_PER_NODE:+n}" shown
    [ -n "${SLURM_JOB_ID:-}" ] || return 0
    [ "${#kinds}" -lt 2 ] || unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE # steps get the job's memory
    [ -n "${SLURM_ARRAY_TASK_ID:-}${SLURM_GPUS_ON_NODE:-}${SLURM_STEP_NUM_TASKS:-}" ] || return 0
    shown=$(scontrol --details --oneliner show job "$SLURM_JOB_ID" 2>/dev/null || true)
    case $shown in JobId=*) ;; *) return 0 ;; esac
    case " $shown " in *" ArrayTaskId=${SLURM_ARRAY_TASK_ID:-} "*) ;; *)
        [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || say "this job is no task of array $SLURM_ARRAY_JOB_ID, from within which it was submitted"
        unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_MIN SLURM_ARRAY_TASK_MAX SLURM_ARRAY_TASK_COUNT ;;
    esac
    case "$shown " in *" GRES="*gpu*) ;; *" GRES= "*) unset SLURM_GPUS_ON_NODE ;; esac # TRES may leave out GPUs that a job has
    if [ -n "${SLURM_STEP_NUM_TASKS:-}" ] && ! scontrol show step "$SLURM_JOB_ID.${SLURM_STEP_ID:-0}" >/dev/null 2>&1; then
        unset SLURM_STEP_NUM_TASKS SLURM_STEP_ID
    fi
}

# Without a model there is nothing to solve a benchmark with: the embedded model then shows its own problems.
choose_work() {
    local task=()
    while [ "$1" != -- ]; do task+=("$1"); shift; done
    shift
    [ -z "$(value_of task "$@")" ] || task=() # the user's goes before the script's
    WORK=("${task[@]}" "$@")
    if [ -z "$(value_of model "$@")$(value_of model.path "$@")" ]; then
        if [ -n "$(value_of task "$@")$(value_of task.input "$@")" ]; then
            say "no model= or model.path= given: the embedded model runs"
        else
            say "no model= or model.path= given: the embedded model runs on its own word problems instead"
            WORK=("$@")
        fi
    fi
}

# The folder of a job without hydra.run.dir. Of several runs in one allocation, the second has that with -2, and so on: a
# file in each says that it has been given out since Slurm started or requeued the job, whose runs then go on in turn.
own_folder() {
    local first=outputs/slurm-$SLURM_JOB_ID number=1 folder
    folder=$first
    if [ "$DRY" = 0 ]; then
        until mkdir -p "$folder" && (set -o noclobber && : >"$folder/.start-${SLURM_RESTART_COUNT:-0}") 2>/dev/null; do
            [ -e "$folder/.start-${SLURM_RESTART_COUNT:-0}" ] || break # it cannot be written: the job says so
            number=$((number + 1)) folder=$first-$number
        done
        [ "$folder" = "$first" ] ||
            say "this job's run number $number: its folder is $folder (hydra.run.dir=$first goes on with the first)"
    fi
    WORK+=("hydra.run.dir=$folder")
}

# Overrides that follow from where the job runs: its folder, and its share of an array.
place() {
    local folder=outputs/slurm-${SLURM_ARRAY_JOB_ID:-} own argument others=()
    own=$(value_of hydra.run.dir "$@")
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
        find_share "$@"
        say "shard $SHARD of $SHARDS, counted from 0"
        for argument in "${WORK[@]}"; do
            case $argument in hydra.run.dir=* | task.shards=* | +hydra.run.dir=* | ++hydra.run.dir=*) ;; *) others+=("$argument") ;; esac
        done
        # a folder of its own for each, also in a folder that the user names, in quotes if it needs them
        folder=${own:-$folder}/shard-$SHARD
        [[ $folder =~ ^[A-Za-z0-9_./:@%+-]*$ || $folder == *'${'* ]] || folder="'$folder'"
        WORK=("${others[@]}" "task.shard=$SHARD" "task.shards=$SHARDS" "hydra.run.dir=$folder")
    elif [ -n "${SLURM_JOB_ID:-}" ] && [ -z "$own" ]; then
        own_folder
    fi
}

# A whole number from LEAST on in an environment variable.
check_number() {
    local name=$1 least=$2
    if [[ ${!name} =~ ^[0-9]{1,6}$ && $((10#${!name})) -ge $least ]]; then
        printf -v "$name" %d "$((10#${!name}))" # bash reads 08 as an octal number
        return
    fi
    echo "$name=${!name}: must be a whole number from $least on" >&2
    exit 2
}

# SHARD and SHARDS of this task of an array. An array without gaps has a shard a task. With task.shards=N the numbers of its
# tasks are those of shards, from 0 on, so that single ones can be run again.
find_share() {
    local first=$SLURM_ARRAY_TASK_MIN last=$SLURM_ARRAY_TASK_MAX
    if [ -n "$(value_of task.shard "$@")" ]; then
        echo "task.shard: the numbers of an array say which shard a task has; leave it out" >&2
        exit 2
    fi
    SHARDS=$(value_of task.shards "$@") SHARD=$SLURM_ARRAY_TASK_ID
    if [ -n "$SHARDS" ]; then
        if [ "$SHARD" -ge "$SHARDS" ]; then
            echo "--array: there is no shard $SHARD of task.shards=$SHARDS, which are counted from 0" >&2
            exit 2
        fi
    elif [ "$SLURM_ARRAY_TASK_COUNT" -lt 2 ] || [ "$SLURM_ARRAY_TASK_COUNT" -ne $((last - first + 1)) ]; then
        echo "--array: $SLURM_ARRAY_TASK_COUNT tasks from $first to $last are not all shards of an input. To run some of an" \
            "earlier array again, give task.shards=N, its number of shards, and hydra.run.dir=FOLDER, its folder" >&2
        exit 2
    else
        SHARD=$((SHARD - first)) SHARDS=$SLURM_ARRAY_TASK_COUNT
    fi
}

# What Slurm calls this job. One task of an array has the array's number as its SLURM_JOB_ID, which means all its tasks.
own_job() {
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

# The command of the job in `COMMAND`, by LAUNCH.
command_line() {
    local nodes=${SLURM_JOB_NUM_NODES:-1} per_node step=()
    local tasks=${SLURM_NTASKS_PER_NODE:-1} # above 1, sbatch was asked for ranks as for another MPI program
    RANKS=${RANKS:-$((tasks > 1 ? tasks : 2))} RESTARTS=${RESTARTS:-0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    check_number RANKS 1
    check_number RESTARTS 0
    check_number OMP_NUM_THREADS 1
    per_node=${SLURM_GPUS_ON_NODE:-0}
    [ "$per_node" -gt 0 ] || per_node=$RANKS
    export OMP_NUM_THREADS HYDRA_FULL_ERROR=1
    if [ -n "${SCRATCH:-}" ] && [ "$DRY" = 0 ] && [ ! -d "$SCRATCH" ]; then
        echo "SCRATCH=$SCRATCH: no such folder on $(uname -n)" >&2
        exit 2
    fi
    [ -n "${SCRATCH:-}" ] && export TMPDIR="$SCRATCH" TRITON_CACHE_DIR="$SCRATCH/triton" TORCHINDUCTOR_CACHE_DIR="$SCRATCH/inductor"
    WORLD=$((nodes * per_node))
    local cores=$((${SLURM_CPUS_PER_TASK:-1} * tasks))
    [ -z "${SLURM_JOB_ID:-}" ] || [ "$cores" -ge "$per_node" ] ||
        say "$per_node ranks of a node share $cores cores: sbatch --cpus-per-task=$per_node, or more, is faster"
    # the ranks get what is set here also under `sbatch --export=...`, which srun else obeys as well
    local common=(--nodes "$nodes" --kill-on-bad-exit=1 --export=ALL --job-name "$STEP")
    [[ ! ${SLURM_STEP_ID:-} =~ ^[0-9]{1,8}$ ]] || common+=(--overlap) # in a step, such as of `srun --pty bash`, whose cores it has
    local share=$((cores > per_node ? cores / per_node : 1))
    # under srun, what the ranks of one node share listens on 127.0.0.1; torchrun's store is open to the network
    [ -n "${LAUNCH:-}" ] || { [ -n "${SLURM_JOB_ID:-}" ] && [ "$nodes" = 1 ] && [ "$RESTARTS" = 0 ] && LAUNCH=srun; } || LAUNCH=torchrun
    if [ "$RESTARTS" != 0 ] && [[ $LAUNCH =~ ^(srun|mpirun)$ ]]; then
        echo "RESTARTS=$RESTARTS: torchrun alone starts ranks again; leave out RESTARTS or LAUNCH=$LAUNCH" >&2
        exit 2
    fi
    case $LAUNCH in
        torchrun)
            # the agents of a job that went well warn of each other's end, in pages
            export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} TORCH_LOGS=${TORCH_LOGS:--distributed}
            [ -n "${SLURM_JOB_ID:-}" ] && step=(srun --ntasks "$nodes" --ntasks-per-node 1 --cpus-per-task "$cores" "${common[@]}")
            # `on_signal` signals every process of the step: the agent shall let its ranks end
            [ -n "${SLURM_JOB_ID:-}" ] && step+=(bash -c 'trap "" USR1; exec "$@"' agent)
            COMMAND=("${step[@]}" "$BIN/python" -m lopa_dist.parallel.torchrun --nnodes "$nodes" --nproc-per-node "$per_node"
                --max-restarts "$RESTARTS" --rdzv-id "${SLURM_JOB_ID:-local}-${SLURM_RESTART_COUNT:-0}"
                --rdzv-backend c10d --rdzv-endpoint "$(first_host):$(free_port)" -m lopa_dist)
            ;;
        srun) COMMAND=(srun --ntasks $((nodes * per_node)) --ntasks-per-node "$per_node" --overcommit --cpus-per-task "$share" "${common[@]}" "$BIN/python" -m lopa_dist) ;;
        mpirun)
            MPIRUN=${MPIRUN:-$(command -v mpirun || echo "$BIN/mpirun")}
            command -v "$MPIRUN" >/dev/null || {
                echo "LAUNCH=mpirun: there is no $MPIRUN: load your MPI's module, or set MPIRUN" >&2
                exit 2
            }
            COMMAND=("$MPIRUN" -n $((nodes * per_node)) "$BIN/python" -m lopa_dist)
            ;;
        *) echo "LAUNCH=$LAUNCH: must be torchrun, srun or mpirun" >&2; exit 2 ;;
    esac
    COMMAND+=("${DOCTOR[@]}" "${WORK[@]}")
}

# Options of sbatch for the time, cores, memory and partition that this job was given: `lopa-dist status` repeats them.
given_by_slurm() {
    local limit options=()
    limit=$(squeue --noheader --jobs "$(own_job)" --format %l 2>/dev/null || true)
    [[ $limit != [0-9]* ]] || options+=("--time=$limit")
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || options+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    [ "${SLURM_NTASKS_PER_NODE:-1}" = 1 ] || options+=("--ntasks-per-node=$SLURM_NTASKS_PER_NODE")
    if [ -n "${SLURM_MEM_PER_NODE:-}" ]; then options+=("--mem=${SLURM_MEM_PER_NODE}M")
    elif [ -n "${SLURM_MEM_PER_GPU:-}" ]; then options+=("--mem-per-gpu=${SLURM_MEM_PER_GPU}M")
    elif [ -n "${SLURM_MEM_PER_CPU:-}" ]; then options+=("--mem-per-cpu=${SLURM_MEM_PER_CPU}M"); fi
    [ -z "${SLURM_JOB_PARTITION:-}" ] || options+=("--partition=$SLURM_JOB_PARTITION")
    [ -z "${SLURM_JOB_ACCOUNT:-}" ] || options+=("--account=$SLURM_JOB_ACCOUNT")
    [ -z "${SLURM_JOB_QOS:-}" ] || options+=("--qos=$SLURM_JOB_QOS")
    printf '%s' "${options[*]}"
}

# What the job would refuse: its settings and files, and ranks that do not fit.
check_settings() {
    local own
    own=$(value_of hydra.run.dir "${WORK[@]}")
    if [ ! -x "$BIN/python" ]; then
        echo "not checked, for there is no $BIN/python: run 'make install', or set BIN to your environment's bin" >&2
        return
    fi
    "$BIN/python" -c 'import sys; from lopa_dist.sweep import main; main(int(sys.argv[1]), sys.argv[2:])' "$WORLD" "${WORK[@]}" &&
        echo "checked: the job would start, with $WORLD ranks; from sbatch its folder would be ${own:-outputs/slurm-<job id>}"
}

# A folder has a link to the log of each of its jobs, of which one may have been refused while another ran.
link_log() {
    local log folder
    log=$(readlink "/proc/$$/fd/1" || true) folder=$(value_of hydra.run.dir "${WORK[@]}")
    if [ -n "${SLURM_JOB_ID:-}" ] && [ -f "$log" ] && [ -n "$folder" ] && [[ $folder != *'${'* ]]; then
        { mkdir -p "$folder" && ln -sfn "$log" "$folder/slurm-$(own_job).log"; } || true
    fi
}

end_child() { kill -TERM "$CHILD" 2>/dev/null || true; } # it may have ended by itself

# The number of the job's step that has this script's ranks: there may be others, also of another run.
own_step() { squeue --steps --noheader --jobs "$(own_job)" --format "%i %j" | awk -v name="$STEP" '$2 == name { print $1; exit }'; }

ask_ranks() {
    local step
    step=$(own_step 2>/dev/null)
    [ -n "$step" ] && scancel --signal=USR1 "$step" 2>/dev/null
}

# A rank that is just starting may not hear the first signal.
repeat_asking() { while sleep 5 && kill -0 "$CHILD"; do ask_ranks || true; done; }

# Before the time limit or a preemption Slurm signals this shell: the ranks finish or drop what they are at, and the job
# goes back into the queue, to go on in the same folder.
on_signal() {
    ASKED=$((ASKED + 1))
    [ -n "$CHILD" ] || return 0 # once it has been started
    say "told to stop: letting the ranks end in order"
    if [ -n "${SLURM_JOB_ID:-}" ] && [ "$LAUNCH" != mpirun ]; then
        # USR1, which W&B's service ignores: it has to write until the ranks have ended
        ask_ranks || end_child
        [ -n "$REPEATER" ] || { repeat_asking >/dev/null 2>&1 & REPEATER=$!; }
    else
        end_child
    fi
}

# Ctrl-C: the ranks end in order; a second one ends them at once. srun alone would only say that they run, and stay.
on_interrupt() {
    INTERRUPTS=$((INTERRUPTS + 1))
    if [ "$INTERRUPTS" = 1 ]; then
        say "interrupted; once more ends the ranks at once"
        on_signal
    elif [ -n "$CHILD" ]; then
        ASKED=$((ASKED + 1))
        kill -KILL "$CHILD" 2>/dev/null || true
        [ -z "${SLURM_JOB_ID:-}" ] || scancel --signal=KILL "$(own_step 2>/dev/null)" 2>/dev/null || true
    fi
}

# How many requests of the job are finished.
finished() { { cat "$(value_of hydra.run.dir "${WORK[@]}")"/journal/*.jsonl 2>/dev/null || true; } | wc -l; }

# Whether a job that is not finished goes back into the queue: if Slurm asked it to stop, which at a preemption with
# GraceTime only the ranks hear. Not if it was cancelled, and not if it would end at its time limit again and again.
#
#   goes_on FINISHED_AT_THE_START
goes_on() {
    [ -n "${SLURM_JOB_ID:-}" ] || return 1
    local job start preempted
    job=$(scontrol --oneliner show job "$(own_job)" 2>/dev/null || true)
    [[ $job != *" BatchFlag=0"* ]] || return 1 # an allocation, which no queue takes back
    start=${job##* StartTime=} preempted=${job##* PreemptTime=}
    start=${start%% *} preempted=${preempted%% *}
    # Slurm is ending it: cancelled, or already back in the queue
    if [[ $job == *" JobState="@(CANCELLED|COMPLETING)* && $job != *" Reason=TimeLimit"* ]]; then
        say "not finished: Slurm is ending this job (cancelled, requeued, or its own script has ended)"
        return 1
    fi
    if [[ $preempted == [0-9]* && ! $preempted < $start ]]; then return 0; fi # of this start, not of an earlier one
    [ "$ASKED" != 0 ] || return 1
    [[ $(value_of hydra.run.dir "${WORK[@]}") != *'${'* ]] || return 0 # only Hydra knows where its journal is
    if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ "$(finished)" = "$1" ]; then
        say "no request was finished before the time limit, so the job does not go back into the queue: give a longer --time"
        return 1
    fi
}

lopa_launch() {
    local given=("$@") all=() argument status=0 before had
    for argument in "${given[@]}"; do
        case $argument in
            --) all+=("$argument") ;; # between the script's and the user's
            --dry-run) DRY=1 ;;
            --doctor) DOCTOR=(doctor) ;;
            -h | --help)
                sed -n '/^#SBATCH/d; 2,$ { /^#/! q; s/^# \{0,1\}//p }' "$SCRIPT" # what the script says of itself
                exit
                ;;
            -*)
                echo "$argument: after the script come --dry-run, --doctor, --help and settings, as KEY=VALUE; sbatch's options go before it" >&2
                exit 2
                ;;
            *) all+=("$argument") ;;
        esac
    done
    forget_outer_job
    if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]; then
        [ "${SLURM_PROCID:-0}" != 0 ] ||
            echo "srun starts this script $SLURM_STEP_NUM_TASKS times, and each would start all ranks: run it once, without srun" >&2
        exit 2
    fi
    choose_work "${all[@]}"
    [ "${#DOCTOR[@]}" != 0 ] || place "${all[@]}"
    local how=""
    [ -n "${LAUNCH:-}${SLURM_JOB_ID:-}" ] || how=" (without Slurm; on one node of sbatch, srun starts the ranks)"
    command_line
    if [ "$DRY" = 1 ]; then
        echo "in $ROOT, with OMP_NUM_THREADS=$OMP_NUM_THREADS$how:"
        printf '%q ' "${COMMAND[@]}"
        echo
        check_settings
        return
    fi
    [ -x "$BIN/python" ] || { echo "$BIN/python not found: run 'make install', or set BIN to your environment's bin" >&2; exit 1; }
    [ "${#DOCTOR[@]}" != 0 ] || link_log
    [ -z "${SLURM_JOB_ID:-}" ] || LOPA_SBATCH=$(given_by_slurm)
    export LOPA_SBATCH=${LOPA_SBATCH:-}
    had=$(finished) ASKED=0 INTERRUPTS=0 CHILD= REPEATER=
    trap on_signal USR1 TERM
    trap on_interrupt INT
    if [ "$(value_of task.input "${WORK[@]}")" = - ]; then
        "${COMMAND[@]}" <&0 & # otherwise a background command has no standard input
    else
        "${COMMAND[@]}" &
    fi
    CHILD=$!
    [ "$ASKED" = 0 ] || on_signal
    before=-1
    while [ "$before" != "$ASKED" ]; do # a trapped signal ends `wait`, not the child, whose status is still to come
        before=$ASKED status=0
        wait "$CHILD" || status=$?
    done
    trap - USR1 TERM INT
    [ -z "$REPEATER" ] || kill "$REPEATER" 2>/dev/null || true
    if [ "$status" = 137 ] && [ "$INTERRUPTS" = 0 ]; then
        local what="a rank was killed by signal 9, most often for want of memory: sbatch it again with a larger --mem"
        [ "${#DOCTOR[@]}" != 0 ] || what+="; if it had begun, lopa-dist status $(value_of hydra.run.dir "${WORK[@]}") has the command that goes on"
        say "$what"
    fi
    [ "$INTERRUPTS" = 0 ] || return 130
    if [ "$status" != 0 ] && goes_on "$had"; then
        say "not finished: back into the queue"
        if scontrol requeue "$(own_job)"; then sleep 60; fi # Slurm ends this shell
        say "Slurm does not put it back (--no-requeue?): lopa-dist status $(value_of hydra.run.dir "${WORK[@]}") has the command that goes on"
    fi
    [ "$status" = 0 ] || [ "${#DOCTOR[@]}" = 0 ] ||
        say "doctor: a job would not run here as it is; lines above, such as those that say 'broken', say what to mend"
    return "$status"
}
