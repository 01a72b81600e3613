"""A task of lm-evaluation-harness gives our jobs the prompts, examples and verdicts that it gives the harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'lopa_dist[eval]'")

import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from lopa_dist.config import Config, DecodeOptions, LoggingConfig, TaskConfig, WandbConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.commands.lm_eval_adapter import LopaDist
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.arithmetic import Arithmetic
from lopa_dist.tasks.harness import HarnessTask
from lopa_dist.tasks.task import RequestSampling

TEST = [{"question": item.messages[0]["content"], "n": int(item.reference)} for item in Arithmetic(4).items()]
TRAIN = [{"question": f"Ann has {n} pens . Ann loses 1 . How many are left ?", "n": n - 1} for n in range(4, 12)]
NUMBER = {"function": "regex", "regex_pattern": "(\\d+)"}


def task_file(folder: Path, **more: Any) -> str:
    for name, rows in (("test", TEST), ("train", TRAIN)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(folder / f"{name}.jsonl") for name in ("test", "train")}
    settings = {
        "task": "tiny", "dataset_path": "json", "dataset_kwargs": {"data_files": files},
        "output_type": "generate_until", "test_split": "test", "training_split": "train", "fewshot_split": "train",
        "num_fewshot": 2, "doc_to_text": "Q: {{question}}\nA:", "doc_to_target": "{{n}}",
        "generation_kwargs": {"until": ["Q:", "\n\n"], "max_gen_toks": 40, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {"name": "last", "filter": [NUMBER | {"group_select": -1}, {"function": "take_first"}]},
            {"name": "first", "filter": [NUMBER, {"function": "take_first"}]},
        ],
        **more,
    }  # fmt: skip
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    return str(file)


class Parrot(LM):
    """A model of the harness that writes down what it is asked, and answers from a list."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self.answers, self.asked = answers, []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.asked = [request.args[0] for request in requests]
        return self.answers

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return json.dumps(chat_history)

    @property
    def tokenizer_name(self) -> str:
        return "none"

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


@pytest.mark.parametrize("more", [{}, {"gen_prefix": "The answer is"}, {"filter_list": None}], ids=str)
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_and_verdicts_are_the_harness_own(tmp_path: Path, chat: bool, more: dict[str, Any]) -> None:
    file = task_file(tmp_path, **more)
    answers = [f"{TEST[0]['n']}", f"it is 1 + 0 = {TEST[1]['n']}", f"{TEST[2]['n']} or 160", "no number"]
    parrot = Parrot(answers)
    result = simple_evaluate(
        parrot, tasks=[file], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True,
        apply_chat_template=chat, fewshot_as_multiturn=chat,
    )  # fmt: skip
    task = HarnessTask(file)
    items = list(task.items())
    assert [item.custom_id for item in items] == [f"tiny-{n}" for n in range(4)]
    begun = [{"role": "assistant", "content": item.answer_prefix} for item in items if item.answer_prefix]
    ours = [json.dumps((item.messages or []) + begun[:1]) if chat else item.prompt for item in items]
    assert ours == parrot.asked
    scores = [task.score(item, text) for item, text in zip(items, answers, strict=True)]
    figures = result["results"]["tiny"]
    first, *others = [key.removeprefix("exact_match,") for key in figures if key.startswith("exact_match,")]
    assert sum(score.correct for score in scores) / 4 == figures[f"exact_match,{first}"]
    for name in others:
        assert sum(score.also[name] for score in scores) / 4 == figures[f"exact_match,{name}"]
    assert {score.correct for score in scores} == {True, False}
    assert items[0].stop == ("Q:", "\n\n")
    assert items[0].max_new_tokens == 40


def test_a_job_and_the_harness_find_the_same_accuracy(tmp_path: Path) -> None:
    """The embedded model answers as our model in the harness, and as a job."""
    file = task_file(tmp_path, num_fewshot=0, doc_to_text="{{question}}", generation_kwargs={"until": ["Q:"]})
    model = LopaDist(verify="confidence", drafts=0, branches=0, block_size=16, max_new_tokens=64, context="d2f")
    result = simple_evaluate(
        model, tasks=[file], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True,
        apply_chat_template=True,
    )  # fmt: skip
    config = Config(
        task=TaskConfig(name="harness", harness=file, limit=None),
        decode=DecodeOptions(verify="confidence", drafts=0, branches=0, block_size=16, max_new_tokens=64),
        engine=EngineConfig(max_sequences=4),
        logging=LoggingConfig(progress="never", wandb=WandbConfig(mode="disabled")),
    )
    report = run(config, tmp_path / "run", World("python"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [one["resps"][0][0] for one in result["samples"]["tiny"][:4]]
    assert report["accuracy"] == result["results"]["tiny"]["exact_match,last"] > 0
    assert report["accuracy_first"] == result["results"]["tiny"]["exact_match,first"]


def test_how_a_task_wants_tokens_drawn(tmp_path: Path) -> None:
    drawn = {"until": "Q:", "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    [item, *_] = HarnessTask(task_file(tmp_path, generation_kwargs=drawn), limit=1).items()
    assert item.sampling == RequestSampling(temperature=0.7, top_p=0.9)
    assert item.stop == ("Q:",)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"output_type": "loglikelihood"},
            r"asks for loglikelihood; a job only generates: lopa-dist lm-eval --model_args path=\.\.\. --tasks ",
        ),
        ({"unsafe_code": True}, "unconfined; take task=humaneval"),
        ({"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}, "nowhere.jsonl"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HarnessTask(task_file(tmp_path, **more))


def test_a_metric_over_all_answers_is_refused(tmp_path: Path) -> None:
    metric = [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]
    task = HarnessTask(task_file(tmp_path, metric_list=metric), limit=1)
    [item] = task.items()
    with pytest.raises(ValueError, match="bleu is not a number for one answer"):
        task.score(item, "9")


def test_names_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match=r"task\.harness=no_such_task: .*no_such_task"):
        HarnessTask("no_such_task")
    with pytest.raises(ValueError, match=r"task=harness needs a task's name"):
        TaskConfig(name="harness")
    with pytest.raises(ValueError, match=r"write a YAML file that includes the task"):
        TaskConfig(name="harness", harness="gsm8k", input="mine.jsonl")
    with pytest.raises(ValueError, match=r"task\.harness=gsm8k: has no effect with task=gsm8k"):
        TaskConfig(name="gsm8k", harness="gsm8k")
