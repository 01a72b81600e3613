"""The engine's options."""

from __future__ import annotations

import pytest

from lopa_dist.engine.config import EngineConfig


@pytest.mark.parametrize(("given", "limit"), [(None, None), (40, 40), ("40", 40)])
def test_rows_may_be_text_or_unbounded(given: int | str | None, limit: int | None) -> None:
    assert EngineConfig(max_rows=given).row_limit == limit


def test_auto_is_for_jobs() -> None:
    options = EngineConfig(max_rows="auto")
    with pytest.raises(ValueError, match=r"engine\.max_rows=auto: no profile was looked up; give a number or null"):
        _ = options.row_limit


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("max_sequences", 0, "an integer of at least 1"),
        ("max_rows", "many", "an integer of at least 1 or 'auto'"),
        ("kv_tokens", -1, "an integer of at least 1"),
        ("prefill_chunk", 0, "an integer of at least 1"),
        ("attention", "flash", "one of auto, torch, meta, plain"),
        ("graphs", "yes", "one of auto, always, never"),
        ("prefix_cache", "on", "one of exact, approximate, none"),
    ],
)
def test_what_is_not_allowed_is_named(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.{key}={value!r}: must be {allowed}"):
        EngineConfig(**{key: value})  # type: ignore[arg-type]
