"""The shards of an array become what one job would have given."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import JobConfig, ModelOptions, TaskConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.commands.shards import merge_shards, not_at_once
from lopa_dist.jobs.commands.status import array_in_words
from lopa_dist.jobs.commands.trace import trace
from lopa_dist.jobs.folder.results import FIGURES
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.metrics import wilson
from lopa_dist.jobs.show.paired import verdicts
from lopa_dist.jobs.show.report import figures
from lopa_dist.jobs.show.run_page import job_s
from lopa_dist.jobs.show.run_state import runs_below
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config, lines


def without_times(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "latency_s"} for line in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job and the same as three shards, a bad line among the requests."""
    place = tmp_path_factory.mktemp("array")
    source = place / "prompts.jsonl"
    prompts = [f'{{"prompt": "Ann has {n} books . How many books does Ann have now ?"}}' for n in range(2, 8)]
    source.write_text("\n".join([*prompts[:4], "not JSON", *prompts[4:]]))
    for shard, shards, name in ((0, 1, "whole"), (0, 3, "array/a"), (1, 3, "array/b"), (2, 3, "array/c")):
        task = TaskConfig("batch", None, str(source), shard=shard, shards=shards)
        (place / name).mkdir(parents=True)
        run(config(task, max_new_tokens=32), place / name, World("python"))
    return place


