"""An engine that scores given texts instead of generating, for jobs: a few requests at a time, from the same queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.likelihood import ROWS, Scorer
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation, Likelihood, Request
from lopa_dist.engine.running_batch import Begin, NextRequests, in_order
from lopa_dist.kernels.dispatch import by_torch, on_device
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.parallel.stop import StopLevel


class ScoringEngine(Engine):
    """Scores the texts of requests on one replica; all ranks of its tensor group make the same calls.

    A step is a batch of `options.max_sequences` requests, in as many forwards as their masks take. The engine stops
    only between steps.

    Args:
        model: on the device where everything runs.
        config: what rows see.
        options: how the model is run: `max_sequences`, and `max_rows` for the rows of a forward.
        masks: how many each text gets, if the model is a masked one.
        requested: returns what this rank was asked to do.
        tensor: the group that the model is split over.
    """

    def __init__(
        self,
        model: Transformer,
        config: DecodeConfig,
        options: EngineConfig,
        masks: int,
        requested: Callable[[], StopLevel] = lambda: StopLevel.RUN,
        tensor: Communicator | None = None,
    ) -> None:
        super().__init__(model, config, Solo(), options, requested=requested, tensor=tensor)
        self.scorer = Scorer(model, config, masks, options.max_rows or ROWS, tensor)

    def prepare(self, requests: Sequence[Request]) -> Any:
        """Do nothing: no K/V is kept, and no graph is captured."""

    def generate(
        self,
        requests: Sequence[Request],
        next_requests: NextRequests | None = None,
        begin: Begin = lambda requests: None,
    ) -> Iterator[Generation]:
        """Yield each request's result, with the likelihoods of its texts, in the order in which they are handed out."""
        take = next_requests or in_order(requests)
        self.statistics.start()
        while self.lockstep.level == StopLevel.RUN and (some := take(self.options.max_sequences)):
            begin(some)
            yield from self.score(some)
            for callback in self.meanwhile:
                callback(self)
            # the highest of the tensor ranks' levels, which hear of a signal at different moments
            level = self.lockstep.least(-int(self.lockstep.requested()), self.device)
            self.lockstep.level = StopLevel(-level)

    def score(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the results of some requests, whose texts are scored in the same forwards."""
        began = time.perf_counter()
        parts = [given for request in requests for text in request.scored for given in text]
        with by_torch(self.runners.plain), on_device(self.device):  # as in a runner's forwards
            likelihoods = iter(self.scorer.score(parts))
        seconds = time.perf_counter() - began
        self.statistics.lap("forward")
        self.statistics.admitted += len(requests)
        self.statistics.steps += 1
        self.statistics.seconds_counted = dict(self.statistics.seconds)
        generations = []
        for request in requests:
            own = [total(list(islice(likelihoods, len(text)))) for text in request.scored]
            tokens = [token for text in request.scored for given in text for token in given.answer]
            failed = any(math.isnan(text.loglikelihood) for text in own)
            generation = Generation(
                request=request,
                tokens=[] if failed else tokens,
                finish_reason="error" if failed else "scored",
                forwards=sum(text.forwards for text in own),
                seconds=seconds,
                first_step_seconds=seconds,
                filled=len(tokens),
                likelihoods=own,
            )
            generations.append(generation)
            self.statistics.forwards += generation.forwards
            self.statistics.tokens_filled += len(tokens)
        return generations


def total(parts: Sequence[Likelihood]) -> Likelihood:
    """Return the likelihood of a text whose parts follow one another."""
    sums, errors, greedy, forwards, of_parts = zip(*parts, strict=True)
    error = math.sqrt(sum(error**2 for error in errors))
    tokens = None if None in of_parts else [token for part in of_parts for token in part]
    return Likelihood(float(sum(sums)), error, all(greedy), sum(forwards), tokens)
