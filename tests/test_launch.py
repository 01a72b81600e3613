"""The launch scripts without a cluster: what they would start, and where they can be started."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lopa_dist import sweep
from lopa_dist.overrides import quoted
from tests.launching import OUTSIDE, ROOT, SCRIPTS, cluster, task_of


def started(script: Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script, asked what it would run."""
    return dry_run(script, cwd, **environment)


def dry_run(script: Path, cwd: Path, *given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same with more overrides."""
    command = ["bash", str(script), "--dry-run", "model.path=m", "task.input=p.jsonl", *given]
    unchecked = {"BIN": "nowhere"}  # without an interpreter nothing is checked
    return subprocess.run(
        command, cwd=cwd, env=OUTSIDE | unchecked | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_dry_run_prints_the_command(script: Path, tmp_path: Path) -> None:
    ran = started(script, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"in {ROOT}, with OMP_NUM_THREADS=" in ran.stdout
    assert "model.path=m task.input=p.jsonl" in ran.stdout


@pytest.mark.parametrize(
    "given",
    [
        ["hydra.run.dir='/tmp/my runs/x'"],
        ['hydra.run.dir="/tmp/my runs/x"'],
        ["hydra.run.dir=/tmp/my runs/x"],
        ["hydra.run.dir=a", "+hydra.run.dir=/tmp/my runs/x"],
    ],
)
def test_a_folder_may_be_quoted_for_hydra(given: list[str]) -> None:
    """The script looks into the folder into which the job writes: of two that are given, the last."""
    program = f'source {ROOT / "slurm" / "prolog.sh"}; value_of hydra.run.dir a=b "$@"'
    said = subprocess.run(
        ["bash", "-c", program, "bash", *given], env=OUTSIDE | {"SLURM_SUBMIT_DIR": str(ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "/tmp/my runs/x\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_with_doctor_the_command_asks_whether_the_job_would_run(script: Path, tmp_path: Path) -> None:
    ran = dry_run(script, tmp_path, "--doctor", SLURM_JOB_ID="17", SLURM_SUBMIT_DIR=str(ROOT))
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"srun --ntasks 2 .* -m lopa_dist doctor (task=\w+ )?model\.path=m task", ran.stdout)
    assert "hydra.run.dir" not in ran.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["task.input=nothing.jsonl"], "refused: task.input=nothing.jsonl: no such file"),
        (["decode.tau_conf=1.5"], "refused: decode.tau_conf=1.5: must be between 0 and 1"),
        (["hydra.run.dir=/proc/x"], "refused: hydra.run.dir=/proc/x: cannot be written to"),
        (["task.column=foo"], "none of its first lines can be used. line 1: no foo in it"),
        (["decode.drfts=3"], "did you mean decode.drafts"),
    ],
)
def test_a_dry_run_refuses_what_the_job_would(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        sweep.main(2, ["task=batch", "model=embedded", *with_input(given)])
    assert left.value.code not in (0, None)
    assert said in f"{left.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("refused", [True, False])
def test_a_dry_run_says_whether_the_job_would_start(refused: bool) -> None:
    environment = OUTSIDE | {"BIN": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}
    given = with_input(["parallel.branch=8", "decode=lopa"] if refused else ["parallel.branch=2"])
    command = ["bash", str(ROOT / "launch" / "batch.sh"), "--dry-run", "model=embedded", *given]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode != 0) == refused, ran.stderr
    assert ("= 8, but the job has 2 ranks; start 8 ranks" in ran.stderr) == refused
    assert ("the job would start, with 2 ranks" in ran.stdout) is not refused


def with_input(given: list[str]) -> list[str]:
    return given if any("task.input" in text for text in given) else [*given, "task.input=examples/prompts.jsonl"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_job_that_was_submitted_elsewhere_says_where_to_submit_it(script: Path, tmp_path: Path) -> None:
    """Slurm runs a copy of the script, which knows the checkout by the folder of sbatch only."""
    copy = tmp_path / "job00007" / "slurm_script"
    copy.parent.mkdir()
    copy.write_text(script.read_text())
    ran = started(copy, tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
    assert ran.returncode == 1
    assert f"{tmp_path} is not a checkout of lopa_dist (no slurm/prolog.sh): cd to one before sbatch" in ran.stderr
    assert started(copy, tmp_path, SLURM_SUBMIT_DIR=str(ROOT)).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_allocation_may_have_been_opened_anywhere(script: Path, tmp_path: Path) -> None:
    ran = started(script, tmp_path, SLURM_JOB_ID="9", SLURM_SUBMIT_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert f"in {ROOT}, with" in ran.stdout


def test_each_run_in_an_allocation_has_a_folder_of_its_own_to_which_a_requeued_job_returns(tmp_path: Path) -> None:
    program = f'source {ROOT / "slurm" / "prolog.sh"}; cd {tmp_path}; WORK=(); own_folder; echo "${{WORK[*]}}"'

    def folder(restarts: str) -> str:
        job = {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": restarts}
        ran = subprocess.run(["bash", "-c", program], env=OUTSIDE | job, capture_output=True, text=True, check=True)
        return re.sub(r"\[\d\d:\d\d:\d\d\]", "[time]", ran.stdout)

    first = "hydra.run.dir=outputs/slurm-9\n"
    assert folder("0") == first
    second = folder("0")
    assert second.endswith("hydra.run.dir=outputs/slurm-9-2\n")
    assert "its folder is outputs/slurm-9-2 (hydra.run.dir=outputs/slurm-9 goes on with the first)" in second
    assert folder("1") == first
    assert folder("1") == second
    (tmp_path / "outputs" / "slurm-9-3").write_text("")
    assert "hydra.run.dir=outputs/slurm-9-3\n" in folder("1"), "the job says that it cannot be written"


@pytest.mark.parametrize("given", [{"RANKS": "08"}, {"RANKS": "8", "SLURM_GPUS_ON_NODE": "0"}], ids=str)
def test_numbers_in_the_environment_are_decimal_and_no_gpus_are_none(tmp_path: Path, given: dict[str, str]) -> None:
    ran = started(SCRIPTS[0], tmp_path, **given)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"--nproc[-_]per[-_]node[ =]8 ", ran.stdout), ran.stdout


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("RANKS", "two", 1), ("RANKS", "0", 1), ("RESTARTS", "x", 0), ("OMP_NUM_THREADS", "-1", 1)],
)
def test_numbers_in_the_environment_are_checked(tmp_path: Path, name: str, value: str, least: int) -> None:
    ran = started(SCRIPTS[0], tmp_path, **{name: value})
    assert (ran.returncode, ran.stderr) == (2, f"{name}={value}: must be a whole number from {least} on\n")


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "launch" / "sweep.sh"], ids=lambda script: script.stem)
def test_help_is_what_a_script_says_of_itself(script: Path, tmp_path: Path) -> None:
    ran = subprocess.run(["bash", str(script), "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"launch/{script.name} --dry-run" in ran.stdout
    assert "SBATCH" not in ran.stdout


def test_mpirun_is_looked_for_before_a_job_waits_for_it(tmp_path: Path) -> None:
    ran = started(SCRIPTS[0], tmp_path, LAUNCH="mpirun", MPIRUN="/no/mpirun")
    assert (ran.returncode, ran.stderr[:39]) == (2, "LAUNCH=mpirun: there is no /no/mpirun: ")


def test_a_sweep_has_its_folder_from_one_place(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "launch" / "sweep.sh"), "--dry-run", "hydra.sweep.dir=x"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr[:26]) == (2, "hydra.sweep.dir=x: here FO")


@pytest.mark.parametrize("given", ["--dryrun", "--task.input=p.jsonl", "--time=1:00:00", "-p"])
def test_an_option_after_the_script_is_refused_before_a_rank_starts(tmp_path: Path, given: str) -> None:
    ran = dry_run(SCRIPTS[0], tmp_path, given)
    assert ran.returncode == 2
    assert ran.stderr.startswith(
        f"{given}: after the script come --dry-run, --doctor, --help and settings, as KEY=VALUE"
    )


@pytest.mark.parametrize(("cores", "said"), [("2", "8 ranks of a node share 2 cores"), ("8", "")])
def test_ranks_that_share_cores_are_told(tmp_path: Path, cores: str, said: str) -> None:
    job = {"SLURM_JOB_ID": "9", "SLURM_CPUS_PER_TASK": cores, "SLURM_SUBMIT_DIR": str(ROOT), "RANKS": "8"}
    ran = dry_run(SCRIPTS[0], tmp_path, **job)
    assert ("sbatch --cpus-per-task=8" in ran.stdout) == bool(said), ran.stdout
    assert said in ran.stdout


def test_scripts_ask_slurm_for_the_same() -> None:
    """Slurm reads what a job needs from the script itself, so each has a copy."""
    asked = [re.findall("^#SBATCH (?!--job-name).*", script.read_text(), re.MULTILINE) for script in SCRIPTS]
    assert asked[0]
    assert asked[0] == asked[1] == asked[2]


@pytest.mark.parametrize(
    ("script", "given", "work"),
    [
        ("gsm8k", ["model=m"], "task=gsm8k model=m"),
        ("gsm8k", [], ""),  # the embedded model solves its own problems
        ("gsm8k", ["model=m", "task=math"], "model=m task=math"),
        ("job", ["model=m", "task=math"], "model=m task=math"),
        ("job", ["task=lists"], "task=lists"),
    ],
)
def test_which_task_a_script_runs(script: str, given: list[str], work: str) -> None:
    command = ["bash", str(ROOT / "launch" / f"{script}.sh"), "--dry-run", *given]
    ran = subprocess.run(command, env=OUTSIDE | {"BIN": "nowhere"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.rstrip().rpartition("-m lopa_dist")[2].strip() == work
    assert ("instead" in ran.stdout) == (not work)


@pytest.mark.parametrize(
    ("array", "number", "given", "share"),
    [
        ("0-3", 2, [], "task.shard=2 task.shards=4 hydra.run.dir=outputs/slurm-7/shard-2"),
        ("1-4", 2, [], "task.shard=1 task.shards=4 hydra.run.dir=outputs/slurm-7/shard-1"),
        ("0-3", 2, ["hydra.run.dir=r"], "task.shard=2 task.shards=4 hydra.run.dir=r/shard-2"),
        ("2", 2, ["task.shards=4", "hydra.run.dir=r"], "task.shard=2 task.shards=4 hydra.run.dir=r/shard-2"),
        ("1,3", 3, ["task.shards=4", "hydra.run.dir=r"], "task.shard=3 task.shards=4 hydra.run.dir=r/shard-3"),
    ],
)
def test_a_task_of_an_array_has_a_shard_and_a_folder(
    tmp_path: Path, array: str, number: int, given: list[str], share: str
) -> None:
    ran = dry_run(SCRIPTS[-1], tmp_path, *given, **task_of(array, number), SLURM_SUBMIT_DIR=str(ROOT))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.rstrip().endswith(share)
    shard, shards = (word.split("=")[1] for word in share.split()[:2])
    assert f"shard {shard} of {shards}, counted from 0" in ran.stdout
    assert ran.stdout.count("hydra.run.dir=") == ran.stdout.count("task.shards=") == 1


@pytest.mark.parametrize(
    ("array", "number", "given", "said"),
    [
        ("3", 3, [], "1 tasks from 3 to 3 are not all shards"),
        ("0,2,4", 2, [], "3 tasks from 0 to 4 are not all shards"),
        ("4", 4, ["task.shards=4"], "there is no shard 4 of task.shards=4"),
        ("0-3", 2, ["task.shard=2"], "task.shard: the numbers of an array say which shard a task has"),
    ],
)
def test_an_array_that_is_not_the_whole_input_is_refused(
    tmp_path: Path, array: str, number: int, given: list[str], said: str
) -> None:
    ran = dry_run(SCRIPTS[-1], tmp_path, *given, **task_of(array, number), SLURM_SUBMIT_DIR=str(ROOT))
    assert ran.returncode == 2
    assert said in ran.stderr


@pytest.mark.parametrize("launch", ["srun", "mpirun"])
def test_restarts_are_torchruns_alone(tmp_path: Path, launch: str) -> None:
    ran = dry_run(SCRIPTS[-1], tmp_path, LAUNCH=launch, RESTARTS="2")
    assert ran.returncode == 2
    assert f"torchrun alone starts ranks again; leave out RESTARTS or LAUNCH={launch}" in ran.stderr


def test_a_folder_for_temporary_files_that_is_not_there(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPTS[-1]), "model.path=m"]
    environment = {"PATH": os.environ["PATH"], "SCRATCH": str(tmp_path / "local")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2
    assert f"SCRATCH={tmp_path / 'local'}: no such folder on " in ran.stderr


def test_a_job_that_another_one_submitted_does_not_take_that_ones_variables_for_its_own(tmp_path: Path) -> None:
    """sbatch passes them on, and Slurm replaces those alone that this job has, too."""
    outer = task_of("0-1", 1) | {
        "SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0",
        "SLURM_MEM_PER_CPU": "100", "SLURM_MEM_PER_NODE": "900",
    }  # fmt: skip
    job = "JobId=9 JobName=x Nodes=n1 CPU_IDs=0 GRES= MinCPUsNode=1"
    environment = cluster(tmp_path, job, 'echo "${!SLURM_MEM_PER_*}:" >$HERE/memory; exit 0')
    asked = f'case "$*" in *"show job 9") echo "{job}" ;; *) exit 1 ;; esac'
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{asked}\n")
    environment |= {"HERE": str(tmp_path), "RANKS": "2"} | outer
    ran = subprocess.run(
        ["bash", str(SCRIPTS[0]), "--dry-run", "task.limit=1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "this job is no task of array 7, from within which it was submitted" in ran.stdout
    assert "task.shard" not in ran.stdout
    assert "hydra.run.dir=outputs/slurm-9" in ran.stdout
    assert "--ntasks-per-node 2" in ran.stdout, "ranks as without GPUs"
    subprocess.run(
        ["bash", str(SCRIPTS[0]), "task.limit=1", f"hydra.run.dir={tmp_path}/run"], env=environment, check=False
    )
    assert (tmp_path / "memory").read_text() == ":\n"


def test_a_job_with_gpus_has_a_rank_for_each(tmp_path: Path) -> None:
    """Of its TRES, Slurm shows the GPUs only where they are accounted for."""
    job = "JobId=9 JobName=x TRES=cpu=1,node=1 JOB_GRES=gpu:5 Nodes=n1 CPU_IDs=0 GRES=gpu:5(IDX:0-4) MinCPUsNode=1"
    environment = cluster(tmp_path, job, "exit 0") | {"SLURM_JOB_ID": "9", "SLURM_GPUS_ON_NODE": "5"}
    command = ["bash", str(SCRIPTS[0]), "--dry-run", "task.limit=1"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--ntasks-per-node 5" in ran.stdout


@pytest.mark.parametrize(
    ("given", "ranks", "cores"),
    [({}, 2, 1), ({"SLURM_NTASKS_PER_NODE": "4"}, 4, 1), ({"SLURM_NTASKS_PER_NODE": "4", "RANKS": "2"}, 2, 2)],
)
def test_tasks_that_sbatch_was_asked_for_are_ranks(
    tmp_path: Path, given: dict[str, str], ranks: int, cores: int
) -> None:
    ran = started(SCRIPTS[0], tmp_path, SLURM_JOB_ID="9", SLURM_CPUS_PER_TASK="1", **given)
    assert f"--ntasks {ranks} --ntasks-per-node {ranks} --overcommit --cpus-per-task {cores} " in ran.stdout
    assert ("share 1 cores" in ran.stdout) == (not given)


def test_in_a_step_of_srun_cores_are_shared_and_one_script_starts_all_ranks(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    assert " --overlap " in started(SCRIPTS[0], tmp_path, **job).stdout
    assert " --overlap " not in started(SCRIPTS[0], tmp_path, SLURM_JOB_ID="9").stdout
    ran = started(SCRIPTS[0], tmp_path, **job, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")
    assert (ran.returncode, ran.stderr[:33]) == (2, "srun starts this script 2 times, ")


@pytest.mark.parametrize(
    ("nodes", "given", "launcher"),
    [
        ("1", {}, "srun"),
        ("2", {}, "torchrun"),
        ("1", {"RESTARTS": "1"}, "torchrun"),
        ("1", {"LAUNCH": "torchrun"}, "torchrun"),
    ],
)
def test_on_one_node_nothing_listens_to_the_network(
    tmp_path: Path, nodes: str, given: dict[str, str], launcher: str
) -> None:
    """torchrun's store always does; each rank under srun has its share of the cores."""
    job = {
        "SLURM_JOB_ID": "9",
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    ran = dry_run(SCRIPTS[0], tmp_path, **job, **given, RANKS="8")
    assert ("torchrun" in ran.stdout) == (launcher == "torchrun")
    assert ("--ntasks 8 --ntasks-per-node 8 --overcommit --cpus-per-task 8 " in ran.stdout) == (launcher == "srun")


def test_a_sweep_of_which_a_job_fails_ends_with_a_table_and_its_status(tmp_path: Path) -> None:
    (tmp_path / "lopa-dist").write_text('#!/bin/bash\necho "$1"; [ "$1" = report ] || exit 3\n')
    (tmp_path / "lopa-dist").chmod(0o755)
    ran = subprocess.run(
        ["bash", str(ROOT / "launch" / "sweep.sh"), "launcher=local", "decode.drafts=4,8"],
        env=OUTSIDE | {"BIN": str(tmp_path), "FOLDER": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.split()) == (3, ["--multirun", "report"])


def test_sbatch_of_the_sweep_script_is_refused(tmp_path: Path) -> None:
    """Slurm runs a copy of the script that sbatch is given."""
    (tmp_path / "spool").mkdir()
    copy = shutil.copy(ROOT / "launch" / "sweep.sh", tmp_path / "spool")
    ran = subprocess.run(["bash", copy, "seed=1,2"], env=OUTSIDE, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "Run this script itself" in ran.stderr


@pytest.mark.parametrize(("sinfo", "launcher"), [("exit 0", " launcher=slurm "), ("exit 1", " ")])
def test_a_sweep_goes_through_slurm_where_a_cluster_answers(tmp_path: Path, sinfo: str, launcher: str) -> None:
    """A machine may have Slurm's programs and no cluster."""
    (tmp_path / "sinfo").write_text(f"#!/bin/bash\n{sinfo}\n")
    (tmp_path / "sinfo").chmod(0o755)
    ran = subprocess.run(
        ["bash", str(ROOT / "launch" / "sweep.sh"), "--dry-run", "decode.drafts=4,8"],
        env=OUTSIDE | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"--multirun{launcher}hydra.sweep.dir=" in ran.stdout
    assert ("one after the other" in ran.stderr) == (launcher == " ")


@pytest.mark.parametrize("name", ["a b=1, [x] (y)", "it's", "plain/name-1"])
def test_folders_of_any_name_reach_hydra(tmp_path: Path, name: str) -> None:
    """As hydra.run.dir of an array's tasks, and as FOLDER of a sweep."""
    sweep_script = ROOT / "launch" / "sweep.sh"
    array = dry_run(
        SCRIPTS[-1], tmp_path, f"hydra.run.dir={quoted(name)}", **task_of("0-3", 2), SLURM_SUBMIT_DIR=str(ROOT)
    )
    whole = dry_run(sweep_script, tmp_path, "launcher=local", "seed=1,2", FOLDER=name)
    for ran, key, wanted in ((array, "hydra.run.dir=", f"{name}/shard-2"), (whole, "hydra.sweep.dir=", name)):
        assert ran.returncode == 0, ran.stderr
        [word] = [word for word in shlex.split(ran.stdout.replace("in ", "", 1)) if word.startswith(key)]
        assert OverridesParser.create().parse_override(word).value() == wanted
