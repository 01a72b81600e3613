"""HumanEval, MBPP and their EvalPlus extensions: prompts, what is run, golds and wrong programs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.tasks import code_task
from lopa_dist.tasks.code_task import first_block
from lopa_dist.tasks.humaneval import HumanEval, HumanEvalPlus
from lopa_dist.tasks.mbpp import MBPP, MBPPPlus
from lopa_dist.tasks.registry import check_judging
from lopa_dist.tasks.rows import rows
from lopa_dist.tasks.task import Item, Score
from tests.tasks.data import real

if not sys.platform.startswith("linux"):
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("sandbox_to_itself")


RUN = {"allow_code_execution": True, "code_timeout_s": 20.0}


def plain(item: Item) -> Item:
    """What a job makes of it for a base model."""
    return replace(item, messages=None, answer_prefix="")


def chat(item: Item) -> Item:
    return replace(item, prompt=None)


def write(path: Path, values: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def right(score: Score | None) -> bool:
    assert score is not None
    return score.correct


def test_humaneval_golds() -> None:
    """Every eighth of the real problems (all 164 take a quarter of a minute and pass too)."""
    source = real("HumanEval.jsonl.gz")
    golds = {row.value["task_id"]: row.value["canonical_solution"] for row in rows(source)}
    task = HumanEval(source, **RUN)
    items = list(task.items())
    assert [item.custom_id for item in items] == [f"HumanEval/{i}" for i in range(164)]
    for item in items[::8]:
        gold = golds[item.custom_id]
        assert right(task.score(plain(item), gold))
        assert not right(task.score(plain(item), "    return None\n"))
        assert item.prompt in item.messages[0]["content"]
        assert item.answer_prefix.endswith(f"```python\n{item.prompt}\n")
    item = items[0]
    assert right(task.score(chat(item), golds[item.custom_id] + "```\nThis works because"))
    assert not right(task.score(plain(item), golds[item.custom_id] + "```\nThis works because"))
    assert "\ndef" in item.stop


ADD = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
}


def test_humaneval_plus(tmp_path: Path) -> None:
    row = ADD | {"test": "import numpy as np\ndef check(candidate):\n    assert np.allclose(candidate(1, 2), 3)"}
    task = HumanEvalPlus(write(tmp_path / "x.jsonl", [row]), **RUN)
    [item] = map(plain, task.items())
    assert right(task.score(item, "    return a + b\n"))
    assert not right(task.score(item, "    return a - b\n"))


def test_evalplus_own_files_are_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    release = ADD | {"base_input": [[1, 2]], "plus_input": [[0.1, 0.2]], "atol": 0, "contract": ""}
    source = write(tmp_path / "x.jsonl", [release | {"assertion": "assert add(1, 2) == 3"}])
    for task in (HumanEvalPlus(source, **RUN), MBPPPlus(source, fewshot=0, **RUN)):
        [item] = task.items()
        assert "leave task.input out" in str(item.error)


MBPP_ROWS = [
    {
        "task_id": i,
        "text": f"Write a function f{i} to add {i}.",
        "code": f"def f{i}(x):\r\n  return x + {i}",
        "test_setup_code": "",
        "test_list": [f"assert f{i}(0) == {i}", f"assert f{i}(1) == {i + 1}", f"assert f{i}(-{i}) == 0"],
        "challenge_test_list": [],
    }
    for i in (1, 2, 3, 4, 5, 11, 510, 511)
]


def test_sanitized_mbpp_has_imports(tmp_path: Path) -> None:
    row = {
        "task_id": 11, "prompt": "Write f.", "code": "def f(): return 2", "test_imports": ["import math"],
        "test_list": ["assert math.sqrt(4) == f()"],
    }  # fmt: skip
    task = MBPP(write(tmp_path / "mbpp.jsonl", [row]), fewshot=0, **RUN)
    [item] = task.items()
    assert right(task.score(plain(item), row["code"]))


def test_mbpp(tmp_path: Path) -> None:
    rows = [*MBPP_ROWS]
    rows[6] = rows[6] | {
        "test_setup_code": "one = f510(0) - 509",
        "test_list": [*rows[6]["test_list"], "assert one == 1"],
    }
    task = MBPP(write(tmp_path / "mbpp.jsonl", rows), **RUN)
    first, last = task.items()
    assert (first.custom_id, last.custom_id) == ("mbpp-11", "mbpp-510")
    begin = (
        "You are an expert Python programmer, and here is your task: Write a function f2 to add 2. Your code should "
    )
    assert first.prompt.startswith(
        begin + "pass these tests:\n\nassert f2(0) == 2\nassert f2(1) == 3\nassert f2(-2) == 0\n[BEGIN]\n"
        "def f2(x):\r\n  return x + 2\n[DONE]\n\nYou are"
    )
    assert first.prompt.count("[DONE]\n\n") == 3
    assert "f5" not in first.prompt
    assert first.prompt.endswith("assert f11(-11) == 0\n[BEGIN]\n")
    assert first.messages[1] == {"role": "assistant", "content": "def f2(x):\r\n  return x + 2\n[DONE]"}
    assert first.stop == ("[DONE]",)
    for item, row in ((first, rows[5]), (last, rows[6])):
        assert right(task.score(plain(item), row["code"] + "\n"))
        assert right(task.score(chat(item), f"Here it is:\n```python\n{row['code']}\n```\nDone."))
        assert not right(task.score(plain(item), f"```python\n{row['code']}\n```"))
        assert not right(task.score(plain(item), row["code"].replace("+", "-")))
    with pytest.raises(ValueError, match=r"task\.fewshot_input=.*examples of 3"):
        MBPP(write(tmp_path / "few.jsonl", rows[4:]), **RUN)


def test_mbpp_plus(tmp_path: Path) -> None:
    row = {
        "task_id": 2,
        "code": "def f(x): return x * 2",
        "prompt": "Write a function to double.",
        "test_imports": ["import math"],
        "test_list": ["assert f(1) == 2"],
        "test": "for x in range(99): assert f(x) == math.floor(2.0 * x)",
    }
    shots = write(tmp_path / "mbpp.jsonl", MBPP_ROWS)
    task = MBPPPlus(write(tmp_path / "plus.jsonl", [row]), fewshot_input=shots, **RUN)
    (item,) = map(plain, task.items())
    assert item.custom_id == "mbpp-2"
    tail = "task: Write a function to double. Your code should pass these tests:\n\nassert f(1) == 2\n[BEGIN]\n"
    assert item.prompt.endswith(tail)
    assert right(task.score(item, row["code"]))
    assert not right(task.score(item, "def f(x): return 2"))


def test_running_code_must_be_decided(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task=humaneval .*task\.allow_code_execution=true.* false generates"):
        HumanEval()
    source = write(tmp_path / "x.jsonl", [ADD | {"test": "def check(f): 1 / 0"}])
    task = HumanEval(source, allow_code_execution=False)
    assert [task.score(item, "") for item in task.items()] == [None]


def test_showing_a_run_needs_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(confined: bool) -> None:
        raise ValueError("no bwrap")

    monkeypatch.setattr(code_task, "check", missing)
    source = write(tmp_path / "x.jsonl", [ADD | {"test": "def check(f): 1 / 0"}])
    task = HumanEval(source, allow_code_execution=True)
    assert [item.error for item in task.items()] == [None]
    with pytest.raises(ValueError, match="no bwrap"):
        check_judging(task)
    check_judging(HumanEval(source, allow_code_execution=False))


def test_rows_of_another_benchmark_are_distinguished(tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", [{"question": "?", "answer": "#### 1"}, {"task_id": 12, "text": "x"}])
    off = {"allow_code_execution": False}
    items = [*HumanEval(source, **off).items(), *MBPP(source, fewshot=0, **off).items()]
    words = ["prompt", "entry_point", "task_id", "test_list"]
    words[1] = "prompt"
    assert len(items) == 4
    for item, word in zip(items, words, strict=True):
        assert word in str(item.error)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Sure:\n```\nx = 1\ny = 2\n```\n```\nz\n```", "x = 1\ny = 2\n"),
        ("```py\nx = 1", "x = 1"),
        ("```x = 1\ny = 2```", "x = 1\ny = 2"),
        ("```python\nx = 1```", "x = 1"),
        ("def f():\n    return 1\n```\nThis returns one.", "def f():\n    return 1\n"),
        ("Here it is:\n```\ndef f(): pass", "def f(): pass"),
        ("1. This:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ('```python title="a.py"\nx = 1\n```', "x = 1\n"),
        ("~~~\nx = 1\n~~~", "x = 1\n"),
        ("The function ```f```:\n```python\nx = 1\n```", "x = 1\n"),
        ("```f``` is what it is called", "f"),
        ("def f(x):\n    return x\n```", "def f(x):\n    return x\n"),
        ("def f(x):\n    return x\n```\nFor example:\n```python\nf(1)\n```", "def f(x):\n    return x\n"),
        ("Here: ```python\ndef f(x):\n    return x\n```\nThat is all.", "def f(x):\n    return x\n"),
        ("Here: ```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),
        ("```python def f(x): return x```", "def f(x): return x"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\n"),
        ('```python\ndef f(x):\n    """>>> f(1)  # ```\n    """\n```', 'def f(x):\n    """>>> f(1)  # ```\n    """\n'),
        ("```python\nx = 1``` does it, or\n```python\ny = 2\n```", "x = 1"),
        ("```python\nreturn x +\n```\nand\n```\n+\n```", "return x +\n"),
        ("You can use ```sorted``` here\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n# show as ```md``` text\ny = 2\n```", "x = 1\n# show as ```md``` text\ny = 2\n"),
        ("from typing import List\n\n```\ndef f(): pass\n```", "from typing import List\n\ndef f(): pass\n"),
        ("def f(x): ...\n```\ndef f(x): return x\n```", "def f(x): ...\ndef f(x): return x\n"),
        ("Sure:\ndef f(x): return x\n```\nExample:\n```\nf(3)\n```", "def f(x): return x\n"),
        ("import the module, then:\n```\nx = 1\n```", "x = 1\n"),
        ("as ```x\n~~~python\nx = 1\n~~~", "x = 1\n"),
        ("```Python x = 1```", "x = 1"),
        ("```python:sol.py\nx = 1\n```", "x = 1\n"),
        ("```python\u00a0\nx = 1\n```", "x = 1\n"),
        ("```\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install x\n```\n```python\nx = 1\n```", "x = 1\n"),
    ],
)
def test_first_block(text: str, code: str) -> None:
    assert first_block(text) == code


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx=1\n" + "```\n" * 8000,
        "```python\nf(\n" + "1, # ```\n" * 4000,
        "```\n" * 8000,
        "```sh\na b\n" * 4000,
    ],
)
def test_a_model_that_repeats_a_fence_costs_little_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of places where the block may end is bounded: else these take seconds and hundreds of megabytes."""
    tried: list[str] = []
    monkeypatch.setattr(code_task, "is_program", lambda text: tried.append(text))
    first_block(text)
    assert len(tried) <= code_task.MOST_BLOCKS * (2 * code_task.MOST_ENDS + 3)
