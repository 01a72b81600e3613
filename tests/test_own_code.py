"""Rules and scoring of the user's own, without editing the package."""

from __future__ import annotations

import importlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_dist import LLM, cli
from lopa_dist.checks import UserError
from lopa_dist.config import Config, JobConfig, TaskConfig, check_files, composed
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.scoring import ScoringEngine
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.compare import compare
from lopa_dist.overrides import as_hydra_reads
from lopa_dist.own_code import digest, forget_changed, load, module_of, own_files
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.batch import Batch
from lopa_dist.tasks.embedded import Arithmetic
from lopa_dist.tasks.registry import make_task
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


TASK = """
from lopa_dist.tasks.task import Item, Score

class Sums:
    name = "sums"

    def __init__(self, limit):
        self.limit = limit

    def items(self):
        for n in range(self.limit or 4):
            yield Item(f"sum-{n}", prompt=f"{n} + {n} =", reference=str(2 * n))
        yield Item("broken", error="this one cannot be used")

    def score(self, item, text):
        also, metrics = ({}, {}) if RIGHT else ({"loosely": True}, {"m": 1})
        read = text.split()[-1] if text.split() else None
        return Score(RIGHT, read, also, "" if RIGHT else "why", metrics, expected=item.reference)

class Nameless:
    def __init__(self, limit): pass

class Greedy(Sums):
    options = ("input", "fewshot")

number = 8
"""


def own_task(folder: Path, name: str, right: bool = True, **options: Any) -> Config:
    (folder / "task.py").write_text(TASK.replace("RIGHT", str(right)))
    forget_changed()
    return config(TaskConfig(f"{folder}/task.py:{name}", **{"limit": None} | options), branches=0)


