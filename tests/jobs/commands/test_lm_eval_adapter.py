"""The harness runs a task of its own on the embedded model; its GSM8K and ours agree on prompts and scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'lopa_dist[eval]'")

import lm_eval
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from lopa_dist import LLM
from lopa_dist.engine.likelihood import Given, Scorer
from lopa_dist.engine.request import Request
from lopa_dist.jobs.commands.lm_eval_adapter import LopaDist, with_prefixes
from lopa_dist.tasks.gsm8k import GSM8K, STOP
from tests.tasks.data import real

ROWS = [
    {"question": f"Tom has {n} apples . Tom buys 4 more . How many apples does Tom have now ?", "answer": str(n + 4)}
    for n in (3, 5)
]


@pytest.fixture(scope="module")
def model() -> LopaDist:
    return LopaDist(branches=1, block_size=16, max_new_tokens=64)


def task(folder: Path, **more: Any) -> dict[str, Any]:
    file = folder / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "task": "tiny", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "output_type": "generate_until", "test_split": "test", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "generation_kwargs": {"until": ["####"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}], **more,
    }  # fmt: skip


def test_the_harness_finds_and_runs_the_model(model: LopaDist, tmp_path: Path) -> None:
    assert get_model("lopa_dist") is LopaDist
    result = simple_evaluate(
        model, tasks=[task(tmp_path)], apply_chat_template=True, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_defaults=False),  # reading all of them takes 10 s
    )  # fmt: skip
    samples = result["samples"]["tiny"]
    assert len(samples) == 2
    for sample in samples:
        assert "####" not in sample["resps"][0][0]
        assert sample["arguments"][0][0].count("Tom buys 4 more") == 1
    assert 0 <= result["results"]["tiny"]["exact_match,none"] <= 1
    assert result["config"]["decode"]["branches"] == 1


def test_multiple_choice_tasks_score_the_choices(tmp_path: Path) -> None:
    """As `LLM.score` and, for whole texts, as the sum over their windows; the right answer mostly wins."""
    causal = LopaDist(path="causal")
    choices = [row["answer"] for row in ROWS]
    asked = {"output_type": "multiple_choice", "doc_to_choice": choices, "doc_to_target": 0}
    asked["metric_list"] = [{"metric": "acc"}]
    result = simple_evaluate(
        causal,
        tasks=[task(tmp_path, **asked)],
        apply_chat_template=True, bootstrap_iters=0, log_samples=True, task_manager=TaskManager(include_defaults=False),
    )  # fmt: skip
    llm = LLM("causal", "parallel.threads=1")
    for sample, row in zip(result["samples"]["tiny"], ROWS, strict=True):
        chats = [[{"role": "user", "content": row["question"]}]] * len(choices)
        wanted = llm.score(chats, choices)  # behind a template the harness puts no space
        found = [response[0] for response in sample["resps"]]
        assert [one[0] for one in found] == pytest.approx([one.loglikelihood for one in wanted], abs=1e-4)
        assert [one[1] for one in found] == [one.greedy for one in wanted]
    text = Instance("loglikelihood_rolling", {}, (ROWS[0]["question"],), 0)
    tokens = causal.tokenizer(ROWS[0]["question"], add_special_tokens=False).input_ids
    [one] = Scorer(causal.builder.load(), causal.decode).score([Given([causal.first_token], tokens, 0)])
    assert causal.loglikelihood_rolling([text], True) == pytest.approx([one.loglikelihood], abs=1e-4)


def test_masked_models_give_a_bound(model: LopaDist) -> None:
    """The same for the same request, wherever it stands."""
    question = "<|user|> Quinn has 3 apples . How many apples does Quinn have now ?<|assistant|>"
    texts = " Quinn has 3", " 3 has Quinn"
    asked = [Instance("loglikelihood", {}, (question, text), i) for i, text in enumerate(texts)]
    few = LopaDist(samples=8)
    found = few.loglikelihood(asked, True)
    assert found == few.loglikelihood(asked[::-1], True)[::-1]
    [bound] = Scorer(few.builder.load(), few.decode, 7).score([few.given(question, texts[0])])
    assert found[0][0] == pytest.approx(bound.loglikelihood, abs=1e-4)  # all masks of three tokens
    assert bound.error == 0


def test_requests_know_how_all_of_their_task_begin() -> None:
    prompts = {"a": [[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 7]], "b": [[1, 2, 5], [1, 2, 5, 6]], "alone": [[1, 2, 3]]}
    tasks = [task for task, of in prompts.items() for _ in of]
    requests = [Request(i, p, 8, i) for i, p in enumerate(p for of in prompts.values() for p in of)]
    found = with_prefixes(requests, tasks)
    assert [request.prefix for request in found] == [2, 2, 2, 3, 3, 0]
    assert [replace(request, prefix=0) for request in found] == requests


def test_unknown_arguments_and_long_prompts(model: LopaDist) -> None:
    with pytest.raises(ValueError, match=r"brances: unknown; known: path, .*branches"):
        LopaDist(brances=1)
    with pytest.raises(ValueError, match="lopa_dist knows until"):
        model.generation_arguments({"num_beams": 4})
    with pytest.raises(ValueError, match="positions; lower"):
        model.encode(0, "Tom has 3 apples . " * 200, 64)
    with pytest.raises(ValueError, match="positions; lower"):
        model.given("Tom has 3 apples . " * 200, " Tom")
    assert model.generation_arguments({"temperature": 0.7})[2].temperature == 0.7
    assert model.generation_arguments({"temperature": 0.7, "do_sample": False})[2].temperature == 0
    assert model.generation_arguments({"until": "a"})[0] == ("a",)


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
