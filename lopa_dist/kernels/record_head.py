"""The record head: the LM head and the reduction of its logits, in one pass.

The logits of all rows never exist at once. Rows and vocabulary are taken in tiles; every tile is reduced to running
sums (online softmax), which are merged at the end. Tensor ranks, which have a part of the vocabulary each, exchange
only these sums. Each row results in three numbers: token, probability, confidence; for a tree of drafts also in the
second choice and its probability. On CUDA, the kernel that multiplies a tile also reduces it (`record_head_triton`).
Top-p and top-k need a row's whole distribution: the logits of a tile of rows are computed first (`filters_triton`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.decode.config import record_size
from lopa_dist.kernels import native
from lopa_dist.kernels.dispatch import fused, in_c
from lopa_dist.kernels.product import product
from lopa_dist.kernels.random import gumbel
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.ragged import ROW_TILE
from lopa_dist.staging import every_row

ROWS, VOCABULARY = 64, 8192  # a tile of logits
FILTERED_ROWS = 128  # a tile for the kernel that filters rows: as many as a GPU has multiprocessors, nearly
ROWS_IN_C = 256  # C is faster with more rows, and its bits do not depend on the tile
SHARES = 8  # a vocabulary is cut into eighths, so that up to 8 tensor ranks can have equal parts


@dataclass(frozen=True)
class Shard:
    """The rows of the head's weight that this rank has: the `rank`-th of `size` equal parts of the vocabulary."""

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]  # of every rank's tensors: ``[...]`` -> ``[size, ...]``


WHOLE = Shard(0, 1, lambda x: x[None])


def record_head(
    hidden: Tensor,
    weight: Tensor,
    mask_id: int,
    keys: Tensor | None,
    sampling: Sampling,
    shard: Shard = WHOLE,
    rows: Tensor | None = None,
    second_choices: bool = False,
) -> Tensor:
    """Return the records of rows.

    The mask token is never predicted. Confidence is the token's probability, the difference of the two highest
    probabilities (margin), or the negative entropy in nats, all of the distribution after temperature and filters.

    With a `shard`, all its ranks call this with the same rows and exchange the running sums of their tiles (28 bytes
    per row and tile, 40 with second choices; in the fused form, per row and share of the vocabulary). They get the same
    records, bit for bit those of one rank with the whole weight: tiles are cut alike and merged in the vocabulary's
    order. Only top-p and top-k need whole rows; their logits are gathered, one tile of rows at a time.

    Args:
        hidden: ``[H, d]`` rows after the final norm.
        weight: ``[vocabulary / shard.size, d]`` of the LM head.
        mask_id: id of the mask token.
        keys: ``[H]`` int64, random keys of the rows (needed with temperature > 0).
        sampling: the rules.
        shard: which part of the head's weight this is.
        rows: ``[1]`` int32 on the device, how many of the rows are real; None: all. The others' records are
            undefined; the fused form spends no time on them.
        second_choices: whether the second choice is wanted: the token that would be chosen without the first.

    Returns:
        ``[H, 3]`` int32: token id, bits of the fp32 probability, bits of the fp32 confidence. With `second_choices`
        ``[H, 5]``: also the second choice's token id and the bits of its fp32 probability.
    """
    if not len(hidden):  # of a chunk of a prompt, which predicts nothing; then there are no keys either
        return torch.empty(0, record_size(second_choices), dtype=torch.int32, device=hidden.device)
    if fused(hidden, "head"):
        return fused_records(hidden, weight, mask_id, keys, sampling, shard, rows, second_choices)
    # a GPU's library gives a row the same bits if it is always called for whole tiles of logits
    count, extra = len(hidden), -len(hidden) % (ROWS if hidden.is_cuda else ROW_TILE)
    at_once = ROWS_IN_C if in_c(hidden) and not sampling.filtered else ROWS  # filters need whole rows of logits
    if extra and not in_c(hidden):  # reductions, too, may give a row other bits if it is alone
        hidden, keys = F.pad(hidden, (0, 0, 0, extra)), None if keys is None else F.pad(keys, (0, extra))
    parts = []
    for begin in range(0, len(hidden), at_once):
        own_keys = None if keys is None else keys[begin : begin + at_once]
        parts.append(_sums(hidden[begin : begin + at_once], weight, mask_id, own_keys, sampling, shard, second_choices))
    sums = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if not sampling.filtered:
        sums = shard.gather(sums).movedim(0, 2).flatten(2)
    return _records(sums, sampling)[:count]


