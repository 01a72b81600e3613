"""The user's own tasks: their items, their scores, and what is said of those that cannot be used."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.composing import composed
from lopa_dist.config import Config, JobConfig, TaskConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.scoring import ScoringEngine
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.compare import compare
from lopa_dist.overrides import as_hydra_reads
from lopa_dist.own_code import forget_changed, load, module_of, own_files
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.registry import make_task
from lopa_dist.tasks.task import CannotJudge, score_of
from tests.jobs.run.test_job import config, lines

ROOT = Path(__file__).parent.parent

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
