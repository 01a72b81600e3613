"""The record head: LM head and what is wanted of its logits, in one go.

Logits of all rows never exist at once: rows are taken in tiles, the vocabulary in tiles too, and every tile is reduced
to running sums (online softmax). Per row three numbers leave: token, probability, confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.random import gumbel

ROWS, VOCABULARY = 64, 8192  # a tile of logits
PAD_ROWS = 16  # see decode.layout.ROW_TILE


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen and how sure the model is of it (spec section 1)."""

    confidence: str = "neg_entropy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def filtered(self) -> bool:
        """Whether the whole distribution of a row is needed at once."""
        return self.top_p < 1 or self.top_k > 0


def record_head(hidden: Tensor, weight: Tensor, mask_id: int, keys: Tensor | None, sampling: Sampling) -> Tensor:
    """Records of rows.

    The mask token itself is never predicted. Confidence is the token's probability, the distance to the runner-up
    (margin), or the negative entropy in nats; all of the distribution after temperature and filters.

    Args:
        hidden: ``[H, d]`` rows behind the final norm.
        weight: ``[vocabulary, d]`` of the LM head.
        mask_id: id of the mask token.
        keys: ``[H]`` int64, random keys of the rows (needed with temperature > 0).
        sampling: the rules.

    Returns:
        ``[H, 3]`` int32: token id, bits of the fp32 probability, bits of the fp32 confidence.
    """
    records = torch.empty(len(hidden), 3, dtype=torch.int32, device=hidden.device)
    for begin in range(0, len(hidden), ROWS):
        rows = hidden[begin : begin + ROWS]
        some = None if keys is None else keys[begin : begin + ROWS]
        token, probability, confidence = _tile(rows, weight, mask_id, some, sampling)
        records[begin : begin + ROWS, 0] = token
        records[begin : begin + ROWS, 1] = probability.float().view(torch.int32)
        records[begin : begin + ROWS, 2] = confidence.float().view(torch.int32)
    return records


def _tile(
    rows: Tensor, weight: Tensor, mask_id: int, keys: Tensor | None, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    count = len(rows)
    if count % PAD_ROWS:  # reductions, too, may give a lone row other bits than a row among others
        extra = PAD_ROWS - count % PAD_ROWS
        rows, keys = F.pad(rows, (0, 0, 0, extra)), None if keys is None else F.pad(keys, (0, extra))
    size = len(weight) if sampling.filtered else VOCABULARY
    state: tuple[Tensor, ...] | None = None
    for low in range(0, len(weight), size):
        logits = F.linear(rows, weight[low : low + size]).float()
        if sampling.temperature > 0:
            logits /= sampling.temperature
        if low <= mask_id < low + size:
            logits[:, mask_id - low] = torch.finfo(torch.float32).min  # finite: 0 x -inf would poison the entropy
        if sampling.filtered:
            logits = filter_logits(logits, sampling.top_p, sampling.top_k)
        state = _merge(state, _reduce(logits, low, keys, sampling))
    assert state is not None
    top, second, total, moment, _, best, token = state
    probability = (best - top).exp() / total
    if sampling.confidence == "probability":
        confidence = probability
    elif sampling.confidence == "margin":
        confidence = (1 - (second - top).exp()) / total
    else:
        confidence = moment / total - total.log()
    return token[:count], probability[:count], confidence[:count]


def _reduce(logits: Tensor, low: int, keys: Tensor | None, sampling: Sampling) -> tuple[Tensor, ...]:
    """Running sums of one tile: greatest and second logit, sum of exponentials, their first moment, the choice."""
    top, token = logits.max(1)
    second = top
    if sampling.confidence == "margin":
        lowest = torch.finfo(logits.dtype).min  # a tile may be one token wide
        second = F.pad(logits, (0, 1), value=lowest).topk(2, 1).values[:, 1]
    shifted = logits - top[:, None]
    exponential = shifted.exp()
    moment = (exponential * shifted).sum(1) if sampling.confidence == "neg_entropy" else top
    if sampling.temperature > 0:
        assert keys is not None
        ids = torch.arange(low, low + logits.shape[1], device=logits.device)
        preference, token = (logits + gumbel(keys, ids)).max(1)
        best = logits.gather(1, token[:, None])[:, 0]
    else:
        preference = best = top
    return top, second, exponential.sum(1), moment, preference, best, token + low


def _merge(a: tuple[Tensor, ...] | None, b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Running sums of two tiles together; on equal preference the lower token id stays."""
    if a is None:
        return b
    top = torch.maximum(a[0], b[0])
    second = torch.maximum(torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1]))
    scale_a, scale_b = (a[0] - top).exp(), (b[0] - top).exp()
    total = a[2] * scale_a + b[2] * scale_b
    moment = (a[3] + a[2] * (a[0] - top)) * scale_a + (b[3] + b[2] * (b[0] - top)) * scale_b
    take = b[4] > a[4]
    return (
        top,
        second,
        total,
        moment,
        torch.where(take, b[4], a[4]),
        torch.where(take, b[5], a[5]),
        torch.where(take, b[6], a[6]),
    )


def filter_logits(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Drop what nucleus and top-k sampling exclude, ``[H, V]`` (spec section 1, b and c).

    top-p drops every token whose preceding mass already exceeds it, never the best one; top-k keeps ties at the k-th.
    """
    lowest = torch.finfo(logits.dtype).min
    if top_p < 1:
        ordered, index = logits.sort(dim=1, descending=True, stable=True)
        mass = ordered.softmax(1)
        drop = mass.cumsum(1) - mass > top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), lowest)
    if top_k:
        least = logits.topk(min(top_k, logits.shape[1]), 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, lowest)
    return logits
