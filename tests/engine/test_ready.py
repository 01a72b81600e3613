"""Requests become ready while the device computes, and begin as soon as other sequences end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.engine import loop
from lopa_dist.engine.chains import Chains
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.lockstep import Lockstep
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.memory import READY, ready_slots
from lopa_dist.engine.outcomes import Outcomes
from lopa_dist.engine.request import Request
from lopa_dist.engine.running_batch import RunningBatch, in_order
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, PeerFailure, Solo
from lopa_dist.parallel.stop import StopLevel
from tests.engine.ranks import on_ranks
from tests.engine.test_causal import causal
from tests.engine.test_loop import BASE, random_requests, texts

SEQUENCES = 2 * READY  # of which two more are ready
STATIC = EngineConfig(SEQUENCES, attention="meta", graphs="always")
MASKED, CAUSAL = replace(BASE, branches=2), causal(drafts=3, draft_from="text")


class Events:
    """What happens in an engine, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for place, name in ((Lockstep, "forward"), (RunningBatch, "to_host")):
            self.note(monkeypatch, place, name)

    def note(self, monkeypatch: pytest.MonkeyPatch, place: type, name: str) -> None:
        function = getattr(place, name)

        def noted(*given: Any) -> Any:
            self.events.append(name)
            return function(*given)

        monkeypatch.setattr(place, name, noted)

    def in_steps(self) -> list[str]:
        """What happened after each event while the device computed."""
        found, computing = [], False
        for event in self.events:
            computing = event == "forward" or (computing and event != "to_host")
            found += [event] if computing and event != "forward" else []
        return found


@pytest.mark.parametrize("config", [MASKED, CAUSAL], ids=["masked", "causal"])
def test_requests_are_taken_and_answers_collected_while_the_device_computes(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    requests = random_requests(1, 60, config.max_new_tokens)
    wanted = {index: tokens for index, (tokens, _) in texts(small_model, config, requests).items()}
    noted, begun, most = Events(monkeypatch), [], []
    given_out, total = in_order(requests), 0

    def take(asked: int) -> list[Request]:
        nonlocal total
        some = given_out(asked)
        total += len(some)
        noted.events += ["take"] * len(some)
        return some

    def look(engine: Engine) -> None:
        assert engine.batch
        most.append(len(engine.batch.running))
        assert not engine.batch.running.keys() & engine.batch.ready.keys()

    engine = Engine(small_model, config, Solo(), STATIC, look)
    collected = []
    for one in engine.generate(requests, take, lambda some: begun.extend(one.index for one in some)):
        noted.events.append("yield")
        collected.append(one)
        assert one.request.index in begun
        assert total <= len(begun) + SEQUENCES // READY
    assert {one.request.index: one.tokens for one in collected} == wanted
    assert begun == [*range(60)], "in their order, each once"
    assert max(most) <= SEQUENCES
    in_steps = noted.in_steps()
    assert in_steps.count("yield") >= 60 - SEQUENCES
    # not those of the first step, nor those that began because more ended at once than were ready
    assert in_steps.count("take") > 30
    assert engine.batch
    assert engine.batch.state.slots == SEQUENCES + SEQUENCES // READY


@pytest.mark.parametrize("options", [STATIC, EngineConfig(SEQUENCES)], ids=["static", "eager"])
@pytest.mark.parametrize("config", [MASKED, CAUSAL], ids=["masked", "causal"])
def test_no_device_waits_for_answers_when_no_request_waits(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, config: Any, options: EngineConfig
) -> None:
    """Answers are collected between two steps only to make room for another request."""
    noted, admitting = Events(monkeypatch), [False]
    admit, collect, of_answers = RunningBatch.admit, RunningBatch.collect, RunningBatch.generation

    def admitted(batch: RunningBatch) -> None:
        admitting[0] = True
        admit(batch)
        admitting[0] = False

    def collected(batch: RunningBatch) -> None:
        assert batch.waiting or not admitting[0]
        collect(batch)

    def answered(batch: RunningBatch, *given: Any) -> Any:
        noted.events.append("answer")
        return of_answers(batch, *given)

    for name, function in (("admit", admitted), ("collect", collected), ("generation", answered)):
        monkeypatch.setattr(RunningBatch, name, function)
    for count in (SEQUENCES, 40):
        noted.events.clear()
        requests = random_requests(3, count, config.max_new_tokens)
        found = {one.request.index for one in Engine(small_model, config, Solo(), options).generate(requests)}
        assert len(found) == count == noted.events.count("answer")
        if count == SEQUENCES:
            between = noted.events.count("answer") - noted.in_steps().count("answer")
            after_all = len(noted.events) - 1 - max(i for i, event in enumerate(noted.events) if event == "to_host")
            assert between == after_all, "those of the last step, after which there is no other"


@given(
    seed=st.integers(0, 10**6), sequences=st.integers(1, 12), ready=st.integers(0, 9), is_causal=st.booleans(),
    options=st.sampled_from([{}, {"max_rows": 40}, {"kv_tokens": 90}, {"prefill_chunk": 4}, {"prefix_cache": "none"}]),
)  # fmt: skip
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_texts_however_many_are_ready(
    small_model: Transformer, seed: int, sequences: int, ready: int, is_causal: bool, options: dict[str, Any]
) -> None:
    """With stop strings, ways of sampling of their own, and the ways in which tokens were written."""
    config = CAUSAL if is_causal else MASKED
    kinds = [None, Sampling(temperature=0.8), Sampling(temperature=1.3, top_k=5)]
    requests = [
        replace(one, sampling=kinds[one.index % 3], stop=("7",) * (one.index % 4 == 1), token_steps=one.index % 5 == 2)
        for one in random_requests(seed, 20, config.max_new_tokens, config)
    ]

    def run(options: EngineConfig) -> dict[int, Any]:
        engine = Engine(small_model, config, Solo(), options, text_of=lambda tokens: " ".join(map(str, tokens)))
        done = [*engine.generate(requests)]
        assert len(done) == len(requests)
        return {
            one.request.index: (
                one.tokens, one.finish_reason, one.filled,
                one.written and [is_causal or (written.step, written.way) for written in one.written],
            ) for one in done
        }  # fmt: skip

    wanted = run(EngineConfig(sequences))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "ready_slots", lambda *_: ready)
        assert run(EngineConfig(sequences, attention="meta", graphs="always", **options)) == wanted
        assert run(EngineConfig(sequences, **options)) == wanted


