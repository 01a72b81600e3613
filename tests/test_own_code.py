"""The user's own rules and scoring, without editing the package."""

from __future__ import annotations

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_dist import LLM, cli
from lopa_dist.checks import UserError
from lopa_dist.config import Config, TaskConfig, check_files
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.jobs.run.job import run
from lopa_dist.own_code import digest, forget_changed, load, module_of
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.embedded import Arithmetic
from lopa_dist.tasks.task import CannotJudge, score_of
from tests.jobs.run.test_job import config, lines

ROOT = Path(__file__).parent.parent
RULES = """
def surest(probability, confidence, masked):
    return probability > 0.9

def half(probability, confidence, masked):
    return probability > 0.5

def probabilities(probability, confidence, masked):
    return probability

def first_column(probability, confidence, masked):
    return probability[:, :1] > 0.5

def nothing(probability, confidence, masked):
    pass
"""
SCORE = """
import re

def last_number(text, fields):
    found = re.findall(r"-?\\d+", text)
    return found[-1:] == [str(fields["expected"])], found[-1] if found else None

def broken(text, fields):
    return 0.5
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "score.py").write_text(SCORE)
    items = list(Arithmetic(limit=6).items())
    rows = [{"messages": item.messages, "expected": item.reference, "reference": "8"} for item in items]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def job(folder: Path, name: str, score: str | None = None, **decode: Any) -> tuple[dict[str, Any], list[str]]:
    """A job over the file; returns its report and texts."""
    asked = config(TaskConfig("batch", None, str(folder / "in.jsonl"), score=score), **decode)
    report = run(asked, folder / name, World("python"))
    return report, [line["text"] for line in lines(folder / name)]


def test_code_that_has_changed_is_executed_anew(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it imports; while it is as it was, so is what it defines."""
    monkeypatch.chdir(files)
    (files / "own_level.py").write_text("LEVEL = 1\n")
    (files / "leveled.py").write_text("import own_level\ndef level(): return own_level.LEVEL\n")
    named = (f"{files}/leveled.py:level", "leveled:level")
    first = [load(text, "x") for text in named]
    hashes = {digest(text, "x") for text in named}
    forget_changed()
    assert [load(text, "x") for text in named] == first
    (files / "own_level.py").write_text("LEVEL = 2\n")  # as long as before: Python would take its compiled copy
    assert {digest(text, "x") for text in named} == hashes, "what runs is what was executed"
    forget_changed()
    assert [load(text, "x")() for text in named] == [2, 2]
    assert hashes.isdisjoint(digest(text, "x") for text in named)
    (files / "leveled.py").unlink()
    forget_changed()
    with pytest.raises(ValueError, match="no such file"):
        load(named[0], "x")


def test_what_is_in_folders_counts_too_but_not_what_the_program_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without `__init__.py` is a package, which keeps its modules as attributes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_package", "own_package.helper", "own_of_program"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own_package").mkdir()
    helper, mine = tmp_path / "own_package" / "helper.py", tmp_path / "own_of_program.py"
    mine.write_text("LEVEL = 1\n")
    program = importlib.import_module("own_of_program")
    rule = tmp_path / "rule_of_folders.py"
    rule.write_text(
        "import own_of_program\nfrom own_package import helper\n"
        "def level(): return helper.LEVEL, own_of_program.LEVEL\n"
    )
    for level in (1, 2, 3):
        helper.write_text(f"LEVEL = {level}\n")
        mine.write_text(f"LEVEL = {level}\n")
        forget_changed()
        assert load(f"{rule}:level", "x")() == (level, 1)
        assert sys.modules["own_of_program"] is program


def test_a_half_saved_helper_is_said_and_what_is_built_in_has_a_hash(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    (files / "own_half.py").write_text("LEVEL = (\n")
    (files / "of_half.py").write_text("import own_half\ndef level(): return 1\n")
    with pytest.raises(ValueError, match=r"of_half\.py cannot be imported: SyntaxError"):
        load(f"{files}/of_half.py:level", "x")
    (files / "own_half.py").write_text("LEVEL = 1\n")
    forget_changed()
    assert load(f"{files}/of_half.py:level", "x")() == 1
    assert digest("builtins:len", "x")


def test_threads_load_and_forget_at_once(files: Path) -> None:
    def again(number: int) -> int:
        file = files / f"of_thread_{number}.py"
        for level in range(20):
            file.write_text(f"def level(): return {level}\n")
            forget_changed()
            assert load(f"{file}:level", "x")() == level
        return number

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(again, range(4))) == [0, 1, 2, 3]


