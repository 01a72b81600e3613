"""Decoding state of all sequences in flight: tensors with a leading S, and its small copy for the host.

Positions are relative to the end of the prompt: the first generated token is position 0, prompts have negative ones.
All sequences' generated tokens begin in the same column of `canvas`, so block arithmetic needs no per-sequence offset.

Models that count blocks from the first token of the prompt (prompt_attention=blocks) need none either: the tail of the
prompt, what its last whole block leaves over, is moved behind position 0 as tokens that are `known`. So position 0
begins a block in their counting, too, and the first window block has masks from `known` on only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.ragged import send


@dataclass(frozen=True)
class Vocabulary:
    """The special tokens that decoding must know, and whether row p-1 predicts position p (`shift`)."""

    mask_id: int
    eos_ids: tuple[int, ...]
    shift: bool


class Records:
    """What the model said of masked positions: token (int32), probability and confidence (fp32), of one shape.

    They are kept as one int32 tensor ``packed [3, ...]``, as they travel, so that one operation moves all three.
    """

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed

    @cached_property
    def token(self) -> Tensor:
        """Ids."""
        return self.packed[0]

    @cached_property
    def probability(self) -> Tensor:
        """Of the tokens."""
        return self.packed[1].view(torch.float32)

    @cached_property
    def confidence(self) -> Tensor:
        """What positions are ranked and branches are scored by."""
        return self.packed[2].view(torch.float32)

    @classmethod
    def of(cls, token: Tensor, probability: Tensor, confidence: Tensor) -> Records:
        """From three tensors."""
        return cls(torch.stack([token, probability.view(torch.int32), confidence.view(torch.int32)]))


class Window(NamedTuple):
    """The positions ``[finished, finished + width)`` of every sequence, all ``[S, width]``."""

    span: Tensor  # positions
    token: Tensor
    inside: Tensor  # bool: appended, and its sequence is running
    masked: Tensor  # bool: inside and not filled


class Lengths(NamedTuple):
    """The one host copy of a step: integers per sequence, numpy [S]. Rows of `State.integers`, in this order."""

    prompt: NDArray[np.int64]
    committed: NDArray[np.int64]  # -1: the prompt is not in the cache
    finished: NDArray[np.int64]
    end: NDArray[np.int64]
    limit: NDArray[np.int64]  # where the answer ends at the latest
    known: NDArray[np.int64]  # tokens from position 0 on that belong to the prompt
    masked: NDArray[np.int64]  # masked positions in [finished, end)
    branches: NDArray[np.int64]  # to run in the next forward, anchor included; 0 for slots with nothing to do
    first_masked: NDArray[np.int64]  # 1 if position `finished` is masked
    winner: NDArray[np.int64]  # branch that the last step chose
    done: NDArray[np.int64]
    step: NDArray[np.int64]  # forwards so far

    def take(self, slots: NDArray[np.int64]) -> Lengths:
        """Of some slots."""
        return Lengths._make(values[slots] for values in self)


BY_SLOT = ("canvas", "key", "eos", "edit_confidence")  # tensors that begin with S


@dataclass
class State:
    """S sequence slots. A slot is running, or `done` (finished or empty).

    Blocks: `committed` tokens have their K/V in the cache, `finished` ends the run of leading complete blocks and
    `end` is the end of the last appended block, so the window is [committed, end) (spec: the D2F pipeline).
    """

    config: DecodeConfig
    vocabulary: Vocabulary
    origin: int  # column of position 0 in `canvas`
    canvas: Tensor  # [S, origin + N] prompts right-aligned before `origin`, mask ids where nothing is filled
    eos_ids: Tensor  # [number of EOS ids]
    integers: Tensor  # [12, S] what the host must know, as `Lengths` names it
    key: Tensor  # [S] int64, the request's random key
    eos: Tensor  # [S] bool: an EOS was filled (sticky)
    edits: Tensor  # [2, S, K, E] positions where a branch differs from the anchor (-1 for none), and the tokens there
    edit_confidence: Tensor  # [S, K] confidence a branch was created with; 1 for the anchor
    boundary: Records  # [S] the record of position `committed`, kept from the commit (boundary=stale)
    sampled: NDArray[np.bool_]  # [S] whether the request draws random numbers

    def __post_init__(self) -> None:
        # rows of `integers`: written in place, so that the host copy is one transfer
        self.prompt, self.committed, self.finished, self.end, self.limit, self.known = self.integers[:6]
        self.masked, self.branches, self.first_masked, self.winner, self.ended, self.step = self.integers[6:]
        self.edit_position, self.edit_token = self.edits
        self.answers = self.canvas[:, self.origin :]  # a view that begins with position 0
        self._window: Window | None = None

    @property
    def done(self) -> Tensor:
        """[S] bool: finished, or empty."""
        return self.ended != 0

    @property
    def slots(self) -> int:
        """S."""
        return self.canvas.shape[0]

    @classmethod
    def empty(
        cls, config: DecodeConfig, vocabulary: Vocabulary, slots: int, max_prompt: int, device: torch.device
    ) -> State:
        """A state of `slots` empty slots for prompts of at most `max_prompt` tokens."""
        # twice the length: the widest window of the batch, laid over any sequence, stays inside
        most = config.max_new_tokens + (config.block_size - 1 if config.prompt_attention == "blocks" else 0)
        blocks = 2 * -(-most // config.block_size)
        k, e = config.max_branches, config.max_edits

        def long(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        integers = long(12, slots)
        integers[1], integers[10] = -1, 1  # no prompt in the cache; done
        edits = long(2, slots, k, e)
        edits[0] = -1
        return cls(
            config=config,
            vocabulary=vocabulary,
            origin=max_prompt,
            canvas=torch.full((slots, max_prompt + blocks * config.block_size), vocabulary.mask_id, device=device),
            eos_ids=torch.tensor(vocabulary.eos_ids, device=device),
            integers=integers,
            key=long(slots),
            eos=torch.zeros(slots, dtype=torch.bool, device=device),
            edits=edits,
            edit_confidence=torch.ones(slots, k, dtype=torch.float64, device=device),
            boundary=Records(long(3, slots).int()),
            sampled=np.zeros(slots, bool),
        )

    def admit(self, slot: int, prompt: Sequence[int], max_new_tokens: int, key: int, sampled: bool = False) -> None:
        """Put a request into an empty slot: one block, fully active, and the anchor as its only branch."""
        self._window = None
        tail = known(self.config, len(prompt))
        before, limit = len(prompt) - tail, max_new_tokens + tail
        end = min(self.config.block_size, limit)
        self.canvas[slot] = self.vocabulary.mask_id
        columns = slice(self.origin - before, self.origin + tail)
        self.key[slot], self.sampled[slot] = key, sampled
        # in the order of `Lengths`: nothing cached or finished, one block, masked from `known` on, one branch
        values = (before, -1, 0, end, limit, tail, end - tail, 1, int(tail == 0), 0, 0, 0)
        sent = send(np.array([*values, *prompt]), self.canvas.device)
        self.integers[:, slot], self.canvas[slot, columns] = sent[: len(values)], sent[len(values) :]
        self.eos[slot] = False
        self.edit_position[slot] = -1
        self.edit_confidence[slot] = 1.0

    def generated(self, slots: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
        """The answers in some slots up to a position each, in one transfer; the prompts' tails are no part of them."""
        at = send(np.array(slots), self.canvas.device)
        rows = torch.cat([self.known[at, None], self.answers[at]], 1).tolist()
        return [answer[known:end] for (known, *answer), end in zip(rows, ends, strict=True)]

    def window(self, width: int) -> Window:
        """The windows, at most `width` positions of each; worked out once a step."""
        if self._window is None or self._window.span.shape[1] != width:
            span = self.finished[:, None] + places(width, self.canvas.device)
            token = self.answers.gather(1, span)
            inside = (span < self.end[:, None]) & (self.ended == 0)[:, None]
            masked = (token == self.vocabulary.mask_id) & inside
            self._window = Window(span, token, inside, masked)
        return self._window

    def take(self, slots: NDArray[np.int64]) -> State:
        """A state of some slots, copied: for a step in which the others wait."""
        at = send(slots, self.canvas.device)
        parts = {name: getattr(self, name)[at] for name in BY_SLOT}
        return replace(
            self,
            **parts,
            integers=self.integers[:, at],
            edits=self.edits[:, at],
            boundary=Records(self.boundary.packed[:, at]),
            sampled=self.sampled[slots],
        )

    def put(self, slots: NDArray[np.int64], part: State) -> None:
        """Write back what `take` gave out, after its step."""
        at = send(slots, self.canvas.device)
        for name in BY_SLOT:
            getattr(self, name)[at] = getattr(part, name)
        self.integers[:, at], self.edits[:, at] = part.integers, part.edits
        self.boundary.packed[:, at] = part.boundary.packed
        self._window = None

    def close_window(self) -> None:
        """The step is over: the next `window` is another."""
        self._window = None

    def lengths(self) -> Lengths:
        """Copy what the host must know: 12 integers a sequence, one transfer."""
        return self.lengths_and(self.integers.new_empty(0))[0]

    def lengths_and(self, beside: Tensor) -> tuple[Lengths, NDArray[np.int64]]:
        """The lengths and `beside` ``[n]``, still in one transfer."""
        count = self.integers.numel()
        host = torch.cat([self.integers.view(-1), beside]).cpu().numpy()
        return Lengths._make(host[:count].reshape(self.integers.shape)), host[count:]


def known(config: DecodeConfig, prompt: int) -> int:
    """How many of a prompt's tokens count as the answer's first ones (see above)."""
    return prompt % config.block_size if config.prompt_attention == "blocks" else 0


@lru_cache(maxsize=256)
def places(count: int, device: torch.device) -> Tensor:
    """``[0, count)``, made once."""
    return torch.arange(count, device=device)
