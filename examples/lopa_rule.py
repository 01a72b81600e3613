"""A decoding rule of your own: ``lopa-dist decode=lopa decode.rule=examples/lopa_rule.py:LOPA``.

The rule is LoPA itself (arXiv 2512.16229), and decodes exactly as ``decode=lopa`` does. Copy the file, and change how a
branch is scored, or which tokens branches try. Both functions run in every step, on all sequences together. On a GPU
they must not wait for the device, so use no Python loop over sequences or positions, and no `.item()`.
"""

from __future__ import annotations

import torch

from lopa_dist.decode import Records, State, Winner
from lopa_dist.decode.state import Window
from lopa_dist.rules import Rule


def verify(state: State, records: Records) -> Winner:
    """Return the branch that is most confident about what it leaves masked (LoPA, Eq. 2), and the token that it fills.

    Args:
        state: the state from which the branches' rows were laid out.
        records: ``[S, K, W]``, what each branch predicts in the window: token, probability, confidence.
    """
    slots, branches, width = records.confidence.shape
    window = state.window(width)
    fills = state.edit_position == window.span[:, None]  # [S, K, W] the one position that a branch fills
    leaves = window.masked[:, None] & ~fills
    count = leaves.sum(-1)
    score = (records.confidence.double() * leaves).sum(-1) / count  # [S, K]
    score = score.masked_fill(count == 0, 1.0)
    number = torch.arange(branches, device=score.device)
    score = score.masked_fill(number >= state.branches[:, None], -torch.inf)
    branch = (score.roll(-1, 1).argmax(1) + 1) % branches  # with equal scores, a lookahead branch beats the anchor
    slot = torch.arange(slots, device=score.device)
    position, token = state.edits[:, slot, branch].unbind()
    # besides the winner's token, the step fills what `decode.tau_conf` allows (docs/inputs.md#a-rule-of-your-own)
    return Winner(branch, Records(records.packed[:, slot, branch]), position, token, score)


def spawn(state: State, winner: Winner, window: Window | None) -> None:
    """Let branch j of the next forward try the winner's token at the masked position with the j-th highest confidence.

    Args:
        state: the state after the step.
        winner: the step's winner.
        window: the window's positions after the step.
    """
    assert window is not None
    masked = state.fillable(window.masked)
    ranked = winner.records.confidence.masked_fill(~masked, -torch.inf)
    column = ranked.sort(dim=1, descending=True, stable=True).indices[:, : state.config.branches]
    tried = torch.stack([window.span.gather(1, column), winner.records.token.gather(1, column)])
    state.edits[:, :, 1 : column.shape[1] + 1, 0] = tried
    branches = (masked.sum(1) + 1).clamp(max=state.config.max_branches)
    state.branches.copy_(branches.masked_fill(state.done != 0, 0))


LOPA = Rule("my own LoPA", verify, spawn)
