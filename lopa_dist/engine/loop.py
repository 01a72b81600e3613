"""The one loop: lay out, forward, gather, select, advance, commit (DESIGN section 1)."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode import Batch, DecodeConfig, Lead, Lengths, State, Vocabulary, advance, layout, select, unpack
from lopa_dist.engine.commit import commit
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.request import Generation, Request
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.engine.runners import Runners
from lopa_dist.engine.scheduler import Scheduler, kv_budget
from lopa_dist.engine.statistics import Statistics, device_mark
from lopa_dist.kernels.products import Choices
from lopa_dist.kernels.record_head import Sampling
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, PeerFailure, Solo
from lopa_dist.parallel.group import broken
from lopa_dist.parallel.stop import Wish

Take = Callable[[int], list[int]]
"""The numbers of the next requests, at most so many; none when there are no more. The same on all branch ranks."""


@dataclass
class Admission:
    """When a slot's request came in."""

    request: Request
    began: float
    first_step: float = 0.0


class Engine:
    """Generates for many requests at once on one replica; all ranks of it run the same calls."""

    def __init__(
        self,
        model: Transformer,
        config: DecodeConfig,
        comm: Communicator,
        options: EngineConfig | None = None,
        observe: Callable[[Engine], None] = lambda engine: None,
        wish: Callable[[], Wish] = lambda: Wish.RUN,
        tensor: Communicator | None = None,
        products: Choices | None = None,
    ) -> None:
        self.tensor = tensor or Solo()  # the group that the model is split over
        self.observe = observe  # called after every step
        self.wish = wish  # asked in every step: whether this rank was told to stop
        self.model, self.config, self.comm, self.options = model, config, comm, options or EngineConfig()
        self.device = model.head_weight.device
        self.runners = Runners(model, config, self.options, self.tensor, products, comm.size)
        self.statistics = Statistics(device_mark if self.device.type == "cuda" else None)
        self.scores: Tensor | None = None  # [S, K] of the last step's branches
        self.taken = 0  # requests admitted so far
        ids = model.config
        self.vocabulary = Vocabulary(ids.mask_id, ids.eos_ids, ids.shift)
        self.sampling = Sampling(config.confidence, config.temperature, config.top_p, config.top_k)

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], take: Take | None = None) -> Iterator[Generation]:
        """Finished requests, in the order in which they finish.

        `take` hands out positions in `requests`; without it, all of them in order.
        """
        if not requests:
            return
        config, comm, tensor, clock = self.config, self.comm, self.tensor, self.statistics
        vars(self).pop("flight", None)  # with its K/V, before there are others
        self.flight = flight = Flight(self, requests, take or in_order(len(requests)))
        pool, runner, schedule = flight.pool, flight.runner, flight.scheduler
        clock.start()
        lengths = flight.admit(flight.state.lengths())

        while flight.admitted:
            slots = schedule.choose(flight.state, lengths)
            state = flight.state if slots is None else flight.state.take(slots)
            before = lengths if slots is None else lengths.take(slots)
            batch = layout(state, before, comm.rank, comm.size, flight.lead(slots, before))
            prepared = runner.prepare(batch, slots)
            clock.lap("host")
            records, error = attempt(runner, prepared, comm)
            clock.lap("forward")
            wish = Wish.FAIL if error else self.wish()
            records, wishes = exchange(records, wish, comm, tensor)
            if error:
                raise error
            clock.lap("all_gather")
            spread = unpack(state, batch, records)
            winner, self.scores = select(state, spread)
            advance(state, spread, winner)
            if slots is not None:
                flight.state.put(slots, state)
            clock.lap("decode")
            lengths, told = flight.state.lengths_and(wishes)
            clock.lap("host", waited=True)
            wish = gravest(wish, told)
            if wish == Wish.DROP:
                return
            after = lengths if slots is None else lengths.take(slots)
            commit(prepared, pool, config, before, after.winner, comm)
            clock.lap("commit")
            self.account(batch, before, after)
            self.observe(self)
            yield from flight.collect(lengths)
            if wish == Wish.RUN:
                lengths = flight.admit(lengths)
            clock.lap("host")

    def account(self, batch: Batch, before: Lengths, after: Lengths) -> None:
        """Count the step, and see that it got somewhere."""
        running = before.branches > 0
        filled = ((before.masked + after.end - before.end) - after.masked)[running]
        if not filled.all():
            raise FloatingPointError(
                "the model's predictions are not numbers, so nothing can be filled; fp16 overflows in many models: "
                "use model.dtype=bf16 or fp32"
            )
        self.statistics.masked_records += batch.masked * batch.local_branches * self.comm.size
        self.statistics.step(before.branches, after.winner, int(filled.sum()))


