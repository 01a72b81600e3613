"""A task of lm-evaluation-harness gives our jobs the prompts, examples, verdicts and figures that the harness has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'lopa_dist[eval]'")

import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lopa_dist import LLM
from lopa_dist.checks import UserError
from lopa_dist.config import (
    AUTO_CHOICES,
    AUTO_NUMBERS,
    Config,
    DecodeOptions,
    LoggingConfig,
    ModelOptions,
    TaskConfig,
    WandbConfig,
)
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.commands.shards import merge_shards
from lopa_dist.jobs.commands.trace import trace
from lopa_dist.jobs.run.job import run
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import find
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.embedded import Arithmetic
from lopa_dist.tasks.harness import HarnessTask
from lopa_dist.tasks.task import RequestSampling
from tests.engine.test_causal import attend_causally

TEST = [{"question": item.messages[0]["content"], "n": int(item.reference)} for item in Arithmetic(4).items()]
TRAIN = [{"question": f"Ann has {n} pens . Ann loses 1 . How many are left ?", "n": n - 1} for n in range(4, 12)]
AUTO = dict.fromkeys((*AUTO_CHOICES, *AUTO_NUMBERS), "auto")
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
    figures = evaluated(file, parrot, chat)["results"]["tiny"]
    task = HarnessTask(file)
    items = list(task.items())
    assert [item.custom_id for item in items] == [f"tiny-{n}" for n in range(4)]
    begun = [{"role": "assistant", "content": item.answer_prefix} for item in items if item.answer_prefix]
    ours = [json.dumps((item.messages or []) + begun[:1]) if chat else item.prompt for item in items]
    assert ours == parrot.asked
    scores = [task.score(item, text) for item, text in zip(items, answers, strict=True)]
    first, *others = [key.removeprefix("exact_match,") for key in figures if key.startswith("exact_match,")]
    assert sum(score.correct for score in scores) / 4 == figures[f"exact_match,{first}"]
    for name in others:
        assert sum(score.also[name] for score in scores) / 4 == figures[f"exact_match,{name}"]
    assert {score.correct for score in scores} == {True, False}
    assert items[0].stop == ("Q:", "\n\n")
    assert items[0].max_new_tokens == 40
    assert all("Q: " + TEST[n]["question"] in item.prompt.removeprefix(item.prefix) for n, item in enumerate(items))


def evaluated(file: str, model: LM, chat: bool) -> dict[str, Any]:
    """What the harness itself finds."""
    return simple_evaluate(
        model, tasks=[file], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True,
        apply_chat_template=chat, fewshot_as_multiturn=chat,
    )  # fmt: skip


def configured(file: str, model: str, **more: Any) -> Config:
    return Config(
        model=ModelOptions(model, pattern="d2f" if model == "embedded" else "auto"),
        task=TaskConfig(name="harness", harness=file, limit=None, **more),
        decode=DecodeOptions(**AUTO),
        engine=EngineConfig(max_sequences=3),
        logging=LoggingConfig(progress="never", wandb=WandbConfig(mode="disabled")),
    )


def job(config: Config, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report and the lines of a job."""
    report = run(config, folder, World("python"))
    return report, [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


class Causal(Parrot):
    """The embedded causal model in the harness, one text at a time by plain forwards."""

    def __init__(self) -> None:
        super().__init__([])
        self.model = load_model(find("causal"), torch.float32, torch.device("cpu"))
        self.tokenizer = load_tokenizer(find("causal"))
        self.templated = False

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self.templated = True
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def likely(self, before: list[int], answer: list[int]) -> tuple[float, bool]:
        text = torch.tensor([*before, *answer])
        with torch.no_grad():
            logits = self.model(text, torch.arange(len(text)), attend_causally) @ self.model.head_weight.T
        logits[:, self.model.config.mask_id] = -torch.inf
        rows, target = logits.log_softmax(1)[len(before) - 1 : -1], torch.tensor(answer)
        return float(rows.gather(1, target[:, None]).sum()), bool((rows.argmax(1) == target).all())

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        found = []
        for context, text in (request.args for request in requests):
            special = bool(context) and not self.templated
            both = self.tokenizer(context + text, add_special_tokens=special).input_ids
            before = self.tokenizer(context.rstrip(), add_special_tokens=special).input_ids if context else []
            found.append(self.likely(both[: len(before)] or [self.model.config.eos_ids[0]], both[len(before) :]))
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found = []
        for (text,) in (request.args for request in requests):
            tokens, most = self.tokenizer(text, add_special_tokens=False).input_ids, self.model.config.max_positions
            pairs = get_rolling_token_windows(tokens, self.model.config.eos_ids[0], most - 1, 1)
            found.append(sum(self.likely(*make_disjoint_window(pair))[0] for pair in pairs))
        return found


@pytest.fixture(scope="module")
def causal_model() -> Causal:
    return Causal()


CHOICES = {
    "output_type": "multiple_choice", "doc_to_choice": ["5", "12", "9", "It is 14"], "doc_to_target": 1,
    "generation_kwargs": None, "filter_list": None,
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "mcc", "acc_mutual_info")],
}  # fmt: skip
# as WinoGrande: the choices are questions, and what stands after them is the same
QUESTIONS = CHOICES | {
    "doc_to_text": 1, "doc_to_choice": "{{[question, 'Q: ' + question + ' A:']}}", "doc_to_target": "It is {{n}}",
    "metric_list": [{"metric": "acc"}], "num_fewshot": 0,
}  # fmt: skip
LAST = {
    "output_type": "loglikelihood", "doc_to_target": "{{n}}", "generation_kwargs": None, "filter_list": None,
    "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc", "aggregation": "mean"}],
}  # fmt: skip
WHOLE = {
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{(question + ' ') * 20}}",
    "num_fewshot": 0, "generation_kwargs": None, "filter_list": None,
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip
KINDS = {"choices": CHOICES, "questions": QUESTIONS, "last": LAST, "whole": WHOLE}


