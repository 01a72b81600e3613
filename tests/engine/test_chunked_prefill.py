"""Long prompts of block-causal models, computed in chunks: the same texts, and nobody waits for a whole prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.prefix_rules import PrefixRules
from lopa_dist.engine.request import Request
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.parallel.stop import StopLevel
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import BASE
from tests.engine.test_prefix_cache import QUICK, prefixed
from tests.strategies import engine_configs

BLOCKS = replace(BASE, context="blocks")
blocks = engine_configs(BASE).filter(lambda config: config.context == "blocks")


def run(
    model: Transformer,
    config: DecodeConfig,
    requests: list[Request],
    chunk: int | None,
    comm: Communicator | None = None,
    max_sequences: int = 4,
    **options: object,
) -> dict[int, tuple[list[int], int]]:
    """Texts and forwards, by request."""
    settings = EngineConfig(max_sequences, prefill_chunk=chunk, **options)  # type: ignore[arg-type]
    engine = Engine(model, config, comm or Solo(), settings)
    return {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows of prompts and of windows of every forward, as they happen."""
    seen: list[tuple[int, int]] = []
    run_one = Runner.run

    def noted(self: Runner, prepared: Prepared) -> torch.Tensor:
        of_prompt = prepared.batch.table.branch < 0
        rows = prepared.batch.table.rows
        seen.append((int(rows[of_prompt].sum()), int(rows[~of_prompt].sum())))
        return run_one(self, prepared)

    monkeypatch.setattr(Runner, "run", noted)
    return seen


@QUICK
@given(
    config=blocks, seed=st.integers(0, 10**6), chunk=st.sampled_from([1, 4, 9]), max_rows=st.sampled_from([None, 30])
)
def test_chunks_change_no_text(
    small_model: Transformer, config: DecodeConfig, seed: int, chunk: int, max_rows: int | None
) -> None:
    requests = prefixed(seed, 8, longest=40)
    whole = run(small_model, config, requests, None, max_rows=max_rows)
    in_chunks = run(small_model, config, requests, chunk, max_rows=max_rows)
    rules = PrefixRules(config, "exact", chunk)
    for request in requests:
        chunks = rules.chunks(rules.shared(len(request.prompt), request.prefix))
        text, forwards = whole[request.index]
        assert in_chunks[request.index] == (text, forwards + chunks)


@QUICK
@given(config=blocks, seed=st.integers(0, 10**6), ranks=st.sampled_from([2, 3]))
def test_the_text_depends_on_no_batch_and_no_rank(
    small_model: Transformer, config: DecodeConfig, seed: int, ranks: int
) -> None:
    requests = prefixed(seed, 6, longest=40)
    alone: dict[int, tuple[list[int], int]] = {}
    for request in requests:
        alone |= run(small_model, config, [request], 4)
    for found in on_ranks(ranks, lambda comm: run(small_model, config, requests, 4, comm)):
        assert found == alone


@pytest.mark.parametrize("attention", ["torch", "plain", "meta"])
def test_every_attention_and_fixed_buffers(small_model: Transformer, attention: str) -> None:
    requests = prefixed(3, 6, longest=40)
    expected = run(small_model, BLOCKS, requests, 8, attention="plain")
    assert run(small_model, BLOCKS, requests, 8, attention=attention) == expected
    if attention == "meta":
        assert run(small_model, BLOCKS, requests, 8, attention=attention, graphs="always") == expected


def test_a_step_waits_for_one_chunk(small_model: Transformer, forwards: list[tuple[int, int]]) -> None:
    """Short prompts come first; two long ones are computed between their steps, and no forward is longer than that."""
    rng = np.random.default_rng(0)
    lengths = [4, 4, 80, 80, 4]
    requests = [Request(i, rng.integers(46, size=n).tolist(), 24, i) for i, n in enumerate(lengths)]
    run(small_model, replace(BLOCKS, max_new_tokens=24), requests, 16)
    of_chunks = [prompt for prompt, window in forwards if not window]
    assert of_chunks == [16] * 10
    assert all(prompt <= 16 for prompt, _ in forwards)
    first = [i for i, (prompt, window) in enumerate(forwards) if prompt and not window]
    assert all(b - a == 2 for a, b in pairwise(first))  # a step between any two


def test_where_nobody_else_runs_chunks_follow_each_other(
    small_model: Transformer, forwards: list[tuple[int, int]]
) -> None:
    run(small_model, BLOCKS, [Request(0, [1] * 40, 8, 0)], 16)
    assert [prompt for prompt, window in forwards if not window] == [16, 16, 8]


