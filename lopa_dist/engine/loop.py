"""The one loop: lay out, forward, verify, advance, spawn, commit (docs/lopa-step.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from lopa_dist.decode import DecodeConfig, State, Vocabulary, Winner
from lopa_dist.engine import memory
from lopa_dist.engine.chains import Chains
from lopa_dist.engine.chunked_prefill import ChunkedPrefill
from lopa_dist.engine.commit import commit
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.drafters import drafter_for
from lopa_dist.engine.endless import check_ends
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.lockstep import Lockstep
from lopa_dist.engine.lookahead import LookaheadPolicy
from lopa_dist.engine.memory import Plan, kv_budget, plan_for, ready_slots, space_needed
from lopa_dist.engine.prefix_rules import PrefixRules
from lopa_dist.engine.request import Generation, Request
from lopa_dist.engine.runners import Runners
from lopa_dist.engine.running_batch import Begin, EndedStep, NextRequests, RunningBatch, Step, in_order
from lopa_dist.engine.scheduler import Scheduler
from lopa_dist.engine.sizes import share_of
from lopa_dist.engine.statistics import Statistics, device_mark
from lopa_dist.engine.stop_strings import TextOf
from lopa_dist.engine.workspace import Workspace
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.tensor_parallel import with_own_kv_heads
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.parallel.step_watch import Watched, unwatched
from lopa_dist.parallel.stop import StopLevel
from lopa_dist.ragged import Ints
from lopa_dist.rows import ForwardBatch
from lopa_dist.rules import rule_for

log = logging.getLogger("lopa_dist")


class Engine:
    """Generates for many requests at once on one replica; all ranks of the replica make the same calls.

    Args:
        model: on the device where everything runs.
        config: how masks are filled.
        comm: the branch group.
        options: how the model is run.
        on_step: a callback that reads the state. It gets the engine after every step, before the next one is queued.
            Callbacks that do not read the state belong in the list `meanwhile`: they run while the device computes,
            after the results of the last step were yielded. More callbacks may be appended to either list.
        requested: returns what this rank was asked to do (go on, stop); called once a step, and before each chunk of a
            long prompt.
        tensor: the group that the model is split over.
        watched: a context around the parts of a step, for a thread that notices when the host waits too long.
        text_of: decodes tokens, for stop strings of requests; None: these end no sequence.
    """

    def __init__(
        self,
        model: Transformer,
        config: DecodeConfig,
        comm: Communicator,
        options: EngineConfig,
        on_step: Callable[[Engine], None] | None = None,
        requested: Callable[[], StopLevel] = lambda: StopLevel.RUN,
        tensor: Communicator | None = None,
        watched: Watched = unwatched,
        text_of: TextOf | None = None,
    ) -> None:
        self.model, self.config, self.comm, self.options = model, config, comm, options
        self.watched, self.text_of = watched, text_of
        self.tensor = tensor or Solo()
        self.device = model.head_weight.device
        self.statistics = Statistics(partial(device_mark, self.device) if self.device.type == "cuda" else None)
        self.prefix_rules = PrefixRules(config, options.prefix_cache, options.prefill_chunk)
        self.rule, self.share = rule_for(config), share_of(config, comm.rank, comm.size)
        self.lockstep = Lockstep(comm, self.tensor, requested, self.statistics, config.own_parts)
        self.on_step = [on_step] if on_step else []
        self.meanwhile: list[Callable[[Engine], None]] = []
        self.ended: EndedStep | None = None  # the last step, until it was counted and its results yielded
        self.winner: Winner | None = None  # of the last step
        self.workspace: Workspace | None = None  # of the last `generate` or `prepare`
        self.batch: RunningBatch | None = None  # of the last `generate`
        self.needed: tuple[Sequence[Request], tuple[int, int, Ints]] | None = None  # the last requests and their space
        self.sampling = Sampling(config.confidence, config.temperature, config.top_p, config.top_k)
        self.take_model()

    def take_model(self) -> None:
        """Rebuild everything that depends on the model: at the start, and after its masks get another adapter."""
        config, ids = self.config, self.model.config
        self.workspace = self.batch = None
        self.runners = Runners(self.model, config, self.options, self.tensor, self.share)
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        adapted = self.device.type == "cpu" and self.model.mask_rows is not None
        self.lookahead = LookaheadPolicy(config, self.share, ids.block_drafts, clock, ids.has_mask, adapted)
        self.drafter = drafter_for(config, ids)
        self.vocabulary = Vocabulary(ids.mask_id, ids.eos_ids, ids.shift, ids.vocab_size)

    def take_over(self, earlier: Engine) -> None:
        """Take over what an earlier engine of the same model has made and learned, if it decoded alike.

        That is its K/V space with the runner's graphs, the texts that it drafts from, and what it knows of its steps'
        times. Engines of several ranks take over nothing: which rank shares branches with which may have changed.
        """
        alone = {comm.size for engine in (self, earlier) for comm in (engine.comm, engine.tensor)} == {1}
        alike = (
            earlier.model is self.model
            and replace(earlier.config, max_new_tokens=self.config.max_new_tokens) == self.config
            and replace(earlier.options, max_sequences=self.options.max_sequences) == self.options
        )
        if not (alone and alike):
            return
        self.drafter, self.lookahead = earlier.drafter, earlier.lookahead
        if earlier.config == self.config:
            self.runners, self.workspace = earlier.runners, earlier.workspace

    def take_adapter(self) -> None:
        """Take the model with another adapter for its masks; keep the counts of choices and what text drafts."""
        chosen, drafter = self.lookahead.chosen, self.drafter
        self.take_model()
        self.lookahead.chosen = chosen
        if self.drafter and drafter:
            self.drafter.inherit(drafter)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        next_requests: NextRequests | None = None,
        begin: Begin = lambda requests: None,
    ) -> Iterator[Generation]:
        """Yield finished requests, in the order in which they finish.

        Args:
            requests: all that may be handed out.
            next_requests: hands out these, or others that are no larger; None: all of them, in order.
            begin: called with requests when they begin; those that were handed out may still wait for K/V space.
        """
        if not requests:
            return
        batch = self.start(requests, next_requests or in_order(requests), begin)
        rule, share = self.rule, self.share
        batch.admit()
        while batch.running:
            with self.watched(False):  # on a GPU all of it is queued, and nothing waits
                step = batch.schedule()  # all sequences, or those that fit engine.max_rows
                if step is None:
                    break
                rows = rule.rows.layout(step.state, step.before, share, step.prefixes, step.lookahead, batch.structures)
                prepared, gathered = self.lockstep.forward(batch.runner, rows, step)  # records of all ranks
                records = rule.rows.unpack(step.state, rows, gathered)  # [S, K, W] token, probability, confidence
                winner = rule.verify(step.state, records)  # which branch wins
                window = rule.advance(step.state, winner)  # write what it brings, fill, append, finish
                rule.spawn(step.state, winner, window)  # the next step's branches and drafts
            yield from self.hand_out()  # the results of the step before, while the device works on this one
            with self.watched(True):
                if self.lockstep.level == StopLevel.RUN:
                    batch.make_ready(batch.next_ready)
                if self.lockstep.finish(batch, step, winner) == StopLevel.ABORT:  # with the step's one copy to the host
                    return
                assert prepared  # else `finish` raised
                commit(prepared, batch.pool, rule.rows, self.config, step.before, step.after, self.comm)
                batch.end()
            self.end_step(step, rows, winner)
            if self.lockstep.level == StopLevel.RUN:
                with self.watched(True):
                    batch.admit()
        yield from self.hand_out()

    def start(self, requests: Sequence[Request], next_requests: NextRequests, begin: Begin) -> RunningBatch:
        """Return a batch without running sequences, with slots and K/V space for as many requests as run at a time."""
        self.batch, self.ended = None, None
        space = self.prepare(requests)
        self.needed = None  # the next call's list may be this one, with other requests
        pool, runner, plan = space.pool, space.runner, space.plan
        slots = len(pool.base)
        state = State.empty(self.config, self.vocabulary, slots, space.longest, self.device, space.suffix)
        scheduler = Scheduler(pool, self.config, self.rule.rows, plan.row_limit, self.share, self.prefix_rules)
        lockstep = self.lockstep
        chunks = ChunkedPrefill(pool, runner, self.prefix_rules, self.rule.rows, lockstep.attempt, lockstep.must_leave)
        self.batch = RunningBatch(
            next_requests, plan.sequences, state, pool, runner, scheduler, chunks, self.lookahead, self.sampling,
            self.statistics, Chains(self.drafter, slots) if self.drafter else None, begin, self.text_of,
        )  # fmt: skip
        self.statistics.start()
        self.lookahead.start()
        return self.batch

    @torch.inference_mode()
    def prepare(self, requests: Sequence[Request]) -> Workspace:
        """Make K/V space for a generation of these requests and, on a GPU, compile and capture what its steps will run.

        `generate` calls this, too. A job calls it before, because it takes as long as many steps, and not equally long
        on all ranks. The requests must not change until they are generated. A workspace that is large enough for these
        requests is reused; without graphs, only if it was made for as many sequences at once, because idle slots cost
        time.
        """
        asked = min(self.options.max_sequences, len(requests))
        needed, self.needed = self.needed, None
        if needed is None or needed[0] is not requests:  # a million of them take seconds
            needed = requests, space_needed(requests, self.config.scope.caches_kv)
        space = self.workspace
        suits = self.runners.static or (space and asked == space.asked)
        if space and suits and space.holds(asked, *needed[1], self.options.kv_tokens):
            space.clear()
        else:
            self.workspace = space = None  # frees its K/V before new ones are made
            self.workspace = space = self.workspace_for(asked, *needed[1])
        self.needed = needed
        return space

    def workspace_for(self, asked: int, longest: int, suffix: int, needs: Ints) -> Workspace:
        """Return a new workspace for `asked` sequences at once; the other arguments are what `space_needed` returns."""
        local = with_own_kv_heads(self.model.config, self.tensor.size)
        plan = self.plan((longest, suffix, needs), asked)
        slots = plan.sequences + plan.ready
        budget = kv_budget(needs, slots, self.options.kv_tokens)
        pool = KVPool(local, slots, budget, self.model.head_weight.dtype, self.device)
        runner = self.runners.make(pool, self.sampling, plan.sequences, longest, plan.scratch)
        if self.device.type == "cuda":
            runner.warm_up()
        return Workspace(asked, longest, suffix, plan, pool, runner)

    def plan(self, requests: tuple[int, int, Ints], sequences: int) -> Plan:
        """Return how many sequences run at once, and how large a forward gets; on a GPU as many as fit in its memory.

        Args:
            requests: what `space_needed` returns for them.
            sequences: how many should run at once.

        Raises:
            TooLarge: not even one sequence fits.
        """
        free = memory.free_bytes(self.device)
        if free is None:
            return Plan(sequences, self.options.max_rows, ready=ready_slots(sequences, self.runners.static))
        free = self.lockstep.least(free, self.device)
        plan = plan_for(
            self.model.config, self.config, self.options, requests, sequences, self.model.head_weight.element_size(),
            free, self.comm.size, self.tensor.size, self.runners.static,
        )  # fmt: skip
        log.info(
            "%d sequences run at once%s, forwards have up to %d rows: %.1f GiB of the %.1f that are free",
            plan.sequences, f" (not {sequences}: too little memory)" if plan.sequences < sequences else "",
            plan.scratch, plan.bytes / 2**30, free / 2**30,
        )  # fmt: skip
        return plan

    def end_step(self, step: Step, rows: ForwardBatch, winner: Winner) -> None:
        """Keep the step for `hand_out`, which runs when the next step is under way, and call `on_step`."""
        self.statistics.lap("commit")
        self.lookahead.stepped(self.lockstep.choice, len(rows.table.hi))
        self.ended = EndedStep(step, rows, dict(self.statistics.seconds))
        self.winner = winner
        for callback in self.on_step:
            callback(self)

    def hand_out(self) -> Iterator[Generation]:
        """Count the step that ended last and learn from its drafts, yield what it finished, and call `meanwhile`."""
        self.statistics.lap("decode")
        assert self.batch
        if self.batch.chains and (expected := self.batch.chains.expected()):  # of the step that was just queued
            self.lookahead.outcomes.expect(*expected)
        ended, self.ended = self.ended, None
        if ended is not None:
            self.batch.collect()
            finished, self.batch.finished = self.batch.finished, []
            self.account(ended)
            if self.drafter:
                before = self.statistics.accepted_from.copy()
                self.drafter.learn(self.statistics)
                self.lookahead.outcomes.accepted(self.statistics.accepted_from - before)
            yield from finished
            for callback in self.meanwhile:
                callback(self)

    def account(self, ended: EndedStep) -> None:
        """Add a step to the statistics."""
        step, rows = ended.step, ended.rows
        check_ends(step.after)
        self.lookahead.count(step.before, step.after, step.masks, step.accepted_with)
        self.statistics.records += rows.heads.columns * rows.heads.branches * self.comm.size
        self.statistics.step(step.before, step.after, rows.computed, step.works, step.accepted_with, ended.seconds)