def test_a_rule_that_is_edited_between_two_calls_counts(files: Path) -> None:
    llm = LLM("embedded", "parallel.threads=1", "decode.max_new_tokens=32")
    rule = files / "edited.py"
    forwards = []
    for level in (0.5, 2.0, 0.5):
        rule.write_text(f"def rule(probability, confidence, masked):\n    return probability > {level}\n")
        [found] = llm.generate(["Ann has 3 books ."], decode="embedded_plain", fill=f"{rule}:rule", progress=False)
        forwards.append(found.forwards)
    assert forwards[0] == forwards[2] < forwards[1]


def test_a_rule_of_one_s_own_fills(files: Path) -> None:
    """That of `tau_conf` writes its texts, another one others, in fewer forwards."""
    usual, texts = job(files, "usual", branches=0, tau_conf=0.9)
    same, again = job(files, "same", branches=0, fill=f"{files}/rules.py:surest")
    assert (again, same["forwards"]) == (texts, usual["forwards"])
    faster, _ = job(files, "faster", branches=0, fill=f"{files}/rules.py:half")
    assert faster["forwards"] < usual["forwards"]
    (files / "rules.py").write_text(RULES.replace("0.9", "0.8"))
    forget_changed()
    with pytest.raises(ValueError, match=r"the source of decode\.fill was"):
        job(files, "same", branches=0, fill=f"{files}/rules.py:surest")


@pytest.mark.parametrize(
    ("rule", "returned"),
    [
        ("probabilities", r"a tensor of shape \[\d+, \d+\] and dtype float32"),
        ("first_column", r"a tensor of shape \[\d+, 1\] and dtype bool"),
        ("nothing", "a NoneType"),
    ],
)
def test_a_rule_that_returns_something_else_is_refused(files: Path, rule: str, returned: str) -> None:
    """A column would be broadcast over the window, and so fill what nobody chose."""
    with pytest.raises(ValueError, match=rf"decode\.fill=.*:{rule} returned {returned}: return a bool tensor"):
        job(files, "refused", branches=0, fill=f"{files}/rules.py:{rule}")


def test_answers_are_judged_by_the_file_s_own_references(files: Path) -> None:
    report, texts = job(files, "own", score=f"{files}/score.py:last_number")
    expected = [item.reference for item in Arithmetic(limit=6).items()]
    right = [text.split()[-1:] == [answer] for text, answer in zip(texts, expected, strict=True)]
    assert report["accuracy"] == sum(right) / 6 > 0
    found = lines(files / "own")
    assert [line["correct"] for line in found] == right
    assert found[0]["extracted"] == texts[0].split()[-1]


