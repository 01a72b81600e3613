"""K/V of filled tokens that are kept within the window; that the text is right is the naive engine's to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import BASE, random_requests, texts

TOKEN = replace(BASE, cache="token", block_size=32, tau_conf=1.0, max_new_tokens=64, stop_at_eos=False)
DECODINGS: list[dict[str, Any]] = [
    {"branches": 0},
    {"branches": 3},
    {"verify": "agreement", "branches": 0, "drafts": 6},
    {"verify": "agreement", "branches": 2, "drafts": 3},
]


@pytest.mark.parametrize("options", DECODINGS, ids=str)
def test_rows_are_left_out_and_come_back_with_each_complete_block(
    small_model: Transformer, options: dict[str, Any]
) -> None:
    config = replace(TOKEN, **options)
    steps = []

    def watch(engine: Engine) -> None:
        ended = engine.ended
        assert ended is not None
        steps.append((ended.before, ended.after, ended.rows))

    engine = Engine(small_model, config, Solo(), EngineConfig(2), on_step=watch)
    assert len(list(engine.generate(random_requests(3, 4, 64)))) == 4
    for before, after, rows in steps:
        window = rows.branch >= 0
        left_out = before.kept[rows.sequence[window]]
        spans = zip(rows.start[window].tolist(), rows.rows[window].tolist(), strict=True)
        drafts = np.array([rows.lo[start : start + count].max() for start, count in spans])
        span = (rows.stop - rows.begin)[rows.sequence[window]]
        assert (rows.rows[window] == span - left_out + 2 * drafts).all()
        running = (before.branches > 0) & (after.done == 0)
        completed = running & (after.complete > before.complete)
        assert (after.kept[completed] == 0).all()
        assert (after.kept >= before.kept)[running & ~completed].all()
        assert (after.kept <= after.end - after.complete + 1).all()
    assert sum(int((before.kept * before.branches).sum()) for before, _, _ in steps) > 20
    assert engine.statistics.rows == sum(int(rows.rows[rows.branch >= 0].sum()) for _, _, rows in steps)


@pytest.mark.parametrize("options", DECODINGS, ids=str)
def test_winners_tokens_reach_all_ranks(small_model: Transformer, options: dict[str, Any]) -> None:
    config, requests = replace(TOKEN, **options), random_requests(5, 5, 64)
    alone = texts(small_model, config, requests, max_sequences=1)
    assert texts(small_model, config, requests[::-1], max_sequences=3) == alone

    def work(comm: Communicator) -> dict[int, tuple[list[int], int]]:
        return texts(small_model, config, requests, comm)

    for size in (2, 3):
        assert on_ranks(size, work) == [alone] * size
