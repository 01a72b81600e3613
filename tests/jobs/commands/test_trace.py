"""A trace shows the order in which the run's own text came about."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lopa_dist import cli
from lopa_dist.config import ModelOptions, TaskConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.commands.trace import (
    BONUS,
    LOOKAHEAD,
    StepRecorder,
    Trace,
    result,
    show,
    trace,
    words,
    write_trace_page,
)
from lopa_dist.jobs.run.job import run
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.task import Item
from tests.jobs.run.test_job import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    prompts = place / "prompts.jsonl"
    prompts.write_text(
        '{"custom_id": "one", "prompt": "Ann has 3 books . Ann gets 4 more . How many books does Ann have ?"}\n'
        '{"custom_id": "<b>&", "prompt": "Ben has 12 pens . Ben gives 5 away . How many pens does Ben have now ?"}\n'
        '{"custom_id": "bad", "prompt": ""}\n'
        '{"custom_id": "0", "prompt": ""}\n'
        '{"custom_id": "two", "prompt": "Ann has 3 books .", "n": 2, "max_tokens": 2}\n'
    )
    run(config(TaskConfig("batch", None, str(prompts))), place, World("python"))
    return place


@pytest.fixture(scope="module")
def found(folder: Path) -> Trace:
    return trace(folder, "<b>&")


def test_a_prompt_is_shown_as_its_user_wrote_it() -> None:
    """Without the chat template's tokens, and without examples that all requests share."""
    assert words(Item("a", "2 + 2 = 4\n3 + 3 =", prefix="2 + 2 = 4\n")) == "3 + 3 ="
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert words(Item("b", messages=chat)) == "system: Be brief.\n\nuser: Why?"
    assert words(Item("c", messages=chat[1:])) == "Why?"


