"""GSM8K: prompts as in lm-evaluation-harness, and scoring of the whole real test set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopa_dist.tasks.gsm8k import GSM8K
from lopa_dist.tasks.rows import rows
from lopa_dist.tasks.task import Item
from tests.tasks.data import real


@pytest.fixture(scope="module")
def task() -> GSM8K:
    return GSM8K(real("gsm8k_test.jsonl"), fewshot_input=real("gsm8k_train_head.jsonl"))


def test_every_gold_answer_scores_and_no_wrong_one_does(task: GSM8K) -> None:
    items = list(task.items())
    assert len(items) == 1319
    for item in items:
        assert item.error is None
        gold = task.score(item, item.reference)
        assert gold.correct
        assert gold.also == {"flexible": True}
        number = item.reference.split("#### ")[1]
        other = str(int(number.replace(",", "")) + 1)
        for text in (f"so the answer is {other}.\n#### {other}", "#### ", "", "no number"):
            wrong = task.score(item, text)
            assert not wrong.correct
            assert wrong.also == {"flexible": False}


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "extracted"),
    [
        ("#### 1,234", True, True, "1,234"),
        ("#### 1234.", True, True, "1234."),
        ("He has 1234 left.", False, True, None),
        ("He has $1,234.", False, True, None),
        ("#### 7\n#### 1234", False, True, "7"),
        ("#### 1234\nand 5 more", True, False, "1234"),
        ("####1234", False, True, None),
        ("#### -1234", False, False, "-1234"),
        ("#### 1234.0", False, False, "1234.0"),
    ],
)
def test_strict_takes_the_first_marked_number_and_flexible_the_last_one(
    task: GSM8K, text: str, strict: bool, flexible: bool, extracted: str | None
) -> None:
    score = task.score(Item("x", reference="... #### 1,234"), text)
    assert (score.correct, score.also["flexible"], score.extracted) == (strict, flexible, extracted)


def test_both_forms_of_the_prompt(task: GSM8K) -> None:
    item = next(iter(task.items()))
    shots = [row.value for row in rows(real("gsm8k_train_head.jsonl"))][:4]
    question = next(iter(rows(real("gsm8k_test.jsonl")))).value["question"]
    expected = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in shots)
    assert item.prompt == f"{expected}Question: {question}\nAnswer:"
    assert [m["role"] for m in item.messages] == ["user", "assistant"] * 4 + ["user"]
    assert item.messages[1]["content"] == shots[0]["answer"]
    assert item.messages[-1]["content"] == f"Question: {question}\nAnswer:"
    assert "Question:" in item.stop
    single = GSM8K(task.source, 1, fewshot_input=real("gsm8k_train_head.jsonl"), fewshot_as_multiturn=False)
    assert [i.messages for i in single.items()] == [[{"role": "user", "content": item.prompt}]]


def test_limit_no_examples_and_bad_rows(tmp_path: Path) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + '\n{"question": 3}\nnot json\n')
    good, no_text, no_json = GSM8K(str(source), fewshot=0).items()
    assert good.prompt == "Question: 1+1?\nAnswer:"
    assert GSM8K(str(source), fewshot=0).score(good, "#### 3").expected == "2"
    assert "question" in str(no_text.error)
    assert "row 2" in str(no_text.error)
    assert "line 3: not JSON" in str(no_json.error)
    assert len(list(GSM8K(str(source), 1, fewshot=0).items())) == 1
    with pytest.raises(ValueError, match=r"task\.fewshot_input=.*row 2"):
        GSM8K(str(source), fewshot_input=str(source))
    source.write_text(source.read_text().split("\n")[0])
    with pytest.raises(ValueError, match="1 examples of 4"):
        GSM8K(str(source), fewshot_input=str(source))
