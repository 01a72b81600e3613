"""What a job and `LLM` have in common: ranks that have met, a model, and an engine that answers some requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from lopa_dist.config import Config
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation, Request
from lopa_dist.engine.running_batch import Begin
from lopa_dist.jobs.run.request_source import RequestSource
from lopa_dist.jobs.run.tries import Tries
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.setup.resolve import sequences_of_replica
from lopa_dist.parallel.group import Group
from lopa_dist.tasks.task import Item


class Session:
    """An engine on this rank for some requests; all ranks of `group` make the same calls.

    Args:
        config: without any ``auto``.
        builder: of the model, which is loaded now unless it is already.
        group: the ranks.
        items: what the requests were made of.
        requests: the same on all ranks.
        masks: how many are drawn for a text, if texts are scored; None: texts are generated.
    """

    def __init__(
        self,
        config: Config,
        builder: EngineBuilder,
        group: Group,
        items: Sequence[Item],
        requests: Sequence[Request],
        masks: int | None = None,
    ) -> None:
        self.group, self.requests = group, requests
        self.model = builder.load(group.world.rank == 0, group.tensor)
        sequences = sequences_of_replica(config.engine, len(requests), group.mesh.data)
        options = replace(config.engine, max_sequences=sequences)
        if masks is not None:
            self.engine: Engine = builder.scoring_engine(config.decode, options, masks, group)
        else:
            self.engine = builder.engine(config.decode, options, group)
        self.tries = Tries(self.engine, items, builder.tokenizer)

    def prepare(self) -> None:
        """Wait until all ranks are ready, and allocate what generation needs."""
        self.group.ready()
        if self.requests:
            self.engine.prepare(self.requests)
            self.group.prepared()

    def generate(
        self,
        end: int | None = None,
        suspects: int = 0,
        begin: Begin = lambda requests: None,
    ) -> Iterator[Generation]:
        """Yield what this rank's replica finishes of the requests, which all replicas share.

        Args:
            end: the number of the first request that is not begun; None: all are.
            suspects: as for `RequestSource`.
            begin: called with requests that begin for the first time.
        """
        if self.engine.workspace is None and self.requests:  # it was freed for a lesson
            self.engine.prepare(self.requests)
        take = partial(self.group.queue.take, total=len(self.requests) if end is None else end)
        return self.tries.generate(RequestSource(self.requests, take, suspects), begin)