def test_a_common_prefix_is_computed_once_in_chunks(small_model: Transformer, forwards: list[tuple[int, int]]) -> None:
    """Three requests with the same first 40 tokens: three chunks in all, and the rest of each prompt beside them."""
    requests = [Request(i, [5] * 40 + [i] * 8, 8, i, None, 40) for i in range(3)]
    engine = Engine(small_model, BLOCKS, Solo(), EngineConfig(4, prefill_chunk=16))
    assert len(list(engine.generate(requests))) == 3
    assert [prompt for prompt, window in forwards if not window] == [16, 16, 8]
    assert (engine.statistics.prompt_tokens, engine.statistics.prompt_reused) == (3 * 48, 2 * 40)


def test_what_is_not_computed_in_chunks(small_model: Transformer) -> None:
    """Prompts that see themselves whole, and where nothing is kept; chunks are whole blocks, and at least one."""
    size = BASE.block_size
    assert PrefixRules(BASE, "exact", 64).chunk is None
    assert PrefixRules(replace(BASE, context="vanilla"), "exact", 64).chunk is None
    assert PrefixRules(BLOCKS, "none", 64).chunk is None
    assert PrefixRules(BLOCKS, "exact", None).chunk is None
    assert PrefixRules(BLOCKS, "exact", 1).chunk == size
    assert PrefixRules(BLOCKS, "exact", 3 * size + 1).chunk == 3 * size
    rules = PrefixRules(BLOCKS, "exact", 4 * size)
    assert [rules.chunks(n * size) for n in (1, 4, 5, 8, 9)] == [0, 0, 2, 2, 3]


def test_rows_of_the_longest_forward(small_model: Transformer, forwards: list[tuple[int, int]]) -> None:
    """A short common prefix is not cut off from a long rest, for that would be computed at once."""
    size = BASE.block_size
    rules = PrefixRules(BLOCKS, "exact", 2 * size)
    assert [rules.shared(8 * size, prefix) for prefix in (2 * size, 5 * size, 6 * size)] == [
        8 * size,
        8 * size,
        6 * size,
    ]
    assert rules.at_once(20 * size) == 4 * size
    assert rules.at_once(3 * size) == 3 * size
    assert PrefixRules(BLOCKS, "exact", None).at_once(20 * size) == 20 * size
    requests = [Request(0, [1] * (8 * size), 8, 0, None, prefix) for prefix in (0, 2 * size, 5 * size, 6 * size)]
    for request in requests:
        run(small_model, BLOCKS, [request], 2 * size)
    assert max(prompt for prompt, _ in forwards) == 2 * size


def test_reused_tokens_are_those_that_others_computed(small_model: Transformer) -> None:
    """Where few rows fit a step, a sequence may wait for it though its prompt was computed."""
    requests = [Request(i, [i + 1] * 40, 8, i) for i in range(6)]
    for max_rows in (None, 8, 20):
        engine = Engine(small_model, BLOCKS, Solo(), EngineConfig(6, prefill_chunk=16, max_rows=max_rows))
        assert len(list(engine.generate(requests))) == 6
        assert (engine.statistics.prompt_tokens, engine.statistics.prompt_reused) == (6 * 40, 0)


def test_a_chunk_that_fails_ends_all_ranks(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose chunk failed raises its error, and the others are told in the same step."""
    run_one, ranks = Runner.run, iter([False, True])

    def fails(self: Runner, prepared: Prepared) -> torch.Tensor:
        if not hasattr(self, "bad"):
            self.bad = next(ranks)  # type: ignore[attr-defined]
        if self.bad and not (prepared.batch.table.branch >= 0).any():  # type: ignore[attr-defined]
            raise RuntimeError("no memory")
        return run_one(self, prepared)

    monkeypatch.setattr(Runner, "run", fails)

    def outcome(comm: Communicator) -> str:
        try:
            run(small_model, BLOCKS, [Request(0, [1] * 40, 8, 0)], 16, comm)
        except Exception as error:
            return str(error)
        return "finished"

    assert sorted("no memory" in said for said in on_ranks(2, outcome)) == [False, True]


def test_a_rank_that_is_told_to_leave_does_not_compute_the_whole_prompt_first(small_model: Transformer) -> None:
    """The chunks of a long prompt may take minutes, and a scheduler kills what does not leave."""
    requests = prefixed(0, 1, longest=60)
    asked: list[int] = []

    def requested() -> StopLevel:
        asked.append(1)
        return StopLevel.ABORT if len(asked) > 2 else StopLevel.RUN

    engine = Engine(small_model, BLOCKS, Solo(), EngineConfig(4, prefill_chunk=4), requested=requested)
    assert list(engine.generate(requests)) == []
    assert (len(asked), engine.lockstep.level) == (3, StopLevel.ABORT)
    assert engine.batch is not None
    [entry] = {id(entry): entry for entry in engine.batch.pool.entry_of.values()}.values()
    assert 0 < entry.computed < entry.tokens
    engine = Engine(small_model, BLOCKS, Solo(), EngineConfig(4, prefill_chunk=4))
    assert len(list(engine.generate(requests))) == 1, "and without being told, it is computed"
