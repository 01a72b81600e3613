"""The main job in one process: what it reads, what it leaves behind."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from rich.console import Console
from safetensors.torch import load_file, save_file

from lopa_dist.checks import UserError
from lopa_dist.config import Config, JobConfig, LoggingConfig, ModelOptions, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.jobs.run.answers import NOT_NUMBERS
from lopa_dist.jobs.run.job import Job, run
from lopa_dist.jobs.setup import device
from lopa_dist.jobs.show import wandb_log
from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.point_names import names_of, words_of
from lopa_dist.jobs.show.seed_groups import SeedGroup
from lopa_dist.jobs.show.wandb_log import WandbLog, children
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.parallel.launcher import LaunchError, World
from tests.jobs import wandb_file
from tests.pages import Page

DECODE = {"verify": "confidence", "branches": 2, "drafts": 0, "block_size": 16, "max_new_tokens": 64}


def config(task: TaskConfig, wandb: str = "disabled", **decode: Any) -> Config:
    return Config(
        task=task,
        decode=DecodeConfig(**{**DECODE, **decode}),
        parallel=ParallelConfig(threads=1),
        logging=LoggingConfig(progress="never", token_ids=True, every_s=0.01, wandb=WandbConfig(mode=wandb)),
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One job over 12 embedded problems, with W&B offline."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run(config(TaskConfig(limit=12), "offline"), folder, World("python"))


def test_lines_without_token_ids_are_not_passed_off_for_lines_with_them(tmp_path: Path) -> None:
    asked = config(TaskConfig(limit=2))
    without = replace(asked, logging=replace(asked.logging, token_ids=False))
    run(without, tmp_path, World("python"))
    with pytest.raises(ValueError, match=r"other settings: logging\.token_ids was None, is True\..* job\.resume=new"):
        run(asked, tmp_path, World("python"))
    run(replace(asked, job=JobConfig(resume="new")), tmp_path, World("python"))
    assert all(line["token_ids"] for line in lines(tmp_path))


def test_results_hold_the_contract(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    found = lines(folder)
    assert [line["index"] for line in found] == list(range(12))
    for line in found:
        assert set(line) == {
            "custom_id", "index", "text", "token_ids", "finish_reason", "usage", "tpf", "latency_s", "correct",
            "extracted", "expected",
        }  # fmt: skip
        usage = line["usage"]
        assert usage["completion_tokens"] == len(line["token_ids"])
        assert line["tpf"] == pytest.approx(usage["completion_tokens"] / usage["forwards"], abs=1e-4)
        assert line["finish_reason"] in ("stop", "length")
        assert line["correct"] == (line["expected"] == line["extracted"])
    assert not list(folder.glob("*.partial"))


def test_report_adds_up(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, report = finished
    assert json.loads((folder / "report.json").read_text()) == report
    found = lines(folder)
    assert report["requests"] == 12
    assert report["errors"] == 0
    assert report["accuracy"] == sum(line["correct"] for line in found) / 12
    assert report["completion_tokens"] == sum(line["usage"]["completion_tokens"] for line in found)
    assert report["forwards"] == sum(line["usage"]["forwards"] for line in found)
    assert report["tpf"] == report["completion_tokens"] / report["forwards"]
    counted = report["reference_counting"]
    assert counted["forwards"] == report["forwards"] + 12
    assert counted["tokens"] >= report["completion_tokens"]
    assert len(report["branch"]["wins"]) == 3
    assert 0 < sum(report["branch"]["wins"]) < report["forwards"]
    parts = {k: v for k, v in report["step_ms"].items() if k != "total"}
    assert report["step_ms"]["total"] == pytest.approx(sum(parts.values()))
    assert report["world"] == {
        "size": 1, "data": 1, "branch": 1, "tensor": 1, "backend": "solo", "launcher": "python",
    }  # fmt: skip


def test_how_tokens_were_written_is_told_on_request(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The text stays; a run folder whose lines lack it has them made again."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    job = config(TaskConfig(limit=12))
    report = run(replace(job, logging=replace(job.logging, token_steps=True)), folder, World("python"))
    found = lines(folder)
    for line, before in zip(found, lines(finished[0]), strict=True):
        steps = line["token_steps"]
        assert len(steps) == len(line["token_ids"])
        assert line["text"] == before["text"] == "".join(one["token"] for one in steps)
        assert max(one["step"] for one in steps) <= line["usage"]["forwards"]
        assert all(one["logprob"] <= 0 and one["way"] in ("filled", "accepted", "bonus") for one in steps)
    means = sorted(sum(one["logprob"] for one in line["token_steps"]) / len(line["token_steps"]) for line in found)
    groups = report["reliability"]
    assert [group["answers"] for group in groups] == [6, 6]
    assert groups[0]["probability"] == pytest.approx(sum(math.exp(mean) for mean in means[:6]) / 6, abs=1e-4)
    assert sum(group["accuracy"] * 6 for group in groups) == pytest.approx(report["accuracy"] * 12)
    assert "by how sure the model was" in (folder / "report.html").read_text()
    assert "reliability" not in finished[1]


def test_a_run_is_shown_by_one_page(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, report = finished
    page = Page(folder / "report.html")
    assert f"{report['accuracy']:.1%}" in page.text
    for title in (
        "Requests by tokens per forward",
        "Requests by latency",
        "Which branch won",
        "Where a step's time goes",
    ):
        assert title in page.text
    assert not [*folder.glob("*.png"), *folder.glob("*.md")]


def test_report_says_what_became_of_the_drafts(tmp_path: Path) -> None:
    job = config(TaskConfig(limit=4), branches=0, verify="agreement", drafts=6)
    report = run(job, tmp_path, World("python"))
    drafts = report["drafts"]
    assert drafts["m"] == 6
    assert 1 <= len(drafts["acceptance"]) <= 6
    assert all(0 <= share <= 1 for share in drafts["acceptance"])
    assert 0 < drafts["accepted_per_forward"] <= 6
    assert report["rows_per_token"] == report["rows"] / report["completion_tokens"]
    page = Page(tmp_path / "report.html").text
    assert f"{drafts['accepted_per_forward']:.2f} accepted per forward" in page
    assert "Drafts accepted with all before them" in page


def test_wandb_offline_file_holds_config_steps_and_figures(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, report = finished
    logged = wandb_file.read(folder)
    assert logged["config"]["decode"]["branches"] == 2
    steps = [row for row in logged["history"] if "step_ms/forward" in row]
    assert len(steps) >= 2
    assert all(row["step_ms/forward"] > 0 for row in steps)
    chosen = [row for row in steps if "wins/anchor" in row]
    assert chosen
    for row in chosen:
        assert sum(share for key, share in row.items() if key.startswith("wins/")) == pytest.approx(1)
        assert row["lookahead_win_share"] == pytest.approx(1 - row["wins/anchor"])
    scored = [row for row in steps if "confidence/best" in row]
    assert scored
    assert all(row["confidence/best"] >= row["confidence/anchor"] for row in scored)
    assert all(row["memory_gib"] > 0 and row["comm_bytes/all_gather"] == 0 for row in steps)
    assert steps[-1]["requests_taken"] == 12
    assert not any(key.startswith("results") for row in logged["history"] for key in row)
    assert logged["artifacts"] == []
    assert logged["summary"]["accuracy"] == report["accuracy"]
    assert logged["summary"]["tpf"] == report["tpf"]


@pytest.mark.parametrize("texts", [False, True])
def test_texts_reach_wandb_only_where_that_is_wished(tmp_path: Path, texts: bool) -> None:
    """Neither prompts nor answers, nor what an error quotes; and all attempts are one run, whose steps go on."""
    prompts, folder = tmp_path / "in.jsonl", tmp_path / "run"
    own = [{"custom_id": f"secret{i}", "text": f"zebras {i}", "max_tokens": 4} for i in range(3)]
    own.append({"custom_id": "bad", "text": "x", "max_tokens": "secret"})
    ids, steps = [], [0]
    for count in (1, 4):
        prompts.write_text("".join(json.dumps(line) + "\n" for line in own[-count:]))
        job = config(TaskConfig("batch", None, str(prompts), prompt="zebras: {text}"), "offline")
        job.logging.wandb.texts = texts
        run(job, folder, World("python"))
        [log] = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        found = b"".join(record.SerializeToString() for record in wandb_file.records(log))
        assert (b"zebras" in found) == texts
        assert texts or b"secret" not in found
        if texts:
            assert wandb_file.read(folder)["artifacts"] == ["run_table", "results"]
        ids.append(log.stem.removeprefix("run-"))
        steps.append(json.loads((folder / "wandb" / "run-0.json").read_text())["steps"])
        shutil.rmtree(log.parent)
    assert ids[0] == ids[1]
    assert steps == sorted(steps)


def test_own_prompts_bad_lines_and_gzip(tmp_path: Path) -> None:
    good = {
        "custom_id": "a",
        "prompt": "Tom has 3 apples . Tom buys 4 more . How many apples does Tom have now ?",
    }
    chat = {"messages": [{"role": "user", "content": "Wörld \n 😀"}], "max_tokens": 5}
    raw = [
        json.dumps(good),
        "{not json",
        "[1]",
        json.dumps({"prompt": "  "}),
        json.dumps({"custom_id": "a", "prompt": "again"}),
        json.dumps({"prompt": "x", "temprature": 1}),
        json.dumps({"prompt": "x " * 600}),
        json.dumps({"prompt": "a <|mask|> inside"}),
        json.dumps({"prompt": "x", "max_tokens": 0}),
        "",
        json.dumps(chat),
    ]
    source = tmp_path / "prompts.jsonl.gz"
    source.write_bytes(gzip.compress("\n".join(raw).encode()))
    report = run(config(TaskConfig("batch", None, str(source))), tmp_path, World("python"))
    found = lines(tmp_path)
    assert [line["index"] for line in found] == list(range(10))
    assert (report["requests"], report["errors"]) == (10, 8)
    assert found[0]["custom_id"] == "a"
    assert found[0]["finish_reason"] != "error"
    assert found[9]["custom_id"] == "line-11"
    assert found[9]["usage"]["completion_tokens"] <= 5
    words = [
        "not JSON",
        "object",
        "white space",
        "used in line 1",
        "temprature",
        "positions",
        "mask token",
        "max_tokens",
    ]
    for line, word in zip(found[1:9], words, strict=True):
        assert line["finish_reason"] == "error"
        assert word in line["error"]
    assert "accuracy" not in report


@pytest.mark.parametrize(
    ("context", "told"),
    [
        (
            "vanilla",
            "10 drafts, context vanilla in blocks of 16 (cached: nothing; its prompt and 82 rows per sequence in a st",
        ),
        (
            "dual",
            "10 drafts, context dual in blocks of 16 (cached: all but the window, anew after each block; 50 rows",
        ),
    ],
)
def test_the_first_line_says_what_is_cached_and_how_many_rows_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, context: str, told: str
) -> None:
    """Without a cache a step takes many times as long, so whoever chose that by mistake must see it at once."""
    decode = {"verify": "agreement", "drafts": 10, "branches": 0, "context": context, "max_active_blocks": 2}
    with caplog.at_level("INFO"):
        run(
            config(TaskConfig("arithmetic", limit=1), max_new_tokens=64, block_size=16, **decode),
            tmp_path,
            World("python"),
        )
    assert told in next(record.getMessage() for record in caplog.records if "1 requests" in record.getMessage())


def test_a_full_disk_is_told_with_the_job_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any rank: only rank 0 has the run folder from the command line."""

    def fsync(descriptor: int) -> None:
        if "/journal/0" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lopa_dist.jobs.folder.journal.os.fsync", fsync)
    with pytest.raises(UserError, match=rf"make room there, then start it again with hydra\.run\.dir={tmp_path};"):
        run(config(TaskConfig(limit=1)), tmp_path, World("python"))


