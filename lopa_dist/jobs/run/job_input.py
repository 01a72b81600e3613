"""What a job has read: its items and requests on disk, and a few bytes of each in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np

from lopa_dist.encodable import encodable
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Request
from lopa_dist.jobs.folder.packed import RequestIds
from lopa_dist.jobs.run.answers import error_line
from lopa_dist.jobs.run.crashes import too_often
from lopa_dist.jobs.run.prompts import Encoder, Rejection
from lopa_dist.jobs.run.spool import Chosen, Spool
from lopa_dist.jobs.setup.resolve import sequences_of_replica
from lopa_dist.jobs.show.run_page import questions_of
from lopa_dist.tasks.names import sample_name
from lopa_dist.tasks.response_format import ResponseFormat
from lopa_dist.tasks.task import Item, Origin, RequestSampling

log = logging.getLogger("lopa_dist")
EVERY_S = 10.0  # between two log lines that say how far reading is
AT_ONCE = 1000  # items that are tokenized together, with all of their texts in memory


class JobInput:
    """Items and what became of them, in input order.

    Args:
        encoder: turns items into requests.
        items: all of them. They are kept without their texts, which the requests hold as tokens.
        named: whether to keep the journal's names of all requests, which rank 0 needs to read the journal.
        referred: as for `request_id`.

    Raises:
        ValueError: two requests have the same name, so their results could not be told apart; only if `named`.
    """

    def __init__(self, encoder: Encoder, items: Iterable[Item], named: bool, referred: bool = True) -> None:
        self.referred = referred
        self.items: Spool[Item] = Spool(Item, Origin, RequestSampling, ResponseFormat)
        self.encoded: Spool[Request | Rejection] = Spool(Request, Rejection)
        self.rejected = bytearray()  # 1 for each item that was rejected
        self.truncated = encoder.notes.cut  # indices of items whose prompts were cut
        self.carries = False  # whether any item is a sample or has fields that pass through (`carried`)
        self.aside: dict[int, str] = {}  # by index, why a request was set aside; it counts as rejected
        self.limits = array("i")  # the most tokens of each answer; 0 for rejected items
        self.ids = RequestIds()
        self.questions: dict[str, str] = {}  # by custom_id, the questions of the first items, for the page
        items, names, told = iter(items), RequestIds(), time.monotonic()
        while some := [encoder.choose(item) for item in islice(items, AT_ONCE)]:
            self.questions = self.questions or questions_of(some)
            if time.monotonic() - told > EVERY_S:
                told = time.monotonic()
                log.info("reading the input: %d requests so far", len(self.items) + len(some))
            for item, request in zip(some, encoder.encode_all(len(self.items), some), strict=True):
                messages: list[dict[str, str]] | None = None if item.messages is None else []
                self.items.append(replace(item, prompt=None, messages=messages, prefix="", continuations=()))
                self.encoded.append(request)
                self.carries |= bool(item.metadata) or is_sample(item)
                self.rejected.append(isinstance(request, Rejection))
                self.limits.append(0 if isinstance(request, Rejection) else request.max_new_tokens)
                if named:
                    self.ids.append(self.name_of(item, request))
                    name = hashlib.sha256(item.custom_id.encode()).hexdigest()[:24]
                    names.append(None if isinstance(request, Rejection) else name)
        self.warnings = encoder.warnings()  # what to say of the requests before they run, and on the page
        if (again := names.repeated()) is not None:
            raise ValueError(f"{self.items[again].custom_id}: two requests of this task have this name; make it unique")

    def __len__(self) -> int:
        return len(self.items)

    def name_of(self, item: Item, request: Request | Rejection) -> str | None:
        """Return the journal's name of a request (`request_id`)."""
        return request_id(item, request, self.referred)

    def set_aside(self, crashes: bytearray, most: int | None) -> int:
        """Set aside requests during which the process ended `most` times; return during how many others it ended."""
        counts = np.array(crashes, int)
        for index in np.flatnonzero(too_often(crashes, most)).tolist():
            self.rejected[index] = 1
            times = f"{counts[index]} times" if counts[index] > 1 else "once"
            alone = ", the last time with no other request running" if counts[index] > 1 else ""
            self.aside[index] = (
                f"the process ended {times} while this request ran{alone}; it was set aside. job.retry=errors runs it "
                "again: give it more memory, or a shorter prompt"
            )
        return int((counts > 0).sum()) - len(self.aside)

    def remaining(
        self, done: bytearray, engine: EngineConfig, replicas: int, crashes: bytes | bytearray = b""
    ) -> Sequence[Request]:
        """Return the requests that are neither done nor rejected, in the order in which they should begin.

        Requests whose answers may be longest go first, so that ranks do not wait for a long answer that began last.
        Requests that may be equally long keep the order of the input.

        Args:
            done: 1 for each item that is done.
            engine: says how many requests a replica takes to begin with.
            replicas: how many replicas take requests.
            crashes: how often the process ended while each request ran; requests during which it did come last.
        """
        numbers = np.flatnonzero(~(np.array(done, bool) | np.array(self.rejected, bool)))
        limits = np.array(self.limits)[numbers]
        if len(set(limits.tolist())) > 1:
            numbers = numbers[np.argsort(-limits, kind="stable")]
            # the first ones are dealt out: otherwise, one replica would take all the longest ones at once
            first, rest = np.split(numbers, [replicas * sequences_of_replica(engine, len(numbers), replicas)])
            numbers = np.concatenate([*(first[replica::replicas] for replica in range(replicas)), rest])
        if len(crashes):
            numbers = numbers[np.argsort(np.array(bytearray(crashes), bool)[numbers], kind="stable")]
        return Chosen(self.encoded, array("q", numbers))

    def rejection(self, index: int) -> dict[str, Any] | None:
        """Return the result line of an item that could not run, or was set aside; None for others."""
        return error_line(self.items[index], self.reason(index)) if self.rejected[index] else None

    def reason(self, index: int) -> str:
        """Return why an item could not run."""
        if index in self.aside:
            return self.aside[index]
        rejection = self.encoded[index]
        assert isinstance(rejection, Rejection)
        return rejection.message

    def carried(self, index: int) -> dict[str, Any]:
        """Return what a result line has from its input line: the sample, fields that pass through, if it was cut."""
        fields: dict[str, Any] = {"truncated": True} if index in self.truncated else {}
        if not self.carries:
            return fields
        item = self.items[index]
        fields |= {"sample": item.origin.sample} if item.origin and is_sample(item) else {}
        return fields | ({"metadata": item.metadata} if item.metadata else {})

    def digest(self, settings: str) -> str:
        """Return a hash of `settings` and of all requests and rejections, in order: it identifies their results."""
        digest = hashlib.sha256(settings.encode())
        for index in range(len(self)):
            name = self.ids[index] or f"{self.items[index].custom_id}: {self.reason(index)}"
            digest.update(encodable(f"\n{name}").encode())
        return digest.hexdigest()[:24]