@pytest.mark.parametrize(
    ("kind", "chat"), [(kind, False) for kind in KINDS] + [("choices", True), ("questions", True)], ids=str
)
def test_likelihoods_and_figures_are_the_harness_own(
    tmp_path: Path, causal_model: Causal, kind: str, chat: bool
) -> None:
    """Every figure as the harness adds it up, of likelihoods that plain forwards find."""
    causal_model.templated = False
    file = task_file(tmp_path, **KINDS[kind])
    wanted = evaluated(file, causal_model, chat)
    config = configured(file, "causal")
    config.model.chat_template = "always" if chat else "never"
    report, lines = job(config, tmp_path / "run")
    for line, sample in zip(lines, sorted(wanted["samples"]["tiny"], key=lambda one: one["doc_id"]), strict=True):
        found = [[one["loglikelihood"], one["greedy"]] for one in line["likelihoods"]]
        theirs = [[response[0], False] if kind == "whole" else response[0] for response in sample["resps"]]
        assert [one[0] for one in found] == pytest.approx([one[0] for one in theirs], rel=1e-4, abs=1e-4)
        assert kind == "whole" or [one[1] for one in found] == [one[1] for one in theirs]
    figures = {key: v for key, v in wanted["results"]["tiny"].items() if "," in key and "_stderr" not in key}
    assert report["metrics"]["tiny"] == pytest.approx(figures, rel=1e-4)
    assert report["masks"] == 1
    assert report.get("accuracy") == figures.get("acc,none")
    assert report["errors"] == 0


def test_likelihoods_of_a_masked_model(tmp_path: Path) -> None:
    """The bounds of `LLM.score`; a job that goes on does nothing again, and shards are the whole."""
    file = task_file(tmp_path, **CHOICES, num_fewshot=0, doc_to_text="{{question}}")
    config = configured(file, "embedded", masks=8)
    report, lines = job(config, tmp_path / "run")
    llm = LLM("embedded", "parallel.threads=1")
    for line, document in zip(lines, TEST, strict=True):
        chat = [{"role": "user", "content": document["question"]}]
        wanted = llm.score([chat] * 4, CHOICES["doc_to_choice"], samples=8)
        assert [one["loglikelihood"] for one in line["likelihoods"][:4]] == pytest.approx(
            [one.loglikelihood for one in wanted], abs=1e-4
        )
        assert line["usage"]["forwards"] > 8
        assert line["finish_reason"] == "scored"
        assert line["extracted"] in CHOICES["doc_to_choice"]
    [part] = (tmp_path / "run" / "journal").glob("*.jsonl")
    kept = part.read_text().splitlines(keepends=True)
    part.write_text("".join(kept[:2]))  # as if it had been killed after two answers
    again, after = job(config, tmp_path / "run")
    assert [one | {"latency_s": 0} for one in after] == [one | {"latency_s": 0} for one in lines]
    assert again["metrics"] == report["metrics"]
    assert len((tmp_path / "run" / "journal" / "002-0.jsonl").read_text().splitlines()) == 3  # two, and the end
    for shard in range(2):
        config.task.shard, config.task.shards = shard, 2
        job(config, tmp_path / "array" / str(shard))
    assert merge_shards(tmp_path / "array")["metrics"] == report["metrics"]
    with pytest.raises(ValueError, match="was scored, not generated"):
        trace(tmp_path / "run", "tiny-0")


