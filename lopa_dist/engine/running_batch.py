"""The sequences that are running: how requests come and go, and who takes part in a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lopa_dist.decode import FAILED, Admitted, HostState, State
from lopa_dist.decode.winner import Winner
from lopa_dist.decode.written import Written, record_written, written
from lopa_dist.engine.chains import Chains
from lopa_dist.engine.chunked_prefill import ChunkedPrefill
from lopa_dist.engine.forecast import Choice
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.lookahead import LookaheadPolicy
from lopa_dist.engine.request import Generation, Request
from lopa_dist.engine.runner import Runner
from lopa_dist.engine.scheduler import Scheduler
from lopa_dist.engine.statistics import Statistics
from lopa_dist.engine.stop_strings import TextOf, has_stop
from lopa_dist.engine.work import Work
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.ragged import Ints
from lopa_dist.rows import ForwardBatch, SharedPrefixes
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.row_maker import Structures

NextRequests = Callable[[int], list[Request]]
"""Takes a limit and returns the next requests, at most that many; empty when there are no more. All branch ranks get
the same."""
Begin = Callable[[Sequence[Request]], None]
"""Is called with requests that begin."""


@dataclass
class Admission:
    """What the host knows about a slot's request, besides its state."""

    request: Request
    began: float  # when it was admitted
    chunks: int  # forwards before its first step, counted also if another request computes them
    first_step: float = 0.0  # seconds until its first step was over
    seen: int = 0  # tokens of the answer that were searched for stop strings
    work: Work = field(default_factory=Work)  # of its forwards that were counted so far


@dataclass
class Step:
    """The sequences that take part in a step."""

    slots: Ints | None  # their slots; None: all
    state: State  # of these slots; the step changes it
    before: HostState  # what the host knew of them before it
    prefixes: SharedPrefixes | None  # what the prompts that it prefills share; None: it prefills none
    after: HostState  # what the host knows of them after it; until then the same as `before`
    lookahead: Lookahead  # of a causal model
    proposal: Choice  # this rank's proposal for the next step's lookahead
    works: list[Work | None]  # of these slots' requests
    masks: Ints | None = None  # [S] places of each chain for which masks had predicted a token; None: all drafts
    accepted_with: Ints | None = None  # [S, K] as in `Winner`, once the step is over


class EndedStep(NamedTuple):
    """What is left of a step when the next one begins."""

    step: Step
    rows: ForwardBatch
    finished: list[Generation]
    seconds: dict[str, float]  # of all phases until its end


