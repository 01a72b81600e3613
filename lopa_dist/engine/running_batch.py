"""The sequences that are running: how requests come and go, and who takes part in a step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lopa_dist.decode import FAILED, Admitted, HostState, State
from lopa_dist.decode.state import Opening
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
from lopa_dist.staging import to_host_later

FADES = 0.95  # of `RunningBatch.pace`, in a step

NextRequests = Callable[[int], list[Request]]
"""Takes a limit and returns the next requests, at most that many; empty when there are no more. All branch ranks get
the same."""
Begin = Callable[[Sequence[Request]], None]
"""Is called with requests that begin."""


@dataclass
class Admission:
    """What the host knows about a slot's request, besides its state."""

    request: Request
    chunks: int  # forwards before its first step, counted also if another request computes them
    work: Work = field(default_factory=Work)  # of its forwards that were counted so far
    began: float = 0.0  # when it was admitted
    first_step: float = 0.0  # seconds until its first step was over
    seen: int = 0  # tokens of the answer that were searched for stop strings


class Ready(NamedTuple):
    """A request that can begin at once: it has a slot, K/V space there, and a text to draft from."""

    admission: Admission
    opening: Opening


class Leaving(NamedTuple):
    """The sequences that a step has finished. Their slots hold what they held until `RunningBatch.collect`."""

    ended: dict[int, Admission]  # by slot
    answers: Callable[[], Tensor]  # returns the tokens of each from position 0 on
    host: HostState  # of all slots, after the step
    ends: Ints  # [slots] where answers end
    ways: dict[int, list[Written]]  # by slot: how the tokens were written, if the request asked
    now: float  # when the step was over


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
    seconds: dict[str, float]  # of all phases until its end