def test_documents_that_do_not_fit(tmp_path: Path) -> None:
    file = task_file(tmp_path, **CHOICES, doc_to_text="{{(question + ' ') * 40}}")
    report, lines = job(configured(file, "causal"), tmp_path / "run")
    assert report["errors"] == 4
    assert "positions; shorten the prompt (in a job, fewer task.fewshot, or task.truncate=left)" in lines[0]["error"]


def test_documents_that_do_not_fit_are_cut(tmp_path: Path, causal_model: Causal) -> None:
    """As the harness's own models do: a token is dropped from the left for each that is too many."""
    file = task_file(tmp_path, **CHOICES, num_fewshot=0, doc_to_text="{{(question + ' ') * 40}}")
    config = configured(file, "causal")
    config.task.truncate, config.model.chat_template = "left", "never"
    report, lines = job(config, tmp_path / "run")
    assert report["errors"] == 0
    assert all(line["truncated"] for line in lines)
    most, words = causal_model.model.config.max_positions, causal_model.tokenizer
    for line, document in zip(lines, TEST, strict=True):
        context = (document["question"] + " ") * 40
        for found, choice in zip(line["likelihoods"], CHOICES["doc_to_choice"], strict=False):
            whole = words(context + " " + choice).input_ids
            answer = whole[len(words(context.rstrip()).input_ids) :]
            wanted, greedy = causal_model.likely(whole[-most : -len(answer)], answer)
            assert (found["loglikelihood"], found["greedy"]) == (pytest.approx(wanted, abs=1e-3), greedy)


def few(include_path: Path, include_defaults: bool) -> TaskManager:
    """The tasks of a folder: reading those of the harness, too, takes ten seconds."""
    assert include_defaults
    return TaskManager(include_path=include_path, include_defaults=False)


def test_a_group_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)
    for number in range(2):
        inner = tmp_path / f"t{number}"
        inner.mkdir()
        text = Path(task_file(inner, **CHOICES, num_fewshot=0)).read_text()
        Path(tmp_path / f"tiny{number}.yaml").write_text(text.replace("task: tiny", f"task: tiny{number}"))
    group = {
        "group": "both", "task": ["tiny0", "tiny1"],
        "aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}],
    }  # fmt: skip
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    task = HarnessTask(str(tmp_path / "both.yaml"), limit=2)
    items = list(task.items())
    assert [item.custom_id for item in items] == ["tiny0-0", "tiny0-1", "tiny1-0", "tiny1-1"]
    right = [True, False, False, False]
    lines = [{"custom_id": i.custom_id, "metrics": {"acc,none": float(r)}} for i, r in zip(items, right, strict=True)]
    lines[0]["metrics"]["mcc,none"] = 5  # which costs this figure alone
    figures = task.totals(lines)
    assert figures == {"tiny0": {"acc,none": 0.5}, "tiny1": {"acc,none": 0.0}, "both": {"acc,none": 0.25}}


def test_a_file_without_a_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness takes a file that names its group for that group, and this one is empty."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)
    with pytest.raises(ValueError, match="the harness finds no task in it; one that has a group is not a task"):
        HarnessTask(task_file(tmp_path, group="words"))