class Flight:
    """The sequences in flight of one `generate`: their state, their K/V, and how requests come and go."""

    def __init__(self, engine: Engine, requests: Sequence[Request], take: Take) -> None:
        config, options, model, device = engine.config, engine.options, engine.model, engine.device
        slots = min(options.max_sequences, len(requests))
        cached = config.cache != "none"
        longest = max(len(r.prompt) for r in requests)
        # a proxy: in a cycle with its engine, the K/V would stay until Python collects its garbage
        self.engine: Engine = weakref.proxy(engine)
        self.requests, self.take = requests, take
        self.state = State.empty(config, engine.vocabulary, slots, longest, device)
        budget = kv_budget(requests, slots, options.kv_tokens) if cached else 0
        local = replace(model.config, kv_heads=model.config.kv_heads // engine.tensor.size)
        self.pool = KVPool(local, slots, budget, model.head_weight.dtype, device)
        self.runner = engine.runners.make(self.pool, engine.sampling, slots, longest)
        self.scheduler = Scheduler(self.pool, config, options.row_limit, engine.comm.size, options.prefix_cache)
        self.admitted: dict[int, Admission] = {}
        self.waiting: deque[int] = deque()  # taken from the queue, but without K/V space yet

    def admit(self, lengths: Lengths) -> Lengths:
        """Fill empty slots from the queue; returns the lengths that then hold."""
        empty = [slot for slot in range(self.state.slots) if slot not in self.admitted]
        missing = len(empty) - len(self.waiting)
        self.waiting.extend(self.take(missing) if missing > 0 else [])
        came = False
        for slot in empty:
            if not self.waiting or not self.scheduler.fits(slot, self.requests[self.waiting[0]]):
                break
            came = True
            self.engine.taken += 1
            request = self.requests[self.waiting.popleft()]
            sampling = request.sampling or self.engine.sampling
            if sampling != self.engine.sampling:
                self.runner.own[slot] = sampling
            self.state.admit(slot, request.prompt, request.max_new_tokens, request.key, sampling.temperature > 0)
            self.admitted[slot] = Admission(request, time.perf_counter())
        return self.state.lengths() if came else lengths

    def lead(self, slots: NDArray[np.int64] | None, lengths: Lengths) -> Lead | None:
        """What the prompts that a step prefills share; null where it prefills none."""
        prefill = (lengths.committed < 0) & (lengths.branches > 0)
        if not prefill.any():
            return None
        lead = self.pool.lead(np.arange(self.state.slots) if slots is None else slots, prefill)
        own = lead.source == np.arange(len(prefill))
        counts = self.engine.statistics
        counts.prompt_tokens += int((lengths.prompt + lengths.known)[prefill].sum())
        counts.prompt_reused += int(lead.tokens[prefill & ~own].sum())
        return lead

    def collect(self, lengths: Lengths) -> Iterator[Generation]:
        """Take finished requests out of their slots."""
        now = time.perf_counter()
        for admission in self.admitted.values():
            admission.first_step = admission.first_step or now - admission.began
        over = [slot for slot in self.admitted if lengths.done[slot]]
        answers = self.state.generated(over, lengths.end[over].tolist()) if over else []
        for slot, tokens in zip(over, answers, strict=True):
            self.runner.own.pop(slot, None)
            self.scheduler.leave(slot)
            yield self.finish(self.admitted.pop(slot), tokens, int(lengths.step[slot]), now)

    def finish(self, admission: Admission, tokens: list[int], forwards: int, now: float) -> Generation:
        """What the user gets: tokens up to the first EOS."""
        vocabulary = self.engine.vocabulary
        stops = [i for i, t in enumerate(tokens) if t in vocabulary.eos_ids]
        return Generation(
            request=admission.request,
            tokens=tokens[: stops[0]] if stops else tokens,
            finish_reason="stop" if stops else "length",
            forwards=forwards,
            seconds=now - admission.began,
            first_step_seconds=admission.first_step,
            filled=sum(t != vocabulary.mask_id for t in tokens),
        )


def in_order(total: int) -> Take:
    """Hands out 0 to total - 1."""
    numbers = iter(range(total))
    return lambda most: list(islice(numbers, most))


def attempt(runner: Runner, prepared: Prepared, comm: Communicator) -> tuple[Tensor, Exception | None]:
    """The forward's records, or its exception and empty records in their place."""
    try:
        return runner.forward(prepared), None
    except Exception as error:
        if comm.size == 1 or broken(error):  # a lost collective is for the others to notice themselves
            raise
        batch = prepared.batch
        shape = (batch.local_branches, batch.masked, 3)
        return torch.zeros(shape, dtype=torch.int32, device=batch.tokens.device), error


def exchange(records: Tensor, wish: Wish, comm: Communicator, tensor: Communicator) -> tuple[Tensor, Tensor]:
    """All branch ranks' records ``[ranks, local_branches, masked, 3]``, and their wishes ``[ranks]``; on the device.

    So all ranks stop at the same step, whichever was asked to or failed. Of a tensor group, whose ranks hear of a
    signal at different moments, the gravest wish travels. A rank that is alone tells nobody: its ``[0]``.
    """
    if comm.size == tensor.size == 1:
        return records[None], records.new_empty(0)
    own = records.new_full((1,), int(wish))  # new_tensor would copy from the host, and wait for the forward
    if tensor.size > 1:
        own = tensor.all_gather(own).amax(0)
    if comm.size == 1:
        return records[None], own
    told = comm.all_gather(torch.cat([records.flatten(), own]))
    return told[:, :-1].view(comm.size, *records.shape), told[:, -1]


def gravest(wish: Wish, told: NDArray[np.int64]) -> Wish:
    """What all ranks do: the gravest of the wishes that the groups were `told`, or this rank's where it is alone.

    Raises:
        PeerFailure: a rank's forward failed.
    """
    wishes = told.tolist()
    if Wish.FAIL in wishes:
        raise PeerFailure(f"the forward of branch rank {wishes.index(Wish.FAIL)} failed")
    return Wish(max(wishes, default=wish))
