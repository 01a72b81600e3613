"""The lookahead settings with which answers were drafted: they change no text, but the figures that a job reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lopa_dist.checks import written
from lopa_dist.decode.config import text_settings

Settings = dict[str, Any]
"""The settings of lookahead that change no text, by name."""


def text_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model as texts depend on them: an adapter for masks changes drafts, and no text."""
    return dict(model) | ({"lora": None, "lora_rows": "all"} if model.get("lora_rows") == "masks" else {})


def lookahead_of(decode: Mapping[str, Any], model: Mapping[str, Any]) -> Settings:
    """Return the settings of lookahead among those of decoding and of the model, where they change no text."""
    found = {f"decode.{key}": decode[key] for key in decode.keys() - text_settings(decode).keys()}
    return found | {"model.lora": model.get("lora") if model != text_model(model) else None}


def drafted_otherwise(who: str, each: Iterable[Settings]) -> str:
    """Return a warning that not all of `who`, such as a job's attempts, drafted alike; empty if they did."""
    used: dict[str, dict[str, None]] = {}  # by setting: its values, in the order of their first use
    for settings in each:
        for key, value in settings.items():
            used.setdefault(key, {})[written(value)] = None
    changed = [f"{key}: {' and '.join(values)}" for key, values in sorted(used.items()) if len(values) > 1]
    if not changed:
        return ""
    return (
        f"{who} drafted with different settings ({'; '.join(changed)}). That changes no text, but tokens per forward, "
        "rows and acceptance are averages over all of them"
    )
