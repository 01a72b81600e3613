"""Any generation task of lm-evaluation-harness: its prompts, its examples and its scoring, in a batch job of ours.

The harness' own task object does all that makes a benchmark's figures comparable: it renders questions and examples,
says where an answer stops, and filters and judges it. Only generating is ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lopa_dist.tasks.task import DEFAULT, CannotJudge, Item, RequestSampling, Score

SEED = 1234  # of the choice of examples, as `lm_eval` has it


class HarnessTask:
    """One task of the harness.

    `correct` is the first metric of the first filter; other metrics and filters stand beside it (`Score.also`). A
    metric that is a share counts as right where it is 1.

    Args:
        harness: a task's name, or a YAML file of one, which may include another task and name its own data.
        limit: the most documents to take; None: all.
        fewshot: examples in a prompt; None: as many as the task says.
        fewshot_as_multiturn: in a chat, every example is a turn of its own.

    Raises:
        ValueError: the harness is not installed, has no such task, or the task does not generate text.
    """

    name = "harness"
    options = ("harness", "fewshot", "fewshot_as_multiturn")

    def __init__(
        self,
        harness: str,
        limit: int | None = None,
        fewshot: int | None = None,
        fewshot_as_multiturn: bool = True,
    ) -> None:
        if find_spec("lm_eval") is None:
            raise ValueError("task=harness needs lm-evaluation-harness: pip install 'lopa_dist[eval]'")
        self.task = load(harness)
        config = self.task.config
        if self.task.OUTPUT_TYPE != "generate_until":
            raise ValueError(
                f"task.harness={harness}: it asks for {self.task.OUTPUT_TYPE}; a job only generates: "
                f"lopa-dist lm-eval --model_args path=... --tasks {harness}"
            )
        if getattr(config, "unsafe_code", False):
            raise ValueError(
                f"task.harness={harness}: it runs the model's code unconfined; take task=humaneval or mbpp"
            )
        self.task.set_fewshot_seed(SEED)
        self.limit, self.multiturn = limit, fewshot_as_multiturn
        self.fewshot = int(config.num_fewshot or 0) if fewshot is None else fewshot
        generation = dict(config.generation_kwargs or {})
        until = generation.get("until") or []
        self.stop = (until,) if isinstance(until, str) else tuple(until)
        self.most = generation.get("max_gen_toks")
        self.sampling = sampling_of(generation)

    def items(self) -> Iterable[Item]:
        """One item a document, called after the task and the document's number, from 0, as the harness counts."""
        for number, document in self.task.doc_iterator(limit=self.limit):
            yield self.item(number, document)

    def item(self, number: int, document: Mapping[str, Any]) -> Item:
        """One document."""
        custom_id = f"{self.task.config.task}-{number}"
        begin = self.task.resolve_field(document, self.task.config.gen_prefix)  # how the task begins an answer
        asked = {"doc": document, "num_fewshot": self.fewshot, "gen_prefix": begin}
        random = self.task.sampler.rnd
        before = random.getstate()
        prompt = self.task.fewshot_context(**asked)
        after = random.getstate()
        random.setstate(before)  # the same examples in both forms, those that `lm_eval` draws
        asked |= {"apply_chat_template": True, "fewshot_as_multiturn": self.multiturn}
        # a template that leaves messages as they are
        messages = self.task.fewshot_context(**asked, chat_template=lambda turns, add_generation_prompt=True: turns)
        random.setstate(after)
        if not isinstance(prompt, str) or not isinstance(messages, list):
            return Item(custom_id, error="it has several prompts; only one can be answered")
        begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        return Item(
            custom_id=custom_id,
            prompt=prompt,
            messages=messages,
            max_new_tokens=self.most,
            reference=json.dumps(document, sort_keys=True, default=str),
            answer_prefix=begun,
            stop=self.stop,
            sampling=self.sampling,
        )

    def score(self, item: Item, text: str) -> Score:
        """Filter and judge a text as the harness does.

        Raises:
            CannotJudge: the task's metric, such as BLEU, is not a number for a single answer.
        """
        from lm_eval.api.instance import Instance

        document = json.loads(item.reference)
        instance = Instance("generate_until", document, ("", {}), 0, resps=[text])
        found: dict[str, float] = {}
        for pipeline in self.task._filters:
            pipeline.apply([instance])
            metrics = self.task.process_results(document, [instance.filtered_resps[pipeline.name]])
            for metric, value in metrics.items():
                if not isinstance(value, (bool, int, float)):
                    raise CannotJudge(
                        f"task.harness={self.task.config.task}: {metric} is not a number for one answer; only tasks "
                        "whose answers are right or wrong can be judged here"
                    )
                found[pipeline.name if len(metrics) == 1 else f"{metric}_{pipeline.name}"] = value
        first = next(iter(instance.filtered_resps.values()))
        (_, right), *others = found.items()
        return Score(bool(right == 1), str(first), {name: bool(value == 1) for name, value in others})


def load(task: str) -> Any:
    """Return the harness' task object, or raise a ValueError that says why there is none."""
    from lm_eval.tasks import TaskManager

    try:
        manager = TaskManager(include_defaults=not Path(task).is_file())  # reading all of them takes ten seconds
        tasks: Sequence[Any] = list(manager.load([task])["tasks"].values())
    except Exception as error:  # errors of the harness, of datasets and of the hub have no common base
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(f"task.harness={task}: {type(error).__name__}: {reason}") from error
    if len(tasks) != 1:
        names = ", ".join(sorted(str(one.config.task) for one in tasks)[:8])
        raise ValueError(f"task.harness={task}: a group of {len(tasks)} tasks; run one at a time, e.g. {names}")
    return tasks[0]


def sampling_of(generation: Mapping[str, Any]) -> RequestSampling:
    """Return how a task wants tokens drawn; tasks mostly say greedily, and then the decode config decides."""
    if not generation.get("do_sample") or not generation.get("temperature"):
        return DEFAULT
    top_p, top_k = generation.get("top_p"), generation.get("top_k")
    return RequestSampling(float(generation["temperature"]), None if top_p is None else float(top_p), top_k)
