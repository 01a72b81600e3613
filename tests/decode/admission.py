"""Putting one request into a state."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_dist.decode.state import Admitted, State


def admit(state: State, slot: int, prompt: Sequence[int], max_new_tokens: int, key: int, sampled: bool = False) -> None:
    """Put a request into an empty slot, see `State.admit_all`."""
    state.admit_all([Admitted(slot, prompt, max_new_tokens, key, sampled)], state.to_host())
