"""D2F's part of a step: write what the winner brings, fill, move the two frontiers, append a block, finish.

The numbers in comments are those in docs/lopa-step.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_dist.checks import UserError
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.edit import replacements, settled
from lopa_dist.decode.state import FAILED, Records, State, Window, arange
from lopa_dist.decode.winner import Winner
from lopa_dist.decode.written import note
from lopa_dist.own_code import load


def advance(state: State, winner: Winner) -> Window:
    """Move every running sequence by one step, in place.

    Finished slots go through the same operations. None of their positions is inside the window, so nothing is filled.
    A branch of an earlier step may still write tokens there, but nothing reads them.

    Args:
        state: from which the forward was laid out.
        winner: from `verify`; the width of its records, W, is a multiple of the block size and at least
            end - complete.

    Returns:
        The forward's windows as they are after the fill, for `spawn`. Blocks that this step appends are not in them.
    """
    config, scope = state.config, state.config.scope
    mask_id, records = state.vocabulary.mask_id, winner.records
    slots, width = records.packed.shape[1:]
    size, end = config.block_size, state.end
    by_block = (slots, width // size, size)
    span, token, inside, masked_before, running = state.window(width)

    # 3: what was complete is committed with this forward
    keep_boundary(state, records, running)
    if scope.caches_kv:
        torch.where(running, state.complete, state.committed, out=state.committed)

    edit = None if config.tau_edit is None else replacements(state, records)

    # 4: what the winner brings becomes the sequence's tokens
    token = write(token, winner.position - state.complete[:, None], winner.token)
    masked = (token == mask_id) & inside
    used = masked if edit is None else masked | edit.possible  # positions whose records decide something
    failed = ((records.probability + records.confidence).isnan() & used).any(1)

    # 5: activate
    total = (end[:, None] - span[:, ::size]).clamp(0, size)  # [S, blocks] positions of each block; 0: not appended
    full = active_blocks(config, masked, total, running)

    # 6: fill; with drafts, a position is forced only if the winner brings no token
    may_force = None if winner.accepted is None else (winner.position < 0).all(1)
    chosen = fill(config, records, state.fillable(masked), full, may_force)
    if scope.boundary == "fill" and state.vocabulary.shift:
        # Fast-dLLM: the forward that fills the cache decides the window's first position only
        chosen = torch.where(masked[:, :1], arange(width, token.device) == 0, chosen)
    token = torch.where(chosen if edit is None else chosen | edit.replaced, records.token, token)
    state.answers.scatter_(1, span, token)
    masked ^= chosen  # all that is chosen was masked
    is_eos = state.is_eos(token) & inside
    if scope.from_prompt:
        is_eos &= span >= state.known[:, None]
    # where this step's tokens are not edited later
    final = running if edit is None else settled(state, masked_before, edit.replaced)
    has_eos = is_eos.any(1)
    state.eos |= has_eos if edit is None else has_eos & final

    # 8, 9: frontiers and the next block
    first = torch.where(masked, span, end[:, None]).amin(1)  # the first masked position; `end` if none is masked
    holes = masked.view(by_block).sum(2)
    complete = torch.where(holes > 0, span[:, ::size], end[:, None]).amin(1)  # end of the leading complete blocks
    if edit is not None:
        complete = torch.where(final | ~running, complete, state.complete)
    last = (total[:, 1:] > 0).sum(1, keepdim=True)  # [S, 1] number of the last block in the window
    progress = ((total - holes) / total).gather(1, last)[:, 0]
    append = (progress >= config.tau_add) & running & ~state.eos
    if config.max_active_blocks is not None:
        append &= (end - complete + size - 1) // size < config.max_active_blocks
    new_end = torch.minimum(torch.add(end, append, alpha=size), scope.last_end(state.limit, size))

    # 10: done, with nothing of the answer left to fill, or an EOS with nothing masked before it
    done = first >= torch.minimum(state.limit, new_end)
    if config.stop_at_eos:
        done |= (is_eos & (span < first[:, None])).any(1)
    state.done |= done & final
    state.done.masked_fill_(failed, FAILED)
    state.step += running
    state.winner.copy_(winner.branch)
    if winner.accepted is not None:
        state.accepted.copy_(winner.accepted)
    window = Window(span, token, inside, masked, running)
    note(state, winner, window, chosen, None if edit is None else edit.replaced)
    # true also where position `complete` lies in a block that was appended in this step
    torch.eq(first, complete, out=state.starts_masked)
    state.starts_masked &= complete < new_end
    torch.add(holes.sum(1), new_end - end, out=state.masked)
    state.complete.copy_(complete)
    state.end.copy_(new_end)
    state.forget_window()
    return window


def active_blocks(config: DecodeConfig, masked: Tensor, total: Tensor, running: Tensor) -> Tensor:
    """Return the fully active blocks ``[S, blocks]``: the first one, and those after a block that is nearly full.

    Everything before the window is complete. Nothing that was filled is ever masked again, so a block that was nearly
    full stays so, and nothing has to be remembered.

    Args:
        config: `tau_act` is read.
        masked: ``[S, W]`` bool.
        total: ``[S, blocks]`` positions of each block.
        running: ``[S]`` bool.
    """
    nearly = (total - masked.view(*total.shape, -1).sum(2)) / total >= config.tau_act
    return torch.cat([running[:, None], nearly[:, :-1]], 1)


def write(window: Tensor, offset: Tensor, token: Tensor) -> Tensor:
    """Return `window` with each `token` written at its `offset`; negative offsets are skipped.

    `window` is ``[S, W]``, `offset` and `token` are ``[S, F]``.
    """
    width = window.shape[1]
    if offset.shape[1] == 0:
        return window
    if offset.shape[1] == 1:
        return torch.where(offset == arange(width, window.device), token, window)
    target = torch.where(offset >= 0, offset, width)  # an extra column takes tokens that have no position
    return torch.cat([window, target[:, :1]], 1).scatter_(1, target, token)[:, :-1]


def keep_boundary(state: State, records: Records, running: Tensor) -> None:
    """Store in `State.boundary` what a committing forward predicts for the first position after the cached tokens.

    Later forwards use it if the row that predicts this position does not run again (`structure.record_of_commit`).
    """
    if state.vocabulary.shift and state.config.scope.caches_kv:
        commits = running & (state.committed != state.complete)
        torch.where(commits, records.packed[:, :, 0], state.boundary, out=state.boundary)


def fill(
    config: DecodeConfig, records: Records, masked: Tensor, full: Tensor, may_force: Tensor | None = None
) -> Tensor:
    """Return which masked positions of the windows are filled in this step, ``[S, W]`` bool.

    Args:
        config: `tau_conf`, `tau_entropy` or `fill`, and `extra_fill` are read.
        records: ``[S, W]``.
        masked: ``[S, W]`` bool, the positions that may be filled.
        full: ``[S, blocks]`` bool, the fully active blocks, in each of which one position is filled if none passes.
        may_force: ``[S]`` bool, sequences in which this may be done; None: all.
    """
    slots, width = masked.shape
    size = config.block_size
    if config.fill is not None:
        passed = masked & own_fill(config.fill, records, masked)
    elif config.tau_entropy is not None:
        passed = masked & (records.confidence >= -config.tau_entropy)
    else:
        passed = masked & (records.probability > config.tau_conf)
    ranked = torch.where(masked, records.confidence, -torch.inf)
    by_block = (slots, width // size, size)
    none = full & ~passed.view(by_block).any(2)  # [S, blocks]
    if may_force is not None:
        none &= may_force[:, None]
    best = arange(size, masked.device) == ranked.view(by_block).argmax(2, keepdim=True)  # the first of equals
    chosen = passed | (best & none[..., None]).view(slots, width) & masked
    if config.extra_fill:
        rest = masked & ~chosen
        rank = records.confidence.masked_fill(~rest, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        extra = torch.zeros_like(rest).scatter_(1, rank[:, : config.extra_fill], True)
        chosen = chosen | extra & rest
    return chosen


def own_fill(name: str, records: Records, masked: Tensor) -> Tensor:
    """Return which of the masked positions the user's rule `name` chooses, ``[S, W]`` bool.

    Raises:
        UserError: the rule returned anything else. A tensor of another shape would be broadcast, and would fill
            positions that the rule did not choose.
    """
    # copies, because the rule may write into them
    given = records.probability.clone(), records.confidence.clone(), masked.clone()
    chosen = load(name, "decode.fill")(*given)
    if not isinstance(chosen, Tensor):
        found = f"a {type(chosen).__name__}"
    elif chosen.dtype != torch.bool or chosen.shape != masked.shape:
        found = f"a tensor of shape {list(chosen.shape)} and dtype {str(chosen.dtype).removeprefix('torch.')}"
    else:
        return chosen
    raise UserError(
        f"decode.fill={name} returned {found}: return a bool tensor of masked's shape, {list(masked.shape)}"
    )
