"""Tasks of lm-evaluation-harness: their prompts, examples and scoring, in a batch job of ours.

The harness's own task objects do all that makes a benchmark's figures comparable: they render questions and examples,
say where an answer stops or which answers there are to choose from, filter, judge, and aggregate. We only generate
answers, and compute how likely given answers are.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lopa_dist.checks import UserError, did_you_mean
from lopa_dist.optional import why_lacking
from lopa_dist.tasks.task import DEFAULT, Continuation, Item, Likely, RequestSampling, Score

log = logging.getLogger("lopa_dist")
SEED = 1234  # for the choice of examples, as in `lm_eval`
SCORED = ("loglikelihood", "multiple_choice", "loglikelihood_rolling")  # judged by how likely the model finds texts
# `generation_kwargs` that a job follows, and the values that others may have because they do nothing
DONE = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "min_p": 0}
GROUP = re.compile(r"^group:[ \t]*([^\s#]+)", re.MULTILINE)  # in a YAML file of a group, its name


class HarnessTask:
    """A task of the harness, or a group of them that are all of one kind.

    `correct` is the first metric that is a share; the other shares are in `Score.also`. The report has every metric as
    the harness aggregates it.

    Args:
        harness: the name of a task or a group, or a YAML file of one. A task's file may include another task and name
            its own data; a group's names tasks, also those of files beside it.
        limit: the most documents to take of each task; None: all.
        fewshot: examples in a prompt; None: as many as the task says.
        fewshot_as_multiturn: in a chat, every example is a turn of its own.
        masks: how many masks are drawn for a text whose likelihood is asked for, if the model is a masked one.

    Raises:
        ValueError: the harness is not installed, has no such task, or the task wants what a job cannot do.
    """

    name = "harness"
    options = ("harness", "fewshot", "fewshot_as_multiturn", "masks")

    @staticmethod
    def check(options: Any) -> None:
        """Raise a ValueError if the section `task` names no task of the harness, or a source."""
        if not options.harness:
            raise ValueError("task.harness: task=harness needs a task's name, e.g. task.harness=gsm8k")
        if options.input:
            raise ValueError(
                f"task.input={options.input}: a task of the harness names its own data; to take yours, write a YAML "
                "file that includes the task and has another dataset_path, and give it as task.harness"
            )

    def __init__(
        self,
        harness: str,
        limit: int | None = None,
        fewshot: int | None = None,
        fewshot_as_multiturn: bool = True,
        masks: int = 128,
    ) -> None:
        self.tasks, self.groups = load(harness)
        self.fewshot, self.limit, self.multiturn, self.masks = fewshot, limit, fewshot_as_multiturn, masks
        for name, task in self.tasks.items():
            check(name, task)
            task.set_fewshot_seed(SEED)
            if fewshot and task.config.num_fewshot == 0:
                log.warning("WARNING: task.fewshot=%d: %s is a task without examples, so it gets none", fewshot, name)
        scored = {task.OUTPUT_TYPE in SCORED for task in self.tasks.values()}
        self.scores = scored == {True}
        if len(scored) > 1:
            raise ValueError(f"task.harness={harness}: some of its tasks ask for texts and some for likelihoods")

    def items(self) -> Iterable[Item]:
        """Yield one item per document, named after the task and the document's number, which counts from 0."""
        for name, task in self.tasks.items():
            before = ""
            for number, document in task.doc_iterator(limit=self.limit):
                item = self.item(name, number, document)
                prompt = item.prompt or ""
                common = os.path.commonprefix([before, prompt])  # noqa: RUF071 - of texts
                before = prompt
                end = task.config.fewshot_delimiter or "\n\n"  # of each example; many documents share examples
                yield replace(item, prefix=common[: common.rfind(end) + len(end)] if end in common else "")

    def item(self, name: str, number: int, document: Mapping[str, Any]) -> Item:
        """Return the item of one document of the task `name`."""
        task = self.tasks[name]
        examples = int(task.config.num_fewshot or 0)
        if self.fewshot is not None and task.config.num_fewshot != 0:  # 0 is the task's own way, as in `lm_eval`
            examples = self.fewshot
        begin = task.resolve_field(document, task.config.gen_prefix)  # how the task begins an answer
        context = partial(task.fewshot_context, doc=document, num_fewshot=examples, gen_prefix=begin)
        before = task.sampler.rnd.getstate()
        plain = context()
        task.sampler.rnd.setstate(before)  # the same examples in both forms, those that `lm_eval` draws
        chat = context(
            apply_chat_template=True,
            fewshot_as_multiturn=self.multiturn,
            chat_template=lambda turns, add_generation_prompt=True: turns,  # leaves messages as they are
        )
        item = Item(f"{name}-{number}", reference=json.dumps(document, sort_keys=True, default=str))
        if task.OUTPUT_TYPE in SCORED:
            texts = tuple(continuations(task, document, plain, chat))
            first = texts[0].after or item  # only for people who look at the results
            return replace(item, prompt=first.prompt, messages=first.messages, continuations=texts)
        if not isinstance(plain, str):
            return replace(item, error="it has several prompts; only one can be answered")
        generation = generation_of(task)
        return replace(
            with_prompt(item, plain, chat),
            max_new_tokens=generation["max_gen_toks"] or None,
            stop=tuple(generation["until"]),
            sampling=sampling_of(generation),
        )

    def score(self, item: Item, text: str) -> Score:
        """Return the score of a text, filtered and judged as the harness does."""
        return self.judged(item, [text])

    def score_likelihoods(self, item: Item, likelihoods: Sequence[Likely]) -> Score:
        """Return the score of an item by how likely the model finds its continuations."""
        task = self.task_of(item)
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            return self.judged(item, [text.loglikelihood for text in likelihoods])
        score = self.judged(item, [(text.loglikelihood, text.greedy) for text in likelihoods])
        if task.OUTPUT_TYPE != "multiple_choice":
            return score
        choices = task.doc_to_choice(json.loads(item.reference))
        best = max(range(len(choices)), key=lambda number: likelihoods[number].loglikelihood)
        right = task.doc_to_target(json.loads(item.reference))
        expected = str(choices[right]) if isinstance(right, int) and 0 <= right < len(choices) else None
        return replace(score, extracted=str(choices[best]), expected=expected)

    def judged(self, item: Item, responses: Sequence[Any]) -> Score:
        """Return the score that the harness gives to a document's responses."""
        from lm_eval.api.instance import Instance
        from lm_eval.api.metrics import mean

        task, document = self.task_of(item), json.loads(item.reference)
        instances = [
            Instance(task.OUTPUT_TYPE, document, ("",), number, resps=[response])
            for number, response in enumerate(responses)
        ]
        metrics: dict[str, Any] = {}
        shares: dict[str, bool] = {}
        for pipeline in task._filters:
            pipeline.apply(instances)
            filtered = [instance.filtered_resps[pipeline.name] for instance in instances]
            values = task.process_results(document, filtered)
            for metric, value in values.items():
                metrics[f"{metric},{pipeline.name}"] = json.loads(json.dumps(value, default=plainly))
                name = pipeline.name if len(values) == 1 else f"{metric}_{pipeline.name}".removesuffix("_none")
                if task.aggregation().get(metric, mean) is mean and isinstance(value, bool | int | float):
                    shares[name] = bool(value == 1)
        first = next(iter(instances[0].filtered_resps.values()))
        right = shares.pop(next(iter(shares))) if shares else None
        extracted = None if task.OUTPUT_TYPE in SCORED else str(first)
        target = task.doc_to_target(document) if task.OUTPUT_TYPE == "generate_until" else None
        expected = target if isinstance(target, str) else None
        return Score(right, extracted, shares, metrics=metrics, expected=expected)

    def task_of(self, item: Item) -> Any:
        """Return the harness's task that an item belongs to."""
        return self.tasks[item.custom_id.rpartition("-")[0]]

    def totals(self, lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Return the metrics of each task and group, aggregated over its documents as the harness does.

        Args:
            lines: of `results.jsonl`.
        """
        from lm_eval.api.metrics import mean

        values: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for line in lines:
            for key, value in line.get("metrics", {}).items():
                values[line["custom_id"].rpartition("-")[0]][key].append(value)
        totals: dict[str, dict[str, Any]] = {}
        for name, task in self.tasks.items():
            for key, of_documents in values.get(name, {}).items():
                rule = task.aggregation().get(key.split(",")[0], mean)
                try:
                    totals.setdefault(name, {})[key] = float(rule(of_documents))
                except Exception as error:  # whatever the metric's library raises; the answers remain
                    log.warning("WARNING: %s: %s could not be worked out (%s)", name, key, error)
        sizes = {name: {"sample_len": max(map(len, metrics.values()))} for name, metrics in values.items()}
        for name, group in self.groups.items():
            metrics = group.aggregate({task: totals[task] | sizes[task] for task in self.tasks if task in totals})
            if figures := {key: metrics[key] for key in metrics if "," in key and "_stderr" not in key}:
                totals[name] = figures
        return totals


def with_prompt(item: Item, plain: str, chat: list[dict[str, str]]) -> Item:
    """Return the item with a prompt in both forms; a last message of the assistant's becomes `answer_prefix`."""
    begun = chat[-1]["content"] if chat[-1]["role"] == "assistant" else ""
    return replace(item, prompt=plain, messages=chat[:-1] if begun else chat, answer_prefix=begun)


def continuations(task: Any, document: Mapping[str, Any], plain: Any, chat: Any) -> Iterator[Continuation]:
    """Yield the texts of a document whose likelihoods a task asks for, each with the prompt that it follows.

    Args:
        task: of the harness.
        document: of the task.
        plain: the prompt, or one for each of the texts.
        chat: the same, as lists of messages.
    """
    forms = []
    for context, in_chat in ((plain, False), (chat, True)):
        requests = task.construct_requests(document, context, apply_chat_template=in_chat)
        forms.append(requests if isinstance(requests, list) else [requests])
    for of_plain, of_chat in zip(*forms, strict=True):
        *context, text = of_plain.args
        *messages, text_in_chat = of_chat.args
        item = with_prompt(Item(""), context[0], messages[0]) if context and context[0] else None
        yield Continuation(text, text_in_chat, item, spaces=True)


def plainly(value: Any) -> Any:
    """Return a value that JSON can hold in place of one that it cannot hold."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def check(name: str, task: Any) -> None:
    """Raise a ValueError if a job cannot do what a task wants."""
    if task.OUTPUT_TYPE not in (*SCORED, "generate_until"):
        raise ValueError(f"task.harness={name}: it asks for {task.OUTPUT_TYPE}, which no job offers")
    if getattr(task.config, "unsafe_code", False):
        raise ValueError(f"task.harness={name}: it runs the model's code unconfined; take task=humaneval or mbpp")
    if (task.config.repeats or 1) > 1:
        raise ValueError(
            f"task.harness={name}: it wants {task.config.repeats} answers to each document. To get one, write a YAML "
            "file that includes the task and sets `repeats: 1`"
        )
    for key, value in generation_of(task).items() if task.OUTPUT_TYPE == "generate_until" else ():
        if key not in DONE and value is not None and NEUTRAL.get(key) != value:
            raise ValueError(
                f"task.harness={name}: its generation_kwargs have {key}={value!r}, which no job offers; a YAML file "
                "that includes it, with generation_kwargs of its own, leaves it out"
            )


def load(task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the harness's task objects and groups by name; raise a ValueError that says why there are none."""
    try:
        manager, name = manager_of(task)
        loaded = manager.load([name])
    except UserError:
        raise
    except Exception as error:  # errors of the harness, of datasets and of the hub have no common base
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(f"task.harness={task}: {type(error).__name__}: {reason}") from error
    if not loaded["tasks"]:
        raise ValueError(f"task.harness={task}: the harness finds no task in it; one that has a group is not a task")
    return dict(loaded["tasks"]), dict(loaded["groups"])


def manager_of(task: str) -> tuple[Any, str]:
    """Return the harness's `TaskManager`, and by which name it knows `task`.

    It takes ten seconds, unless `task` is a task's file.

    Raises:
        UserError: the harness is not installed, or does not know the task; no data is read before.
    """
    if why := why_lacking("lm_eval", name="lm-evaluation-harness"):
        raise UserError(f"task=harness {why}")
    from lm_eval.tasks import TaskManager

    is_file = Path(task).is_file()
    group = group_in(Path(task)) if is_file else None
    alone = is_file and not group
    manager = TaskManager(include_path=Path(task).parent if group else None, include_defaults=not alone)
    if not is_file and task not in manager.all_tasks:
        what = "no such file" if task.endswith((".yaml", ".yml")) else "the harness has no task or group of this name"
        raise UserError(f"task.harness={task}: {what}{did_you_mean(task, manager.all_tasks)}")
    return manager, group or task


def group_in(file: Path) -> str | None:
    """Return the name of the group that a YAML file describes; None if it describes none."""
    found = GROUP.search(file.read_text(encoding="utf-8"))
    return found[1].strip("\"'") if found else None


def generation_of(task: Any) -> dict[str, Any]:
    """Return a task's `generation_kwargs`, in the one form that the harness gives to its models.

    `max_gen_toks` is 0 if the task does not say how long an answer may be.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    generation = dict(normalize_gen_kwargs(dict(task.config.generation_kwargs or {}), default_max_gen_toks=0))
    return generation | {"until": [text for text in generation["until"] if text]}


def sampling_of(generation: Mapping[str, Any]) -> RequestSampling:
    """Return how a task wants tokens drawn. Most tasks want greedy decoding; for them the decode config decides.

    One that wants tokens drawn, and has no temperature, means 1, as transformers does.
    """
    temperature = generation.get("temperature", 1.0)
    if not generation.get("do_sample") or not temperature:
        return DEFAULT
    top_p, top_k = generation.get("top_p"), generation.get("top_k")
    return RequestSampling(float(temperature), None if top_p is None else float(top_p), top_k)