def test_a_prompt_that_was_cut_is_shown_as_the_model_got_it(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    asked = {"long": "books " * 600 + "pens ?", "short": "books ?"}
    lines = ({"id": name, "prompt": text, "max_tokens": 2} for name, text in asked.items())
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(config(TaskConfig("batch", None, str(prompts), truncate="left")), tmp_path, World("python"))
    assert result(tmp_path, "long")["truncated"] is True
    assert "truncated" not in result(tmp_path, "short")
    shown = trace(tmp_path, "long").prompt
    assert shown.endswith("pens ?")
    assert shown.count("books") < 520
    assert "<|" not in shown


def test_the_prompts_tail_is_no_part_of_the_answer(small_model: Transformer) -> None:
    """Where it begins the first block (context=blocks), positions of the answer still count from 0."""
    recorder = StepRecorder()
    decode = DecodeConfig(
        verify="confidence",
        drafts=0,
        branches=3,
        block_size=8,
        max_new_tokens=20,
        tau_conf=0.95,
        context="blocks",
    )
    engine = Engine(small_model, decode, Solo(), EngineConfig(1), on_step=recorder)
    [generation] = engine.generate([Request(0, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 20, 0)])
    assert recorder.tokens[: len(generation.tokens)] == generation.tokens
    filled = [position for step in recorder.steps for position in step.filled]
    assert sorted(filled) == list(range(len(filled)))
    assert recorder.steps[0].end == 5 + 8  # what the prompt left of its last block, and the next one
    assert any(step.winner for step in recorder.steps)
    for step in recorder.steps:
        assert list(step.filled.values()).count(LOOKAHEAD) == (1 if step.winner else 0)


def test_accepted_drafts_rejected_ones_and_what_took_their_place(small_model: Transformer) -> None:
    recorder = StepRecorder()
    decode = DecodeConfig(
        branches=1,
        block_size=8,
        max_new_tokens=20,
        tau_conf=0.95,
        verify="agreement",
        drafts=2,
        context="blocks",
    )
    [generation] = Engine(small_model, decode, Solo(), EngineConfig(1), on_step=recorder).generate(
        [Request(0, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 20, 0)]
    )
    assert recorder.tokens[: len(generation.tokens)] == generation.tokens
    assert sum(step.accepted for step in recorder.steps) > 0
    for step in recorder.steps:
        kinds = list(step.filled.values())
        assert kinds.count(LOOKAHEAD) == step.accepted <= step.drafts
        assert kinds.count(BONUS) == (1 if step.accepted < step.drafts else 0)
        assert (step.rejected is None) == (step.accepted == step.drafts)
        if step.rejected:
            position, text = step.rejected
            assert step.filled[position] == BONUS
            assert text != str(recorder.tokens[position])


def test_every_position_is_filled_once_and_gives_the_text(folder: Path, found: Trace) -> None:
    line = json.loads((folder / "results.jsonl").read_text().splitlines()[1])
    assert found.same
    assert len(found.steps) == line["usage"]["forwards"]
    assert found.prompt == "Ben has 12 pens . Ben gives 5 away . How many pens does Ben have now ?"  # no template
    filled = [position for step in found.steps for position in step.filled]
    assert len(filled) == len(set(filled))
    assert "".join(found.texts).split("\u00b6")[0].split() == line["text"].split()
    for number, step in enumerate(found.steps, 1):
        lookaheads = [p for p, kind in step.filled.items() if kind == LOOKAHEAD]
        assert len(lookaheads) == (1 if step.winner else 0)
        assert all(found.order[p] == number for p in step.filled)
        assert max(step.filled) < step.end


def test_steps_that_the_run_need_not_have_taken_are_called_that(folder: Path, found: Trace, tmp_path: Path) -> None:
    """Where drafts depend on the load and on what was written before, though no text does."""

    def printed(trace: Trace) -> str:
        out = io.StringIO()
        show(trace, Console(file=out, width=300))
        write_trace_page(trace, tmp_path / "page.html")
        said = [
            text
            for text in (out.getvalue(), (tmp_path / "page.html").read_text())
            if "steps of the request alone" in text
        ]
        return f"{len(said)} {out.getvalue()}"

    assert printed(found).startswith("0 ")
    asked = config(TaskConfig("batch", None, str(folder / "prompts.jsonl")))
    for name, drafts, source in (("auto", "auto", "masks"), ("text", 4, "auto"), ("masks", 4, "masks")):
        causal = DecodeConfig(context="causal", max_new_tokens=24, drafts=drafts, draft_from=source)
        asked = replace(asked, model=ModelOptions(path="causal"), decode=causal)
        run(asked, tmp_path / name, World("python"))
        traced, forwards = trace(tmp_path / name, "<b>&"), result(tmp_path / name, "<b>&")["usage"]["forwards"]
        assert traced.same
        said = printed(traced)
        if name == "masks":
            assert (said[0], len(traced.steps)) == ("0", forwards)
        else:
            assert said[0] == "2"
            assert f"The run took {forwards} forwards" in said


def test_index_and_custom_id_name_the_same(folder: Path, found: Trace) -> None:
    assert trace(folder, "1") == found


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("nobody", "no request 'nobody'"),
        ("two", "two has 2 answers; name one: two#0 to two#1"),
        ("bad", "has no answer to trace: line 3: prompt is empty"),
    ],
)
def test_what_cannot_be_traced_says_why(folder: Path, which: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(folder, which)


def test_a_run_that_has_not_ended_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no report\.json; name the folder of a finished run"):
        trace(tmp_path, "0")
    (tmp_path / "journal").mkdir()
    with pytest.raises(ValueError, match=r"not finished; `lopa-dist status .*` says how it goes on"):
        trace(tmp_path, "0")


def test_a_custom_id_counts_before_an_index(folder: Path) -> None:
    assert result(folder, "0")["index"] == 3
    assert result(folder, "1")["custom_id"] == "<b>&"


def test_the_try_that_stayed_is_shown(tmp_path: Path) -> None:
    """Of answers that had to be of a format; a page says where the text is another one, too."""
    line = {"prompt": "Ann has 3 books .", "response_format": {"type": "json_object"}, "temperature": 1.0}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    task = TaskConfig(name="batch", input=str(tmp_path / "in.jsonl"), limit=None, tries=3)
    run(config(task, max_new_tokens=16), tmp_path / "run", World("python"))
    found = result(tmp_path / "run", "0")
    assert found["usage"]["tries"] == 3
    shown = trace(tmp_path / "run", "0")
    assert shown.same
    for same in (True, False):
        write_trace_page(replace(shown, same=same), tmp_path / "page.html")
        assert ("This is not the text of the run" in (tmp_path / "page.html").read_text()) != same


def test_an_input_of_the_same_name_elsewhere_is_reported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    file, other = tmp_path / "run" / "report.json", tmp_path / "other.jsonl"
    other.write_text('{"prompt": "Ann has 3 books ."}\n')
    report = json.loads(file.read_text())
    file.write_text(json.dumps(report | {"task": report["task"] | {"input": str(other)}}))
    with pytest.raises(ValueError, match=r"one: the task's input has changed .* task\.input=.*other\.jsonl is another"):
        trace(tmp_path / "run", "one")


def test_weights_that_have_changed_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    file, results = tmp_path / "run" / "report.json", tmp_path / "run" / "results.jsonl"
    report = json.loads(file.read_text())
    file.write_text(json.dumps(report | {"weights": report["weights"] | {"revision": "0" * 16}}))
    assert trace(tmp_path / "run", "one").same, "the same text needs no explanation"
    first, *others = results.read_text().splitlines()
    results.write_text("\n".join([json.dumps(json.loads(first) | {"text": "Ann has 9 ."}), *others, ""]))
    with pytest.raises(
        ValueError, match=r"one: the checkpoint .* has changed since the run \(revision 0{16}, now [\w-]+\)"
    ):
        trace(tmp_path / "run", "one")


def test_standard_input_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / "report.json"
    report = json.loads(file.read_text())
    file.write_text(json.dumps(report | {"task": report["task"] | {"input": "-"}}))
    with pytest.raises(ValueError, match="standard input cannot be read again"):
        trace(tmp_path / "run", "one")


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in (tmp_path / "nowhere" / "x.html", tmp_path):
        monkeypatch.setattr("sys.argv", ["lopa-dist", "trace", str(folder), "one", "--html", str(page)])
        with pytest.raises(SystemExit, match=r"--html .*: cannot be written; name a file"):
            cli.main()
    assert not capsys.readouterr().out


def test_a_page_is_there_even_if_nobody_reads_the_terminal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `lopa-dist trace RUN ID --html FILE | head`."""

    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("lopa_dist.jobs.commands.trace.show", gone)
    monkeypatch.setattr("lopa_dist.commands.os.dup2", lambda *_: None)
    monkeypatch.setattr("sys.stdout", (tmp_path / "out").open("w"))
    monkeypatch.setattr("sys.argv", ["lopa-dist", "trace", str(folder), "one", "--html", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "</html>" in (tmp_path / "page.html").read_text()


def test_terminal_shows_every_step(found: Trace) -> None:
    out = io.StringIO()
    show(found, Console(file=out, width=200))
    printed = out.getvalue()
    assert "request <b>&" in printed
    assert len(re.findall(r"^step \d+:", printed, re.M)) == len(found.steps)
    assert f"tokens of text in {len(found.steps)} forwards" in printed
    assert "not the text" not in printed
    assert "coloured" not in printed, "there is no colour in a file"
    out = io.StringIO()
    show(found, Console(file=out, width=200, force_terminal=True, color_system="standard"))
    assert "Tokens of the step are coloured" in out.getvalue()


def test_control_characters_do_not_reach_the_terminal(found: Trace) -> None:
    texts = ["\x1b[31m", *found.texts[1:]]
    console = Console(record=True, width=200, file=io.StringIO())
    show(replace(found, prompt="a\n\x1b]0;b\x07", custom_id="c\x00\x9b", texts=texts), console)
    printed = console.export_text()
    assert not set(printed) & set("\x1b\x07\x00\x9b")
    assert "a\n\\x1b]0;b\\x07" in printed


def test_page_holds_the_steps_and_nothing_that_breaks_it(found: Trace, tmp_path: Path) -> None:
    write_trace_page(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<b>&</code>" not in page
    data = json.loads(re.search(r"const data = (.*);\n", page).group(1))  # type: ignore[union-attr]
    assert sum(step["filled"] for step in data["steps"]) == sum(1 for token in data["tokens"] if token["step"])
    assert page.count("</script>") == 1


def test_tokens_a_forward_are_those_of_the_results(folder: Path, found: Trace) -> None:
    """Without the filler after the end of the text, which the steps fill as well."""
    line = result(folder, found.custom_id)
    console = Console(record=True, width=200)
    show(found, console)
    count, forwards = line["usage"]["completion_tokens"], line["usage"]["forwards"]
    assert f"{count} tokens of text in {forwards} forwards: {line['tpf']:.2f} per forward" in console.export_text()


@pytest.mark.parametrize("source", ["masks", "auto"])
def test_what_a_branch_brought_is_told_from_the_chain_s_drafts(tmp_path: Path, source: str) -> None:
    decode = DecodeConfig(context="causal", drafts=3, branches=2, draft_from=source, temperature=1.0, max_new_tokens=48)
    asked = replace(config(TaskConfig(limit=8)), model=ModelOptions(path="causal"), decode=decode)
    run(asked, tmp_path / "run", World("python"))
    steps = [step for i in range(8) for step in trace(tmp_path / "run", str(i)).steps]
    won = [step for step in steps if step.winner]
    assert won, "no branch has won: the test needs other requests"
    for step in won:
        assert step.accepted > 0
        assert step.rejected, "the chain's own draft was refused where the branch went on"
        assert sum(way == "lookahead" for way in step.filled.values()) == step.accepted
        assert ("from the branch that won" in step.sources) == (source == "auto")