@dataclass(eq=False)
class RunningBatch:
    """The running sequences of one `Engine.generate`: their state, their K/V, and the requests that wait for a slot."""

    next_requests: NextRequests
    state: State  # made for the largest requests that may come, like the four fields after it
    pool: KVPool
    runner: Runner
    scheduler: Scheduler
    chunks: ChunkedPrefill
    lookahead: LookaheadPolicy  # how far causal models look ahead
    sampling: Sampling  # how tokens are chosen for requests that do not say
    statistics: Statistics  # counts the times of phases, and prompts
    chains: Chains | None  # of a causal model whose drafts the host chooses
    begin: Begin  # called with requests that are admitted
    text_of: TextOf | None  # decodes tokens, to find stop strings; None: they end no sequence
    running: dict[int, Admission] = field(default_factory=dict)  # by slot
    structures: Structures = field(default_factory=dict)  # cached layouts of earlier steps
    waiting: deque[Request] = field(default_factory=deque)  # handed out, but without K/V space yet

    def __post_init__(self) -> None:
        self.host = self.state.to_host()

    def admit(self) -> None:
        """Fill empty slots with the next requests, as far as there is K/V space."""
        empty = [slot for slot in range(self.state.slots) if slot not in self.running]
        missing = len(empty) - len(self.waiting)
        self.waiting.extend(self.next_requests(missing) if missing > 0 else [])
        admitted: list[Admitted] = []
        begun: list[Request] = []
        for slot in empty:
            if not self.waiting or not self.scheduler.allocate(slot, self.waiting[0]):
                break
            begun.append(request := self.waiting.popleft())
            sampling = request.sampling or self.sampling
            if sampling != self.sampling:
                self.runner.request_sampling[slot] = sampling
            sampled = sampling.temperature > 0
            limit = request.max_new_tokens
            admitted.append(Admitted(slot, request.prompt, limit, request.key, sampled, request.suffix))
            chunks = self.chunks.prefix_rules.chunks(int(self.pool.prefix_length[slot]))
            self.running[slot] = Admission(request, time.perf_counter(), chunks)
            if self.chains:
                self.chains.admit(slot, request.prompt, self.running[slot].work)
            self.statistics.admitted += 1
        if self.waiting and not self.running:
            raise RuntimeError(f"request {self.waiting[0].index} has no K/V space, although nothing else runs")
        if admitted:
            self.begin(begun)
            self.host = self.state.admit_all(admitted, self.host)
            record_written(self.state, any(admission.request.token_steps for admission in self.running.values()))
        self.statistics.lap("host")

    def schedule(self) -> Step | None:
        """Prefill, draft, choose how far to look ahead and which sequences run, and return that step.

        At most one chunk of a long prompt is prefilled; more if nothing else can run. None: this rank was told to leave
        meanwhile.
        """
        waiting = self.chunks.waiting()
        chunk = bool(waiting)
        waiting = self.compute_chunk(waiting)
        if len(waiting) == len(self.running):
            return None
        if self.chains:
            choice = self.lookahead.choice
            foresee = self.lookahead.foresees()
            self.host = self.chains.draft(self.state, self.host, choice.worth / 1000, bool(choice.text), foresee)
            if self.chains.expected is not None:
                self.lookahead.outcomes.expect(*self.chains.expected)
        ahead = self.lookahead.lookahead(self.chains.ends if self.chains else None)
        if ahead.most_branches is not None:
            self.host = self.state.limit_branches(self.host, ahead.most_branches)
        slots = self.scheduler.choose(self.state, self.host, ahead, waiting)
        state, before = self.state, self.host
        if slots is not None:
            ahead, before, state = ahead.take(slots), before.take(slots), state.take(slots)
        in_step = range(self.state.slots) if slots is None else slots.tolist()
        works = [self.running[slot].work if slot in self.running else None for slot in in_step]
        prefixes = self.shared_prefixes(slots, before, works)
        self.lookahead.begin(ahead, before, chunk)
        masks = None
        if self.chains:
            masks = self.chains.predicted.copy() if slots is None else self.chains.predicted[slots]
        return Step(slots, state, before, prefixes, before, ahead, self.lookahead.propose(before), works, masks)

    def compute_chunk(self, waiting: list[int]) -> list[int]:
        """Prefill one chunk of a long prompt, or more if nothing can run otherwise; return the slots that still wait.

        So a step waits for at most one chunk, however long newly admitted prompts are. `waiting` are the slots that
        wait before the call. If this rank is told to leave meanwhile, all of them may still wait.
        """
        while waiting:
            self.statistics.lap("host")
            self.chunks.compute(waiting[0])
            self.statistics.lap("forward")
            waiting = self.chunks.waiting()
            if len(waiting) < len(self.running) or self.chunks.must_leave():
                break
        return waiting

    def to_host(self, step: Step, winner: Winner, extra: Tensor) -> Ints:
        """Copy the state to the host when a step is over, and return `extra` ``[n]`` from the same transfer."""
        if step.slots is not None:
            self.state.put(step.slots, step.state)
        accepted_with = extra.new_empty(0) if winner.accepted_with is None else winner.accepted_with
        to_send = self.chains.to_send(winner) if self.chains else ()
        self.host, (own, of_branches, *of_chains) = self.state.to_host_with(extra, accepted_with.view(-1), *to_send)
        if winner.accepted_with is not None:
            step.accepted_with = of_branches.reshape(accepted_with.shape)
        step.after = self.host if step.slots is None else self.host.take(step.slots)
        if self.chains:
            slots = np.arange(self.state.slots) if step.slots is None else step.slots
            self.chains.received(slots, step.after.complete - step.before.complete, *of_chains)
        self.statistics.lap("host", waited=True)
        return own

    def shared_prefixes(
        self, slots: Ints | None, host: HostState, works: Sequence[Work | None]
    ) -> SharedPrefixes | None:
        """Return what the prompts that a step prefills share; None if it prefills none."""
        prefill = host.waits_for_prefill
        if not prefill.any():
            return None
        slots = np.arange(self.state.slots) if slots is None else slots
        prefixes = self.pool.shared_prefixes(slots, prefill)
        computed = prefixes.source == np.arange(len(prefill))
        if self.chunks.computed:
            computed |= np.isin(slots, list(self.chunks.computed))
            self.chunks.computed.difference_update(slots[prefill].tolist())
        # the first steps only: without a cache, every step computes the prompts anew
        first = np.flatnonzero(prefill & (host.step == 0))
        tokens = (host.prompt + host.known + host.suffix)[first]
        reused = np.where(computed, 0, prefixes.length)[first]
        for number, prompt_tokens, prompt_reused in zip(*(x.tolist() for x in (first, tokens, reused)), strict=True):
            own = works[number]
            assert own is not None
            for work in (self.statistics, own):
                work.prompt_tokens += prompt_tokens
                work.prompt_reused += prompt_reused
        return prefixes

    def collect(self) -> list[Generation]:
        """Return the results of finished requests, and free their slots."""
        now = time.perf_counter()
        for slot in np.flatnonzero(self.host.step == 1).tolist():
            if (admission := self.running.get(slot)) and not admission.first_step:
                admission.first_step = now - admission.began
        ends = np.minimum(self.host.end, self.host.limit)
        stopped = self.end_at_stops()
        ends[stopped] = self.host.complete[stopped]
        done = self.host.done.tolist()
        finished = [slot for slot in self.running if done[slot]]
        answers = self.state.generated(finished, self.host.known, ends) if finished else []
        asked = [slot for slot in finished if self.running[slot].request.token_steps]
        ways = dict(zip(asked, written(self.state, asked, ends[asked].tolist()), strict=True)) if asked else {}
        generations = []
        for slot, tokens in zip(finished, answers, strict=True):
            generations.append(self.generation(slot, tokens, ways.get(slot), now))
            self.runner.request_sampling.pop(slot, None)
            self.scheduler.free(slot)
            if self.chains:
                self.chains.leave(slot)
            del self.running[slot]
        return generations

    def end_at_stops(self) -> list[int]:
        """Finish the sequences whose complete tokens contain a stop string of their request, and return their slots."""
        if self.text_of is None or not self.state.config.stop_at_eos:
            return []
        complete = self.host.complete
        counts = complete - self.host.known
        slots = [
            slot for slot, admission in self.running.items()
            if admission.request.stop and counts[slot] > admission.seen and not self.host.done[slot]
        ]  # fmt: skip
        texts = self.state.generated(slots, self.host.known, complete) if slots else []
        stopped = []
        for slot, tokens in zip(slots, texts, strict=True):
            admission = self.running[slot]
            if has_stop(self.text_of, tokens, admission.seen, admission.request.stop):
                stopped.append(slot)
            admission.seen = len(tokens)
        if stopped:
            self.host = self.state.finish(stopped, self.host)
        return stopped

    def generation(self, slot: int, tokens: list[int], ways: list[Written] | None, now: float) -> Generation:
        """Return the result of the sequence in a slot, with the tokens before the first EOS; none if it failed."""
        admission, vocabulary = self.running[slot], self.state.vocabulary
        failed = self.host.done[slot] == FAILED
        tokens = [] if failed else tokens
        stops = [tokens.index(eos) for eos in vocabulary.eos_ids if eos in tokens]
        answer = tokens[: min(stops)] if stops else tokens
        return Generation(
            request=admission.request,
            tokens=answer,
            finish_reason="error" if failed else "stop" if stops else "length",
            forwards=admission.chunks + int(self.host.step[slot]),
            seconds=now - admission.began,
            first_step_seconds=admission.first_step,
            filled=len(tokens) - tokens.count(vocabulary.mask_id),
            work=admission.work,
            written=ways and ways[: len(answer)],
        )


def in_order(requests: Iterable[Request]) -> NextRequests:
    """Return a function that hands out `requests` in order."""
    left = iter(requests)
    return lambda most: list(islice(left, most))
