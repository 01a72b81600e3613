"""Models that edit: filled tokens are predicted again, and replaced where the model predicts another token.

So a token that was filled too early is taken back, whether verification had accepted it or not (LLaDA2.1, arXiv
2602.08676). A block without masks is not complete yet. It becomes complete once a forward changes nothing in it, or
after `MOST_CHECKS` forwards without masks. Until then its tokens may change, an end-of-text included. The prompt's
tokens stay.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lopa_dist.decode.state import Records, State

MOST_CHECKS = 16  # after this many forwards without masks, a block is complete even if the last one changed it


class Replacements(NamedTuple):
    """What a forward says about the filled positions of the windows, ``[S, W]`` bool."""

    possible: Tensor  # positions of the answer that were filled before the forward
    replaced: Tensor  # of these, where the record's token replaces the one that stands there


def replacements(state: State, records: Records) -> Replacements:
    """Return which filled tokens of the windows are replaced.

    `State.edits` is something else: the tokens in which branches differ from the anchor.

    Args:
        state: from which the forward was laid out, with `DecodeConfig.tau_edit`.
        records: ``[S, W]`` of the branch that won.
    """
    assert state.config.tau_edit is not None
    width = records.packed.shape[-1]
    _, token, _, masked, _ = state.window(width)
    possible = state.wanted(width) & ~masked
    differs = records.token != token
    return Replacements(possible, possible & differs & (records.probability > state.config.tau_edit))


def settled(state: State, masked: Tensor, replaced: Tensor) -> Tensor:
    """Return which windows are complete, ``[S]`` bool, and count the forwards without masks in `State.settling`.

    Args:
        state: its `settling` is changed in place.
        masked: ``[S, W]`` bool, the masks that the forward found.
        replaced: ``[S, W]`` bool, of `Replacements`.
    """
    checked = (state.done == 0) & ~masked.any(1)
    state.settling.add_(1).mul_(checked)
    return checked & (~replaced.any(1) | (state.settling >= MOST_CHECKS))
