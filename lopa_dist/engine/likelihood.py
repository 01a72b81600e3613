"""How likely a model finds given answers.

A causal model's likelihood is exact: the sum of the tokens' log probabilities, each in the context of the tokens before
it. For a masked model there is a lower bound (LLaDA, arXiv 2502.09992), the mean over masks of an answer:

    E over l in 1..L, E over l masked positions:  L / l  x  the sum of the masked tokens' log probabilities.

Masks are drawn by the answer's key; their sizes l are spread evenly, as in the authors' program. If an answer is so
short that it has no more masks than samples were asked for, all of them are computed, and the bound has no sampling
error. In contexts where a row sees nothing after its block, each block sees the true blocks before it, and the bounds
of the blocks add up.

Many answers and many of their masks share one forward. What a row sees before its block is computed once for all masks
of an answer, and for consecutive answers to the same prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode import DecodeConfig
from lopa_dist.decode.context import Part
from lopa_dist.engine.request import Given, Likelihood, TokenLikelihood
from lopa_dist.kernels.attention import AttentionKernel, Grouped, Native
from lopa_dist.kernels.dispatch import in_c
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.models.tensor_parallel import head_shard
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.ragged import Ints, padded
from lopa_dist.rows.structure import own_columns
from lopa_dist.staging import to_device

Mask = NDArray[np.bool_]
ROWS = 4096  # the most rows of a forward, unless one mask of one answer has more
TILE = 256  # rows whose logits are in memory at once
SAMPLES = 128  # masks of an answer, as many as LLaDA's authors take


class View(NamedTuple):
    """A part of an answer, some of whose tokens are masked."""

    answer: int  # its number
    part: Part
    mask: Mask  # [end - first]


class Predicted(NamedTuple):
    """What a model predicts at the masked tokens of a view, in order."""

    logprob: NDArray[np.float64]  # of the answer's tokens
    right: Mask  # whether the answer's token is the most probable one
    best: NDArray[np.float64]  # log probability of the most probable one
    top: NDArray[np.float64]  # [n, 2, k] the most probable tokens, and their log probabilities


class Scorer:
    """Scores answers; all ranks of the `tensor` group make the same calls.

    Args:
        model: on the device where everything runs.
        config: what rows see; the other options are not read.
        samples: masks of an answer, or of each block where blocks are scored one by one.
        rows: the most rows of a forward, unless one mask has more.
        tensor: the group that the model is split over.
    """

    def __init__(
        self,
        model: Transformer,
        config: DecodeConfig,
        samples: int = SAMPLES,
        rows: int = ROWS,
        tensor: Communicator | None = None,
    ) -> None:
        if samples < 1:
            raise ValueError(f"samples={samples}: must be at least 1")
        self.model, self.config, self.samples, self.rows = model, config, samples, rows
        self.shard = head_shard(tensor or Solo())
        self.scope = config.scope
        self.exact = self.scope.causal  # one forward gives the likelihood itself
        self.shift = int(model.config.shift or self.exact)

    @torch.inference_mode()
    def score(self, given: Sequence[Given]) -> list[Likelihood]:
        """Return the likelihoods of some answers; with the logit shift, no prompt may be empty."""
        views: list[View] = []
        weights: list[float] = []  # of the views in their part's sum
        drawn: set[tuple[int, Part]] = set()  # parts of which only some masks are computed
        for number, answer in enumerate(given):
            for index, part in enumerate(self.parts(answer)):
                random = np.random.default_rng([answer.key, index])
                masks, own_weights, are_drawn = self.masks(part.end - part.first, random)
                views += [View(number, part, mask) for mask in masks]
                weights += own_weights
                if are_drawn:
                    drawn.add((number, part))
        terms: dict[tuple[int, Part], list[float]] = {}
        greedy = [True] * len(given)
        tokens: list[list[TokenLikelihood] | None] = [None] * len(given)
        for view, weight, predicted in zip(views, weights, self.predict(given, views), strict=True):
            terms.setdefault((view.answer, view.part), []).append(weight * float(predicted.logprob.sum()))
            if self.exact:
                greedy[view.answer] &= bool(predicted.right.all())
                tokens[view.answer] = of_tokens(given[view.answer], predicted)
        sums, variances = np.zeros((2, len(given)))
        for (number, part), of_masks in terms.items():
            sums[number] += sum(of_masks)
            if (number, part) in drawn and len(of_masks) > 1:
                variances[number] += len(of_masks) * np.var(of_masks, ddof=1)
        forwards = Counter(view.answer for view in views)
        if not self.exact:
            greedy = self.greedy(given, forwards)
        errors = np.sqrt(variances)
        return [
            Likelihood(float(sums[n]), float(errors[n]), greedy[n], forwards[n], tokens[n]) for n in range(len(given))
        ]

    def parts(self, given: Given) -> list[Part]:
        """Return the parts of an answer that are scored one by one."""
        prompt = len(given.prompt)
        return self.scope.parts(prompt, prompt + len(given.answer), self.config.block_size, self.shift)

    def masks(self, length: int, random: np.random.Generator) -> tuple[list[Mask], list[float], bool]:
        """Return masks of `length` tokens, their weights in the sum, and whether they are a random sample."""
        if self.exact:  # every token is predicted, and seen by the tokens after it
            return [np.ones(length, bool)], [1.0], False
        if length < 63 and 2**length - 1 <= self.samples:
            sets = [list(some) for count in range(1, length + 1) for some in combinations(range(length), count)]
            masks = [np.isin(np.arange(length), some) for some in sets]
            return masks, [1 / len(some) / math.comb(length, len(some)) for some in sets], False
        counts = ((np.arange(self.samples) + random.random()) / self.samples * length).astype(int) + 1
        masks = [random.permutation(length) < count for count in counts]
        return masks, [length / count / self.samples for count in counts.tolist()], True

    def greedy(self, given: Sequence[Given], forwards: Counter[int]) -> list[bool]:
        """Return for each answer whether decoding gives it if every forward fills the likeliest token of each part.

        Args:
            given: the answers.
            forwards: of each answer; those made here are added.
        """
        greedy = [True] * len(given)
        views = [
            View(number, part, np.ones(part.end - part.first, bool))
            for number, answer in enumerate(given)
            for part in self.parts(answer)
        ]
        while views:
            left = []
            forwards.update(view.answer for view in views)
            for view, predicted in zip(views, self.predict(given, views), strict=True):
                best = int(predicted.best.argmax())
                greedy[view.answer] &= bool(predicted.right[best])
                mask = view.mask.copy()
                mask[np.flatnonzero(mask)[best]] = False
                if mask.any():
                    left.append(view._replace(mask=mask))
            views = [view for view in left if greedy[view.answer]]
        return greedy

    def predict(self, given: Sequence[Given], views: Iterable[View]) -> Iterator[Predicted]:
        """Yield what the model predicts in each view; as many views share a forward as have room in it."""
        batch: list[View] = []
        rows, last = 0, None
        for view in views:
            before = self.before(given[view.answer], view.part)
            own = view.part.end - view.part.begin
            more = own + (0 if before == last else len(before))
            if batch and rows + more > self.rows:
                yield from self.forward(given, batch)
                batch, rows, more = [], 0, own + len(before)
            batch.append(view)
            rows, last = rows + more, before
        if batch:
            yield from self.forward(given, batch)

    def before(self, given: Given, part: Part) -> list[int]:
        """Return the tokens before a part that are computed apart from it (`Context.before`)."""
        return [*given.prompt, *given.answer][: self.scope.before(part, len(given.prompt))]

    def forward(self, given: Sequence[Given], views: Sequence[View]) -> list[Predicted]:
        """Return what the model predicts in some views, all in one forward."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[tuple[int, int, int, int]] = []  # start, rows, base and number of the other rows that it sees
        ends: list[int] = []  # for each row, where the columns that it sees of its own segment end
        wanted: list[int] = []  # rows that predict
        targets: list[int] = []
        last, base = None, 0
        for view in views:
            answer, part = given[view.answer], view.part
            text, before = [*answer.prompt, *answer.answer], self.before(answer, part)
            if before != last:
                last, base = before, len(tokens)
                if before:
                    segments.append((base, len(before), base, 0))
                    tokens += before
                    positions += range(len(before))
                    ends += self.ends(len(before), len(answer.prompt))
            masked = part.first + np.flatnonzero(view.mask)
            start, count = len(tokens), part.end - part.begin
            own = np.array(text[part.begin : part.end])
            if not self.exact:
                own[masked - part.begin] = self.model.config.mask_id
            segments.append((start, count, base, part.begin if before else 0))
            tokens += own.tolist()
            positions += range(part.begin, part.end)
            ends += range(1, count + 1) if self.exact else [count] * count
            predicts = masked - self.shift
            wanted += np.where(predicts < part.begin, base + predicts, start + predicts - part.begin).tolist()
            targets += [text[position] for position in masked.tolist()]
        top = max(given[view.answer].top or 0 for view in views)
        hidden = self.hidden(tokens, positions, np.array(segments), np.array(ends))
        columns = self.logprobs(hidden, wanted, targets, top)
        cuts = np.cumsum([view.mask.sum() for view in views])[:-1]
        return [
            Predicted(part[0], part[1] > 0, part[2], part[3:].reshape(2, -1, part.shape[1]).transpose(2, 0, 1))
            for part in np.split(columns, cuts, 1)
        ]

    def ends(self, rows: int, prompt: int) -> list[int]:
        """Return for each of `rows` rows where the columns that it sees end; the first `prompt` are the prompt's."""
        first = np.array([0 if self.scope.from_prompt else -prompt])
        count = np.array([rows])
        return own_columns(self.config, first + np.arange(rows), first, count, count).tolist()

    def hidden(self, tokens: list[int], positions: list[int], segments: Ints, ends: Ints) -> Tensor:
        """Return the hidden states ``[R, d]`` of packed rows."""
        weight, shape = self.model.head_weight, self.model.config
        extra = padded(len(tokens)) - len(tokens)
        start, rows, base, seen = segments.T
        laid_out = Segments(start, rows, base, seen, start, ends)
        sent = to_device(np.array([tokens + extra * [0], positions + extra * [0]]), weight.device)
        kernel: AttentionKernel = Grouped(shape.heads // shape.kv_heads, weight.device, weight.dtype)
        if in_c(weight):  # `Grouped` makes a mask as large as the square of the longest segment
            kernel = Native()
        plan = kernel.plan(laid_out, len(tokens) + extra)
        return self.model(*sent, lambda layer, q, k, v: kernel.attend(q, k, v, plan))

    def logprobs(self, hidden: Tensor, rows: list[int], targets: list[int], top: int = 0) -> NDArray[np.float64]:
        """Return what `rows` predict about their `targets` and the most probable tokens, ``[3 + 2 top, H]``.

        First come the targets' log probabilities, then 1 where the target is the most probable token, then the log
        probability of the most probable token; then the `top` most probable tokens, and their log probabilities.
        """
        mask_id, columns = self.model.config.mask_id, []
        both = to_device(np.array([rows, targets]), hidden.device)
        for row, target in zip(both[0].split(TILE), both[1].split(TILE), strict=True):
            tile = F.pad(row, (0, padded(len(row)) - len(row)))
            parts = self.shard.gather(F.linear(hidden[tile], self.model.head_weight))
            logits = parts.transpose(0, 1).flatten(1)[: len(row)].float()
            logits[:, mask_id : mask_id + 1] = -torch.inf  # as in decoding, it is never predicted
            total, (best, token) = logits.logsumexp(1), logits.max(1)
            logprob = logits.gather(1, target[:, None])[:, 0] - total
            found = [logprob, (token == target).float(), best - total]
            most, ids = logits.topk(min(top, logits.shape[1] - 1), 1)
            columns.append(torch.cat([torch.stack(found), ids.T, (most - total[:, None]).T]).double().cpu())
        return torch.cat(columns, 1).numpy()


def of_tokens(given: Given, predicted: Predicted) -> list[TokenLikelihood] | None:
    """Return the likelihood of each token of an answer; None if it was not asked for (`Given.top`)."""
    if given.top is None:
        return None
    found = zip(given.answer, predicted.logprob.tolist(), predicted.top.tolist(), strict=True)
    return [
        TokenLikelihood(token, logprob, [(int(id), other) for id, other in zip(*top, strict=True)][: given.top])
        for token, logprob, top in found
    ]
