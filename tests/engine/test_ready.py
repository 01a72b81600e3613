"""Requests become ready while the device computes, and begin as soon as other sequences end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.engine import loop
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.lockstep import Lockstep
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.memory import READY, ready_slots
from lopa_dist.engine.request import Request
from lopa_dist.engine.running_batch import RunningBatch, in_order
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.stop import StopLevel
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


def test_how_many_are_ready() -> None:
    assert ready_slots(64, 1000, static=True) == 64 // READY
    assert ready_slots(64, 70, static=True) == 6
    assert ready_slots(64, 64, static=True) == ready_slots(1, 1000, static=True) == 0
    assert ready_slots(64, 1000, static=False) == 0
