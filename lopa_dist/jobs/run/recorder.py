"""Writes a replica's answers to its journal, each once it has a verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from lopa_dist.config import Config
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation
from lopa_dist.jobs.folder.journal import TRIED, Writer
from lopa_dist.jobs.run.answers import NOT_NUMBERS, Pieces, answer_of, error_line, generation_line
from lopa_dist.jobs.run.attempt import Attempt, tries_of
from lopa_dist.jobs.run.crashes import Begun
from lopa_dist.jobs.run.job_input import JobInput
from lopa_dist.jobs.run.judge_watch import JudgeWatch
from lopa_dist.jobs.run.judging import Answer, Judges, Verdict
from lopa_dist.jobs.run.lessons import Lessons
from lopa_dist.jobs.run.rejudge import verdict_rule
from lopa_dist.jobs.setup.device import cores
from lopa_dist.jobs.show.metrics import Figures
from lopa_dist.jobs.show.progress import ProgressDisplay
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.stop import StopLevel
from lopa_dist.tasks.task import Task

MOST_JUDGES = 8  # programs that a rank runs at a time, each of which may take gigabytes


@dataclass
class Recorder:
    """Judges and writes what a replica finishes, on the leader of its ranks.

    Attributes:
        input: all items of the job.
        attempt: knows what earlier attempts have done.
        start: when generation began, by `time.perf_counter`.
        begun: notes which requests run.
    """

    config: Config
    group: Group
    task: Task
    tokenizer: PreTrainedTokenizerFast
    input: JobInput
    attempt: Attempt
    start: float
    writer: Writer
    begun: Begun

    def __post_init__(self) -> None:
        self.pieces = Pieces(self.tokenizer)

    def record(self, generations: Iterable[Generation], engine: Engine, lessons: Lessons) -> None:
        """Write all that `generations` yields; judge, and show progress on rank 0, also while lessons are held."""
        group, config = self.group, self.config
        is_rank_0 = group.world.rank == 0
        progress = config.logging.progress if is_rank_0 else "never"
        judges = Judges(self.task, min(MOST_JUDGES, config.parallel.threads or cores(group.world).number))
        display = ProgressDisplay(progress, len(self.input), engine.statistics, config.logging.every_s)
        last_acts = [*group.failures.last_acts, self.begun.forget]
        with display, judges, JudgeWatch(group.stop, last_acts) as watch:
            if is_rank_0:
                rejected = sum(self.input.rejected)
                done, failed = rejected + sum(self.attempt.done), rejected + self.attempt.errors
                display.update(group.progress.add(done=done, failed=failed, invalid=self.attempt.invalid))
                engine.meanwhile.append(lambda engine: display.stopping(group.stop, self.begun.open))
            engine.meanwhile.append(lambda engine: self.write_verdicts(judges.verdicts(), display))
            lessons.meanwhile.append(lambda *_: self.write_verdicts(judges.verdicts(), display))
            lessons.meanwhile.append(display.learning)
            lessons.on_outcome.append(lambda _: display.learned())
            for generation in generations:
                item = self.input.items[generation.request.index]
                self.begun.note(self.input.name_of(item, generation.request), ended=True)
                reasoning, text = None, ""
                if generation.likelihoods is None:
                    generation, reasoning, text = answer_of(self.tokenizer, generation, item.stop)
                with watch.judging(item.custom_id):
                    judges.submit(Answer(item, generation, text, self.now(), reasoning))
            self.write_verdicts(judges.verdicts(), display)
            seconds = self.now() if engine.statistics.steps else 0.0  # an attempt that only judges generates nothing
            end = {"statistics": engine.statistics.sums(), "replica": group.data_rank, "at": seconds}
            while judges.open and group.stop.level() != StopLevel.ABORT:
                group.failures.check()
                self.write_verdicts(judges.verdicts(0.1), display)
            self.writer.write(end)
            self.writer.close()
            display.update(group.progress.add())

    def write_verdicts(self, verdicts: Iterable[Verdict], display: ProgressDisplay) -> None:
        """Write what has been judged to the journal, and show it in the progress."""
        entries: list[dict[str, Any]] = []
        amounts = Counter[str]()
        try:
            for verdict in verdicts:
                item, generation = verdict.answer.item, verdict.answer.generation
                entry = {"id": self.input.name_of(item, generation.request), "at": verdict.answer.at}
                amounts.update(done=1)
                if generation.finish_reason == "error":
                    amounts.update(failed=1)
                    entries.append(entry | {"line": error_line(item, NOT_NUMBERS)})
                    continue
                figures = Figures.of(generation, verdict.score, item)
                line = generation_line(verdict, self.config.logging.token_ids, self.pieces)
                if self.attempt.changes:
                    line["retried_with"] = self.attempt.changes
                if (rule := verdict_rule(self.attempt.settings, item)) is not None:
                    entry |= {"judged_by": rule}
                if verdict.failure:
                    entry |= {"unjudged": True}
                if generation.invalid and generation.tries >= tries_of(self.input, generation.request.index):
                    entry |= {TRIED: generation.tries}
                entries.append(entry | {"figures": asdict(figures), "work": generation.work.totals(), "line": line})
                amounts.update(tokens=figures.tokens, forwards=0 if generation.likelihoods else figures.forwards)
                amounts.update(invalid=int(bool(generation.invalid)))
                if figures.correct is not None:
                    amounts.update(judged=1, right=int(figures.correct))
        finally:  # even if judging one of them failed
            if entries:
                self.writer.write(*entries)
                display.update(self.group.progress.add(**amounts))

    def now(self) -> float:
        """Return the seconds since generation began."""
        return round(time.perf_counter() - self.start, 6)