def test_a_task_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as those of the package do; where its file changes, finished answers are judged anew."""
    report = run(own_task(tmp_path, "Sums"), tmp_path / "run", World("python"))
    found = lines(tmp_path / "run")
    assert [line["custom_id"] for line in found] == ["sum-0", "sum-1", "sum-2", "sum-3", "broken"]
    assert [line.get("expected") for line in found[:4]] == ["0", "2", "4", "6"]
    assert found[4]["error"] == "this one cannot be used"
    assert (report["accuracy"], report["errors"], report["task"]["name"]) == (1.0, 1, f"{tmp_path}/task.py:Sums")
    monkeypatch.setattr(Engine, "generate", lambda *_: iter(()))
    again = run(own_task(tmp_path, "Sums", right=False), tmp_path / "run", World("python"))
    assert (again["accuracy"], again["accuracy_loosely"]) == (0, 1)
    assert all((line["reason"], line["metrics"]) == ("why", {"m": 1}) for line in lines(tmp_path / "run")[:4])
    assert [line["text"] for line in lines(tmp_path / "run")[:4]] == [line["text"] for line in found[:4]]
    assert "accuracy_loosely" not in run(own_task(tmp_path, "Sums"), tmp_path / "run", World("python"))
    assert lines(tmp_path / "run") == found


def test_relative_imports_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg_of_mine"
    package.mkdir()
    for name, text in {"__init__": "", "helper": "x = 1", "other": "y = 1"}.items():
        (package / f"{name}.py").write_text(text)
    (package / "score.py").write_text(
        "from .helper import x\nfrom . import other\ndef right(text, fields): return True"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("pkg_of_mine.score:right", "task.score")
    assert {file.name for file in own_files(package / "score.py")} >= {"score.py", "helper.py", "other.py"}


def test_it_imports_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the console script, unlike `python -m`, does not put on `sys.path`."""
    (tmp_path / "beside_me.py").write_text("VALUE = 5")
    (tmp_path / "mine.py").write_text("from beside_me import VALUE\n\ndef f():\n    return VALUE\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert module_of("mine.py:f", "decode.fill").f() == 5
    assert str(tmp_path) == sys.path[-1]
    assert {file.name for file in own_files(tmp_path / "mine.py")} == {"mine.py", "beside_me.py"}


def test_a_file_is_a_module_that_python_knows(tmp_path: Path) -> None:
    """As dataclasses need, whose annotations are texts; and one that fails is forgotten."""
    (tmp_path / "judge.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Kept:\n    k: ClassVar[int] = 1\ndef right(text, fields): return Kept.k == 1\n"
    )
    function = load(f"{tmp_path}/judge.py:right", "task.score")
    assert function("", {})
    assert sys.modules[function.__module__].right is function
    (tmp_path / "ends.py").write_text("import sys\nsys.exit('bye')")
    with pytest.raises(ValueError, match=r"ends\.py cannot be imported: SystemExit: bye"):
        load(f"{tmp_path}/ends.py:right", "task.score")
    assert not [name for name in sys.modules if name.startswith("ends_")]


def task_of_one(folder: Path, item: str, score: str) -> TaskConfig:
    """A task of one's own, of which the only item, and each score, are what these expressions give."""
    (folder / "task.py").write_text(
        "from lopa_dist.tasks.task import Item, RequestSampling, Score\nclass Mine:\n    name = 'mine'\n"
        f"    def __init__(self, limit): pass\n    def items(self): yield {item}\n"
        f"    def score(self, item, text): return {score}\n"
    )
    return TaskConfig(f"{folder}/task.py:Mine", limit=None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("Score('yes', None)", "`correct` is True, False or None"),
        ("Score(True, 3.5)", "`extracted` and `expected` are texts"),
        ("Score(True, None, metrics={'m': {1}})", "metrics that JSON cannot hold"),
        ("Score(2, None)", "`correct` is True, False or None"),
        ("Score(True, None, reason={1})", "`reason` is a text"),
        ("Score(True, None, also={'strict': 'yes'})", "also={'strict': 'yes'}: give True or False"),
    ],
)
def test_scores_that_cannot_be_written_are_named(tmp_path: Path, body: str, said: str) -> None:
    task = task_of_one(tmp_path, "Item('a', prompt='1 + 1 =')", body)
    with pytest.raises(CannotJudge, match=re.escape(said)):
        run(config(task, branches=0), tmp_path / "run", World("python"))


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("'a text'", "which is not an Item"),
        ("Item(5, prompt='x')", "has custom_id=5, which is not a text"),
        ("Item('a', prompt=5)", "has prompt=5, which is not a text"),
        ("Item('a')", "has neither prompt nor messages"),
        ("Item('a', messages=['x'])", "has messages that are not all {'role': TEXT, 'content': TEXT}"),
        ("Item('a', messages=[{'role': 'user'}])", "has messages that are not all {'role': TEXT, 'content': TEXT}"),
        ("Item('a', 'x', stop=' .')", "has stop=' .', which is not a tuple of texts"),
        ("Item('a', 'x', stop=(1,))", "cannot be used: stop must be"),
        ("Item('a', 'x', sampling={})", "has sampling={}, which is not a RequestSampling"),
        ("Item('a', 'x', sampling=RequestSampling(-3))", "cannot be used: temperature=-3 must be"),
        ("Item('a', 'x', sampling=RequestSampling(top_p=7))", "cannot be used: top_p=7 must be"),
        ("Item('a', 'x', max_new_tokens=2.5)", "has max_new_tokens=2.5, which is not an int"),
        ("Item('a', 'x', max_new_tokens=0)", "cannot be used: max_new_tokens=0 must be an integer of at least 1"),
        ("Item('a', 'x', prefix=None)", "has prefix=None, which is not a text"),
        ("Item('a', 'x', sampling=RequestSampling(top_k=20.0))", "has top_k=20.0, which is not an int"),
        ("Item('a', 'x', response_format={'type': 'json_object'})", "which is not a ResponseFormat"),
        ("Item('a', 'x', suffix='.')", "cannot be used: suffix needs max_tokens"),
        ("Item('a', 'x', continuations=('x',))", "has continuations that are not all Continuations"),
        ("Item('a', 'x', metadata={1: 'a', 'b': 2})", "that JSON cannot hold"),
        ("Item('a', 'x', reference={1})", "that JSON cannot hold"),
        ("Item('a', 'x', metadata={'b': {1}})", "that JSON cannot hold"),
        ("Item('a\\ud800', 'x')", "has a custom_id that UTF-8 cannot hold"),
    ],
)
def test_items_that_cannot_be_used_are_named(tmp_path: Path, item: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"task\.py:Mine: items\(\) gave .*{re.escape(said)}"):
        list(make_task(task_of_one(tmp_path, item, "None")).items())