def is_sample(item: Item) -> bool:
    """Return whether the item is one of several samples of its line."""
    return item.origin is not None and item.custom_id == sample_name(item.origin.custom_id, item.origin.sample)


def request_id(item: Item, request: Request | Rejection, referred: bool = True) -> str | None:
    """Return the journal's name of a request; None for a rejected item.

    It is a hash of the item's name and of all that its text and its verdict depend on, except the settings. The
    reference is part of it only if `referred`. Where the rule of judging may change, it is not: an answer whose
    reference has changed is judged again (`verdict_rule`), and need not be generated again.
    """
    if isinstance(request, Rejection):
        return None
    parts: list[Any] = [item.custom_id, request.max_new_tokens, request.key]
    if request.sampling is not None:
        parts.append(asdict(request.sampling))
    if item.stop:
        parts.append(list(item.stop))
    if request.token_steps:  # a line without them is not what is asked for
        parts.append("token_steps")
    if request.suffix:
        parts.append({"suffix": list(request.suffix)})
    if request.scored:
        parts.append([[[list(part.prompt), list(part.answer), part.key] for part in text] for text in request.scored])
    if item.response_format is not None:
        # without the number of tries: an answer with its format stays if more tries are allowed (`journal.TRIED`)
        parts.append({"response_format": {"schema": item.response_format.schema}})
    if item.reference is not None and referred:
        parts.append({"reference": item.reference})
    return hashlib.sha256(json.dumps(parts).encode() + array("i", request.prompt).tobytes()).hexdigest()[:24]
