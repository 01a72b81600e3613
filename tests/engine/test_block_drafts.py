"""Linear self-speculation: drafts come from blocks that see themselves, and texts are those of one token at a time."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.kernels.record_head import record_head
from lopa_dist.kernels.rope_scaling import QueryScaling, YarnScaling
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.families import check_drafts
from lopa_dist.models.mask_rows import MaskRowAdapter, MaskRows
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine import test_lookahead
from tests.engine.ranks import on_ranks
from tests.engine.test_causal import (
    SAMPLINGS,
    causal,
    engines,
    groups_after_several,
    lookaheads,
    one_at_a_time,
    requests_of,
    texts,
)


@pytest.fixture(scope="module")
def block_model(small_model: Transformer) -> Transformer:
    """The small model with Nemotron-Labs-Diffusion's rotation and drafts; its texts go beyond the original length."""
    config = replace(
        small_model.config, block_drafts=True, rope_theta=100.0, rope_scaling=YarnScaling(100.0, 16.0, 32.0, 1.0, 16),
        query_scaling=QueryScaling(0.5, 16),
    )  # fmt: skip
    model = Transformer(config)
    model.load_state_dict(small_model.state_dict())
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def adapted_model(block_model: Transformer) -> Transformer:
    """The same with an adapter for the rows that draft."""
    model, generator = copy.deepcopy(block_model), torch.Generator().manual_seed(1)
    model.mask_rows, size = MaskRows(), model.config.hidden_size
    for layer in model.model.layers:
        pair = torch.randn(4, size, generator=generator) / 4, torch.randn(size, 4, generator=generator) / 4
        MaskRowAdapter(model.mask_rows, [(size, pair)]).attach(layer.self_attn.o_proj)
    return model


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ahead=lookaheads(), engine=engines(), sampling=st.sampled_from(SAMPLINGS), seed=st.integers(0, 10**6))
def test_any_lookahead_writes_the_oracle_s_text(
    block_model: Transformer, ahead: dict[str, Any], engine: dict[str, Any], sampling: dict[str, Any], seed: int
) -> None:
    """Users are refused branches, for their drafts would be bad ones; but no text depends on drafts."""
    requests = requests_of(seed, 5)
    config = causal(**ahead, **sampling)
    found = texts(block_model, config, requests, **engine)
    rules = Sampling(config.confidence, config.temperature, config.top_p, config.top_k)
    for request in requests:
        assert one_at_a_time(block_model, request, rules) in (found[request.index], None)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ahead=lookaheads(), seed=st.integers(0, 10**6))
def test_fixed_buffers(block_model: Transformer, adapted_model: Transformer, ahead: dict[str, Any], seed: int) -> None:
    requests = requests_of(seed, 4)
    plain = texts(block_model, causal(), requests)
    config = causal(**ahead | {"branches": 0})
    assert texts(adapted_model, config, requests, attention="meta", graphs="always", groups=4) == plain


def test_ranks(block_model: Transformer) -> None:
    requests = requests_of(7, 6)
    plain = texts(block_model, causal(), requests)
    config = causal(drafts="auto")

    def work(comm: Communicator) -> dict[int, list[int]]:
        return texts(block_model, config, requests, comm)

    assert on_ranks(2, work) == [plain, plain]


def test_a_step_s_time_counts_for_its_rows(block_model: Transformer) -> None:
    """With the two rows of a group that predict nothing."""
    test_lookahead.test_a_step_s_time_counts_for_its_rows(block_model)


def test_branches_are_refused(block_model: Transformer) -> None:
    check_drafts(block_model.config, 3)
    with pytest.raises(ValueError, match=r"decode\.branches=2: .*set decode\.branches=0"):
        check_drafts(block_model.config, 3, 2)


@dataclass
class Proposed:
    """What the groups of one step's chain proposed."""

    complete: int  # verified tokens before the step: the last of the prompt, and those of the answer
    drafts: int  # of the chain
    groups: Tensor  # [D, n] tokens; -1: none
    accepted: int
    rows: int  # of the forward without those of the prompt