def test_sampling_is_seeded_by_request(tmp_path: Path) -> None:
    """Another seed gives other texts; the same seed the same, in another batch size too."""
    texts = []
    for name, seed, sequences in (("a", 0, 16), ("b", 0, 3), ("c", 1, 16)):
        folder = tmp_path / name
        folder.mkdir()
        job = config(TaskConfig(limit=6), temperature=1.0)
        job.seed, job.engine.max_sequences = seed, sequences
        run(job, folder, World("python"))
        texts.append([line["text"] for line in lines(folder)])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_report_is_that_of_the_input_at_hand(tmp_path: Path) -> None:
    """Of the same folder and as many requests, but other ones; and what a kill tore is made anew."""
    folder, results = tmp_path / "run", []

    def job(*prompts: str) -> dict[str, Any]:
        file = tmp_path / "in.jsonl"
        file.write_text("".join(json.dumps({"prompt": p, "max_tokens": 8}) + "\n" for p in prompts))
        report = run(config(TaskConfig(name="batch", input=str(file))), folder, World("python"))
        results.append(lines(folder))
        assert report == json.loads((folder / "report.json").read_text())
        assert report["completion_tokens"] == sum(
            line["usage"]["completion_tokens"] for line in results[-1] if "usage" in line
        )
        assert report["errors"] == sum(line["finish_reason"] == "error" for line in results[-1])
        return report

    first, attempts = job("Tom has 3 apples .", "Ann has 9 eggs ."), []
    job("Sam has 2 cats .", "Ann has 9 eggs .")
    again = job("Tom has 3 apples .", "Ann has 9 eggs .")
    assert results[0] == results[2]
    assert (again["completion_tokens"], again["input"]) == (first["completion_tokens"], first["input"])
    assert job("Tom has 3 apples .", "")["errors"] == 1
    whole = job("Tom has 3 apples .", "Ann has 9 eggs .")
    for text in (json.dumps(whole)[:99], ""):
        (folder / "report.json").write_text(text)
        with pytest.raises(ValueError, match=r"report\.json is incomplete"):
            compare(tmp_path)
        attempts.append(job("Tom has 3 apples .", "Ann has 9 eggs .")["attempts"])
    assert job("Tom has 3 apples .", "Ann has 9 eggs .")["attempts"] == attempts[-1], "it was done before"


