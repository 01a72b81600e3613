"""`lopa-dist learn RUN [KEY=VALUE ...]`: learn an adapter for drafting from the answers of a run.

Under torchrun, mpirun or srun all ranks learn together, each from a share of the answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lopa_dist.atomic import check_writable, write_lines
from lopa_dist.composing import composed
from lopa_dist.config import Config
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import WRITTEN, Request
from lopa_dist.jobs.folder.one_job import only_job
from lopa_dist.jobs.folder.results import results
from lopa_dist.jobs.run.lessons import FOLDER
from lopa_dist.jobs.run.prompts import Encoder
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.device import choose_device
from lopa_dist.jobs.setup.learning import learning_of
from lopa_dist.jobs.show.learned import figures, in_words, write_learn_page
from lopa_dist.jobs.show.report import config_of, why_no_results
from lopa_dist.jobs.show.where_it_began import report_where_it_began
from lopa_dist.learn.learning import HELD_OUT, Answers, Learning, answers_of, check_learnable, is_held_out, with_end
from lopa_dist.learn.trainer import LearningFailed, Lesson
from lopa_dist.models.families import FAMILIES
from lopa_dist.overrides import as_hydra_reads
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import Start, detect
from lopa_dist.parallel.mesh import choose_mesh
from lopa_dist.parallel.stop import Stop, Stopped, bounded_end
from lopa_dist.setting_keys import check_keys
from lopa_dist.tasks.registry import make_again

SECTIONS = ("learn", "parallel", "model.device", "model.path", "task.input")
DRAFTS = (2, 4, 8, 16)  # numbers of drafts for which tokens per forward are measured
TRIED = 200  # the most held-out requests with which they are measured, over all ranks (rounded up on each)
SAVE_EVERY_S = 60.0
LOCK = "learn.lock"


@dataclass
class Answered:
    """A request of a run, and the tokens of its answer (`with_end`)."""

    request: Request
    tokens: list[int]


def learn(folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Learn from a run, on this rank; rank 0 writes `RUN/drafts`. Return the content of `learn.json`.

    Raises:
        ValueError: there is no such run, or its drafts cannot be learned.
        Stopped: on a signal, after what was learned until then has been written.
    """
    world = detect()
    report = report_of(folder)
    config = settings_of(report, settings)
    device = choose_device(config, world)
    builder = EngineBuilder(config.model, device)
    if not FAMILIES[builder.shape.family].causal:
        raise ValueError(f"{folder}: {builder.shape.family} models are not causal: what they draft changes their texts")
    if builder.drafts_revision != builder.revision:
        raise ValueError(
            f"{folder}: ran with {config.model.lora}, which is merged into the checkpoint while it is loaded; a job "
            "takes one adapter, so drafts cannot be learned beside it. Merge it into a checkpoint of its own (PEFT's "
            "merge_and_unload), and learn from a run of that"
        )
    if changed := builder.changed_since(report.get("weights", {})):
        raise ValueError(f"{folder}: {changed}; another model wrote its answers. Learn from a run of these weights")
    try:
        check_writable(folder / FOLDER)
    except OSError as error:
        raise ValueError(
            f"{folder / FOLDER}, for what is learned, cannot be written; copy the run to another place"
        ) from error
    answered = list(answered_requests(folder, config, builder))
    if len(answered) < 2:
        raise ValueError(f"{folder}: {len(answered)} answers of two tokens or more: there is nothing to learn from")
    if all(is_held_out(one.request.prompt) for one in answered):
        raise ValueError(
            f"{folder}: all {len(answered)} answers are to prompts that are held out to measure with, as one in "
            f"{HELD_OUT} is: there is nothing to learn from; learn from a run of more prompts"
        )
    mesh = choose_mesh("auto", 1, config.parallel.tensor, world.size, world.size, 1)
    parallel = config.parallel
    group = Group(world, mesh, parallel.backend, parallel.timeout_s, device, Stop(config.job.grace_s))
    with bounded_end(world, parallel.timeout_s), group.failures.guard(), ExitStack() as ending:
        if world.rank == 0:
            ending.enter_context(only_job(folder / FOLDER, Start.read(), 1.0, LOCK, "copy the run"))
        model = builder.load(world.rank == 0, group.tensor)
        check_learnable(model)
        group.ready()
        return Student(folder, config, builder, group, answered).learn()


