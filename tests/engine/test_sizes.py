"""How many rows a sequence has: bounds that no forward of an engine exceeds, and usual sizes in numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import first_engines
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine import memory
from lopa_dist.engine.buckets import bucket
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.forecast import Choice
from lopa_dist.engine.lookahead import LookaheadPolicy
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.memory import MOST_ROWS
from lopa_dist.engine.sizes import longest_sequence, most_rows, tile_rows, usual_forward, usual_predictions
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.ragged import padded
from tests.engine.test_loop import BASE, random_requests

PLAIN = replace(BASE, branches=0)
VERIFIED = replace(PLAIN, drafts=6, verify="agreement")
CAUSAL = DecodeConfig(context="causal", drafts=3, max_new_tokens=18)


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        BASE,
        VERIFIED,
        replace(VERIFIED, branches=2, drafts=3, max_active_blocks=1, tau_conf=0.3),
        replace(VERIFIED, context="d2f_causal", drafts=4, max_active_blocks=2),
        replace(VERIFIED, context="blocks", drafts=2),
        replace(VERIFIED, context="vanilla", branches=1, drafts=2),
        replace(VERIFIED, context="dual", drafts=3),
        CAUSAL,
    ],
    ids=lambda config: f"{config.context}-{config.branches}-{config.drafts}-{config.max_active_blocks}",
)
def test_no_forward_of_one_sequence_exceeds_the_bound(small_model: Transformer, config: DecodeConfig) -> None:
    engine = Engine(small_model, config, Solo(), EngineConfig(1))
    forwards: list[tuple[int, int]] = []  # prompt, rows
    engine.on_step = [
        lambda engine: forwards.append((int(engine.ended.step.before.prompt[0]), engine.ended.rows.table.rows.sum()))
    ]
    requests = random_requests(1, 6, config.max_new_tokens)
    assert len(list(engine.generate(requests))) == 6
    assert len(forwards) > 6
    for prompt, rows in forwards:
        assert rows <= most_rows(config, config.max_branches, prompt)


@pytest.mark.parametrize(
    ("drafts", "branches", "source"), [("auto", 0, "auto"), ("auto", 3, "auto"), (16, 3, "masks"), (16, 0, "text")]
)
@pytest.mark.parametrize("tokens", [3, 40])
def test_nor_does_one_that_looks_ahead_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, drafts: Any, branches: int, source: str, tokens: int
) -> None:
    """Groups of masks after all drafts are more rows than a short prompt and answer have tokens."""
    widest = Choice(16, 17, int(branches > 0))
    monkeypatch.setattr(LookaheadPolicy, "propose", lambda *_: widest if drafts == "auto" else Choice(16, 1, 1))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 34)
    config = replace(
        CAUSAL, drafts=drafts, branches=branches, draft_from=source, max_new_tokens=tokens, stop_at_eos=False
    )
    model = first_engines.model_of("causal", torch.device("cpu"))
    for sequences in (1, 3):
        engine = Engine(model, config, Solo(), EngineConfig(sequences, attention="meta", graphs="always"))
        forwards: list[int] = []
        predictions: list[int] = []

        def count(engine: Engine, forwards: list[int] = forwards, predictions: list[int] = predictions) -> None:
            assert engine.ended is not None
            forwards.append(int(engine.ended.rows.table.rows.sum()))
            predictions.append(len(engine.ended.rows.heads.slots))

        engine.on_step = [count]
        requests = [replace(one, max_new_tokens=tokens) for one in first_engines.requests_of(3, 12)]
        assert len(list(engine.generate(requests))) == 3
        assert engine.workspace is not None
        pool, scratch = engine.workspace.pool, engine.workspace.plan.scratch
        assert scratch is not None
        assert max(forwards) <= scratch
        assert pool.keys.shape[1] <= pool.scratch + (bucket(scratch) or padded(scratch)), "it has not grown"
        if drafts == "auto":  # which compares times: no choice should capture a graph
            runner = engine.workspace.runner
            assert isinstance(runner, StaticRunner)
            assert max(predictions) <= runner.usual_heads


@pytest.mark.parametrize(
    ("options", "limit", "rows"),
    [
        ({}, MOST_ROWS, 4 * 100),
        ({"branches": 15}, MOST_ROWS, 4 * 16 * 3 * 4),
        ({"branches": 31, "max_active_blocks": 1}, MOST_ROWS, 4 * 32 * 2 * 4),
        ({"context": "vanilla"}, MOST_ROWS, 4 * 4 * 100),
        ({"context": "vanilla"}, 600, 600),
        ({"context": "vanilla"}, 300, 4 * 100),
        ({}, 10_000, 4 * 100),
        ({"branches": 511}, MOST_ROWS, MOST_ROWS),
        ({"branches": 511}, 9000, 9000),
    ],
    ids=str,
)
def test_usual_forward(options: dict[str, Any], limit: int, rows: int) -> None:
    config = replace(BASE, **options)
    assert usual_forward(config, config.max_branches, 4, 100, limit) == rows


@pytest.mark.parametrize(
    ("config", "branches", "predictions"),
    [
        (PLAIN, 1, 4 * 3 * 4),
        (replace(BASE, branches=15), 16, 4 * 16 * 3 * 4),
        (replace(VERIFIED, context="vanilla"), 1, 4 * (BASE.max_new_tokens + 2 * 5)),
        (CAUSAL, 1, 4 * (1 + 3 * 2)),
        (replace(CAUSAL, draft_from="text"), 1, 4 * (1 + 3)),
    ],
    ids=str,
)
def test_usual_predictions_leave_prompts_out(config: DecodeConfig, branches: int, predictions: int) -> None:
    assert usual_predictions(config, branches, 4) == predictions
    assert predictions <= usual_forward(config, branches, 4, 10_000, MOST_ROWS)


def test_ranks_that_share_out_branches_have_their_share_of_rows() -> None:
    config = replace(BASE, branches=7, block_size=8)
    assert usual_forward(config, 8, 4, 10, MOST_ROWS) == 8 * usual_forward(config, 1, 4, 10, MOST_ROWS)


def test_drafts_are_in_the_longest_sequence() -> None:
    assert longest_sequence(replace(VERIFIED, drafts=5), 10) == longest_sequence(PLAIN, 10) + 2 * 4


def test_tiles_do_not_depend_on_drafts_or_in_reproducible_texts_on_branches() -> None:
    """A tile of another height may add up in another order, and neither must change a text."""
    drafts: tuple[Any, ...] = (0, 3, 8, 16, "auto")
    sizes = [replace(CAUSAL, branches=0, drafts=number) for number in drafts]
    assert [tile_rows(config, 1, 4) for config in sizes] == [16] * 5
    assert [tile_rows(config, 1, 4, reproducible=True) for config in sizes] == [16] * 5
    windows = replace(VERIFIED, branches=3, drafts=2)
    assert tile_rows(windows, 4, 1, reproducible=True) == tile_rows(replace(windows, branches=0), 1, 1)
