"""The one loop: lay out, forward, gather, select, advance, commit (DESIGN section 1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lopa_dist.decode import DecodeConfig, Lengths, State, Vocabulary, advance, layout, select, unpack
from lopa_dist.engine.commit import commit
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.request import Generation, Request
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.engine.statistics import Statistics
from lopa_dist.kernels.record_head import Sampling
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, PeerFailure
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
    """Generates for many requests at once on one replica; all ranks of its branch group run the same calls."""

    def __init__(
        self,
        model: Transformer,
        config: DecodeConfig,
        comm: Communicator,
        max_sequences: int = 16,
        attention: str = "torch",
        observe: Callable[[Statistics], None] = lambda statistics: None,
        wish: Callable[[], Wish] = lambda: Wish.RUN,
    ) -> None:
        self.observe = observe  # called after every step
        self.wish = wish  # asked in every step: whether this rank was told to stop
        self.model, self.config, self.comm = model, config, comm
        self.max_sequences, self.attention = max_sequences, attention
        self.device = model.head_weight.device
        self.statistics = Statistics()
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
        config, comm, clock = self.config, self.comm, self.statistics
        take = take or in_order(len(requests))
        longest = max(len(r.prompt) for r in requests)
        slots = min(self.max_sequences, len(requests))
        state = State.empty(config, self.vocabulary, slots, longest, self.device)
        region = 0 if config.cache == "none" else longest + config.max_new_tokens
        pool = KVPool(self.model.config, slots, region, self.model.head_weight.dtype, self.device)
        runner = Runner(self.model, pool, self.sampling, self.attention)
        admitted: dict[int, Admission] = {}
        clock.start()
        lengths = self.admit(state, runner, requests, take, admitted, state.lengths())

        while admitted:
            batch = layout(state, lengths, comm.rank, comm.size)
            prepared = runner.prepare(batch)
            clock.lap("host")
            records, error = attempt(runner, prepared, comm)
            clock.lap("forward")
            records, wish = exchange(records, Wish.FAIL if error else self.wish(), comm, error)
            clock.lap("all_gather")
            if wish == Wish.DROP:
                return
            spread = unpack(state, lengths, batch, records)
            winner, _ = select(state, spread)
            advance(state, spread, winner)
            clock.lap("decode")
            before, lengths = lengths, state.lengths()
            clock.lap("host")
            commit(pool, config, batch, before, lengths.winner, comm)
            clock.lap("commit")
            clock.masked_records += batch.masked * batch.local_branches * comm.size
            running = before.branches > 0
            filled = ((before.masked + lengths.end - before.end) - lengths.masked)[running]
            if not filled.all():
                raise FloatingPointError(
                    "the model's predictions are not numbers, so nothing can be filled; fp16 overflows in many models: "
                    "use model.dtype=bf16 or fp32"
                )
            clock.step(before.branches, lengths.winner, int(filled.sum()))
            self.observe(clock)
            yield from self.collect(state, runner, lengths, admitted)
            if wish == Wish.RUN:
                lengths = self.admit(state, runner, requests, take, admitted, lengths)
            clock.lap("host")

    def admit(
        self,
        state: State,
        runner: Runner,
        requests: Sequence[Request],
        take: Take,
        admitted: dict[int, Admission],
        lengths: Lengths,
    ) -> Lengths:
        """Fill empty slots from the queue; returns the lengths that then hold."""
        empty = [slot for slot in range(state.slots) if slot not in admitted]
        numbers = take(len(empty)) if empty else []
        if not numbers:
            return lengths
        for slot, number in zip(empty, numbers, strict=False):
            request = requests[number]
            sampling = request.sampling or self.sampling
            if sampling != self.sampling:
                runner.own[slot] = sampling
            state.admit(slot, request.prompt, request.max_new_tokens, request.key, sampling.temperature > 0)
            admitted[slot] = Admission(request, time.perf_counter())
        return state.lengths()

    def collect(
        self, state: State, runner: Runner, lengths: Lengths, admitted: dict[int, Admission]
    ) -> Iterator[Generation]:
        """Take finished requests out of their slots."""
        now = time.perf_counter()
        for slot in list(admitted):
            admission = admitted[slot]
            admission.first_step = admission.first_step or now - admission.began
            if lengths.done[slot]:
                del admitted[slot]
                runner.own.pop(slot, None)
                yield self.finish(state, slot, int(lengths.end[slot]), admission, now)

    def finish(self, state: State, slot: int, end: int, admission: Admission, now: float) -> Generation:
        """What the user gets: tokens up to the first EOS."""
        tokens = state.generated(slot, end)
        stops = [i for i, t in enumerate(tokens) if t in self.vocabulary.eos_ids]
        return Generation(
            request=admission.request,
            tokens=tokens[: stops[0]] if stops else tokens,
            finish_reason="stop" if stops else "length",
            forwards=int(state.step[slot]),
            seconds=now - admission.began,
            first_step_seconds=admission.first_step,
            filled=sum(t != self.vocabulary.mask_id for t in tokens),
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
        if comm.size == 1:
            raise
        batch = prepared.batch
        shape = (batch.local_branches, batch.masked, 3)
        return torch.zeros(shape, dtype=torch.int32, device=batch.tokens.device), error


def exchange(records: Tensor, wish: Wish, comm: Communicator, error: Exception | None) -> tuple[Tensor, Wish]:
    """All ranks' records ``[ranks, local_branches, masked, 3]``, and the gravest of their wishes, which travel along.

    So all ranks stop at the same step, whichever was asked to or failed.
    """
    if comm.size == 1:
        return records[None], wish
    told = comm.all_gather(torch.cat([records.flatten(), records.new_tensor([wish])]))
    wishes = told[:, -1].tolist()
    if error is not None:
        raise error
    if Wish.FAIL in wishes:
        raise PeerFailure(f"the forward of branch rank {wishes.index(Wish.FAIL)} failed")
    return told[:, :-1].view(comm.size, *records.shape), Wish(max(wishes))