def drafted(
    model: Transformer, request: Request, before: list[int], masks: int, sampling: Sampling
) -> list[int | None]:
    """The definition: [last token, masks ...] sees itself and, causally computed, what is before it.

    The mask after the last token stands for the next one, which that token's own row verifies: what the `masks` after
    it predict are the drafts, each of its own place, with the noise of that place. None where two tokens are so close
    that rounding may choose.
    """
    config, tokens = model.config, [*request.prompt, *before]
    row = torch.arange(len(tokens) + 1 + masks)
    visible = (row[:, None] >= row) | (row[:, None] >= len(tokens) - 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(config.heads // config.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("rhd,chd->hrc", q, k) * config.head_dim**-0.5
        return torch.einsum("hrc,chd->rhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)

    rows, of_block, begin = model.mask_rows, row >= len(tokens) - 1, MaskRows.begin
    with patch.object(MaskRows, "begin", lambda *_: None):
        if rows is not None:
            begin(rows, of_block)
        hidden = model(torch.tensor(tokens + [config.mask_id] * (masks + 1)), row, attend)[len(tokens) + 1 :]
    place = torch.arange(masks) + len(before) + 1
    keys = (torch.tensor(request.key) * 0x1_0000_0001 + place + 1) * 0x1_0000_0001  # wraps at 64 bits
    found, nudged = (
        record_head(rows, model.head_weight, config.mask_id, keys, sampling)[:, 0].tolist()
        for rows in (hidden, hidden * 1.00001)
    )
    return [int(token) if token == other else None for token, other in zip(found, nudged, strict=True)]


@pytest.mark.parametrize("which", ["block_model", "adapted_model"])
@pytest.mark.parametrize(("attention", "temperature"), [("torch", 0.0), ("torch", 1.0), ("plain", 0.0), ("meta", 1.0)])
def test_drafts_are_what_the_definition_says(
    which: str, attention: str, temperature: float, block_model: Transformer, request: pytest.FixtureRequest
) -> None:
    """After every draft, accepted or not, in each step of some answers; and no adapter changes a text."""
    model: Transformer = request.getfixturevalue(which)
    steps: list[Proposed] = []

    def look(engine: Engine) -> None:
        assert engine.ended is not None
        assert engine.winner is not None
        assert engine.winner.records.drafts is not None
        before, rows = engine.ended.step.before, engine.ended.rows
        groups, counted = engine.winner.records.drafts.token[0], rows.table.rows[rows.table.branch >= 0].sum()
        accepted = int(engine.winner.accepted[0])
        steps.append(Proposed(int(before.complete[0]), int(before.drafts[0]), groups, accepted, int(counted)))

    compared = chains = 0
    for one in requests_of(5, 4):
        steps.clear()
        config = causal(drafts=3, draft_from="masks", temperature=temperature)
        engine = Engine(model, config, Solo(), EngineConfig(1, attention=attention), look)
        groups_after_several(engine, 4)
        [generation] = engine.generate([one])
        assert generation.tokens == texts(block_model, replace(config, drafts=0), [one])[one.index]
        proposed: list[int] = []
        for step in steps:
            chain = proposed[: step.drafts]
            groups = [[token for token in group if token >= 0] for group in step.groups.tolist()]
            assert step.rows == 1 + len(chain) + sum(len(group) + 2 for group in groups if group)
            for depth, group in enumerate(groups):
                before = [*generation.tokens[: step.complete - 1], *chain[:depth]]
                if not group:
                    continue
                wanted = drafted(model, one, before, len(group), engine.sampling)
                assert [token if right is None else right for token, right in zip(group, wanted, strict=True)] == group
                compared += len(group)
            chains += len(chain)
            proposed = groups[step.accepted]
    assert compared > 100
    assert chains > 20