def test_merged_is_what_one_job_gives(folder: Path) -> None:
    report = merge_shards(folder / "array")
    assert without_times(lines(folder / "array")) == without_times(lines(folder / "whole"))
    whole = json.loads((folder / "whole" / "report.json").read_text())
    for key in ("requests", "errors", "completion_tokens", "forwards", "tpf"):
        assert report[key] == whole[key]
    assert report["shards"] == 3
    [told] = [text for text in whole["warnings"] if "does not know" in text]  # a busy machine is told as well
    [of_shard] = [text for text in report["warnings"] if "does not know" in text]  # once, though all shards have it
    assert of_shard.startswith("shard 0, 1, 2, each with figures of its own; shard 0: ")
    assert re.sub(r"\d+", "", of_shard).endswith(f"shard : {re.sub(r'[0-9]+', '', told)}")
    assert trace(folder / "array", "5").custom_id == lines(folder / "whole")[5]["custom_id"]  # of shard 2


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_relative_paths_begin_where_the_shards_were_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    """Not where they are merged, where a file of the same name may be."""
    out = f"out/answers.{ending}"
    for place in ("began", "elsewhere"):
        (tmp_path / place / "out").mkdir(parents=True)
    (tmp_path / "elsewhere" / out).write_text("mine")
    monkeypatch.chdir(tmp_path / "began")
    Path("prompts.jsonl").write_text('{"prompt": "Ann has 2 books .", "max_tokens": 4}\n' * 2)
    for shard in range(2):
        task = TaskConfig("batch", None, "prompts.jsonl", output=out, shard=shard, shards=2)
        run(config(task), Path(f"array/shard-{shard}").absolute(), World("python"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    for _ in range(2):
        merge_shards(Path("../began/array"))
    assert Path(out).read_text() == "mine"
    written = (tmp_path / "began" / out).read_text()
    assert written.count("\n") == 2 + (ending == "csv")
    assert "Ann has" in written or ending == "jsonl"
    assert "was there already" not in caplog.text  # the second time they are its own

    (tmp_path / "began" / "array" / "report.json").unlink()
    merge_shards(tmp_path / "began" / "array")
    assert f"task.output={tmp_path}/began/{out} was there already; the merged results replace it" in caplog.text


def test_shards_that_did_not_run_at_once_are_told(folder: Path) -> None:
    """For tokens per second are as if they had."""
    reports = [json.loads(file.read_text()) for file in sorted((folder / "array").glob("?/report.json"))]
    for minute, report in enumerate(reports):
        report |= {"wall_s": 60.0, "decode_s": 50.0}
        report["made"]["date"] = f"2026-11-20T10:{minute:02d}:00+00:00"
    assert not_at_once(reports[:1]) == ""
    said = "From the first start to the last end 180 s passed; generation took 150 s in all"
    assert not_at_once(reports).endswith(said)
    reports[1]["made"] = reports[2]["made"] = reports[0]["made"]
    assert not_at_once(reports) == ""


def test_shards_of_different_code_are_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "array", tmp_path / "array")
    file = tmp_path / "array" / "b" / "report.json"
    report = json.loads(file.read_text())
    report["made"]["code"] = "another"
    file.write_text(json.dumps(report))
    assert merge_shards(tmp_path / "array")["warnings"][0].startswith("the shards were made by different code")


def test_samples_of_a_prompt_are_one_problem_however_they_are_asked_for(tmp_path: Path) -> None:
    """By each line's n or by task.samples, in one job or in shards, which have some samples of each prompt."""
    prompts = [{"prompt": f"Ann has {n} books .", "max_tokens": 4, "temperature": 1.0} for n in range(2, 7)]
    (tmp_path / "judge.py").write_text("def right(text, fields):\n    return len(text) % 2 == 0\n")

    def job(name: str, lines: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        source = tmp_path / f"{name.split('/')[0]}.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = TaskConfig("batch", None, str(source), score=f"{tmp_path}/judge.py:right", **options)
        return run(config(task), tmp_path / name, World("python"))

    own = job("own", [line | {"n": 3} for line in prompts])
    by_setting = job("setting", prompts, samples=3)
    some = [line | {"n": n} for line, n in zip(prompts, (1, 1, 4, 1, 1), strict=True)]
    mixed = job("mixed", some, samples=2)
    one = job("one", prompts)
    found = [(r["requests"], r["judged"], r["problems"], r.get("prompts")) for r in (own, by_setting, mixed, one)]
    assert found == [(15, 15, 5, 5), (15, 15, 5, 5), (8, 8, 5, 5), (5, 5, 5, None)]
    assert own["accuracy_95"] == by_setting["accuracy_95"] == [*wilson(own["accuracy"], 5)]
    assert [len(verdicts([tmp_path / name])) for name in ("own", "setting", "mixed", "one")] == [5] * 4

    for shard in range(2):
        job(f"array/{shard}", some, samples=2, shard=shard, shards=2)
    merged = merge_shards(tmp_path / "array")
    assert (merged["judged"], merged["problems"], merged["prompts"]) == (8, 5, 5)
    assert merged["accuracy_95"] == mixed["accuracy_95"]


def test_a_folder_of_another_shard_is_refused(folder: Path) -> None:
    """Its results would be lost: the folder has one results.jsonl."""
    task = TaskConfig("batch", None, str(folder / "prompts.jsonl"), shard=1, shards=3)
    with pytest.raises(ValueError, match="shard was '0 of 3', is '1 of 3'"):
        run(config(task, max_new_tokens=32), folder / "array" / "a", World("python"))


def test_answers_in_openai_s_form_are_those_of_one_job(tmp_path: Path) -> None:
    """Also of a line whose samples are in different shards."""
    question = "Ann has 3 books . How many books does Ann have now ?"
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
    raw = [
        {"custom_id": "four", "method": "POST", "url": "/v1/chat/completions", "body": body | {"n": 4}},
        {"prompt": question, "max_tokens": 8, "n": 2},
        {"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": body | {"n": 0}},
        {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"prompt": question, "max_tokens": 8}},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in raw))
    for shard, shards, name in ((0, 1, "whole"), (0, 2, "array/a"), (1, 2, "array/b")):
        (tmp_path / name).mkdir(parents=True)
        task = TaskConfig("batch", None, str(source), shard=shard, shards=shards)
        run(config(task, temperature=1.0), tmp_path / name, World("python"))
    assert not list(tmp_path.glob("array/*/batch_output.jsonl"))
    merge_shards(tmp_path / "array")

    def answers(folder: Path) -> list[Any]:
        found = [json.loads(line) for line in (folder / "batch_output.jsonl").read_text().splitlines()]
        for answer in found:
            if answer["response"]:
                del answer["response"]["body"]["created"]
        return found

    whole = answers(tmp_path / "whole")
    bodies = [answer["response"] and answer["response"]["body"] for answer in whole]
    assert [body and len(body["choices"]) for body in bodies] == [4, 2, None, 1]
    assert answers(tmp_path / "array") == whole


def test_a_run_is_not_merged_from_what_it_has_set_aside(tmp_path: Path) -> None:
    """`job.resume=new` leaves `journal.old` in its folder, with results and a report."""
    job = config(TaskConfig(limit=1), max_new_tokens=16)
    for again in (job, replace(job, seed=1, job=JobConfig(resume="new"))):
        run(again, tmp_path, World("python"))
    before = (tmp_path / "report.json").read_text()
    with pytest.raises(ValueError, match="a single run, which needs no merge"):
        merge_shards(tmp_path)
    assert (tmp_path / "report.json").read_text() == before


def test_what_does_not_belong_together_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "array", tmp_path / "array")
    file = tmp_path / "array" / "b" / "report.json"
    report = json.loads(file.read_text())
    file.write_text(json.dumps({**report, "seed": 5}))
    with pytest.raises(ValueError, match=r"other settings.*seed was 0, is 5"):
        merge_shards(tmp_path / "array")
    file.unlink()
    with pytest.raises(ValueError, match=r"array: 2 of 3 shards are complete; shard 1 was stopped; run the rest with:"):
        merge_shards(tmp_path / "array")
    file.write_text(json.dumps(report))
    results = file.with_name("results.jsonl")
    results.write_text(results.read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=r"b: 1 result lines of 2"):
        merge_shards(tmp_path / "array")
    with pytest.raises(ValueError, match="no finished shard"):
        merge_shards(tmp_path)