@pytest.mark.parametrize("items", ["5", "[1 / 0]"])
def test_items_that_fail_say_where(tmp_path: Path, items: str) -> None:
    task = task_of_one(tmp_path, "Item('a', 'x')", "None")
    file = tmp_path / "task.py"
    file.write_text(file.read_text().replace("yield Item('a', 'x')", f"return {items}"))
    forget_changed()
    where = re.escape(f"{file}, line 5: ZeroDivisionError") if "/" in items else "TypeError"
    with pytest.raises(ValueError, match=rf"task\.py:Mine: items\(\) failed: {where}"):
        list(make_task(task).items())


def test_the_limit_holds_where_a_task_does_not_look_at_it(tmp_path: Path) -> None:
    task = task_of_one(tmp_path, "Item('a', 'x'); yield Item('b', 'x')", "None")
    assert len(list(make_task(task).items())) == 2
    assert len(list(make_task(replace(task, limit=1)).items())) == 1


def test_corrected_references_are_judged_with_and_nothing_is_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are in a file of their own, so that the class stays as it is."""
    known = tmp_path / "known"
    known.write_text("2")
    item = f"Item('a', '1 + 1 =', reference=open({str(known)!r}).read())"
    task = task_of_one(tmp_path, item, "Score(True, None, expected=item.reference)")
    run(config(task, branches=0), tmp_path / "run", World("python"))
    monkeypatch.setattr(Engine, "generate", lambda *_: iter(()))
    known.write_text("3")
    run(config(task, branches=0), tmp_path / "run", World("python"))
    assert [line["expected"] for line in lines(tmp_path / "run")] == ["3"]


def test_likelihoods_are_judged_anew_by_their_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, known = tmp_path / "task.py", tmp_path / "known"
    file.write_text(
        "from lopa_dist.tasks.task import Continuation, Item, Score\n"
        "class Mine:\n    name, scores, masks = 'mine', True, 2\n    def __init__(self, limit): pass\n"
        "    def items(self):\n"
        f"        yield Item('a', '1 + 1 =', reference=int(open({str(known)!r}).read()),\n"
        "            continuations=(Continuation(' 2', ' 2'), Continuation(' 7', ' 7')))\n"
        "    def score(self, item, text): return Score(False, 'wrong function')\n"
        "    def score_likelihoods(self, item, likelihoods):\n"
        "        best = max(range(2), key=lambda i: likelihoods[i].loglikelihood)\n"
        "        return Score(best == item.reference, 'likelihoods')\n"
    )
    verdicts = []
    for reference in "010":
        known.write_text(reference)
        run(config(TaskConfig(f"{file}:Mine", limit=None), branches=0), tmp_path / "run", World("python"))
        [line] = lines(tmp_path / "run")
        assert line["extracted"] == "likelihoods"
        verdicts.append(line["correct"])
        monkeypatch.setattr(ScoringEngine, "generate", lambda *_: iter(()))
    assert verdicts[0] == verdicts[2] != verdicts[1]


@pytest.mark.parametrize("right", ["1", "numpy.bool_(True)", "numpy.int64(1)", "True"])
def test_flags_of_other_kinds_are_flags(tmp_path: Path, right: str) -> None:
    right = right.replace("numpy", "__import__('numpy')")
    task = make_task(task_of_one(tmp_path, "Item('a', 'x')", f"Score({right}, None, {{'r': {right}}})"))
    score = score_of(task, next(iter(task.items())), "")
    assert score is not None
    assert (score.correct, score.also) == (True, {"r": True})
    json.dumps(score.fields())


def test_the_page_of_a_run_that_began_elsewhere_has_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever `lopa-dist report` is typed, files of its task are those that the job had; without them it says so."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    own = own_task(Path(), "Sums")
    own.task.name = "task.py:Sums"
    run(own, tmp_path / "run", World("python"))
    page = tmp_path / "run" / "report.html"
    prompt = next(iter(make_task(own.task).items())).prompt
    assert prompt is not None
    monkeypatch.chdir(tmp_path)
    forget_changed()
    compare(tmp_path / "run")
    assert prompt in page.read_text()
    assert "no prompts" not in capsys.readouterr().out


def test_a_judge_may_change_and_end_what_it_likes(tmp_path: Path) -> None:
    """Neither reaches the results: sys.exit() is an error of one verdict, and fields are copies."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1 =", "tags": ["a"]}\n{"prompt": "1 + 2 =", "tags": ["b"]}\n')
    (tmp_path / "judge.py").write_text(
        "import sys\ndef known(text, fields):\n    fields['tags'].append(text)\n"
        "    return True if fields['tags'][0] == 'a' else sys.exit(0)\n"
    )
    task = TaskConfig("batch", input=str(tmp_path / "p.jsonl"), score=f"{tmp_path}/judge.py:known", limit=None)
    report = run(config(task, branches=0), tmp_path / "run", World("python"))
    one, two = lines(tmp_path / "run")
    assert (one["correct"], one["metadata"]["tags"]) == (True, ["a"])
    assert (two["correct"], two["unjudged"], two["metadata"]["tags"]) == (None, "SystemExit: 0", ["b"])
    assert report["unjudged"] == 1