def test_finished_answers_are_judged_anew_and_not_generated(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rule was added, mended, fails no longer or is left out, and where a line's reference was corrected."""
    score = f"{files}/score.py:last_number"
    whole, texts = job(files, "whole", score=score)
    kept = {key: whole[key] for key in ("completion_tokens", "forwards")}
    rules = {
        "broken": SCORE.replace("re.findall", "re.nothing"),
        "wrong": SCORE.replace("found[-1:] ==", "found[-1:] !="),
    }

    def again(rule: str | None, source: str = SCORE) -> dict[str, Any]:
        (files / "score.py").write_text(source)
        forget_changed()
        report, found = job(files, "later", score=rule)
        assert found == texts
        return report

    generated = again(None)["decode_s"]
    monkeypatch.setattr(Engine, "generate", lambda *_: iter(()))
    for rule, source, unjudged, accuracy in (
        (score, rules["broken"], 6, None),
        (score, rules["wrong"], 0, 1 - whole["accuracy"]),
        (score, SCORE, 0, whole["accuracy"]),
        (None, SCORE, 0, None),
        (score, SCORE, 0, whole["accuracy"]),
    ):
        report = again(rule, source)
        assert (report.get("unjudged", 0), report.get("accuracy")) == (unjudged, accuracy)
        assert {key: report[key] for key in kept} == kept
        assert report["decode_s"] == generated, "nothing was generated"
    assert lines(files / "later") == [one | {"latency_s": two["latency_s"]} for one, two in
                                      zip(lines(files / "whole"), lines(files / "later"), strict=True)]  # fmt: skip
    given = (files / "in.jsonl").read_text().splitlines()
    given[2] = json.dumps(json.loads(given[2]) | {"expected": "nothing"})
    (files / "in.jsonl").write_text("\n".join(given))
    again(score)
    assert [line["correct"] for line in lines(files / "later")] == [
        line["correct"] and index != 2 for index, line in enumerate(lines(files / "whole"))
    ]


def test_exact_answers(files: Path) -> None:
    source = str(files / "in.jsonl")
    items = list(Batch(source, score="exact").items())
    assert [Batch(source, score="exact").score(items[0], text).correct for text in (" 8\n", "18")] == [True, False]
    assert Batch(source).score(items[0], "8") is None
    (files / "none.jsonl").write_text('{"prompt": "x", "expected": 8}')
    [item] = Batch(str(files / "none.jsonl"), score="exact").items()
    assert item.error == "line 1: task.score=exact needs a field reference; besides the prompt there is expected"
    broken = Batch(source, score=f"{files}/score.py:broken")
    with pytest.raises(CannotJudge, match=r"score\.py:broken returned 0\.5: return True or False"):
        broken.score(next(iter(broken.items())), "8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py:f", r"decode\.fill=nowhere\.py:f: no such file: /"),
        ("rules.py:none", "there is no function 'none' in"),
        (
            "score.py:broken",
            r"it takes \(text, fields\), but is called with 3 arguments: probability, confidence, masked",
        ),
        ("math:sqrt", r"decode\.fill=math:sqrt: it takes \(x, /\), but is called with 3 arguments"),
        ("bad.py:f", r"bad\.py cannot be imported: ZeroDivisionError"),
        ("lopa_nothing:f", "lopa_nothing cannot be imported: ModuleNotFoundError"),
        (":f", r"write FILE\.py:FUNCTION"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_is_read(files: Path, text: str, message: str) -> None:
    (files / "bad.py").write_text("1 / 0")
    named = text if text in (":f", "lopa_nothing:f", "nowhere.py:f", "math:sqrt") else f"{files}/{text}"
    with pytest.raises(ValueError, match=message):
        check_files(Config(decode=replace(Config().decode, fill=named)))


def test_a_verdict_that_is_no_score_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Arithmetic(limit=1)
    monkeypatch.setattr(task, "score", lambda item, text: False)
    with pytest.raises(CannotJudge, match=r"score\(\) returned False: return a Score"):
        score_of(task, next(iter(task.items())), "8")


def test_settings_that_cannot_be_a_function_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decode\.fill=budget: write FILE\.py:FUNCTION"):
        DecodeConfig(fill="budget")
    with pytest.raises(ValueError, match=r"task\.score=judge: must be exact or FILE\.py:FUNCTION"):
        TaskConfig("batch", input="x", score="judge")
    assert load("math:hypot", "decode.fill")(2, 3, 6) == 7


def test_the_examples_do_what_they_say() -> None:
    answer, budget = (load(f"{ROOT}/examples/{name}", "") for name in ("score.py:answer", "rules.py:budget"))
    assert answer("Now 3 + 4 = 7 . #### 7", {"reference": "7"}) == (True, "7")
    assert answer("Now 3 + 4 = 7 .", {"reference": "7"}) == (False, None)
    probability = torch.tensor([[0.95, 0.5, 0.9, 0.99], [0.7, 0.7, 0.7, 0.7]])
    masked = torch.tensor([[True, True, True, False], [True, True, True, True]])
    # errors of 0.05 and 0.1 fit into 0.2, that of 0.5 does not, and what is not masked is not filled again
    assert budget(probability, probability, masked).tolist() == [[True, False, True, False], [False] * 4]


def test_a_hash_is_also_of_the_files_that_one_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not of what is installed."""
    files = {
        "reader_of_mine": "import json\nimport numbers_of_mine as n\ndef read(text): return n.ONE",
        "numbers_of_mine": "ONE = 1",
        "judge_of_mine": "import torch\nfrom reader_of_mine import read\ndef judge(text, fields): return read(text)",
    }
    monkeypatch.syspath_prepend(str(tmp_path))

    def hashed(**changed: str) -> str:
        for name, text in (files | changed).items():
            (tmp_path / f"{name}.py").write_text(text)
        forget_changed()
        return digest(f"{tmp_path / 'judge_of_mine.py'}:judge", "task.score")

    first = hashed()
    assert hashed() == first
    assert hashed(numbers_of_mine="ONE = 2") != first
    assert hashed(reader_of_mine=files["reader_of_mine"] + " ") != first
    assert hashed() == first


def test_an_error_of_the_user_s_own_code_says_where_it_is(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("import json\n\n\ndef parse(text):\n    return json.loads(text)\n")
    with pytest.raises(UserError, match=rf"^{own}, line 5: Expecting value"), cli.mistakes():
        module_of(f"{own}:parse", "task.score").parse("")