def report_of(folder: Path) -> dict[str, Any]:
    """Return a run's report, with the files of its task where they are; raise a ValueError if there is none."""
    if not (folder / "report.json").exists():
        shards = any(folder.glob("shard-*/report.json"))
        merge = f"`lopa-dist merge {quote(str(folder))}`"
        array = f"no report.json; {merge} joins its shards; learn from that, or from one of them"
        nothing = "no report.json; name the folder of a finished or stopped run"
        raise ValueError(why_no_results(folder, array if shards else nothing))
    return report_where_it_began(folder)


def settings_of(report: dict[str, Any], settings: Sequence[str]) -> Config:
    """Return the configuration of a run's report, changed by `settings`, which must be of `SECTIONS`."""
    config = config_of(report)
    check_keys(list(settings))
    for setting in settings:
        if not setting.split("=")[0].startswith(SECTIONS):
            raise ValueError(f"{setting}: has no effect here; learn takes {', '.join(SECTIONS)}")
    given = composed(as_hydra_reads(list(settings)))
    named = {setting.split("=")[0] for setting in settings}
    model = replace(config.model, **{k: getattr(given.model, k) for k in ("device", "path") if f"model.{k}" in named})
    task = replace(config.task, input=given.task.input) if "task.input" in named else config.task
    return replace(config, learn=given.learn, parallel=given.parallel, model=model, task=task)


def answered_requests(folder: Path, config: Config, builder: EngineBuilder) -> Iterator[Answered]:
    """Yield the requests that a run has answered with two tokens or more, and their answers.

    Where the run did not keep the answer's tokens (`logging.token_ids`), its text is tokenized. If the model wrote
    other tokens than these, drafting is learned a little worse, but no text changes.
    """
    encoder = Encoder(config, builder.shape, builder.tokenizer)
    lines = {line["index"]: line for line in results(folder) if line["finish_reason"] in WRITTEN}
    changed = f"{folder}: the task's input has changed since the run, or task.input={config.task.input} is another file"
    for index, item in enumerate(make_again(config.task).items()):
        if (line := lines.get(index)) is None or "text" not in line:
            continue
        if item.custom_id != line["custom_id"]:
            raise ValueError(changed)
        request = encoder.encode(index, encoder.choose(item))
        if isinstance(request, Request):
            tokens = line.get("token_ids") or builder.tokenizer(line["text"], add_special_tokens=False).input_ids
            tokens = with_end(tokens, line["finish_reason"], request, builder.shape.eos_ids[0])
            if len(tokens) > 1:
                yield Answered(request, tokens)


@contextmanager
def told(remedy: str = "") -> Iterator[None]:
    """Turn a failure of learning, which all ranks have, into a message for people, which ends with `remedy`."""
    try:
        yield
    except LearningFailed as error:
        raise ValueError(f"{error}{remedy}") from error