def test_a_request_without_room_in_the_kv_pool_is_an_error_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    prompts = ["Tom has 3 apples .", "Tom has 3 apples . " * 9, "Ann has 9 eggs ."]
    file.write_text("".join(json.dumps({"prompt": p, "max_tokens": 8}) + "\n" for p in prompts))
    tight = replace(config(TaskConfig(name="batch", input=str(file))), engine=EngineConfig(kv_tokens=40))
    assert run(tight, tmp_path / "run", World("python"))["errors"] == 1
    first, second, third = lines(tmp_path / "run")
    assert second["error"].startswith("line 2: the prompt has ")
    assert "8 are to be generated, but engine.kv_tokens=40; raise that" in second["error"]
    assert first["text"]
    assert third["text"]


def test_comparison_of_runs(tmp_path: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    for name, k in (("plain", 0), ("lopa", 2)):
        (tmp_path / name).mkdir()
        other = json.loads((folder / "report.json").read_text())
        other["decode"]["branches"], other["tpf"] = k, 1.0 + k
        (tmp_path / name / "report.json").write_text(json.dumps(other))
    compare(tmp_path)
    with (tmp_path / "comparison.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [(row["run"], row["branches"], row["tpf"]) for row in rows] == [("plain", "0", "1.0"), ("lopa", "2", "3.0")]
    assert (tmp_path / "pareto.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ValueError, match=r"no report\.json"):
        compare(tmp_path / "plain" / "nothing")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (config(TaskConfig("batch", None, "missing.jsonl")), "no such file"),
        (Config(model=ModelOptions(path="./nowhere")), "no such folder"),
        (Config(parallel=ParallelConfig(branch=4)), r"the job has 1 rank; start 4 ranks \(torchrun --nproc-per-node 4"),
    ],
)
def test_mistakes_name_the_remedy(tmp_path: Path, job: Config, message: str) -> None:
    with pytest.raises((ValueError, LaunchError), match=message):
        run(job, tmp_path, World("python"))


def test_a_report_is_of_the_settings_that_made_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a job that started over is killed when all is generated and nothing is reported."""
    before = run(config(TaskConfig(limit=3), branches=3), tmp_path, World("python"))
    anew = replace(config(TaskConfig(limit=3), branches=0), job=JobConfig(resume="new"))
    with monkeypatch.context() as patch:
        patch.setattr(Job, "finish", lambda *_: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            run(anew, tmp_path, World("python"))
    assert not (tmp_path / "report.json").exists()
    assert json.loads((tmp_path / "journal.old" / "report.json").read_text())["decode"]["branches"] == 3
    after = run(replace(anew, job=JobConfig()), tmp_path, World("python"))
    assert (after["decode"]["branches"], before["decode"]["branches"]) == (0, 3)
    assert after["forwards"] == sum(line["usage"]["forwards"] for line in lines(tmp_path)) > before["forwards"]


def test_a_report_of_other_settings_is_not_taken_for_this_job_s(tmp_path: Path) -> None:
    run(config(TaskConfig(limit=3)), tmp_path, World("python"))
    file = tmp_path / "report.json"
    report = json.loads(file.read_text())
    settings = tmp_path / "journal" / "settings.json"
    written = json.loads(settings.read_text())
    settings.write_text(json.dumps(written | {"seed": 7}))
    job = config(TaskConfig(limit=3))
    job.seed = 7
    assert run(job, tmp_path, World("python"))["input"] != report["input"]


def test_without_a_way_to_wandb_a_job_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it said auto: a key is set, and a compute node has no network. Who asked for online hears of it at once."""

    ids: list[str] = []

    def init(mode: str, real: Any = wandb.init, **more: Any) -> Any:
        ids.append(more["id"])
        if mode == "online":
            raise wandb.errors.CommError("no such host")
        return real(mode=mode, **more)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(ValueError, match=r"logging\.wandb\.mode=online: W&B could not begin a run \(no such host\)"):
        run(config(TaskConfig(limit=1), "online"), tmp_path, World("python"))
    with caplog.at_level("WARNING"):
        assert run(config(TaskConfig(limit=1), "auto"), tmp_path, World("python"))["requests"] == 1
    assert "(no such host): this run is kept offline" in caplog.text
    assert len({*ids[-2:]}) == 2, "W&B's service holds the id of a run that it could not begin"
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "read-only"])
def test_results_do_not_depend_on_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Its service is killed or hangs in mid-run, or cannot begin: all is generated and reported, with one warning."""

    def observe(self: WandbLog, engine: Engine) -> None:
        for process in children("wandb-core"):
            os.kill(process, signal.Signals[how])
        self.flush(engine)

    def init(**_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(wandb_log, "FINISH_LIMIT_S", 1.0)
    if how == "read-only":
        monkeypatch.setattr(wandb, "init", init)
    else:
        monkeypatch.setattr(WandbLog, "observe", observe)
    with caplog.at_level("WARNING"):
        report = run(config(TaskConfig(limit=2), "offline"), tmp_path, World("python"))
    assert (report["requests"], len(lines(tmp_path))) == (2, 2)
    assert (tmp_path / "report.html").exists()
    [warning] = [record.message for record in caplog.records if "W&B" in record.message]
    assert warning.startswith("WARNING: W&B is lost: ")
    assert warning.endswith(". The job goes on without it.")
    end = time.monotonic() + 10
    while children("wandb-core") and time.monotonic() < end:
        time.sleep(0.05)
    assert not children("wandb-core"), "its service is ended, too"


def test_results_do_not_depend_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lopa_dist.jobs.run.job.write_run_page", full)
        with caplog.at_level("WARNING"):
            report = run(config(TaskConfig(limit=2)), tmp_path, World("python"))
    assert report == json.loads((tmp_path / "report.json").read_text())
    said = [record.message for record in caplog.records if record.name == "lopa_dist"]
    assert [message.split(":")[1] for message in said] == [" report.html could not be written"]
    assert run(config(TaskConfig(limit=2)), tmp_path, World("python")) == report
    assert (tmp_path / "report.html").exists(), "made good by the next attempt"


def test_runs_of_a_sweep_are_distinguished(tmp_path: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    """By settings, or a name that a person gave; where these are equal, by what names do not have in common."""
    report = finished[1]
    named = [(f"seed={i},task.limit=9", report) for i in range(2)]

    def names(*runs: tuple[str, dict[str, Any]]) -> list[str]:
        groups = [SeedGroup(name, report, [tmp_path]) for name, report in runs]
        return names_of(groups, words_of(groups))

    assert names(*named) == ["seed=0", "seed=1"]
    for name, _ in named:
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    console = Console(width=120, record=True)
    compare(tmp_path, console)
    shown = console.export_text()
    assert "seed=0" in shown
    assert "seed=1" in shown
    other = report | {"decode": report["decode"] | {"branches": 5}}
    assert names(("decode.branches=2,seed=1", report), ("x=5", other)) == ["branches=2", "branches=5"]
    assert names(("plain", report), ("lopa", other)) == ["plain (branches=2)", "lopa (branches=5)"]
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "report.json").write_text("{}")
    console = Console(width=120, record=True)
    with pytest.raises(ValueError, match=r"not compared: .*foreign/report\.json is not the report of a job"):
        compare(tmp_path, console)
    assert "seed=1" in console.export_text(), "the others are compared first"


def test_what_may_be_longest_begins_first(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    limits = [8, 32, 16, 32, 8]
    file.write_text(
        "".join(json.dumps({"prompt": f"{i} apples", "max_tokens": n}) + "\n" for i, n in enumerate(limits))
    )
    job = replace(config(TaskConfig("batch", None, str(file))), engine=EngineConfig(max_sequences=1))
    run(job, tmp_path, World("python"))
    assert [line["custom_id"] for line in lines(tmp_path)] == [f"line-{i}" for i in range(1, 6)]
    journal = [
        json.loads(line) for path in (tmp_path / "journal").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    finished = [entry["line"]["custom_id"] for entry in journal if "line" in entry]
    assert finished == ["line-2", "line-4", "line-3", "line-1", "line-5"]


def test_what_the_model_cannot_number_ends_as_an_error_of_its_request(tmp_path: Path) -> None:
    """The others are answered, and an attempt that follows has nothing to do."""
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    weights = load_file(model / "model.safetensors")
    token = load_tokenizer(EMBEDDED).convert_tokens_to_ids("▁Sam")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"{name} has 4 books ." for name in ("Ann", "Sam", "Tom")]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    asked = config(TaskConfig(name="batch", input=str(prompts)), drafts=4, verify="agreement", branches=0)
    asked = replace(asked, model=ModelOptions(path=str(model), pattern="d2f"))
    report = run(asked, tmp_path / "run", World("python"))
    assert (report["requests"], report["errors"]) == (3, 1)
    first, failed, last = lines(tmp_path / "run")
    assert (failed["finish_reason"], failed["error"]) == ("error", NOT_NUMBERS)
    assert {first["finish_reason"], last["finish_reason"]} <= {"stop", "length"}
    assert run(asked, tmp_path / "run", World("python")) == report


def test_how_far_reading_is_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lopa_dist.jobs.run.job_input.EVERY_S", -1.0)
    with caplog.at_level("INFO", "lopa_dist"):
        run(config(TaskConfig(limit=1)), tmp_path, World("python"))
    assert "reading the input: 1 requests so far" in caplog.text


def test_a_rank_that_is_bound_too_narrowly_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, cores in (("cores_of_launcher", 64), ("usable_cores", 1)):
        monkeypatch.setattr(device, name, lambda cores=cores: cores)
    monkeypatch.setattr(device, "share_of_cores", lambda world: 1)
    monkeypatch.setattr(device, "busy_cores", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run(replace(config(TaskConfig(limit=1)), parallel=ParallelConfig()), tmp_path, World("python"))
    assert "WARNING: mpirun binds this rank to 1 core, but its share is 64: start it with --bind-to none" in caplog.text