@dataclass(eq=False)
class RunningBatch:
    """The running sequences of one `Engine.generate`: their state, their K/V, and the requests that come next.

    At most `most` sequences run at a time. If there are more slots, requests become ready in these while a device
    computes, and begin there as soon as other sequences end.
    """

    next_requests: NextRequests
    most: int
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
    ready: dict[int, Ready] = field(default_factory=dict)  # by slot, in the order in which they begin
    may_stop: set[int] = field(default_factory=set)  # slots of running sequences that a stop string may end
    leaving: Leaving | None = None  # those that the last step has finished, until `collect`
    finished: list[Generation] = field(default_factory=list)  # results that were not yielded yet
    pace: float = 0.0  # the most sequences that ended in one of the last steps; it fades
    structures: Structures = field(default_factory=dict)  # cached layouts of earlier steps
    waiting: deque[Request] = field(default_factory=deque)  # handed out, but without K/V space yet

    def __post_init__(self) -> None:
        self.host = self.state.to_host()

    def admit(self) -> None:
        """Begin the next requests, as many as may run at a time and as far as there is K/V space."""
        missing = self.most - len(self.running)
        if len(self.ready) < missing:
            self.ask(missing - len(self.ready))
            if self.waiting:  # else collecting can wait until the device computes
                self.collect()  # frees slots and K/V space
                self.make_ready_in(self.idle_slots(missing - len(self.ready)))
        begun = {slot: self.ready.pop(slot) for slot in [*islice(self.ready, missing)]}
        now = time.perf_counter()
        for slot, (admission, _) in begun.items():
            request, admission.began = admission.request, now
            if request.sampling and request.sampling != self.sampling:
                self.runner.request_sampling[slot] = request.sampling
            if request.stop and self.text_of and self.state.config.stop_at_eos:
                self.may_stop.add(slot)
            self.running[slot] = admission
        if self.waiting and not self.running:
            raise RuntimeError(f"request {self.waiting[0].index} has no K/V space, although nothing else runs")
        if begun:
            self.statistics.admitted += len(begun)
            self.begin([one.admission.request for one in begun.values()])
            if self.chains:
                self.chains.begin([*begun])
            self.host = self.state.admit_all([one.opening for one in begun.values()], self.host)
            if self.state.written is not None or any(one.admission.request.token_steps for one in begun.values()):
                record_written(self.state, any(one.request.token_steps for one in self.running.values()))
        self.statistics.lap("host")

    @property
    def next_ready(self) -> int:
        """How many requests should be ready when the step that is under way ends: as many as may begin then.

        Others would only wait here, although another replica may have a free slot for them.
        """
        return min(math.ceil(self.pace), self.state.slots - self.most)

    def make_ready(self, most: int) -> None:
        """Take further requests until `most` are ready to begin, as far as there are slots and K/V space for them.

        This is done while the device computes a step, so that it waits for less between two steps.
        """
        if len(self.ready) < most:
            slots = self.idle_slots(most - len(self.ready))
            self.ask(len(slots))
            self.make_ready_in(slots)

    def idle_slots(self, most: int) -> list[int]:
        """Return the first slots in which requests may become ready, at most `most`."""
        taken = {*self.running, *self.ready, *(self.leaving.ended if self.leaving else ())}
        return [slot for slot in range(self.state.slots) if slot not in taken][:most]

    def ask(self, most: int) -> None:
        """Have `most` requests waiting, or as many as there are."""
        if (missing := most - len(self.waiting)) > 0:
            self.waiting.extend(self.next_requests(missing))

    def make_ready_in(self, slots: Iterable[int]) -> None:
        """Make waiting requests ready in idle `slots`, as far as there is K/V space for them."""
        requests: list[Request] = []
        admitted: list[Admitted] = []
        for slot in slots:
            if not self.waiting or not self.scheduler.allocate(slot, self.waiting[0]):
                break
            requests.append(one := self.waiting.popleft())
            sampled = (one.sampling or self.sampling).temperature > 0
            admitted.append(Admitted(slot, one.prompt, one.max_new_tokens, one.key, sampled, one.suffix))
        openings = self.state.openings(admitted) if admitted else []
        for request, opening in zip(requests, openings, strict=True):
            slot = opening.slot
            chunks = self.chunks.prefix_rules.chunks(int(self.pool.prefix_length[slot]))
            self.ready[slot] = ready = Ready(Admission(request, chunks), opening)
            if self.chains:
                self.chains.admit(slot, request.prompt, ready.admission.work)

    def schedule(self) -> Step | None:
        """Prefill, draft, choose how far to look ahead and which sequences run, and return that step.

        At most one chunk of a long prompt is prefilled; more if nothing else can run. None: this rank was told to leave
        meanwhile.
        """
        waiting = self.waiting_for_chunks()
        chunk = bool(waiting)
        waiting = self.compute_chunk(waiting)
        if len(waiting) == len(self.running):
            return None
        if self.chains:
            choice = self.lookahead.choice
            foresee = self.lookahead.foresees()
            self.host = self.chains.draft(self.state, self.host, choice.worth / 1000, bool(choice.text), foresee)
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

    def waiting_for_chunks(self) -> list[int]:
        """Return the slots of running sequences that cannot take part before more of their prompt is computed."""
        return [slot for slot in self.chunks.waiting() if slot in self.running]

    def compute_chunk(self, waiting: list[int]) -> list[int]:
        """Prefill one chunk of a long prompt, or more if nothing can run otherwise; return the slots that still wait.

        So a step waits for at most one chunk, however long newly admitted prompts are. `waiting` are the slots that
        wait before the call. If this rank is told to leave meanwhile, all of them may still wait.
        """
        while waiting:
            self.statistics.lap("host")
            self.chunks.compute(waiting[0])
            self.statistics.lap("forward")
            waiting = self.waiting_for_chunks()
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
        self.statistics.lap("host", waited=True)
        if winner.accepted_with is not None:
            step.accepted_with = of_branches.reshape(accepted_with.shape)
        step.after = self.host if step.slots is None else self.host.take(step.slots)
        if self.chains:
            slots = np.arange(self.state.slots) if step.slots is None else step.slots
            self.chains.received(slots, step.after.complete - step.before.complete, *of_chains)
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
        # the first steps only: without a cache, every step computes the prompts anew
        for number in np.flatnonzero(prefill & (host.step == 0)).tolist():
            computed = prefixes.source[number] == number or int(slots[number]) in self.chunks.computed
            own = works[number]
            assert own is not None
            for work in (self.statistics, own):
                work.prompt_tokens += int(host.prompt[number] + host.known[number] + host.suffix[number])
                work.prompt_reused += 0 if computed else int(prefixes.length[number])
        if self.chunks.computed:
            self.chunks.computed.difference_update(slots[prefill].tolist())
        return prefixes

    def end(self) -> None:
        """Take the sequences that a step has finished out of the batch; `collect` then returns their results."""
        now = time.perf_counter()
        for slot in np.flatnonzero(self.host.step == 1).tolist():
            if (admission := self.running.get(slot)) and not admission.first_step:
                admission.first_step = now - admission.began
        ends = np.minimum(self.host.end, self.host.limit)
        stopped = self.end_at_stops()
        ends[stopped] = self.host.complete[stopped]
        done = self.host.done.tolist()
        slots = [slot for slot in self.running if done[slot]]
        self.pace = max(len(slots), FADES * self.pace)
        if not slots:
            return
        asked = [slot for slot in slots if self.running[slot].request.token_steps]
        ways = dict(zip(asked, written(self.state, asked, ends[asked].tolist()), strict=True)) if asked else {}
        answers = to_host_later(self.state.answers_in(slots))
        ended = {slot: self.running.pop(slot) for slot in slots}
        self.may_stop.difference_update(slots)
        self.leaving = Leaving(ended, answers, self.host, ends, ways, now)

    def collect(self) -> None:
        """Add the results of the sequences that have left to `finished`, and free their slots.

        Like `make_ready`, this can be done while the device computes the next step.
        """
        leaving, self.leaving = self.leaving, None
        if leaving is None:
            return
        for slot, answer in zip(leaving.ended, leaving.answers().tolist(), strict=True):
            self.finished.append(self.generation(slot, answer, leaving))
            self.runner.request_sampling.pop(slot, None)
            self.scheduler.free(slot)
            if self.chains:
                self.chains.leave(slot)

    def end_at_stops(self) -> list[int]:
        """Finish the sequences whose complete tokens contain a stop string of their request, and return their slots."""
        if not self.may_stop:
            return []
        assert self.text_of
        complete = self.host.complete
        counts = complete - self.host.known
        done = self.host.done
        slots = [slot for slot in sorted(self.may_stop) if counts[slot] > self.running[slot].seen and not done[slot]]
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

    def generation(self, slot: int, answer: list[int], leaving: Leaving) -> Generation:
        """Return the result of a sequence that leaves, with the tokens before the first EOS; none if it failed.

        `answer` has the tokens of its slot from position 0 on.
        """
        admission, host, vocabulary = leaving.ended[slot], leaving.host, self.state.vocabulary
        failed = host.done[slot] == FAILED
        tokens = [] if failed else answer[host.known[slot] : leaving.ends[slot]]
        stops = [tokens.index(eos) for eos in vocabulary.eos_ids if eos in tokens]
        kept = tokens[: min(stops)] if stops else tokens
        ways = leaving.ways.get(slot)
        return Generation(
            request=admission.request,
            tokens=kept,
            finish_reason="error" if failed else "stop" if stops else "length",
            forwards=admission.chunks + int(host.step[slot]),
            seconds=leaving.now - admission.began,
            first_step_seconds=admission.first_step,
            filled=len(tokens) - tokens.count(vocabulary.mask_id),
            work=admission.work,
            written=ways and ways[: len(kept)],
        )


def in_order(requests: Iterable[Request]) -> NextRequests:
    """Return a function that hands out `requests` in order."""
    left = iter(requests)
    return lambda most: list(islice(left, most))
