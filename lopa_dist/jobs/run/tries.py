"""Answers that must have a format: those that do not are generated again, with other random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation, Request, request_key
from lopa_dist.engine.running_batch import Begin
from lopa_dist.engine.work import Work
from lopa_dist.jobs.run.answers import answer_of
from lopa_dist.jobs.run.request_source import RequestSource
from lopa_dist.parallel.stop import StopLevel
from lopa_dist.tasks.task import Item
from lopa_dist.tasks.worker import Lost, TooLong, Workers

SCHEMA_WORKER = "lopa_dist.tasks.schema_worker"
CHECK_S = 5.0  # seconds that checking an answer against its schema may take
SLOW_CHECKS = 3  # after this many checks that took longer, a schema's answers are not checked any more
TOO_SLOW = f"not checked: a check by its schema takes more than {CHECK_S:g} s; simplify the schema and its patterns"
SLOW, FAULT, VALID = range(3)  # outcomes of a check; ranks agree on the lowest


class Tries:
    """Generates answers, with further tries; all ranks of a replica make the same calls, and check every answer.

    Args:
        engine: of this rank.
        items: by a request's index, what it was made of.
        tokenizer: of the model.
    """

    def __init__(self, engine: Engine, items: Sequence[Item], tokenizer: PreTrainedTokenizerFast) -> None:
        self.engine, self.items, self.tokenizer = engine, items, tokenizer
        self.checks = Workers(SCHEMA_WORKER, CHECK_S)
        self.too_slow: Counter[str] = Counter()  # by schema: how many checks took too long

    def failure(self, generation: Generation) -> str:
        """Return why an answer does not have the format that it must have; empty if it does, or if any text will do."""
        item = self.items[generation.request.index]
        if (wanted := item.response_format) is None or generation.finish_reason == "error":
            return ""
        text = answer_of(self.tokenizer, generation, item.stop)[2]
        return wanted.failure(text) if wanted.schema is None else self.failure_of_schema(wanted.schema, text)

    def without_rest(self, generation: Generation) -> Generation:
        """Return a rejected answer cut at its first stop string.

        How much was generated after that depends on the batch.
        """
        return answer_of(self.tokenizer, generation, self.items[generation.request.index].stop)[0]

    def failure_of_schema(self, schema: str, text: str) -> str:
        """Return why a text does not match a schema; empty if it does.

        A child process checks it for up to `CHECK_S`, because a schema may take forever. Ranks of a replica may differ
        in how long that takes: if one finds a fault, all do.
        """
        if self.too_slow[schema] >= SLOW_CHECKS:
            return TOO_SLOW
        failure = ""
        try:
            failure = self.checks.ask({"schema": schema, "text": text})
        except TooLong:
            failure = TOO_SLOW
        except Lost as lost:
            failure = f"not checked: the process that checks schemas {lost}"
        found = SLOW if failure == TOO_SLOW else FAULT if failure else VALID
        agreed = self.engine.lockstep.least(found, self.engine.device)
        self.too_slow[schema] += agreed == SLOW  # on all ranks alike: they must ask each other, or none
        return "" if agreed == VALID else failure or TOO_SLOW

    def is_last(self, generation: Generation) -> bool:
        """Return whether this is a request's last try; at temperature 0 the first one is: others would be the same."""
        wanted = self.items[generation.request.index].response_format
        sampling = generation.request.sampling or self.engine.sampling
        return wanted is None or generation.tries >= wanted.tries or not sampling.temperature

    def generate(self, source: RequestSource, begin: Begin) -> Iterator[Generation]:
        """Yield finished requests as `Engine.generate` does; suspects come last. `begin` is called once per request.

        Answers that do not have their format are thrown away, and their cost is counted with the next try's. If the
        last try fails, too, its answer is yielded, with the reason.
        """
        tried: dict[int, Generation] = {}  # by index: the tries so far of a request that is tried again, joined

        def begin_first(requests: Sequence[Request]) -> None:
            begin([request for request in requests if request.index not in tried])

        with ExitStack() as ending:
            self.checks = Workers(SCHEMA_WORKER, CHECK_S)
            ending.callback(self.checks.end)
            while True:
                for latest in self.engine.generate(source.requests, source, begin_first):
                    before = tried.pop(latest.request.index, None)
                    answer = latest if before is None else joined(before, latest)
                    failure = self.failure(latest)
                    if not failure or self.is_last(answer):
                        yield replace(answer, invalid=failure)
                        continue
                    tried[latest.request.index] = self.without_rest(answer)
                    source.again.append(of_try(answer.request, answer.tries + 1))
                if self.engine.lockstep.level != StopLevel.RUN or not (source.again or source.next_suspect()):
                    return


def of_try(request: Request, number: int) -> Request:
    """Return a request with the random numbers of its try `number`, from 1."""
    return request if number == 1 else replace(request, key=request_key(request.key, f"try {number - 1}"))


def joined(before: Generation, latest: Generation) -> Generation:
    """Return the answer of the latest try, with the cost of all tries so far."""
    work = Work()
    work.add(before.work.totals())
    work.add(latest.work.totals())
    return replace(
        latest,
        request=before.request,
        forwards=before.forwards + latest.forwards,
        seconds=before.seconds + latest.seconds,
        first_step_seconds=before.first_step_seconds,
        filled=before.filled + latest.filled,
        work=work,
        tries=before.tries + 1,
        failed_tokens=before.failed_tokens + len(before.tokens),
    )
