"""The beginning of an attempt at a job: rank 0 opens the journal, and all ranks learn what is left to do."""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lopa_dist.config import Config
from lopa_dist.jobs.build import EngineBuilder
from lopa_dist.jobs.journal import FORMAT, Journal
from lopa_dist.jobs.packed import RequestIds
from lopa_dist.models.files import find, revision
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import Start


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job.

    Attributes:
        journal: of the job.
        settings: on rank 0, what the texts depend on besides the requests.
        number: counts the attempts from 1.
        done: by a request's index, 1 if an earlier attempt finished it.
    """

    journal: Journal
    settings: dict[str, Any]
    number: int
    done: bytearray


def begin_attempt(config: Config, folder: Path, builder: EngineBuilder, ids: RequestIds, group: Group) -> Attempt:
    """Return the attempt that begins now, on every rank of `group`.

    Args:
        config: without any ``auto``.
        folder: the run folder.
        builder: of the model.
        ids: on rank 0, the ids of the job's requests.
    """
    journal, number, done = Journal(folder), 1, bytearray()
    settings: dict[str, Any] = {}
    if group.world.rank == 0:
        settings = journal_settings(config, builder)
        journal.open(settings, config.job.resume, Start.read())
        number, done = journal.next_attempt(), journal.done(ids)
    # other ranks do not look for themselves: on their hosts, a shared folder may lag behind
    done = unpack_flags(group.store.broadcast("done", pack_flags(done)))
    return Attempt(journal, settings, int(group.store.broadcast("attempt", str(number))), done)


def journal_settings(config: Config, builder: EngineBuilder) -> dict[str, Any]:
    """Return what the texts depend on besides the requests."""
    task = config.task
    model = {
        "revision": revision(builder.folder),
        "lora": config.model.lora and revision(find(config.model.lora, "model.lora")),
        "lora_rows": config.model.lora_rows,
        "dtype": builder.dtype,
        "quantization": config.model.quantization,
        "chat_template": config.model.chat_template,
    }
    settings: dict[str, Any] = {"journal": FORMAT, "model": model, "decode": asdict(config.decode)}
    settings |= {"seed": config.seed, "task": task.name}
    if task.allow_code_execution is not None:  # what was generated without judging has no verdicts
        settings["allow_code_execution"] = task.allow_code_execution
    if task.allow_code_execution:
        settings["code_timeout_s"] = task.code_timeout_s
    return settings


def pack_flags(flags: bytearray) -> str:
    """Return flags as short text: a million of them, mostly equal, take a few kilobytes."""
    return base64.b64encode(zlib.compress(bytes(flags))).decode()


def unpack_flags(text: str) -> bytearray:
    """Return the flags that `pack_flags` made a text of."""
    return bytearray(zlib.decompress(base64.b64decode(text)))
