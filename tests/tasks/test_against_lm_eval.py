"""Prompts of the code tasks and of MATH, rendered from the harness's own task files; GSM8K's verdicts, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'lopa_dist[eval]'")

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import apply_template

from lopa_dist.tasks import humaneval, mbpp, minerva_math
from lopa_dist.tasks.gsm8k import GSM8K, STOP
from tests.tasks.data import real
from tests.tasks.test_code_tasks import MBPP_ROWS, write

OFF = {"allow_code_execution": False}


class Loader(yaml.SafeLoader):
    """Reads `!function` as its name."""


Loader.add_constructor("!function", lambda loader, node: node.value)


def shipped(name: str) -> dict[str, Any]:
    """A task file of the harness."""
    return yaml.load((Path(lm_eval.__file__).parent / "tasks" / name).read_text(), Loader)


def test_humaneval_and_its_chat_form() -> None:
    plain, chat = shipped("humaneval/humaneval.yaml"), shipped("humaneval/humaneval_instruct.yaml")
    source = real("HumanEval.jsonl.gz")
    for item in humaneval.HumanEval(source, 5, **OFF).items():
        prompt = item.reference[0]
        assert item.prompt == apply_template(plain["doc_to_text"], {"prompt": prompt})
        assert item.messages == [{"role": "user", "content": apply_template(chat["doc_to_text"], {"prompt": prompt})}]
        assert item.answer_prefix == apply_template(chat["gen_prefix"], {"prompt": prompt})
        assert list(item.stop) == plain["generation_kwargs"]["until"]


@pytest.mark.parametrize("plus", [False, True])
def test_mbpp(plus: bool, tmp_path: Path) -> None:
    base = shipped("mbpp/mbpp.yaml")
    template = shipped("mbpp/mbpp_plus.yaml")["doc_to_text"] if plus else base["doc_to_text"]
    source = write(tmp_path / "mbpp.jsonl", [row | {"test": ""} for row in MBPP_ROWS])
    kind = mbpp.MBPPPlus if plus else mbpp.MBPP
    task = kind(source, None, 3, source, **OFF)
    row = next(r for r in MBPP_ROWS if r["task_id"] == 11)
    item = next(i for i in task.items() if i.custom_id == "mbpp-11")
    shots = [r for r in MBPP_ROWS if r["task_id"] in (2, 3, 4)]
    answers = [apply_template(base["doc_to_target"], r | {"is_fewshot": True}) for r in shots]
    questions = [apply_template(template, r) for r in (*shots, row)]
    expected = "".join(q + base["target_delimiter"] + a + "\n\n" for q, a in zip(questions, answers, strict=False))
    assert item.prompt == expected + questions[-1]
    assert [m["content"] for m in item.messages][1::2] == answers
    assert list(item.stop) == base["generation_kwargs"]["until"]


def test_minerva_s_stop_and_shots() -> None:
    """Its prompt is code there, which needs another version of antlr than Hydra to import."""
    task = shipped("minerva_math/minerva_math_algebra.yaml")
    assert list(minerva_math.STOP) == task["generation_kwargs"]["until"]
    assert task["num_fewshot"] == len(Path(minerva_math.MinervaMath.train).read_text().splitlines())
    source = (Path(lm_eval.__file__).parent / "tasks" / "minerva_math" / "utils.py").read_text()
    for line in Path(minerva_math.MinervaMath.train).read_text().splitlines():
        for value in json.loads(line).values():
            assert json.dumps(value) in source


# answers in which the two readings of GSM8K differ from each other and from the gold; {n} is the gold number
ENDS = ("#### {n}", "so ${n}.", "#### {n}.\nThat was 1", "#### 0", "none", "#### {n}\n#### 3", "#### -{n}", "{n}.0")


def test_gsm8k_is_the_harness_s() -> None:
    """The same 4-shot prompts, plain and as turns, and the same verdicts of both readings."""
    test, train = real("gsm8k_test.jsonl"), real("gsm8k_train_head.jsonl")
    ours = GSM8K(test, 8, fewshot_input=train)
    shipped = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())
    entry = ConfigurableTask(config=shipped | {
        "dataset_path": "json", "dataset_name": None, "num_fewshot": 4, "fewshot_config": {"sampler": "first_n"},
        "dataset_kwargs": {"data_files": {"test": test, "train": train}},
    })  # fmt: skip
    docs = list(entry.test_docs())
    assert set(entry.config.generation_kwargs["until"]) == set(STOP)
    for number, item in enumerate(ours.items()):
        doc = docs[number]
        assert entry.fewshot_context(doc, 4) == item.prompt
        turns = entry.fewshot_context(
            doc, 4, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=lambda m, **_: json.dumps(m)
        )
        assert [(t["role"], t["content"]) for t in json.loads(turns)] == [
            (m["role"], m["content"]) for m in item.messages
        ]
        for end in ENDS:
            text = end.format(n=doc["answer"].split("#### ")[1])
            score = ours.score(item, text)
            verdicts = {"strict-match": score.correct, "flexible-extract": score.also["flexible"]}
            instance = Instance("generate_until", doc, (), 0, resps=[text])
            for ensemble in entry._filters:
                ensemble.apply([instance])
                theirs = entry.process_results(doc, [instance.filtered_resps[ensemble.name]])
                assert bool(theirs["exact_match"]) == verdicts[ensemble.name], (text, ensemble.name)