def fused_records(
    hidden: Tensor,
    weight: Tensor,
    mask_id: int,
    keys: Tensor | None,
    sampling: Sampling,
    shard: Shard = WHOLE,
    rows: Tensor | None = None,
    second_choices: bool = False,
) -> Tensor:
    """Compute `record_head` with the kernel that multiplies and reduces at once.

    With top-p or top-k, other kernels filter and reduce one tile of logits at a time.
    """
    from lopa_dist.kernels.filters_triton import filtered_sums
    from lopa_dist.kernels.record_head_triton import merged_records, share_sums

    if not sampling.filtered:
        first, by_shares = shard.rank * len(weight), len(weight) * shard.size % SHARES == 0
        shares = SHARES // shard.size if by_shares else 1
        sums = share_sums(hidden, weight, first, shares, mask_id, keys, sampling, rows, second_choices)
        return merged_records(shard.gather(sums).movedim(0, 2).flatten(2), sampling.confidence)
    assert keys is not None
    count, rows = len(hidden), every_row(hidden) if rows is None else rows
    size = FILTERED_ROWS
    hidden = F.pad(hidden, (0, 0, 0, -count % size))  # the library gives a row the same bits in tiles of one size
    parts = []
    for begin in range(0, len(hidden), size):
        logits = whole_rows(hidden[begin : begin + size], weight, shard)
        real = (rows - begin).clamp(0, size)
        sums = filtered_sums(logits, mask_id, keys[begin : begin + size], sampling, real, second_choices)
        parts.append(merged_records(sums, sampling.confidence))
    return torch.cat(parts)[:count]


