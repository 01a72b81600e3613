"""The engine's options."""

from __future__ import annotations

import pytest

from lopa_dist.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("max_sequences", 0, "an integer of at least 1"),
        ("max_rows", "many", "an integer of at least 1"),
        ("kv_tokens", -1, "an integer of at least 1"),
        ("prefill_chunk", 0, "an integer of at least 1"),
        ("attention", "flash", "one of auto, torch, meta, plain"),
        ("kernels", "cuda", "one of auto, triton, torch"),
        ("graphs", "yes", "one of auto, always, never"),
        ("prefix_cache", "on", "one of exact, none"),
    ],
)
def test_what_is_not_allowed_is_named(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.{key}={value!r}: must be {allowed}"):
        EngineConfig(**{key: value})  # type: ignore[arg-type]
