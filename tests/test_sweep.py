"""The points of a sweep are checked before the first of them starts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from submitit.core.utils import FailedJobError

from lopa_dist import cli
from lopa_dist.checks import UserError
from lopa_dist.cli import hint
from lopa_dist.jobs.run.job import Job
from lopa_dist.overrides import quoted
from lopa_dist.parallel.stop import SIGNALS
from lopa_dist.sweep import SweepFolder, check_points


def test_points_that_can_run_are_let_through(tmp_path: Path) -> None:
    folder = f"hydra.sweep.dir={tmp_path}"
    check_points(["-m", "launcher=local", folder, "decode.drafts=0,4", "decode=embedded,verified", "task.limit=1,2"])
    check_points(["-m", "decode.temperature=0.5", "seed=1,2"])
    check_points(["-m", "decode.drafts=0,4", "seed=1"])
    check_points(["-m", "hydra/sweeper=other", "decode.drafts=x,y"])


def test_jobs_that_share_a_machine_are_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    for launcher, told in (("submitit_local", True), ("basic", False)):
        check_points(["-m", f"hydra/launcher={launcher}", "decode.drafts=0,4"])
        assert ("2 jobs run at once and share this machine: compare no speeds" in capsys.readouterr().err) == told


def test_points_whose_answers_could_not_be_judged_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    (tmp_path / "in.jsonl").write_text('{"problem": "1 + 1?", "solution": "$\\\\boxed{2}$"}\n')
    with pytest.raises(UserError, match="task=math needs math-verify"):
        check_points(["-m", "task=math", f"task.input={tmp_path}/in.jsonl", "task.fewshot=0", "decode.drafts=0,4"])


def refusal(*arguments: str) -> list[str]:
    """The lines of the message by which a sweep is refused."""
    with pytest.raises(UserError) as refused:
        check_points(arguments)
    return str(refused.value).splitlines()


def test_points_that_cannot_are_named_with_the_reason() -> None:
    first, point, advice = refusal("--multirun", "task.limit=3", "decode.drafts=0,4", "decode.branches=0,3")
    assert first == "1 of 4 points cannot run, so none has started:"
    assert point.startswith("  decode.drafts=0 decode.branches=3: decode.branches=3 with decode.verify=agreement needs")
    assert "hydra.sweep.dir" in advice


def test_points_that_do_not_suit_the_model_are_named_before_any_starts() -> None:
    first, point, _ = refusal("-m", "model=lists", "decode.drafts=0,2", "decode.branches=0")
    assert first == "1 of 2 points cannot run, so none has started:"
    assert point.startswith("  decode.drafts=0: decode.tau_look=0.5: has no effect here")
    assert "choose another decode= (decode=vanilla, decode=embedded_plain and others)" in point
    check_points(["-m", "model.path=owner/name", "decode.drafts=0,2", "decode.branches=0"])  # it may be downloaded


@pytest.mark.parametrize(
    ("given", "said"), [("task.input=nothing.jsonl", "no such file"), ("task.input=x.xlsx", "a .xlsx file is not read")]
)
def test_what_is_wrong_with_all_is_said_once(given: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^{given}: {said}"):
        check_points(["-m", "task=batch", given, "decode.drafts=3,4"])


def test_a_seed_that_changes_nothing_is_refused() -> None:
    """Equal runs would pass for a spread of 0."""
    said = "^seed changes nothing at decode.temperature=0: every seed writes the same texts; task.problem_seed=1,2 asks"
    with pytest.raises(UserError, match=said):
        check_points(["-m", "seed=0,1,2", "decode=embedded,verified"])
    with pytest.raises(UserError, match=r"2 of 4 points cannot run.*\n  decode.temperature=0 seed=0: seed changes"):
        check_points(["-m", "decode.temperature=0,0.5", "seed=0,1"])
    check_points(["-m", "task=batch", "task.input=examples/prompts.jsonl", "seed=0,1"])


def test_only_slurm_gets_the_hint_to_do_without_it() -> None:
    assert "launcher=local" in hint(["-m", "launcher=slurm"])
    assert hint(["-m", "hydra/launcher=submitit_local"]) == ""


@pytest.mark.parametrize(
    "values",
    [["task.input=d/x.jsonl,d_x.jsonl"], ["logging.wandb.mode=disabled,offline"]],
)
def test_points_that_would_share_a_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for name in ("d/x.jsonl", "d_x.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    given = ["task=batch", "task.input=d_x.jsonl"] if "logging" in values[0] else ["task=batch"]
    with pytest.raises(UserError, match=r"would have one folder, .*hydra\.sweep\.subdir="):
        check_points([*given, *values])
    check_points([*given, *values, "hydra.sweep.subdir=${hydra.job.num}"])


def test_standard_input_is_for_one_point() -> None:
    with pytest.raises(UserError, match=r"task\.input=-: only one point can read standard input"):
        check_points(["task=batch", "task.input=-", "decode.block_size=8,16"])


def test_a_sweep_has_no_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", "decode.block_size=8,16", "hydra.run.dir=x"])
    with pytest.raises(SystemExit, match=r"hydra\.run\.dir=x: is for a single job; hydra\.sweep\.dir="):
        cli.main()


def test_a_sweep_inside_torchrun_is_refused_before_it_makes_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", "decode.drafts=2,3"])
    with pytest.raises(SystemExit, match=r"a sweep cannot run inside torchrun: start it from one process"):
        cli.main()
    assert not list(tmp_path.iterdir())


LONG = [
    f"decode.{setting}"
    for setting in (
        "branches=0", "block_size=16", "max_new_tokens=16", "max_active_blocks=1", "tau_conf=0.9",
        "temperature=0.0", "context=d2f", "top_p=1.0", "top_k=0", "sub_block_size=null", "tau_look=0.0",
        "verify=agreement",
    )
]  # fmt: skip


def test_a_signal_while_a_job_of_a_sweep_writes_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After that job, which is whole. Its name, of all overrides, is longer than a folder's may be."""
    write = Job.write_page

    def signalled(self: Job, report: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(self, report)

    monkeypatch.setattr(Job, "write_page", signalled)
    quiet = ["logging.wandb.mode=disabled", "parallel.threads=1", "task.limit=1"]
    sweep = ["-m", f"hydra.sweep.dir={tmp_path}", *quiet, *LONG, "decode.drafts=4,8"]
    monkeypatch.setattr("sys.argv", ["lopa-dist", *sweep])
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.raises(SystemExit, match=r"^75$"):
            cli.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    [report] = tmp_path.glob("*/report.json")
    assert len(",".join([*LONG, "decode.drafts=4", "task.limit=1"])) > 255 >= len(report.parent.name)
    assert (
        "stopped by SIGTERM when this job was done; go on with the sweep and hydra.sweep.dir=" in capfd.readouterr().err
    )


def test_a_sweep_ends_with_the_command_that_compares_its_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "my sweep"
    said = f"Compare the runs: lopa-dist report '{folder}'"

    def job(raw: Any) -> None:
        if raw.task.problem_seed == 2:
            raise UserError("this one fails")
        folder = Path(HydraConfig.get().runtime.output_dir, "a value with a slash")
        folder.mkdir()
        (folder / "report.json").touch()

    monkeypatch.setattr(cli, "job", job)
    monkeypatch.setattr(SweepFolder, "folder", None)
    monkeypatch.setattr(
        "sys.argv", ["lopa-dist", "-m", f"hydra.sweep.dir={quoted(str(folder))}", "task.problem_seed=0,1"]
    )
    cli.main()
    assert capsys.readouterr().out.splitlines()[-1] == said
    monkeypatch.setattr("sys.argv", [*sys.argv[:-1], "task.problem_seed=2,3"])
    with pytest.raises(SystemExit, match=r"^lopa-dist: task\.problem_seed=2: this one fails$"):
        cli.main()
    assert capsys.readouterr().out.splitlines()[-1] == said
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", f"hydra.sweep.dir={tmp_path / 'none'}", "task.problem_seed=2"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Compare" not in capsys.readouterr().out, "there is nothing to compare"


def test_a_job_of_a_sweep_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    sweep = ["-m", f"hydra.sweep.dir={tmp_path}", "task=batch", f"task.input={tmp_path}/none.jsonl", "seed=0,1"]
    sweep += ["logging.wandb.mode=disabled"]
    monkeypatch.setattr("sys.argv", ["lopa-dist", *sweep])
    with pytest.raises(SystemExit, match=r"^lopa-dist: seed=0,.*nothing to run: .*none\.jsonl has no lines$"):
        cli.main()


def test_every_job_of_a_sweep_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def job(raw: Any) -> None:
        raise RuntimeError(f"broken at {raw.seed}")

    monkeypatch.setattr(cli, "job", job)
    monkeypatch.setattr(
        "sys.argv", ["lopa-dist", "-m", f"hydra.sweep.dir={tmp_path}", "decode.temperature=1", "seed=0,1"]
    )
    with pytest.raises((SystemExit, RuntimeError)):
        cli.main()
    told = "".join(capfd.readouterr())
    assert "broken at 0" in told
    assert "broken at 1" in told


def test_a_sweep_that_slurm_refuses_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise FailedJobError("sbatch: error: invalid partition specified: gpu\n")

    monkeypatch.setattr(cli, "app", refused)
    monkeypatch.setattr("sys.argv", ["lopa-dist", "-m", "decode.drafts=4,8"])
    with pytest.raises(SystemExit, match=r"^lopa-dist: .*could not be submitted.*invalid partition specified: gpu$"):
        cli.main()
