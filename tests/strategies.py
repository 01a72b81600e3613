"""Random ways of decoding for hypothesis: a new option is added here, and every property is tested with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig


@st.composite
def verification(draw: st.DrawFn) -> dict[str, Any]:
    """Options of verification that go together, with a number of branches."""
    branches = draw(st.sampled_from([0, 1, 3, 7]))
    verify = draw(st.sampled_from(["confidence", "agreement", "agreement"]))
    options: dict[str, Any] = {"branches": branches, "verify": verify}
    if verify == "agreement":
        options["drafts"] = draw(st.sampled_from(DRAFTS))
    else:
        options["drafts"] = 0
        options["extra_fill"] = draw(st.sampled_from([0, 0, 1, 2]))
    return options


DRAFTS = [1, 2, 3, 5, 16]


CONTEXTS = [
    "d2f",
    "d2f",
    "d2f_causal",
    "lopa_released",
    "blocks",
    "vanilla",
    "dual",
]  # causal models have tests of their own


RANKINGS: list[dict[str, Any]] = [
    {"confidence": "probability"},
    {"confidence": "margin"},
    {"confidence": "neg_entropy"},
    {"confidence": "neg_entropy", "tau_entropy": 0.5},
    {"confidence": "neg_entropy", "tau_entropy": 2.5},
]


@st.composite
def decode_configs(draw: st.DrawFn) -> DecodeConfig:
    """Anything that the rules of decoding allow, for records that come from no model."""
    eighths = st.integers(0, 8).map(lambda n: n / 8)
    context = draw(st.sampled_from(CONTEXTS))
    tau_edit = draw(st.sampled_from([None, 0.0, 0.25, 0.75])) if context == "blocks" else None
    size = draw(st.sampled_from([1, 3, 4, 8, 32]))
    return DecodeConfig(
        **draw(verification()),
        tau_edit=tau_edit,
        tau_entropy=draw(st.sampled_from([None, None, 0.0, 0.125, 0.5])),
        block_size=size,
        sub_block_size=draw(st.sampled_from([None, None, *(part for part in (1, 2, 4) if size % part == 0)])),
        max_new_tokens=draw(st.integers(1, 70)),
        max_active_blocks=draw(st.sampled_from([None, 1, 2])) if tau_edit is None else 1,
        tau_add=draw(eighths),
        tau_act=draw(eighths),
        tau_conf=draw(st.sampled_from([0.02, 0.25, 0.5, 0.75, 0.875, 0.95])),
        tau_look=draw(st.sampled_from([0.0, 0.25, 0.5])),
        context=context,
        stop_at_eos=draw(st.booleans()),
    )


@st.composite
def engine_configs(draw: st.DrawFn, base: DecodeConfig) -> DecodeConfig:
    """Variants of `base` for short answers of a small random model."""
    size = draw(st.sampled_from([1, 3, 4, 4, 8, 32]))
    return replace(
        base,
        **draw(verification()),
        block_size=size,
        sub_block_size=draw(st.sampled_from([None, None, 2 if size % 2 == 0 else size])),
        max_active_blocks=draw(st.sampled_from([None, None, 1])),
        tau_conf=draw(st.sampled_from([0.02, 0.1, 0.3, 0.6, 0.95])),
        tau_add=draw(st.sampled_from([0.02, 0.25, 0.95])),
        tau_act=draw(st.sampled_from([0.02, 0.75, 0.95])),
        **draw(st.sampled_from(RANKINGS)),
        context=draw(st.sampled_from(CONTEXTS)),
        stop_at_eos=draw(st.booleans()),
    )
