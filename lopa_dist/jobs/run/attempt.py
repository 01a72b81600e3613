"""The beginning of an attempt at a job: rank 0 opens the journal, and all ranks learn what is left to do."""

from __future__ import annotations

import base64
import json
import logging
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lopa_dist.code_hash import code_hash
from lopa_dist.config import Config, TaskConfig
from lopa_dist.decode.config import text_settings
from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.folder.journal import FORMAT, JUDGED_AGAIN, VERDICT_SETTINGS, Journal, Writer, attempt_of
from lopa_dist.jobs.folder.lookahead import drafted_otherwise, lookahead_of, text_model
from lopa_dist.jobs.run.crashes import crashes, too_often
from lopa_dist.jobs.run.job_input import JobInput
from lopa_dist.jobs.run.rejudge import rejudge
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.kernels.native import form
from lopa_dist.own_code import SOURCE_OF, digest, is_own
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import Start, World
from lopa_dist.tasks.task import Task

log = logging.getLogger("lopa_dist")


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job.

    Attributes:
        journal: of the job.
        settings: what the texts depend on besides the requests.
        number: counts the attempts from 1.
        done: by a request's index, 1 if an earlier attempt finished it.
        crashes: by a request's index, how often the process ended while it ran (at most 255).
        changes: what differs from the first attempt's settings, if failed requests are run again.
        rejudged: answers of earlier attempts that this one judged again; on rank 0.
        errors: requests that earlier attempts finished with an error; on rank 0.
        invalid: answers of earlier attempts that do not have their format; on rank 0.
    """

    journal: Journal
    settings: dict[str, Any]
    number: int
    done: bytearray
    crashes: bytearray
    changes: list[str]
    rejudged: int = 0
    errors: int = 0
    invalid: int = 0

    def packed(self) -> dict[str, Any]:
        """Return what other ranks must know of the attempt, ready for JSON."""
        flags = {"done": pack_flags(self.done), "crashes": pack_flags(self.crashes)}
        return {"settings": self.settings, "number": self.number, "changes": self.changes} | flags


def begin_attempt(
    config: Config, folder: Path, builder: EngineBuilder, task: Task, job_input: JobInput, input_hash: str, group: Group
) -> Attempt:
    """Return the attempt that begins now, on every rank of `group`, once all agree on what is to be done.

    Args:
        config: without any ``auto``.
        folder: the run folder.
        builder: of the model.
        task: judges answers of earlier attempts by today's `task.score`.
        job_input: of the job; on rank 0 with the ids of its requests.
        input_hash: of all items, as this rank read them.

    Raises:
        ValueError: this rank would not do the same as rank 0, or the journal has results of other settings.
    """
    group.store.agree("job", work(config, builder) | {"the input's hash": input_hash})
    settings, attempt = journal_settings(config, builder), None
    if group.world.rank == 0:
        attempt = open_attempt(config, folder, settings, task, job_input, group.world)
    # other ranks do not look for themselves: on their hosts, a shared folder may lag behind
    found = json.loads(group.store.broadcast("attempt", json.dumps(attempt.packed() if attempt else {})))
    if attempt:
        return attempt
    done, crashed = unpack_flags(found["done"]), unpack_flags(found["crashes"])
    return Attempt(Journal(folder), found["settings"], found["number"], done, crashed, found["changes"])


def open_attempt(
    config: Config, folder: Path, settings: dict[str, Any], task: Task, job_input: JobInput, world: World
) -> Attempt:
    """Open the journal, give finished answers the verdicts that they lack, and return the attempt, on rank 0.

    Args:
        config, folder, task, job_input: as in `begin_attempt`.
        settings: what the texts depend on besides the requests.
        world: all ranks.
    """
    journal, start, retry, rejudged = Journal(folder), Start.read(), config.job.retry == "errors", 0
    changes = journal.open(settings, config.job.resume, start, retry)
    number = journal.next_attempt()
    since = journal.retried_from(retry, number, start)
    rules = [one.get(key) for one in (settings, journal.first_settings()) for key in VERDICT_SETTINGS]
    again = config.job.retry == "verdicts"
    if again and not any(rules):
        raise ValueError("job.retry=verdicts: only answers that task.score or your own task judges are judged again")
    if judged_again := journal.retried_from(again, number, start, "verdicts"):
        settings = settings | {JUDGED_AGAIN: judged_again}
    if any(rules):
        rejudged = rejudge(journal, partial(Writer, folder, number, world.size), job_input, task, settings)
    done, errors, invalid, strangers = journal.done(
        job_input.ids, since if retry else 0, unjudged=any(rules), tries=partial(tries_of, job_input)
    )
    crashed = crashes(journal.folder, job_input.ids, done, since) if config.job.crashes is not None else bytearray()
    rejected = sum(job_input.rejected) + int(too_often(crashed, config.job.crashes).sum())
    drafted, left = lookahead_of(asdict(config.decode), asdict(config.model)), len(job_input) - rejected - sum(done)
    wrote = {attempt_of(part) for part in journal.parts() if part.stat().st_size}
    each = [one.lookahead for one in AttemptRecord.all(journal.folder) if one.number in wrote]
    if others := drafted_otherwise("the attempts at this job", [*each, *([drafted] if left else [])]):
        job_input.warnings.append(others)
        log.warning(others)
    if strangers:
        log.warning(
            "%d finished answers in %s belong to requests that are not in today's input%s: they stay in journal/, and "
            "are not in these results. A request is identified by its id or, without one, by its line's number, and "
            "with task.samples above 1 also by its sample's number; an earlier version of lopa_dist may have named the "
            "requests of your own task differently",
            strangers, folder, f" with task.limit={limit}" if (limit := config.task.limit) else "",
        )  # fmt: skip
    if sum(done) and (last := AttemptRecord.last(journal.folder)) and last.code != code_hash():
        log.warning(
            "WARNING: other code of lopa_dist (%s; now %s) wrote the %d results so far. If a rule has changed since "
            "(CHANGELOG.md), the rest may differ from what that code would have written; job.resume=new starts over",
            last.code or "an older version", code_hash(), sum(done),
        )  # fmt: skip
    AttemptRecord.of(number, len(job_input), rejected, sum(done), errors, invalid, world, drafted).write(journal.folder)
    return Attempt(journal, settings, number, done, crashed, changes, rejudged, errors, invalid)


def tries_of(job_input: JobInput, index: int) -> int:
    """Return how many answers a request may have until one has its format; 0 if any text will do."""
    wanted = job_input.items[index].response_format
    return wanted.tries if wanted is not None else 0


def work(config: Config, builder: EngineBuilder) -> dict[str, Any]:
    """Return what all ranks must have in common, by the names that users know.

    Paths may differ: nodes may have copies on their own disks, and only the contents count.

    Args:
        config: without any ``auto``.
        builder: of the model.
    """
    paths = ("path", "lora", "input", "output", "fewshot_input", "device")
    settings = {
        f"{section}.{key}": value
        for section in ("model", "decode", "engine", "task")
        for key, value in asdict(getattr(config, section)).items()
        if key not in paths
    }
    return (
        settings
        | own_sources(config)
        | {
            "seed": config.seed,
            "model.revision": builder.revision,
            "model.lora's revision": builder.adapter_revision,
            "model.dtype": builder.dtype,
            "the kind of device": builder.device.type,
            "what computes on a CPU in fp32": form(builder.device, builder.dtype, config.engine.kernels),
            "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        }
    )


def journal_settings(config: Config, builder: EngineBuilder) -> dict[str, Any]:
    """Return what the lines of results depend on besides the requests."""
    task = config.task
    model: dict[str, Any] = {"revision": builder.revision, "lora": builder.adapter_revision, "dtype": builder.dtype}
    model |= {key: getattr(config.model, key) for key in ("lora_rows", "quantization", "chat_template")}
    model = text_model(model)
    if config.model.template:
        model["template"] = config.model.template
    settings: dict[str, Any] = {"journal": FORMAT, "model": model, "decode": text_settings(asdict(config.decode))}
    settings |= {"seed": config.seed, "task": task.name}
    if task.shards > 1:  # else a folder with another share would lose its results
        settings["shard"] = f"{task.shard} of {task.shards}"
    if task.allow_code_execution is not None:  # what was generated without judging has no verdicts
        settings["allow_code_execution"] = task.allow_code_execution
    if task.allow_code_execution:
        settings["code_timeout_s"] = task.code_timeout_s
    if task.score:
        settings["score"] = task.score
    if task.masks != TaskConfig.masks:
        settings["masks"] = task.masks
    if config.logging.token_ids:  # lines without them are not what is asked for
        settings["logging.token_ids"] = True
    return settings | own_sources(config)


def own_sources(config: Config) -> dict[str, str]:
    """Return hashes of the files with the user's own code."""
    named = {"task": config.task.name, "task.score": config.task.score} | config.decode.own_parts
    return {SOURCE_OF + key: digest(str(text), key) for key, text in named.items() if is_own(text)}


def pack_flags(flags: bytearray) -> str:
    """Return flags as short text: a million of them, mostly equal, take a few kilobytes."""
    return base64.b64encode(zlib.compress(bytes(flags))).decode()


def unpack_flags(text: str) -> bytearray:
    """Return the flags in a text from `pack_flags`."""
    return bytearray(zlib.decompress(base64.b64decode(text)))
