"""Texts that are replayed take as many forwards as their drafts leave."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replayed_drafts
from benchmarks.replayed_drafts import DRAFTS, EOS, functions, in_tokens, replay, texts_of
from lopa_dist.engine.c_drafter import CDrafter
from lopa_dist.engine.plain_drafter import PlainDrafter
from tests.tasks.data import real


def test_where_nothing_repeats_every_token_takes_a_forward() -> None:
    texts = [([n], [*range(1000 * n + 1, 1000 * n + 40), EOS]) for n in range(1, 100)]
    found = replay(CDrafter([EOS], DRAFTS, masks=False), texts, 0.05)
    assert (found["tokens_per_forward"], found["rows_per_token"]) == (1, 1)


def test_what_repeats_takes_few() -> None:
    """Of 40 tokens after the first, 9 in a forward at most. The first 64 texts, side by side, know of none before."""
    texts = [([1], [*range(2, 42), EOS])] * 2000
    found = replay(CDrafter([EOS], DRAFTS, masks=False), texts, 0.05)
    assert 6 < found["tokens_per_forward"] <= 8
    assert 1 <= found["rows_per_token"] < 1.1


def test_both_drafters_fare_alike() -> None:
    rng = random.Random(4)
    texts = [
        ([rng.randrange(1, 5)], [*(rng.randrange(1, 5) for _ in range(rng.randrange(1, 30))), EOS]) for _ in range(99)
    ]
    found: list[Any] = [replay(kind([EOS], DRAFTS, masks=False), texts, 0.1) for kind in (CDrafter, PlainDrafter)]
    assert found[0] | {"us": 0} == found[1] | {"us": 0}


def test_texts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed_drafts, "functions", lambda: functions()[:3])
    answers = tmp_path / "results.jsonl"
    answers.write_text(json.dumps({"token_ids": [5, 0]}) + "\n")
    texts = dict(texts_of(Path(real("HumanEval.jsonl.gz")).parent, [answers]))
    assert texts[str(answers)] == [([EOS], [6, 1, EOS])]
    assert [len(some) for some in texts.values()] == [1319, 164, 3, 1]
    assert in_tokens([("To be", "or not to be")]) == [([1, 2], [3, 4, 5, 2, EOS])]
