"""K/V of filled tokens that are kept while their block still has masks (decode.cache=token).

What a token's row computes changes little soon after the token was filled (dKV-Cache, arXiv 2505.15781). So with this
cache a row goes through the model until two forwards had its token and nobody needs its prediction any more: with the
logit shift that is as soon as the next position is filled, too. Then its K/V are kept, and rows see them as they see
those of complete blocks. One forward would save more rows, and cost accuracy (docs/embedded-model.md). When another
block is complete, what is kept is dropped: the forward after it computes all rows of the window anew, commits the
block, and begins again.

In the pool kept tokens lie behind the committed ones, in the order in which they came: attention does not ask for the
order of columns, and rotation has put each token's position into its keys. So what a window's rows see of the pool is
one range still. The row before the window, which is computed anew while the first position is masked
(boundary=fresh), belongs to the window here, and is kept like a filled token: kept tokens begin in its place in the
pool, and the forward that commits the next block commits it once more.

The device knows which tokens are kept (`State.kv_kept`), the host how many of each sequence (`HostState.kept`), from
which the structure of the next forward follows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.decode.state import State, arange
from lopa_dist.decode.structure import Structure, computes_boundary

SEEN, KEPT, NEW = 1, 2, 3
"""What `State.kv_kept` holds of a token: one forward had it; its K/V were kept before the last step; the last step
keeps them. Of other tokens it holds 0."""


def keep_tokens(state: State, masked: Tensor, filled: Tensor) -> None:
    """Note whose K/V of the last forward are kept, at the end of `advance`.

    Args:
        state: with the frontiers as they are then.
        masked: ``[S, W]`` bool, the window's positions that were masked in the forward.
        filled: ``[S, W]`` bool, those inside the window that are filled now.
    """
    shift = state.vocabulary.shift
    # one column more than the window: the last committed token
    before = (state.committed > 0) & computes_boundary(state.config, shift)
    seen = torch.cat([before[:, None], filled & ~masked], 1)
    column = (state.origin + state.committed).clamp(min=0)[:, None] + arange(seen.shape[1], seen.device)
    mark = state.kv_kept.gather(1, column)
    kept = seen & (mark >= SEEN) & ((state.complete == state.committed) & (state.done == 0))[:, None]
    if shift:  # row p predicts p + 1
        kept = kept & F.pad(filled, (0, 1))
    state.kv_kept.scatter_(1, column, torch.where(kept, torch.where(mark >= KEPT, KEPT, NEW), seen * SEEN))
    state.kept.copy_(kept.sum(1))


def counted_before(marked: Tensor) -> Tensor:
    """Return how many columns before each one are marked, of ``[S, n]`` bool."""
    return marked.long().cumsum(1) - marked.long()


class RemainingRows:
    """The rows of a forward that go through the model, where those of kept tokens are left out.

    Args:
        state: as laid out for the forward.
        structure: of the forward.
        on: its arrays on the device, and the rows' `cells` in `State.canvas`.
    """

    def __init__(self, state: State, structure: Structure, on: dict[str, Tensor]) -> None:
        kept = state.kv_kept >= KEPT
        self.columns, self.first, self.in_order = kept.shape[1], state.origin + 1, len(on["row_sequence"])
        self.counts = counted_before(kept).view(-1)
        cells = on["cells"][: self.in_order] + on["row_sequence"] + 1  # in `State.kv_kept`, which has a column more
        remaining = ~kept.view(-1).index_select(0, cells)
        self.rows = torch.nonzero_static(remaining, size=self.in_order - int(structure.kept.sum()))[:, 0]

    def of(self, values: Tensor) -> Tensor:
        """Return those of the remaining rows and of the padding, of values of all rows in the order of positions."""
        return torch.cat([values.index_select(0, self.rows), values[self.in_order :]])

    def kept_before(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Return how many kept tokens of a sequence lie before a position: by so much its row moves to the left."""
        cell = (sequence * self.columns + self.first + position).clamp_(0, len(self.counts) - 1)
        return self.counts.index_select(0, cell.view(-1)).view_as(cell)
