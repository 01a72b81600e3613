"""Models that edit: what is filled is predicted again, and replaced where the model says another token.

So a token that was filled too early is taken back, whether verification had accepted it or not (LLaDA2.1, arXiv
2602.08676). A block without masks is not complete yet. It is once a forward changes nothing in it, or after
`MOST_CHECKS` such forwards; until then what it holds may change, an end-of-text included. The prompt's tokens stay.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lopa_dist.decode.state import Records, State

MOST_CHECKS = 16  # forwards of a block without masks, after which it is complete, whatever the last one changed


class Replacements(NamedTuple):
    """What a forward says of the filled positions of the windows, ``[S, W]`` bool."""

    possible: Tensor  # positions of the answer that were filled before the forward
    replaced: Tensor  # of these, where the record's token replaces the one that stands there


def replacements(state: State, records: Records) -> Replacements:
    """Return which filled tokens of the windows are replaced.

    `State.edits` is another thing: the tokens in which branches differ.

    Args:
        state: as it was laid out for the forward, with `DecodeConfig.tau_edit`.
        records: ``[S, W]`` of the branch that won.
    """
    assert state.config.tau_edit is not None
    width = records.packed.shape[-1]
    _, token, _, masked, _ = state.window(width)
    possible = state.wanted(width) & ~masked
    differs = records.token != token
    return Replacements(possible, possible & differs & (records.probability > state.config.tau_edit))


def settled(state: State, masked: Tensor, replaced: Tensor) -> Tensor:
    """Return which windows are complete, ``[S]`` bool, and count in `State.settling` the forwards that found no mask.

    Args:
        state: its `settling` is changed in place.
        masked: ``[S, W]`` bool, the masks that the forward found.
        replaced: ``[S, W]`` bool, of `Replacements`.
    """
    checked = (state.done == 0) & ~masked.any(1)
    state.settling.add_(1).mul_(checked)
    return checked & (~replaced.any(1) | (state.settling >= MOST_CHECKS))