def test_nothing_more_is_taken_after_a_stop(small_model: Transformer) -> None:
    requests, begun, level, told = random_requests(2, 60, BASE.max_new_tokens), [], StopLevel.RUN, 0
    given_out, taken, late = in_order(requests), 0, set[int]()

    def take(asked: int) -> list[Request]:
        nonlocal taken
        some = given_out(asked)
        taken += len(some)
        late.update({engine.statistics.steps} if level else ())
        return some

    engine = Engine(small_model, MASKED, Solo(), STATIC, requested=lambda: level)
    ended = []
    for one in engine.generate(requests, take, lambda some: begun.extend(one.index for one in some)):
        ended.append(one.request.index)
        if engine.statistics.steps >= 12 and not level:
            level, told = StopLevel.DRAIN, engine.statistics.steps
    assert sorted(ended) == sorted(begun)
    assert 0 < len(ended) < 60
    assert late <= {told, told + 1}, "a step that was under way does not know of it"
    assert taken > len(begun), "some were ready, and did not begin"


@pytest.mark.parametrize("bad", [0, 1])
def test_ranks_whose_requests_come_together_end_together(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """Requests are broadcast while a step is under way, whose forward may have failed on one rank."""
    monkeypatch.setattr(loop, "ready_slots", lambda *_: 2)
    requests = random_requests(1, 20, BASE.max_new_tokens)

    def work(comm: Communicator) -> type[BaseException] | None:
        given_out, taken = in_order(requests), []

        def take(most: int) -> list[Request]:
            some = given_out(most)
            assert comm.broadcast(torch.tensor([len(some)]), 0, counted=False) == len(some)
            taken.append(engine.statistics.steps)
            return some

        def fail(engine: Engine) -> None:
            if comm.rank == bad and len(taken) == 3:
                assert engine.batch
                engine.batch.runner.forward = lambda *_: torch.zeros(1)[[2]]  # type: ignore[method-assign]

        engine = Engine(small_model, MASKED, comm, EngineConfig(3), fail)
        try:
            list(engine.generate(requests, take))
        except (IndexError, PeerFailure) as error:
            return type(error)
        return None

    wanted = [PeerFailure, PeerFailure]
    wanted[bad] = IndexError
    assert on_ranks(2, work) == wanted


@pytest.mark.parametrize("drafts", [3, "auto"])
def test_what_text_should_bring_is_counted_once(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, drafts: Any
) -> None:
    drafted, counted = 0, 0
    draft, expect = Chains.draft, Outcomes.expect

    def noted(self: Chains, *given: Any, **named: Any) -> Any:
        nonlocal drafted
        made = draft(self, *given, **named)
        if self.with_text is not None:
            drafted += int((self.with_text[1][self.with_text[0].slots] == 0).sum())
        return made

    def expected(self: Outcomes, ends: Any, *given: Any) -> None:
        nonlocal counted
        counted += len(ends)
        expect(self, ends, *given)

    monkeypatch.setattr(Chains, "draft", noted)
    monkeypatch.setattr(Outcomes, "expect", expected)
    engine = Engine(small_model, causal(drafts=drafts), Solo(), EngineConfig(3))
    for seed in range(2):
        assert len(list(engine.generate(random_requests(seed, 10, 24)))) == 10
    assert counted == drafted > 0


def test_no_more_are_ready_than_may_begin(small_model: Transformer) -> None:
    """Others would wait here, although another replica may have a free slot for them."""
    ready: list[int] = []

    def look(engine: Engine) -> None:
        assert engine.batch
        ready.append(len(engine.batch.ready))
        assert len(engine.batch.ready) <= engine.batch.next_ready <= SEQUENCES // READY

    requests = [replace(one, max_new_tokens=18) for one in random_requests(1, 40, 18)]
    engine = Engine(small_model, replace(MASKED, stop_at_eos=False), Solo(), STATIC, look)
    assert len(list(engine.generate(requests))) == 40
    assert ready[0] == 0, "none has ended yet"
    assert max(ready) == SEQUENCES // READY


def test_room_for_those_that_are_ready() -> None:
    assert ready_slots(64, static=True) == 64 // READY
    assert ready_slots(1, static=True) == ready_slots(64, static=False) == 0
