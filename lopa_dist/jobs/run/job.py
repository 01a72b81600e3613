"""The main job: read, generate, write, report."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lopa_dist.atomic import no_room
from lopa_dist.checks import UserError
from lopa_dist.config import Config
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.folder.apart import check_apart
from lopa_dist.jobs.folder.batch_output import NAME as BATCH_OUTPUT
from lopa_dist.jobs.folder.batch_output import line_of, write_batch_lines, write_batch_output
from lopa_dist.jobs.folder.journal import VERDICT_SETTINGS, Writer
from lopa_dist.jobs.folder.merged import Merged, merge
from lopa_dist.jobs.folder.one_job import Lock, only_job
from lopa_dist.jobs.folder.part_names import in_parts
from lopa_dist.jobs.folder.results import results, write_errors
from lopa_dist.jobs.folder.shard_figures import write_figures
from lopa_dist.jobs.run.announcement import announcement
from lopa_dist.jobs.run.attempt import Attempt, begin_attempt
from lopa_dist.jobs.run.crashes import Begun
from lopa_dist.jobs.run.disturbances import Disturbances
from lopa_dist.jobs.run.job_input import JobInput
from lopa_dist.jobs.run.lessons import Lessons
from lopa_dist.jobs.run.output import check_parts, warnings_of, write_output
from lopa_dist.jobs.run.parts import Parts
from lopa_dist.jobs.run.prompts import Encoder, wraps
from lopa_dist.jobs.run.recall import recall
from lopa_dist.jobs.run.recorder import Recorder
from lopa_dist.jobs.run.rejudge import verdict_rule
from lopa_dist.jobs.run.scoring import check_scoring, idle_in_scoring, scored_masks
from lopa_dist.jobs.run.session import Session
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.device import choose_device, threads
from lopa_dist.jobs.setup.learning import check_learning
from lopa_dist.jobs.setup.resolve import resolve
from lopa_dist.jobs.show.extra import Extra
from lopa_dist.jobs.show.made_on import made_on
from lopa_dist.jobs.show.metrics import build_report, failures
from lopa_dist.jobs.show.report import read_report, write_report
from lopa_dist.jobs.show.run_page import NAME as RUN_PAGE
from lopa_dist.jobs.show.run_page import write_run_page
from lopa_dist.jobs.show.wandb_log import WandbLog, chosen_mode
from lopa_dist.models.transformer import Transformer
from lopa_dist.overrides import typed
from lopa_dist.own_code import SOURCE_OF, is_own
from lopa_dist.parallel.failures import announce_before_joining
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import Start, World
from lopa_dist.parallel.mesh import choose_mesh
from lopa_dist.parallel.stop import Stop, Stopped
from lopa_dist.tasks.hashed_items import HashedItems
from lopa_dist.tasks.registry import check_judging, make_task
from lopa_dist.tasks.task import Task, TotallingTask

log = logging.getLogger("lopa_dist")
PAGE_LIMIT_S = 60.0  # to write report.html


def run(
    config: Config, folder: Path, world: World, stop: Stop | None = None, given: Collection[str] | None = None
) -> dict[str, Any]:
    """Run the job on this rank; rank 0 writes into `folder` and returns the report, the others return nothing.

    Args:
        stop: learns of signals, including those that come too late to stop this job.
        given: the keys that were typed, if that is known; one that nothing reads is then refused, whatever its value.

    Raises:
        UserError: a disk is full; the message says where, and how to go on.
        Stopped: on a signal, after what was in flight has been finished or dropped.
    """
    began = time.perf_counter()
    try:
        device = choose_device(config, world)
        if config.task.input == "-" and world.size > 1:
            raise ValueError(
                f"task.input=- with {world.size} ranks: standard input reaches one rank only; write a file"
            )
        chosen_mode(config)
        check_apart(config.task, folder)
        task = make_task(config.task)
        check_judging(task)
        whole_input = HashedItems(task.items())
        items = islice(whole_input, config.task.shard, None, config.task.shards)
        # for the mesh, the number of items matters only if they are few
        first = list(islice(items, world.size * config.engine.max_sequences))
        parallel = config.parallel
        check_scoring(task, parallel)
        check_learning(config, scored_masks(task))
        branches = 1 if scored_masks(task) else config.decode.max_branches
        mesh = choose_mesh(parallel.data, parallel.branch, parallel.tensor, world.size, len(first), branches)
    except Exception as error:
        announce_before_joining(world, error, config.parallel.timeout_s)
        raise
    group = Group(world, mesh, parallel.backend, parallel.timeout_s, device, stop or Stop(config.job.grace_s))
    with group.failures.guard():
        # its name has the time, which may differ between ranks
        folder = Path(group.store.broadcast("folder", str(folder)))
        try:
            with only_job(folder, Start.read()) if world.rank == 0 else nullcontext() as lock:
                builder = EngineBuilder(config.model, device)
                config = resolve(config, builder.shape, device, given)
                encoder = Encoder(config, builder.shape, builder.tokenizer)
                job_input = JobInput(
                    encoder, group.store.between(chain(first, items)), world.rank == 0, not is_own(config.task.name)
                )
                if not len(job_input) and config.task.shards == 1:  # results of an earlier input stay
                    raise UserError(f"nothing to run: task.input={config.task.input} has no lines")
                if world.rank == 0:
                    job_input.warnings += warnings_of(config.task, not (folder / "journal").exists())
                    job_input.warnings += idle_in_scoring(task, given or ())
                    for warning in job_input.warnings:
                        log.warning(warning)
                attempt = begin_attempt(config, folder, builder, task, job_input, whole_input.digest(), group)
                return Job(config, folder, task, group, builder, job_input, whole_input, attempt, lock, began).run()
        except OSError as error:  # perhaps of this rank's own disk; callers do not know the folder
            if full := no_room(error, f"start it again with {typed('hydra.run.dir', folder)}"):
                raise UserError(full) from error
            raise


@dataclass
class Job:
    """An attempt at a job, on one rank of its group.

    Attributes:
        config: without any ``auto``.
        input: the items of this job, and what became of them.
        whole_input: all items, of which this job may have a share.
        lock: of the run folder, on rank 0.
        began: when this job began, by `time.perf_counter`.
    """

    config: Config
    folder: Path
    task: Task
    group: Group
    builder: EngineBuilder
    input: JobInput
    whole_input: HashedItems
    attempt: Attempt
    lock: Lock | None
    began: float
    disturbances: Disturbances = field(init=False)
    lessons: Lessons = field(init=False)
    parts: Parts | None = field(init=False)
    writer: Writer = field(init=False)

    def __post_init__(self) -> None:
        self.is_rank_0 = self.group.world.rank == 0
        self.masks = self.config.decode.scope.estimates(scored_masks(self.task))
        self.made = made_on(self.builder.device)
        crashes = self.attempt.crashes
        self.suspects = self.input.set_aside(crashes, self.config.job.crashes)
        self.requests = self.input.remaining(self.attempt.done, self.config.engine, self.group.mesh.data, crashes)

    def run(self) -> dict[str, Any]:
        """Generate and write the results; return the report on rank 0, and nothing on others."""
        config, group = self.config, self.group
        before = self.finished_before() if self.is_rank_0 else {}
        if group.store.broadcast_flag("finished", bool(before)):
            return before
        self.parts = self.make_parts() if self.is_rank_0 else None
        model = self.builder.load(self.is_rank_0, group.tensor)
        if self.is_rank_0:
            self.announce(model)
        if group.is_leader:  # so that from here on, a signal finds a journal to write to
            self.writer = Writer(self.folder, self.attempt.number, group.data_rank)
            group.failures.last_acts.append(self.writer.close)
        logs = (self.is_rank_0 or config.logging.wandb.ranks) and chosen_mode(config)[0] != "disabled"
        wandb_log = WandbLog(config, self.folder, group.world.rank) if logs else None
        session = Session(config, self.builder, group, self.input.items, self.requests, self.masks or None)
        self.hook_up(session.engine, wandb_log)
        self.generate(session)
        return self.conclude(session.engine, wandb_log)

    def hook_up(self, engine: Engine, wandb_log: WandbLog | None) -> None:
        """Make the job's lessons, and have the engine and the lessons call what runs beside them: W&B, the lock."""
        config, group = self.config, self.group
        self.lessons = Lessons(
            config, group, engine, self.builder.tokenizer, self.folder, self.builder.drafts_revision,
            len(self.requests), sum(self.attempt.done), self.attempt.number,
        )  # fmt: skip
        if wandb_log is not None:
            engine.meanwhile.append(wandb_log.observe)
            self.lessons.on_lesson.append(partial(wandb_log.lesson_begins, engine))
            self.lessons.meanwhile.append(partial(wandb_log.learning, engine))
            self.lessons.on_outcome.append(lambda outcome: wandb_log.learned(engine, asdict(outcome)))
        if self.lock:
            engine.meanwhile.append(self.lock.check)
            self.lessons.meanwhile.append(self.lock.check)
        if self.parts is not None:
            engine.meanwhile.append(self.parts)
            self.lessons.meanwhile.append(self.parts)

    def generate(self, session: Session) -> None:
        """Answer all requests that are left, and learn between them; a leader records the answers."""
        group, engine = self.group, session.engine
        self.lessons.begin()
        if (engine.drafter or not self.lessons.ended) and not self.masks and any(self.attempt.done):
            attempt = self.attempt
            answers = recall(attempt.journal, attempt.number, self.input.ids, self.builder.tokenizer, group)
            if engine.drafter:
                for answer in answers:
                    engine.drafter.remember(answer.tokens)
            self.lessons.recall(answers, self.input.encoded)
        session.prepare()
        start, self.disturbances = time.perf_counter(), Disturbances(self.config, group, self.builder.device)
        generate = partial(session.generate, suspects=self.suspects)
        if not group.is_leader:
            deque(self.lessons.rounds(generate), maxlen=0)
            return
        lone = group.mesh.branch == group.mesh.tensor == 1
        with Begun(self.attempt.journal.folder, self.attempt.number, group.data_rank, lone) as begun:

            def begin(requests: Sequence[Request]) -> None:
                begun.note(*(self.input.name_of(self.input.items[request.index], request) for request in requests))

            Recorder(
                self.config, group, self.task, self.builder.tokenizer, self.input, self.attempt, start,
                self.writer, begun,
            ).record(self.lessons.rounds(partial(generate, begin=begin)), engine, self.lessons)  # fmt: skip

    def conclude(self, engine: Engine, wandb_log: WandbLog | None) -> dict[str, Any]:
        """Write what is made of all results; return the report on rank 0, and nothing on others.

        Raises:
            Stopped: the job was asked to stop, and is not complete.
        """
        group = self.group
        traffic = group.store.sum(group.traffic)
        stopped = group.stop.asked
        if self.parts is not None:
            self.parts.close(stopped)
        report: dict[str, Any] = {}
        if wandb_log is not None:
            wandb_log.flush(engine)  # before the statistics become those of all replicas
        if self.lock:
            self.lock.check()
        if self.is_rank_0:
            report = self.finish(engine, traffic, stopped)
            self.write_page(report)
        if wandb_log is not None:
            wandb_log.finish(stopped, report)
        # all leave together: a launcher ends the others when one rank leaves a job that is not complete
        whole = report.get("requests") == len(self.input) and not report.get("open")
        complete = group.store.broadcast_flag("complete", whole)
        if self.is_rank_0 and complete:
            self.write_output(report)
        if stopped and not complete:
            raise Stopped(f"stopped by {group.stop.signal}; the results so far are kept")
        return report

    def finished_before(self) -> dict[str, Any]:
        """Return the report of an earlier attempt that left nothing to do, after writing its results again; else {}."""
        file, report = self.folder / "report.json", {}
        if not self.requests and not self.attempt.rejudged and file.exists():
            with suppress(ValueError):  # a damaged one is made anew
                report = read_report(file)
        if not report or report.get("unjudged") or report.get("open") or report["requests"] != len(self.input):
            return {}
        # another attempt may have been killed since
        if report.get("input") != self.digest() or report.get("attempts") != self.attempt.number - 1:
            return {}
        self.merge()
        write_errors(self.folder, report["errors"])
        self.write_batch_output()
        self.write_output(report)
        if not (self.folder / RUN_PAGE).exists():
            self.write_page(report)
        log.info("all %d requests were done before", len(self.input))
        if any(self.attempt.settings.get(key) for key in VERDICT_SETTINGS if key != "score"):
            log.info(
                "their verdicts are kept, because the rule has not changed; job.retry=verdicts judges them again, for "
                "example after a file that the rule reads has changed"
            )
        if invalid := report.get("tries", {}).get("invalid"):
            log.info(
                "%d of them do not have the format asked for, which is not an error: a higher task.tries, at a "
                "temperature above 0, generates them again", invalid,
            )  # fmt: skip
        aside = len(self.input.aside)
        if unusable := sum(self.input.rejected) - aside:
            log.info(
                "%d of them cannot run at all (errors.jsonl says why): correct their lines and give the same command",
                unusable,
            )  # fmt: skip
        if aside:
            log.info("%d of them were set aside, as errors.jsonl says; job.retry=errors runs them again", aside)
        return report

    def make_parts(self) -> Parts | None:
        """Return what writes the parts of `task.output`; None if it is one file, or if the job is a shard."""
        task, attempt = self.config.task, self.attempt
        if not task.output or not in_parts(task.output) or task.shards > 1:
            return None
        check_parts(self.folder, task.output, len(self.input), begins=not any(attempt.done))
        return Parts(task, self.folder, self.input, attempt.journal, attempt.number, attempt.done)

    def finish(self, engine: Engine, traffic: dict[str, int], stopped: bool) -> dict[str, Any]:
        """Merge the results of all attempts in input order; write and return the report on them."""
        config, folder, statistics = self.config, self.folder, engine.statistics
        merged = self.merge()
        errors = merged.failed + sum(self.input.rejected)
        write_errors(folder, errors)
        lines = len(merged.figures) + errors
        if lines == len(self.input):
            self.write_batch_output()
        elif stopped:
            (folder / BATCH_OUTPUT).unlink(missing_ok=True)  # of an earlier input
        else:
            raise RuntimeError(
                f"{lines} result lines of {len(self.input)} requests in {folder}; do all ranks use the same folder?"
            )
        for replica in merged.replicas:
            if replica["attempt"] == self.attempt.number and replica["replica"] > 0:
                statistics.absorb(replica["statistics"])
        wall_s = time.perf_counter() - self.began
        busy, warnings = self.disturbances.look()
        if busy is not None:
            self.made["others"] = round(busy, 1)
        report = build_report(config, merged, errors, statistics, traffic, self.group, wall_s)
        report |= {
            "weights": self.attempt.settings["model"],
            "attempts": self.attempt.number,
            "input": self.digest(),
            "whole_input": self.whole_input.digest(),
            "whole_prompts": self.whole_input.prompts(),
            "draws": config.decode.temperature > 0 or self.whole_input.draws,
            "expected": len(self.input),
            "made": self.made,
            "chat_template": wraps(self.builder.tokenizer, config.model.chat_template),
        }
        if stopped and lines == len(self.input) and (left := self.left()):
            report["open"] = left  # they have results, which this attempt was to replace
        if own := {key: value for key, value in self.attempt.settings.items() if key.startswith(SOURCE_OF)}:
            report["own_code"] = own
        if in_vain := statistics.in_vain():
            warnings.append(in_vain)
        for warning in warnings:
            log.warning("WARNING: %s", warning)
        if all_warnings := self.input.warnings + warnings:
            report["warnings"] = all_warnings
        if lessons := self.lessons.report():
            report["lessons"] = lessons
        if errors:
            report["failures"] = failures(results(folder))
        if self.masks:
            report["masks"] = self.masks
        if isinstance(self.task, TotallingTask):
            report["metrics"] = self.task.totals(results(folder))
        write_report(folder, report)  # last, because a job that finds it has nothing more to do
        return report

    def announce(self, model: Transformer) -> None:
        """Log what begins."""
        config, world = self.config, self.group.world
        what = announcement(config, self.builder, model, world, self.group.mesh, self.masks)
        log.info(
            "%s: %d requests, %s, into %s (%s)", self.task.name, len(self.input), what, self.folder, self.made["date"]
        )
        if self.builder.device.type == "cpu" and (found := threads(config, world)).surprise:
            log.warning("WARNING: %s", found.why)
        if any(self.attempt.done):
            log.info("%d of them were done before (attempt %d)", sum(self.attempt.done), self.attempt.number)
        if self.attempt.rejudged:
            log.info("%d finished answers were judged anew", self.attempt.rejudged)
        if self.suspects or self.input.aside:
            log.warning(
                "WARNING: the process ended while requests ran: %d of them run again, one at a time when all others "
                "are done; %d were set aside as errors", self.suspects, len(self.input.aside),
            )  # fmt: skip

    def left(self) -> int:
        """Return how many of this attempt's requests have not ended."""
        ended = self.group.progress.add()["done"] - sum(self.input.rejected) - sum(self.attempt.done)
        return len(self.requests) - ended

    def merge(self) -> Merged:
        """Write `results.jsonl` from what all attempts have finished, and return their figures."""
        inputs, task = self.input, self.config.task

        def rule(index: int) -> str | None:
            return verdict_rule(self.attempt.settings, inputs.items[index])

        last = task.shard + task.shards * len(inputs)
        numbers = range(task.shard, last, task.shards)  # places in the whole input, of which this job may have a share
        journal = self.attempt.journal
        merged = merge(journal, self.folder, inputs.ids, inputs.rejection, numbers, inputs.carried, rule)
        if task.shards > 1:
            write_figures(self.folder, merged)
        return merged

    def write_page(self, report: dict[str, Any]) -> None:
        """Write `report.html`; the job goes on if that fails."""
        writing = Extra("report.html could not be written", PAGE_LIMIT_S)
        writing.wait(lambda: write_run_page(self.folder, report, self.input.questions))
        writing.close()

    def digest(self) -> str:
        """Return a hash of what the results depend on: the settings, and every request and rejection, in order."""
        return self.input.digest(f"{json.dumps(self.attempt.settings, sort_keys=True)}\n{self.whole_input.digest()}")

    def write_batch_output(self) -> None:
        """Write the answers in OpenAI's form, too, if the input had it; a shard writes what `lopa-dist merge` needs."""
        if not getattr(self.task, "of_lines", False):
            return
        items = self.input.items
        if self.config.task.shards == 1:
            write_batch_output(self.folder, lambda: map(line_of, items), self.config.model.path)
        else:
            write_batch_lines(self.folder, map(line_of, items))

    def write_output(self, report: dict[str, Any]) -> None:
        """Write the results to `task.output`, too; those of shards are written when they are merged."""
        if self.config.task.shards == 1:
            write_output(self.folder, report | {"task": asdict(self.config.task)})