def test_shards_of_a_causal_model_may_draft_differently(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"prompt": "Ann has {n} books ."}}\n' for n in range(2, 6)))
    for shard, drafts in enumerate((0, 8)):
        job = config(TaskConfig("batch", None, str(source), shard=shard, shards=2))
        decode = DecodeConfig(context="causal", drafts=drafts, max_new_tokens=8)
        run(replace(job, model=ModelOptions("causal"), decode=decode), tmp_path / "array" / str(shard), World("python"))
    text = "\n".join(array_in_words(tmp_path / "array", runs_below(tmp_path / "array")))
    assert "lopa-dist merge" in text
    merged = merge_shards(tmp_path / "array")
    assert merged["requests"] == 4
    assert "the shards drafted with different settings (decode.drafts: 0 and 8)" in merged["warnings"][0]


def test_settings_that_a_shard_s_version_did_not_have_do_not_keep_it_from_the_others(
    folder: Path, tmp_path: Path
) -> None:
    """An array may be finished with a newer version than began it."""
    shutil.copytree(folder / "array", tmp_path / "array")
    file = tmp_path / "array" / "b" / "report.json"
    report = json.loads(file.read_text())
    for section, key in (("decode", "draft_from"), ("decode", "drafts_per_branch"), ("model", "template")):
        report[section].pop(key, None)
    report["decode"]["gone"] = 3
    file.write_text(json.dumps(report))
    assert merge_shards(tmp_path / "array")["requests"] == 7
    report["decode"]["tau_conf"] = 0.123
    file.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"other settings.*tau_conf was"):
        merge_shards(tmp_path / "array")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 1}, r"array: 2 of 3 shards are complete; shard 1 was stopped; run the rest with:"),
        ({"whole_input": "x"}, r"b: of another input than .*a; it changed between their runs"),
        ({"shard": 2}, r"shard 2 is in both .*b and .*c: remove one of them"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_nothing_is_written_before_all_is_known_to_fit(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(folder / "array", tmp_path / "array")
    for name in ("results.jsonl", "errors.jsonl", "report.json"):
        (tmp_path / "array" / name).unlink(missing_ok=True)
    file = tmp_path / "array" / "b" / "report.json"
    report = json.loads(file.read_text())
    if "requests" in change:
        results = file.with_name("results.jsonl")
        results.write_text(results.read_text().splitlines()[0] + "\n")
    if "shard" in change:
        change = {"task": report["task"] | change}
    file.write_text(json.dumps(report | change))
    with pytest.raises(ValueError, match=message):
        merge_shards(tmp_path / "array")
    assert not list(tmp_path.glob("array/*.json*"))


def test_the_input_s_digest_tells_what_other_shards_have(tmp_path: Path) -> None:
    """So a line that came or went, or that is another, is noticed by shards that do not have it."""
    source = tmp_path / "in.jsonl"
    found = []
    for texts in (["a", "b", "c"], ["a", "x", "c"], ["a", "b"], ["a", "b", "c"]):
        source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        task = TaskConfig("batch", None, str(source), shard=0, shards=2)
        run(config(task, max_new_tokens=16), tmp_path, World("python"))
        found.append(json.loads((tmp_path / "report.json").read_text())["whole_input"])
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_the_speed_of_shards_that_were_stopped_counts_all_attempts(tmp_path: Path) -> None:
    """The wall time of the last attempt at the slowest shard is not the job's."""
    for shard in range(2):
        folder = tmp_path / str(shard)
        run(config(TaskConfig(limit=4, shard=shard, shards=2), max_new_tokens=8), folder, World("python"))
        report = json.loads((folder / "report.json").read_text())
        (folder / "report.json").write_text(json.dumps(report | {"attempts": shard + 1, "decode_s": 90.0 + shard}))
    merged = merge_shards(tmp_path)
    assert (merged["attempts"], merged["decode_s"]) == (2, 91.0)
    assert merged["wall_s"] < 91.0
    assert job_s(merged) == 91.0
    assert "decoding took 91.0 s in all of them" in dict(figures(merged))["wall time"]


OF_ONE_JOB = {"step_ms", "steps", "comm_bytes_per_step", "world", "input"}
TIMES = {"made", "tokens_per_s", "latency_s", "decode_s", "wall_s"}


def without_chance(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what depends on times and on what ran beside what."""
    kept = {key: value for key, value in report.items() if key not in TIMES | OF_ONE_JOB | {"shards", "warnings"}}
    kept["reference_counting"] = {k: v for k, v in kept["reference_counting"].items() if k != "tokens_per_s"}
    kept["prompt_tokens"] = kept["prompt_tokens"]["total"]
    kept["task"] = {key: value for key, value in kept["task"].items() if key not in ("shard", "shards")}
    return kept


@pytest.mark.parametrize("kind", ["judged", "scored", "tries"])
def test_the_report_of_shards_is_that_of_one_job(tmp_path: Path, kind: str) -> None:
    """All of it: accuracy, reliability, drafts, branches, prompt tokens, tries, versions, and errors."""
    drafts = {"verify": "agreement", "drafts": 3, "branches": 2, "max_new_tokens": 48}
    task = TaskConfig(limit=23)
    if kind != "judged":
        body: dict[str, Any] = {"prompt": "Ann has 3 books .", "reference": "7"}
        if kind == "tries":
            body |= {"response_format": {"type": "json_object"}, "temperature": 1.0}
        given = [body | {"max_tokens": 3 + number} for number in range(6)] + [{"prompt": ""}]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
        task = TaskConfig("batch", None, str(tmp_path / "in.jsonl"), score="exact" if kind == "scored" else None)
    job = config(task, **drafts)
    job = replace(job, logging=replace(job.logging, token_steps=True))
    whole = run(job, tmp_path / "whole", World("python"))
    for shard in range(3):
        part = replace(job, task=replace(task, shard=shard, shards=3))
        run(part, tmp_path / "array" / str(shard), World("python"))
    merged = merge_shards(tmp_path / "array")
    assert without_chance(merged) == without_chance(whole)
    assert {key: merged["made"][key] for key in ("host", "device")} == {
        key: whole["made"][key] for key in ("host", "device")
    }
    assert whole.keys() - merged.keys() == OF_ONE_JOB
    assert {key: list(merged[key]) for key in ("tokens_per_s", "latency_s")} == {
        key: list(whole[key]) for key in ("tokens_per_s", "latency_s")
    }
    assert merged["drafts"]["accepted_per_forward"] > 0
    assert [name for name, _ in figures(merged)] == [name for name, _ in figures(whole)]
    again = run(job, tmp_path / "whole", World("python"))
    assert again == whole, "a job that was done before has the same report"


def test_figures_are_written_anew_by_a_shard_that_is_done(folder: Path, tmp_path: Path) -> None:
    """As one of an older version is, which wrote none."""
    shutil.copytree(folder / "array", tmp_path / "array")
    wanted = merge_shards(tmp_path / "array")
    (tmp_path / "array" / "b" / FIGURES).unlink()
    with pytest.raises(ValueError, match=r"b: no figures\.npz, .*; start its job again with this run folder"):
        merge_shards(tmp_path / "array")
    task = TaskConfig("batch", None, str(folder / "prompts.jsonl"), shard=1, shards=3)
    run(config(task, max_new_tokens=32), tmp_path / "array" / "b", World("python"))
    assert merge_shards(tmp_path / "array") == wanted


def test_shards_of_an_earlier_input_are_to_run_again(tmp_path: Path) -> None:
    """`status` does not recommend a merge that is refused."""
    source = tmp_path / "in.jsonl"
    for shard in range(2):
        source.write_text("".join(f'{{"id": "q{n}", "prompt": "Ann has {n} books ."}}\n' for n in range(2, 6 + shard)))
        job = config(TaskConfig("batch", None, str(source), shard=shard, shards=2), max_new_tokens=8)
        run(job, tmp_path / "array" / f"shard-{shard}", World("python"))
        report = tmp_path / "array" / f"shard-{shard}" / "report.json"
        made = json.loads(report.read_text())
        made["made"]["date"] = f"2026-11-20T10:0{shard}:00+00:00"
        report.write_text(json.dumps(made))
    text = "\n".join(array_in_words(tmp_path / "array", runs_below(tmp_path / "array")))
    assert "shard 0 has answers to an earlier input, which cannot be merged; run the rest of it with:\n" in text
    assert "lopa-dist merge" not in text
    with pytest.raises(ValueError, match="of another input than"):
        merge_shards(tmp_path / "array")
    report, made = (tmp_path / "array" / f"shard-{shard}" / "report.json" for shard in range(2)), []
    for file in report:
        made.append(json.loads(file.read_text()))
        made[-1]["whole_input"] = "the same"
        made[-1]["decode"]["drafts"] += len(made)
        file.write_text(json.dumps(made[-1]))
    text = "\n".join(array_in_words(tmp_path / "array", runs_below(tmp_path / "array")))
    assert "shard 0 has other settings: decode.drafts was " in text
    assert "lopa-dist merge" not in text