def test_a_metric_over_all_answers(tmp_path: Path) -> None:
    """BLEU is no share of the answers: it is told as the harness adds it up, and there is no accuracy."""
    metric = [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]
    file = task_file(tmp_path, metric_list=metric, num_fewshot=0, doc_to_text="{{question}}", filter_list=None)
    report, lines = job(configured(file, "embedded"), tmp_path / "run")
    texts = [line["text"] for line in lines]
    wanted = evaluated(file, Parrot(texts), False)["results"]["tiny"]["bleu,none"]
    assert report["metrics"]["tiny"]["bleu,none"] == pytest.approx(wanted)
    assert "accuracy" not in report


def test_how_a_task_wants_tokens_drawn(tmp_path: Path) -> None:
    drawn = {"until": "Q:", "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    [item, *_] = HarnessTask(task_file(tmp_path, generation_kwargs=drawn), limit=1).items()
    assert item.sampling == RequestSampling(temperature=0.7, top_p=0.9)
    assert item.stop == ("Q:",)


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_a_task_s_limit_has_several_names(tmp_path: Path, name: str) -> None:
    """And a temperature alone means that tokens are drawn, as in the harness's models."""
    drawn = {name: 7, "temperature": 0.7, "until": ["", "Q:"]}
    [item, *_] = HarnessTask(task_file(tmp_path, generation_kwargs=drawn), limit=1).items()
    assert (item.max_new_tokens, item.sampling, item.stop) == (7, RequestSampling(temperature=0.7), ("Q:",))
    [other, *_] = HarnessTask(task_file(tmp_path, generation_kwargs={"do_sample": False}), limit=1).items()
    assert other.max_new_tokens is None


def test_a_task_that_draws_tokens_without_a_temperature_means_one(tmp_path: Path) -> None:
    drawn = {"until": "Q:", "do_sample": True, "num_beams": 1, "min_p": None, "repetition_penalty": 1.0}
    [item, *_] = HarnessTask(task_file(tmp_path, generation_kwargs=drawn), limit=1).items()
    assert item.sampling == RequestSampling(temperature=1.0)


@pytest.mark.parametrize("more", [{"min_p": 0.1}, {"repetition_penalty": 1.3}, {"num_beams": 4}], ids=str)
def test_what_a_job_cannot_do_for_a_task_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    file = task_file(tmp_path, generation_kwargs={"until": "Q:", "do_sample": True, "temperature": 1.0} | more)
    [(name, value)] = more.items()
    with pytest.raises(ValueError, match=rf"tiny: its generation_kwargs have {name}={value}, which no job offers"):
        HarnessTask(file)


def test_a_task_without_examples_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in `lm_eval`, where its own number is 0; elsewhere the user's counts."""
    with caplog.at_level("WARNING", "lopa_dist"):
        [item] = HarnessTask(task_file(tmp_path, num_fewshot=0), limit=1, fewshot=2).items()
    assert str(item.prompt).count("Q: ") == 1
    assert "task.fewshot=2: tiny is a task without examples" in caplog.text
    [item] = HarnessTask(task_file(tmp_path, num_fewshot=None), limit=1, fewshot=1).items()
    assert str(item.prompt).count("Q: ") == 2


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"repeats": 4}, "wants 4 answers to each document"),
        ({"unsafe_code": True}, "unconfined; take task=humaneval"),
        ({"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}, "nowhere.jsonl"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HarnessTask(task_file(tmp_path, **more))


def test_names_that_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(TaskManager):  # reading all that there are takes ten seconds
        all_tasks: ClassVar[list[str]] = ["gsm8k", "mmlu"]  # type: ignore[misc]

    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path, include_defaults: Few(include_defaults=False))
    for name, reason in (("gsm9k", "no task or group of this name; did you mean gsm8k"), ("x.yaml", "no such file")):
        with pytest.raises(UserError, match=rf"task\.harness={name}: .*{reason}"):
            HarnessTask(name)
    with pytest.raises(ValueError, match=r"task=harness needs a task's name"):
        TaskConfig(name="harness")
    with pytest.raises(ValueError, match=r"write a YAML file that includes the task"):
        TaskConfig(name="harness", harness="gsm8k", input="mine.jsonl")
    with pytest.raises(ValueError, match=r"task\.harness=gsm8k: has no effect with task=gsm8k"):
        TaskConfig(name="gsm8k", harness="gsm8k")
