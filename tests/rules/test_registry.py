"""Which rule decodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from lopa_dist.decode import DecodeConfig
from lopa_dist.rules import rule_for
from lopa_dist.rules.registry import RULES
from tests.engine.test_loop import BASE
from tests.strategies import engine_configs


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("causal", {"context": "causal", "branches": 0, "drafts": 0}),
        ("causal", {"context": "causal", "branches": 2, "drafts": 4}),
        ("plain", {"branches": 0, "drafts": 0}),
        ("plain", {"verify": "confidence", "branches": 0, "drafts": 0}),
        ("lopa", {"verify": "confidence", "branches": 3, "drafts": 0}),
        ("verified", {"branches": 0, "drafts": 2}),
        ("verified", {"branches": 2, "drafts": 2}),
    ],
)
def test_the_rule_follows_from_the_keys(name: str, options: dict[str, Any]) -> None:
    assert rule_for(DecodeConfig(**options)).name == name


@settings(max_examples=200)
@given(config=engine_configs(BASE))
def test_exactly_one_rule_serves_a_configuration(config: DecodeConfig) -> None:
    assert sum(rule.serves(config) for rule in RULES) == 1


def test_a_rule_says_how_it_looks_ahead() -> None:
    """Branches beside the drafts compute several times as many rows."""

    def words(**options: Any) -> str:
        config = DecodeConfig(**options)
        return rule_for(config).words(config)

    causal = {"context": "causal", "max_active_blocks": 1}
    assert words(**causal, drafts=4) == "4 drafts, context causal"
    assert words(**causal, drafts=4, branches=3) == "3 lookahead branches and 4 drafts, context causal"
    assert words(**causal, drafts=0) == "no drafts, context causal"
    assert words(**causal, drafts="auto") == "as many drafts as are fastest, context causal"
    windows = {"context": "d2f", "block_size": 32}
    assert (
        words(**windows, drafts=2, branches=3)
        == "3 lookahead branches and 2 drafts per branch, context d2f in blocks of 32"
    )
    assert words(**windows, verify="confidence", drafts=0) == "no lookahead, context d2f in blocks of 32"