def whole_rows(rows: Tensor, weight: Tensor, shard: Shard) -> Tensor:
    """Return the logits ``[R, V]`` of rows, those of all ranks of a `shard` together."""
    # a GPU's library may add up in another order for another number of columns: one share of the vocabulary at a time
    by_shares = rows.is_cuda and len(weight) * shard.size % SHARES == 0
    parts = [product(rows, part.t(), in_fp32=True) for part in weight.chunk(SHARES // shard.size if by_shares else 1)]
    return shard.gather(torch.cat(parts, 1)).transpose(0, 1).flatten(1)


def _sums(
    rows: Tensor,
    weight: Tensor,
    mask_id: int,
    keys: Tensor | None,
    sampling: Sampling,
    shard: Shard,
    second_choices: bool,
) -> Tensor:
    """Return running sums ``[7 or 10, R, tiles]`` of this rank's tiles; with filters, of the whole rows as one tile."""
    if sampling.filtered:
        logits = whole_rows(rows, weight, shard)
        return _reduce(logits, 0, logits.shape[1], mask_id, keys, sampling, second_choices)
    first, parts = shard.rank * len(weight), []
    for low, high, width in tiles(first, first + len(weight), len(weight) * shard.size):
        logits = product(rows, weight[low - first : high - first].t(), in_fp32=True)
        parts.append(_reduce(logits, low, width, mask_id, keys, sampling, second_choices))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def tiles(begin: int, end: int, vocabulary: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(low, high, width)``: how the vocabulary's part [begin, end) is cut.

    Logits from `low` to `high` are computed at once, and reduced in tiles of `width`. The tiles are the same whichever
    part of the vocabulary a rank has, if it is one or more of `SHARES` equal parts.
    """
    share = vocabulary // SHARES if vocabulary % SHARES == 0 else vocabulary
    if end - begin <= VOCABULARY:
        yield begin, end, share
        return
    for first in range(begin, end, share):
        for low in range(first, first + share, VOCABULARY):
            high = min(low + VOCABULARY, first + share)
            yield low, high, high - low


def _reduce(
    logits: Tensor, low: int, width: int, mask_id: int, keys: Tensor | None, sampling: Sampling, second_choices: bool
) -> Tensor:
    """Return running sums ``[7, R, tiles]`` of logits ``[R, columns from low]``, in tiles of `width` columns.

    These are a tile's greatest and second logit, the sum of exponentials and their first moment, and the preference,
    logit and token of its choice. With `second_choices` ``[10, R, tiles]``: the last three also of the second choice.
    All are of the logits after temperature and filters, and never of the mask token.
    """
    if in_c(logits):
        return native.reduce(logits, low, width, mask_id, keys, sampling, second_choices)
    if sampling.temperature > 0:
        logits = logits / sampling.divisor
    if low <= mask_id < low + logits.shape[1]:
        # finite: 0 x -inf would poison the entropy
        logits.select(1, mask_id - low).fill_(torch.finfo(torch.float32).min)
    if sampling.filtered:
        logits = filter_logits(logits, sampling.top_p, sampling.top_k)
    starts = torch.arange(low, low + logits.shape[1], width, device=logits.device)
    flat, logits = logits, logits.unflatten(1, (-1, width))
    top, choice = logits.max(2)
    preferences, preference, best, second = logits, top, top, top
    if sampling.temperature > 0:
        assert keys is not None
        ids = torch.arange(low, low + flat.shape[1], device=flat.device)
        preferences = (flat + gumbel(keys, ids)).unflatten(1, (-1, width))
        preference, choice = preferences.max(2)
        best = logits.gather(2, choice[..., None])[..., 0]
    if sampling.confidence == "margin":
        lowest = torch.finfo(logits.dtype).min  # a tile may be one token wide
        second = F.pad(logits, (0, 1), value=lowest).topk(2, 2).values[..., 1]
    shifted = logits - top[..., None]
    exponential = shifted.exp()
    moment = (exponential * shifted).sum(2) if sampling.confidence == "neg_entropy" else top
    token = (starts + choice).float()  # fp32 holds token ids exactly, up to 2^24
    sums = [top, second, exponential.sum(2), moment, preference, best, token]
    if second_choices:
        others = preferences.scatter(2, choice[..., None], torch.finfo(logits.dtype).min)
        preference, choice = others.max(2)
        sums += [preference, logits.gather(2, choice[..., None])[..., 0], (starts + choice).float()]
    return torch.stack(sums)


def _records(sums: Tensor, sampling: Sampling) -> Tensor:
    """Return records ``[R, 3 or 5]`` of all tiles' sums ``[7 or 10, R, tiles]``; on a tie the lower id wins."""
    if in_c(sums):
        return native.records(sums, sampling)
    tops, seconds, totals, moments, preferences, logits, tokens = sums[:7]
    top = tops.amax(1, keepdim=True)
    below = tops - top
    scale = below.exp()
    total = (totals * scale).sum(1)
    choice = preferences.max(1, keepdim=True).indices
    probability = (logits.gather(1, choice) - top).exp()[:, 0] / total
    if sampling.confidence == "probability":
        confidence = probability
    elif sampling.confidence == "margin":
        second = torch.cat([tops, seconds], 1).topk(2, 1).values[:, 1:]
        confidence = (1 - (second - top).exp())[:, 0] / total
    else:
        moment = ((moments + totals * below) * scale).sum(1)
        confidence = moment / total - total.log()
    record = [tokens.gather(1, choice)[:, 0].int(), probability.view(torch.int32), confidence.view(torch.int32)]
    if len(sums) > 7:  # the best of the other tiles' choices and this tile's second choice
        preferences, logits, tokens = (
            best.scatter(1, choice, second.gather(1, choice)) for best, second in zip(sums[4:7], sums[7:], strict=True)
        )
        choice = preferences.max(1, keepdim=True).indices
        logit, token = logits.gather(1, choice)[:, 0], tokens.gather(1, choice)[:, 0]
        record += [token.int(), ((logit - top[:, 0]).exp() / total).view(torch.int32)]
    return torch.stack(record, 1)


def filter_logits(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return logits ``[H, V]`` without the tokens that top-k and nucleus sampling exclude.

    top-k keeps the k best tokens. top-p drops a token if the tokens with greater logits have a total probability above
    `top_p`. So both keep ties, and never drop the best token. With both, probabilities are among the k tokens, as in
    transformers and vLLM.
    """
    lowest = torch.finfo(logits.dtype).min
    if top_k:
        least = logits.topk(min(top_k, logits.shape[1]), 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, lowest)
    if top_p < 1:
        ordered = logits.sort(dim=1, descending=True).values
        mass = ordered.softmax(1)
        dropped = mass.cumsum(1) - mass > top_p
        least = ordered.masked_fill(dropped, torch.inf).amin(1, keepdim=True)
        logits = logits.masked_fill(logits < least, lowest)
    return logits
