"""A structure that was kept gives the batch that a new one gives."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig
from lopa_dist.models.transformer import Transformer
from lopa_dist.rows import ForwardBatch, window_rows
from lopa_dist.rows.forward_batch import Heads
from lopa_dist.rows.window_rows import FEW, WindowRows
from tests.engine.test_loop import BASE, random_requests, texts
from tests.strategies import engine_configs

layout = WindowRows.layout


def assert_same(found: Any, wanted: Any) -> None:
    """Equal values in all fields, whatever they are made of."""
    assert type(found) is type(wanted)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(found, np.ndarray):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)
    elif isinstance(found, tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(found, partial):  # makes what the attribute below holds
        pass
    elif hasattr(found, "__dataclass_fields__"):
        if isinstance(found, Heads):
            assert_same(found.predictions, wanted.predictions)
        for field in fields(found):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    else:
        assert found == wanted


class Both:
    """Lays every forward out twice, with the structures that were kept and without any."""

    def __init__(self) -> None:
        self.new = self.kept = 0

    def __call__(self, rows: WindowRows, state: Any, host: Any, *rest: Any) -> ForwardBatch:
        *others, structures = rest
        before, anew = len(structures), dict[Any, Any]()
        batch = layout(rows, state, host, *rest)
        wanted = layout(rows, state, host, *others, anew)
        self.kept += bool(anew) and len(structures) == before
        self.new += len(structures) > before
        running = host.branches > 0  # nobody reads the bounds of the others
        for bounds in ("begin", "stop"):
            getattr(batch.windows, bounds)[~running] = getattr(wanted.windows, bounds)[~running]
        assert_same(batch, wanted)
        return batch


def lay_out_both_ways(model: Transformer, config: DecodeConfig, sequences: int, seed: int) -> Both:
    both = Both()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowRows, "layout", lambda *arguments: both(*arguments))
        texts(model, config, random_requests(seed, 6, config.max_new_tokens), max_sequences=sequences)
    return both


@settings(max_examples=80)
@given(config=engine_configs(BASE), sequences=st.sampled_from([1, 1, 2, FEW]), seed=st.integers(0, 99))
def test_however_it_is_decoded(small_model: Transformer, config: DecodeConfig, sequences: int, seed: int) -> None:
    lay_out_both_ways(small_model, config, sequences, seed)


@pytest.mark.parametrize("drafts", [{}, {"verify": "agreement", "drafts": 4, "branches": 1}], ids=str)
def test_one_sequence_finds_most_of_its_structures(small_model: Transformer, drafts: dict[str, Any]) -> None:
    both = lay_out_both_ways(small_model, replace(BASE, max_new_tokens=60, **drafts), 1, seed=1)
    assert both.kept > both.new


@pytest.mark.parametrize("context", ["d2f", "d2f_causal", "blocks"])
def test_a_prompt_that_waits_is_no_sequence_after_its_first_block(small_model: Transformer, context: str) -> None:
    """In blocks of one token, both begin one token before their window."""
    config = replace(BASE, block_size=1, context=context, stop_at_eos=False)
    both = lay_out_both_ways(small_model, config, 1, seed=1)
    assert both.kept


def test_many_sequences_keep_nothing(small_model: Transformer) -> None:
    both = lay_out_both_ways(small_model, BASE, FEW + 1, seed=1)
    assert both.kept == both.new == 0


def test_no_more_are_kept_than_there_is_room_for(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_rows, "MOST_STRUCTURES", 3)
    sizes = []

    def counted(rows: WindowRows, state: Any, *rest: Any) -> ForwardBatch:
        batch = layout(rows, state, *rest)
        sizes.append(len(rest[-1]))
        return batch

    monkeypatch.setattr(WindowRows, "layout", counted)
    texts(small_model, BASE, random_requests(1, 6, 18), max_sequences=1)
    assert max(sizes) == 3
