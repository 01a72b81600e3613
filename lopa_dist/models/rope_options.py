"""What a checkpoint's files say about how positions become angles."""

from __future__ import annotations

import math
from typing import Any

from lopa_dist.kernels.rope_scaling import Llama3Scaling, QueryScaling, YarnScaling
from lopa_dist.models.families import Family
from lopa_dist.models.files import unsupported

ROTATED = "partial_rotary_factor"
BEFORE_SCALING = "original_max_position_embeddings"


def rope_options(family: Family, raw: dict[str, Any]) -> dict[str, Any]:
    """Return how positions become angles, with the base and the share of each head that is rotated.

    `rope_parameters` has all of this. Older files have `rope_scaling`, and the other keys at the top level.

    Raises:
        KeyError: neither config.json nor the family has a base.
        ValueError: two of these places contradict each other.
    """
    newer, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if newer and older and named(newer) != named(older):
        raise ValueError("rope_parameters and rope_scaling differ, and programs differ in which they take: remove one")
    bases = [place["rope_theta"] for place in (raw, newer, older) if place.get("rope_theta") is not None]
    if len(set(bases)) > 1:
        raise ValueError(
            f"rope_theta is {' and '.join(map(str, dict.fromkeys(bases)))} in config.json, its rope_parameters or "
            "rope_scaling, and programs differ in which they take: remove all but one"
        )
    rope = newer or older
    inside, beside = (place.get(BEFORE_SCALING) for place in (rope, raw))
    if inside is not None and beside not in (None, inside):
        raise ValueError(
            f"{BEFORE_SCALING} is {beside} in config.json and {inside} in its rope_parameters, and programs differ in "
            "which they take: remove one"
        )
    theta = rope.get("rope_theta", raw.get("rope_theta", family.rope_theta))
    if theta is None:
        raise KeyError("rope_theta")
    shares = [place[ROTATED] for place in (rope, raw) if place.get(ROTATED) is not None]
    if len(set(shares)) > 1:
        raise ValueError(f"{ROTATED} is {shares[1]} in config.json and {shares[0]} in its rope_parameters: remove one")
    return rope | {"rope_theta": theta, ROTATED: shares[0] if shares else family.partial_rotary_factor}


def named(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a scaling of positions by its newer names, without the base, which older files have elsewhere."""
    return {"rope_type" if key == "type" else key: value for key, value in rope.items() if key != "rope_theta"}


def rope_scaling(rope: dict[str, Any], types: tuple[str, ...]) -> Llama3Scaling | YarnScaling | None:
    """Return how frequencies are changed for long contexts, or None.

    Raises:
        ValueError: it is none of the `types` that the family supports, or has unsupported options.
    """
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None and (others := sorted(rope.keys() - {"rope_theta", "llama_4_scaling_beta", ROTATED})):
        raise ValueError(
            f"rope_scaling has {', '.join(others)}, but no rope_type: set it there, 'default' for no scaling"
        )
    kind = "default" if kind is None else kind
    if kind not in types:
        allowed = " and ".join(map(repr, types))
        raise ValueError(f"rope_scaling of type {kind!r} is not supported, only {allowed}")
    if kind == "default":
        return None
    if kind == "llama3":
        keys: tuple[str, ...] = "factor", "low_freq_factor", "high_freq_factor", BEFORE_SCALING
        return Llama3Scaling(*(positive(rope, key) for key in keys))
    if message := unsupported(rope, {"attention_factor": None, "truncate": True}):
        raise ValueError(f"rope_parameters: {message}")
    if not rope["mscale"] or rope["mscale"] != rope["mscale_all_dim"]:  # else cosines and sines would be scaled
        raise ValueError(
            f"rope_parameters: mscale={rope['mscale']!r} with mscale_all_dim={rope['mscale_all_dim']!r} is not "
            "supported, only equal ones"
        )
    keys = "rope_theta", "factor", "beta_fast", "beta_slow", BEFORE_SCALING
    return YarnScaling(*(positive(rope, key) for key in keys))


def positive(rope: dict[str, Any], key: str) -> Any:
    """Return the number under `key`; raise a ValueError unless it is positive and finite."""
    value = rope[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"rope_scaling: {key}={value!r} must be a positive number")
    return value


def query_scaling(rope: dict[str, Any], types: tuple[str, ...]) -> QueryScaling | None:
    """Return how queries grow along a text, in families with YaRN.

    Raises:
        ValueError: a checkpoint of another family asks for it.
    """
    key = "llama_4_scaling_beta"
    if "yarn" in types:
        return QueryScaling(rope[key], rope[BEFORE_SCALING])
    if rope.get(key):
        raise ValueError(f"{key}={rope[key]!r} is not supported in this family")
    return None