@dataclass
class Student:
    """Learns from a run's answers, on one of the ranks."""

    folder: Path
    config: Config
    builder: EngineBuilder
    group: Group
    answered: list[Answered]

    def learn(self) -> dict[str, Any]:
        """Learn, measure, and write the files; return the content of `learn.json`."""
        group, world, builder = self.group, self.group.world, self.builder
        model = builder.load(tensor=group.tensor)
        own = self.answered[group.data_rank :: group.mesh.data]
        answers = answers_of((one.request.prompt, one.tokens) for one in own)
        held_out = [one for one in own if is_held_out(one.request.prompt)][: -(-TRIED // group.mesh.data)]
        before = self.measured("before", held_out, own)
        if group.asked_anywhere("before"):
            raise Stopped(f"stopped by {group.stop.signal or 'another rank'} before anything was learned")
        drafts = self.folder / FOLDER
        with told():
            learning = learning_of(model, builder.tokenizer, self.config, group)
        with told(f": correct that, or move {drafts} away to begin anew"):
            again = learning.load(drafts, builder.revision)
        self.say(f"{len(self.answered)} answers{', continuing with the earlier drafts' if again else ''}")
        group.store.barrier(keys.LESSON.format("begin"))
        with told(f"; what was saved in {drafts} before stays"):
            lesson = self.lesson(learning, answers, drafts)
            learning.adopt()
        # one that was cut short would measure its first requests only
        after = None if group.asked_anywhere("lesson") else self.measured("after", held_out, own)
        if group.asked_anywhere("after"):
            after = None
        measured = sum(is_held_out(one.request.prompt) for one in self.answered)
        learned = figures(lesson, before, after, len(self.answered), measured)
        if world.rank == 0:
            learning.save(drafts, self.config.model.path, builder.revision)
            write_lines(drafts / "learn.json", [json.dumps(learned, indent=1) + "\n"])
            write_learn_page(drafts, self.config.model.path, learned)
            self.say(in_words(learned, drafts))
        group.store.barrier(keys.LESSON.format("end"))
        if after is None:
            raise Stopped(f"stopped by {group.stop.signal or 'another rank'}; what was learned until then is kept")
        return learned

    def lesson(self, learning: Learning, answers: Answers, drafts: Path) -> Lesson:
        """Learn for `learn.minutes`, with a progress bar; save now and then. Return the lesson's figures."""
        rank_0, saved = self.group.world.rank == 0, time.monotonic()
        columns = TextColumn("learning"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[status]}")
        with Progress(*columns, disable=not rank_0) as display:
            bar = display.add_task("", total=1.0, status="")

            def on_step(share: float, loss: float) -> None:
                nonlocal saved
                display.update(bar, completed=share, status=f"loss {loss:.3f}")
                if rank_0 and time.monotonic() - saved > SAVE_EVERY_S:
                    saved = time.monotonic()
                    try:
                        learning.save(drafts, self.config.model.path, self.builder.revision)
                    except OSError as error:  # there may be room again at the end
                        self.say(f"WARNING: what was learned so far could not be kept: {error}")

            return learning.lesson(answers, 60 * self.config.learn.minutes, self.group.stopped, on_step)

    def measured(self, name: str, held_out: list[Answered], own: list[Answered]) -> dict[str, dict[str, float]]:
        """Return tokens per forward and seconds per answer on held-out requests of all ranks, by number of drafts.

        Drafts come from text, too, as in a job; at first, this is the text of the answers that this rank learned from.
        """
        found: dict[str, dict[str, float]] = {}
        requests = [replace(one.request, index=i) for i, one in enumerate(held_out)]
        for drafts in (0, *DRAFTS):
            decode = replace(self.config.decode, drafts=drafts, branches=0, draft_from="auto")
            options = EngineConfig(min(self.config.engine.max_sequences, max(len(requests), 1)))
            engine = self.builder.engine(decode, options, self.group)
            if engine.drafter:
                for one in own:
                    if not is_held_out(one.request.prompt):
                        engine.drafter.remember(one.tokens)
            began = time.perf_counter()
            generations = list(engine.generate(requests))
            seconds = time.perf_counter() - began
            tokens = sum(len(generation.tokens) for generation in generations)
            self.group.store.barrier(keys.LESSON.format(f"{name} {drafts}"))
            done = len(generations)
            of_all = torch.tensor([tokens, engine.statistics.forwards, done, seconds], dtype=torch.float64)
            tokens, forwards, count, seconds = self.group.everyone.sum(of_all.to(engine.device)).tolist()
            found[str(drafts)] = {"tpf": tokens / max(forwards, 1.0), "seconds": seconds / max(count, 1.0)}
        return found

    def say(self, message: str) -> None:
        """Print a line on rank 0."""
        if self.group.world.rank == 0:
            print(message, flush=True)