def test_all_is_judged_again_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that a judge reads may have changed, which nothing notices."""
    key = tmp_path / "key.txt"
    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "1 + 2 ="}\n')
    (tmp_path / "judge.py").write_text(f"def known(line, text):\n    return open({str(key)!r}).read() == 'yes'\n")
    task = TaskConfig("batch", input=str(tmp_path / "p.jsonl"), score=f"{tmp_path}/judge.py:known", limit=None)

    def accuracy(answer: str, retry: str | None = None) -> float:
        key.write_text(answer)
        asked = replace(config(task, branches=0), job=JobConfig(retry=retry))
        with caplog.at_level("INFO", "lopa_dist"):
            return run(asked, tmp_path / "run", World("python"))["accuracy"]

    assert accuracy("yes") == 1
    monkeypatch.setattr(Engine, "generate", lambda *_: iter(()))
    assert accuracy("no") == 1
    assert "job.retry=verdicts judges them again" in caplog.text
    assert accuracy("no", "verdicts") == 0
    assert accuracy("yes") == 0
    assert accuracy("yes", "verdicts") == 1
    with pytest.raises(ValueError, match=r"job\.retry=verdicts: only answers that task\.score or your own task judges"):
        run(replace(config(TaskConfig(limit=1)), job=JobConfig(retry="verdicts")), tmp_path / "other", World("python"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Nameless", {}, r"task=.*:Nameless: is a type and has no name, items, score; a task is a class with a name"),
        ("number", {}, r"task=.*:number: is a int and has no name, items, score; a task is a class"),
        ("nothing", {}, r"task=.*:nothing: there is no 'nothing' in .*task\.py"),
        ("Greedy", {}, r"it is made with limit, .*, here limit, input, fewshot, but got an unexpected keyword"),
        ("Sums", {"fewshot": 3}, r"task\.fewshot=3: has no effect with task=.*:Sums, only with gsm8k"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(own_task(tmp_path, name, **options).task)


def test_a_task_of_one_s_own_is_named_as_others_are() -> None:
    given = as_hydra_reads(["task=examples/task.py:Capitals", "task.limit=2"])
    assert given == ["task=own", "task.name=examples/task.py:Capitals", "task.limit=2"]
    found = composed(given).task
    task = make_task(replace(found, name=found.name.replace("examples", str(ROOT / "examples"))))
    assert [item.reference for item in task.items()] == ["Paris", "Tokyo"]
    assert [task.score(item, "Paris.").correct for item in task.items()] == [True, False]


def test_options_that_no_task_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "misspelt.py").write_text(
        "class Sums:\n    name, options = 'sums', ('problem_sed',)\n    items = score = lambda *_: None\n"
    )
    with pytest.raises(ValueError, match=r"its `options` name problem_sed, which task\.\* does not have"):
        make_task(TaskConfig(f"{tmp_path}/misspelt.py:Sums"))


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


def test_items_of_one_name_are_refused(tmp_path: Path) -> None:
    """Also if they ask for different things: results and verdicts are found by their names."""
    (tmp_path / "twins.py").write_text(
        "from lopa_dist.tasks.task import Item, Score\n"
        "class Twins:\n"
        "    name = 'twins'\n"
        "    def __init__(self, limit):\n        pass\n"
        "    def items(self):\n        return (Item('same', prompt=f'Tom has {n} apples .') for n in (2, 3))\n"
        "    def score(self, item, text):\n        return Score(True)\n"
    )
    job = config(TaskConfig(f"{tmp_path}/twins.py:Twins"))
    with pytest.raises(ValueError, match="same: two requests of this task have this name; make it unique"):
        run(job, tmp_path / "run", World("python"))


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
