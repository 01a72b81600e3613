"""`lopa-dist status`: what it says of runs and arrays is so, and the commands that it names run the rest."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lopa_dist.commands import perform
from lopa_dist.composing import composed
from lopa_dist.config import Config, TaskConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.commands import status as module
from lopa_dist.jobs.commands.go_on import go_on, spans
from lopa_dist.jobs.commands.shards import merge_shards
from lopa_dist.jobs.commands.status import runs_in_words, status
from lopa_dist.jobs.folder.attempt_record import AttemptRecord, Submission
from lopa_dist.jobs.folder.one_job import only_job
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.report import duration
from lopa_dist.jobs.show.run_state import state_of
from lopa_dist.parallel.launcher import Start, World
from tests.jobs.folder.test_one_job import other
from tests.jobs.run.test_job import config
from tests.jobs.test_resumed_figures import Killed, killed_after

ROOT = Path(__file__).parents[3]
SHARDS = 4
TYPED = [
    "task=batch", "task.input=prompts.jsonl", "decode.branches=0", "decode.max_new_tokens=16", "engine.max_sequences=1",
    "parallel.threads=1", "logging.progress=never", "logging.wandb.mode=disabled",
]  # fmt: skip


def said(*folders: Path) -> str:
    out = io.StringIO()
    status(folders, Console(file=out, width=80))
    return out.getvalue()


def cells(text: str) -> list[list[str]]:
    """The rows of the table."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards 0 to 3 of nine requests, of which one is none: 0 complete, 1 killed, 2 never begun, 3 complete."""
    place = tmp_path_factory.mktemp("array")
    prompts = [json.dumps({"prompt": f"Ann has {n} books . How many books does Ann have now ?"}) for n in range(2, 10)]
    (place / "prompts.jsonl").write_text("\n".join(["not JSON", *prompts]))
    before = Path.cwd()
    os.chdir(place)
    try:
        for shard in (0, 1, 3):
            folder = place / "outputs" / f"shard-{shard}"
            (folder / ".hydra").mkdir(parents=True)
            words = [*TYPED, "job.resume=new", f"task.shard={shard}", f"task.shards={SHARDS}"]
            (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
            job = composed([*TYPED, f"task.shard={shard}", f"task.shards={SHARDS}"])
            if shard != 1:
                run(job, folder, World("python"))
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lopa_dist.jobs.folder.journal.Writer.write", killed_after(1))
                with pytest.raises(Killed):
                    run(job, folder, World("python"))
    finally:
        os.chdir(before)
    return place / "outputs"


def test_done_open_and_errors_of_each_and_what_is_missing(array: Path) -> None:
    text = said(array)
    rows = [row[:5] for row in cells(text)]
    assert rows == [
        [f"{array}/shard-0", "complete", "3", "0", "1"],
        [f"{array}/shard-1", "stopped", "1", "1", "0"],
        [f"{array}/shard-3", "complete", "2", "0", "0"],
        [f"{array}: shard 2", "missing", "0", "?", "-"],
    ]
    assert all(float(row[5].replace(",", "")) > 0 for row in cells(text)[:3])
    assert f"{array}: 2 of 4 shards are complete; 6 requests are done, 1 of them with errors" in text
    what = "2 of 4 shards are complete; shard 2 is missing and shard 1 was stopped; run the rest with:"
    with pytest.raises(ValueError, match=f"{array}: {what}") as error:
        merge_shards(array)
    assert str(error.value).splitlines()[1:] == text.splitlines()[-1:]


def test_the_command_that_it_names_runs_the_rest(array: Path, tmp_path: Path) -> None:
    """From any folder; nothing that was done is set aside, and nothing but `merge` is left to do."""
    shutil.copytree(array.parent, tmp_path / "array")
    folder = tmp_path / "array" / "outputs"
    for file in folder.glob("*/journal/*.json"):
        file.write_text(file.read_text().replace(str(array.parent), str(tmp_path / "array")))
    program = f'lopa-dist() {{ {sys.executable} -m lopa_dist "$@"; }}; '
    done = subprocess.run(
        ["bash", "-ec", program + said(folder).splitlines()[-1]], capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    words = "4 of 4 shards are complete; 9 of 9 requests are done, 1 of them with errors"
    assert f"{folder}: {words}\nlopa-dist merge {folder}\n" in said(folder)
    assert state_of(folder / "shard-1").record == replace(state_of(folder / "shard-1").record, number=2, done=1)
    assert merge_shards(folder)["requests"] == 9
    assert said(folder).endswith(f"merged: {folder / 'results.jsonl'}\n")


def test_a_batch_script_s_array_is_continued_by_one(
    array: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(array, tmp_path / "outputs" / "slurm-7")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "job.sh").touch()
    record = AttemptRecord(1, 2, 0, 0, 0, "srun", 4, str(tmp_path), Submission(2, 0, 4))
    for folder in tmp_path.glob("outputs/*/shard-*"):
        record.write(folder / "journal")
    monkeypatch.chdir(tmp_path)
    words = f"{shlex.join(TYPED)} task.shards=4 hydra.run.dir=outputs/slurm-7"
    folder = Path("outputs/slurm-7")
    assert said(folder).splitlines()[-1] == f"LAUNCH=srun sbatch --array=1-2 --nodes=2 launch/job.sh {words}"
    assert said(folder).splitlines()[-2].endswith("run the rest, unless squeue lists it, with:")
    replace(record, submission=Submission(1, 0, 4)).write(folder / "shard-0" / "journal")
    assert said(folder).splitlines()[-1].startswith("RANKS=4 sbatch --array=1-2 launch/job.sh ")
    by_torchrun = replace(record, launcher="torchrun", ranks=16, submission=Submission(2, 8, 4))
    by_torchrun.write(folder / "shard-0" / "journal")
    assert said(folder).splitlines()[-1].startswith("sbatch --array=1-2 --nodes=2 --gpus-per-node=8 launch/job.sh ")
    given = "--time=8:00:00 --cpus-per-task=64 --mem-per-gpu=65536M"
    replace(by_torchrun, submission=Submission(1, 8, 4, given)).write(folder / "shard-0" / "journal")
    *_, command, what = said(folder).splitlines()
    assert command.startswith(f"LAUNCH=torchrun sbatch --array=1-2 --gpus-per-node=8 {given} launch/")
    assert "add what else sbatch was given" in what


def test_a_job_of_slurm_that_was_refused_is_shown(array: Path, tmp_path: Path) -> None:
    """Its folder has nothing but the settings that were typed and the link to the log."""
    shutil.copytree(array / "shard-3", tmp_path / "shard-3")
    for name in ("shard-1", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slurm-7.log").symlink_to(tmp_path / "log")
    (tmp_path / "log").touch()
    (tmp_path / "shard-1" / ".hydra").mkdir()
    (tmp_path / "shard-1" / ".hydra" / "overrides.yaml").write_text("- task.shard=1\n- task.shards=4\n")
    text = said(tmp_path)
    assert [row[:4] for row in cells(text)[:2]] == [
        [f"{tmp_path}/shard-1", "not begun", "0", "?"],
        [f"{tmp_path}/shard-3", "complete", "2", "0"],
    ]
    assert "shards 0,2 are missing and shard 1 has not begun; run the rest" in text
    assert f"{tmp_path}/whole has not begun: if squeue does not list it, slurm-*.log in it says why\n" in text


def test_a_shard_whose_job_has_hardly_started_is_listed_once(array: Path, tmp_path: Path) -> None:
    """The batch script has made its folder, and the job has written nothing there."""
    shutil.copytree(array, tmp_path / "jobs")
    shutil.rmtree(tmp_path / "jobs" / "shard-1")
    (tmp_path / "jobs" / "shard-1").mkdir()
    (tmp_path / "jobs" / "shard-1" / "slurm-9.log").touch()
    text = said(tmp_path / "jobs")
    assert [f"{tmp_path}/jobs/shard-1", "not begun", "0", "?"] in [row[:4] for row in cells(text)]
    assert "shard 1 │ missing" not in text
    assert "shard 1 has not begun" in text


def test_a_name_of_a_folder_is_not_broken_in_a_file(array: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    shutil.copytree(array / "shard-3", folder)
    assert cells(said(folder))[0][0] == str(folder)


def test_a_complete_run_has_the_speed_of_its_report(array: Path, tmp_path: Path) -> None:
    """Which counts all attempts."""
    shutil.copytree(array / "shard-3", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    report["tokens_per_s"]["job"] = 1234.4
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    assert cells(said(tmp_path / "run"))[0][5] == "1,234"


def test_a_job_that_runs_is_known_by_its_lock(array: Path, tmp_path: Path) -> None:
    shutil.copytree(array / "shard-1", tmp_path / "shard-1")
    process = other(tmp_path / "shard-1")
    text = said(tmp_path / "shard-1")
    process.kill()
    process.communicate()
    assert cells(text)[0][1] == "running"
    assert "shard 1 runs" in text
    assert "shards 0,2-3 are missing; run" in text


def test_a_whole_run_that_was_stopped_goes_on_by_its_command(array: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(array / "shard-1", folder)
    for name in ("settings.json", "001.json"):
        found = json.loads((folder / "journal" / name).read_text())
        (folder / "journal" / name).write_text(json.dumps({k: v for k, v in found.items() if k != "shard"}))
    assert said(folder).splitlines()[-2:] == [
        f"{folder} goes on with:",
        f"cd {array.parent} && lopa-dist {' '.join(TYPED)} hydra.run.dir={folder}",
    ]
    (folder / "journal" / "001.json").unlink()  # by a version that wrote none
    assert cells(said(folder))[0][1:4] == ["stopped", "1", "?"]
    assert said(folder).endswith(f"the same command again, with hydra.run.dir={folder}\n")


def test_a_run_that_read_standard_input_needs_the_same_again(array: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(array / "shard-1", folder)
    settings = json.loads((folder / "journal" / "settings.json").read_text())
    (folder / "journal" / "settings.json").write_text(json.dumps(settings | {"shard": "0 of 1"}))
    record = json.loads((folder / "journal" / "001.json").read_text())
    words = [word.replace("prompts.jsonl", "-") for word in TYPED]
    (folder / "journal" / "001.json").write_text(json.dumps(record | {"words": words}))
    assert said(folder).endswith("\n(pipe the same text into it again)\n")


def test_answers_that_were_judged_again_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"Ann has {n} books .", "max_tokens": 4, "reference": "x"} for n in range(2, 10)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text("def right(text, fields):\n    return True\n")

    def job(score: str) -> Config:
        return config(TaskConfig("batch", None, str(tmp_path / "in.jsonl"), score=score))

    for score, entries in (("exact", 3), (f"{tmp_path}/judge.py:right", 5)):  # in the second, three have new verdicts
        made = replace(job(score), engine=EngineConfig(max_sequences=1))
        with monkeypatch.context() as patch:
            patch.setattr("lopa_dist.jobs.folder.journal.Writer.write", killed_after(entries))
            with pytest.raises(Killed):
                run(made, tmp_path / "run", World("python"))
    found = state_of(tmp_path / "run")
    assert (found.state, found.done, found.open) == ("stopped", 5, 3)


def test_a_complete_run_whose_output_is_not_there_says_so(array: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(array / "shard-3", folder)
    for name in ("a b.csv", "c.jsonl"):
        report = json.loads((folder / "report.json").read_text())
        report["task"]["output"] = str(tmp_path / name)
        (folder / "report.json").write_text(json.dumps(report))
        text = "\n".join(runs_in_words([state_of(folder)]))
        assert "is complete, but task.output=" in text
        assert text.endswith(f"this writes it:\n{go_on(state_of(folder))}")
        (tmp_path / name).write_text("")
        assert not state_of(folder).unwritten


def test_a_complete_run_without_some_parts_of_its_output_says_so(array: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(array / "shard-3", folder)
    report = json.loads((folder / "report.json").read_text())
    report["task"]["output"] = "part-*.csv"  # relative to where the job began
    (folder / "report.json").write_text(json.dumps(report))
    begun = tmp_path / "begun"
    begun.mkdir()
    AttemptRecord(1, 2, 0, 0, 0, "python", 1, str(begun), None).write(folder / "journal")
    assert state_of(folder).unwritten == "part-*.csv"
    (begun / "part-00000.csv").write_text("")
    assert not state_of(folder).unwritten


def test_a_damaged_run_hides_no_other(array: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(array / "shard-3", tmp_path / "runs" / name)
    (tmp_path / "runs" / "two" / "journal" / "settings.json").write_text("")
    console = Console(record=True, width=20, file=io.StringIO())
    with pytest.raises(ValueError, match=r"two.*settings\.json: damaged .*job\.resume=new starts over"):
        status([tmp_path / "runs"], console)
    assert f"{tmp_path}/runs/one" in console.export_text(), "a narrow terminal shows all, too"


def test_a_run_that_cannot_be_read_hides_no_other(array: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's."""

    def below(folder: Path, *given: Any, real: Any = module.runs_below) -> Any:
        if folder.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return real(folder, *given)

    monkeypatch.setattr(module, "runs_below", below)
    out = io.StringIO()
    with pytest.raises(ValueError, match=r"Permission denied: .*theirs"):
        status([tmp_path / "theirs", array / "shard-0"], Console(file=out, width=300))
    assert "shard-0" in out.getvalue()


def test_a_path_is_shown_as_it_is(array: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between colons, rich reads the names of pictures: `:id:` became one."""
    shutil.copytree(array / "shard-0", tmp_path / "xnli:id:test")
    perform("status", [str(tmp_path / "xnli:id:test")])
    assert "xnli:id:test" in capsys.readouterr().out.replace("\n", "")


def test_answers_that_were_not_judged_are_told(array: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    shutil.copytree(array / "shard-3", folder)
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(report | {"unjudged": 2}))
    text = "\n".join(runs_in_words([state_of(folder)]))
    assert "a run is complete, but 2 answers could not be judged; this tries again:\n" in text


def test_a_larger_input_opens_a_finished_run_again(array: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(array / "shard-3", folder)
    AttemptRecord(2, 5, 0, 2, 0, "python", 1, str(tmp_path), None).write(folder / "journal")
    found = state_of(folder)
    assert (found.state, found.done, found.open) == ("stopped", 2, 3)


def test_of_many_runs_those_that_are_not_complete_are_shown(array: Path, tmp_path: Path) -> None:
    for number in range(25):
        shutil.copytree(array / "shard-3", tmp_path / f"{number}")
        settings = tmp_path / f"{number}" / "journal" / "settings.json"
        settings.write_text(settings.read_text().replace("3 of 4", f"{number} of 27"))
    text = said(tmp_path)
    assert [row[0] for row in cells(text)] == [f"{tmp_path}: shard 25", f"{tmp_path}: shard 26"]


def test_where_no_run_is_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run in it; name the folder of a run"):
        said(tmp_path)
    with only_job(tmp_path / "shard-1", Start()):  # before it has read its input
        pass
    assert cells(said(tmp_path))[0][1:5] == ["stopped", "0", "?", "0"]


def test_numbers_as_slurm_writes_them() -> None:
    assert spans([7, 3, 4, 5, 1]) == "1,3-5,7"


def test_elapsed_and_remaining_time(array: Path, tmp_path: Path) -> None:
    """The time left follows from the pace of the whole attempt."""
    found = state_of(array / "shard-1")
    assert (found.done, found.open) == (1, 1)
    assert found.left_s == pytest.approx(found.seconds)
    assert cells(said(array / "shard-1"))[0][6:] == [duration(found.seconds), "-"]  # it does not run
    whole = cells(said(array / "shard-3"))[0]
    report = json.loads((array / "shard-3" / "report.json").read_text())
    assert whole[6:] == [duration(report["decode_s"]), "-"]
    shutil.copytree(array / "shard-1", tmp_path / "shard-1")
    process = other(tmp_path / "shard-1")
    row = cells(said(tmp_path / "shard-1"))[0]
    process.kill()
    process.communicate()
    assert row[7] == duration(found.seconds)


def test_a_table_of_a_run_that_was_killed_after_its_results_were_written_counts_what_is_done(
    array: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(array / "shard-1", tmp_path / "run")
    shutil.copy(array / "shard-0" / "results.jsonl", folder)
    report = json.loads((array / "shard-0" / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(report | {"attempts": 0, "expected": 9}))
    perform("table", [str(folder)])
    printed = capsys.readouterr()
    assert "3 rows: " in printed.out
    assert "STOPPED: 1 of 2 requests are done, and this table has those of results.jsonl, which was" in printed.err


def test_a_stopped_run_says_how_its_log_ends(array: Path, tmp_path: Path) -> None:
    """Where the job wrote why it ended; a batch script's log is another one."""
    shutil.copytree(array / "shard-1", tmp_path / "run")
    settings = tmp_path / "run" / "journal" / "settings.json"
    settings.write_text(settings.read_text().replace("1 of 4", "0 of 1"))
    why = "18:00:00 rank 1 of 2 does not answer: killed"
    (tmp_path / "run" / "slurm-7.log").write_text("said by others\n")
    assert "the log of" not in said(tmp_path / "run")
    (tmp_path / "run" / "cli.log").write_text(f"18:00:00 begins\n{why}\n\n")
    assert f"the log of {tmp_path / 'run'} ends with: {why}\n{tmp_path / 'run'} goes on with:\n" in said(tmp_path)


def test_a_folder_without_runs_hides_nothing_of_the_others(array: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="no run in it"):
        status([tmp_path, array], Console(file=out, width=200))
    assert "shard-0" in out.getvalue()
