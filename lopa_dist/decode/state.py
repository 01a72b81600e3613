"""Decoding state of all sequences in flight: tensors with a leading S, and its small copy for the host.

Positions are relative to the end of the prompt: the first generated token is position 0, prompts have negative ones.
All sequences' generated tokens begin in the same column of `canvas`, so block arithmetic needs no per-sequence offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig


@dataclass(frozen=True)
class Vocabulary:
    """The special tokens that decoding must know, and whether row p-1 predicts position p (`shift`)."""

    mask_id: int
    eos_ids: tuple[int, ...]
    shift: bool


class Records(NamedTuple):
    """What the model said of masked positions. Three tensors of one shape: int32, fp32, fp32."""

    token: Tensor
    probability: Tensor
    confidence: Tensor


@dataclass
class Lengths:
    """The one host copy of a step: integers per sequence, numpy [S]."""

    prompt: NDArray[np.int64]
    committed: NDArray[np.int64]  # -1: the prompt is not in the cache
    finished: NDArray[np.int64]
    end: NDArray[np.int64]
    masked: NDArray[np.int64]  # masked positions in [finished, end)
    branches: NDArray[np.int64]  # to run in the next forward, anchor included; 0 for slots with nothing to do
    first_masked: NDArray[np.int64]  # 1 if position `finished` is masked
    winner: NDArray[np.int64]  # branch that the last step chose
    done: NDArray[np.int64]


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
    prompt: Tensor  # [S] tokens of the prompt
    limit: Tensor  # [S] most new tokens
    key: Tensor  # [S] int64, the request's random key
    committed: Tensor  # [S]
    finished: Tensor  # [S]
    end: Tensor  # [S]
    full: Tensor  # [S, blocks] bool: fully activated (sticky)
    eos: Tensor  # [S] bool: an EOS was filled (sticky)
    done: Tensor  # [S] bool
    step: Tensor  # [S] forwards so far
    branches: Tensor  # [S] branches of the next forward
    edit_position: Tensor  # [S, K, E] positions where a branch differs from the anchor, -1 for none
    edit_token: Tensor  # [S, K, E]
    edit_confidence: Tensor  # [S, K] confidence a branch was created with; 1 for the anchor
    boundary: Records  # [S] the record of position `committed`, kept from the commit (boundary=stale)
    winner: Tensor  # [S] branch chosen in the last step

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
        blocks = 2 * -(-config.max_new_tokens // config.block_size)
        k, e = config.max_branches, config.max_edits

        def long(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        def flag(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.bool, device=device)

        def real(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            config=config,
            vocabulary=vocabulary,
            origin=max_prompt,
            canvas=torch.full((slots, max_prompt + blocks * config.block_size), vocabulary.mask_id, device=device),
            prompt=long(slots),
            limit=long(slots),
            key=long(slots),
            committed=long(slots) - 1,
            finished=long(slots),
            end=long(slots),
            full=flag(slots, blocks),
            eos=flag(slots),
            done=~flag(slots),
            step=long(slots),
            branches=long(slots),
            edit_position=long(slots, k, e) - 1,
            edit_token=long(slots, k, e),
            edit_confidence=real(slots, k).double() + 1,
            boundary=Records(long(slots).int(), real(slots), real(slots)),
            winner=long(slots),
        )

    def admit(self, slot: int, prompt: list[int], max_new_tokens: int, key: int) -> None:
        """Put a request into an empty slot: one block, fully active, and the anchor as its only branch."""
        self.canvas[slot] = self.vocabulary.mask_id
        self.canvas[slot, self.origin - len(prompt) : self.origin] = torch.tensor(prompt, device=self.canvas.device)
        self.prompt[slot], self.limit[slot], self.key[slot] = len(prompt), max_new_tokens, key
        self.committed[slot], self.finished[slot] = -1, 0
        self.end[slot] = min(self.config.block_size, max_new_tokens)
        self.full[slot] = False
        self.full[slot, 0] = True
        self.eos[slot], self.done[slot] = False, False
        self.step[slot], self.branches[slot], self.winner[slot] = 0, 1, 0
        self.edit_position[slot] = -1
        self.edit_confidence[slot] = 1.0

    def generated(self, slot: int, end: int) -> list[int]:
        """Tokens [0, end) of a slot."""
        return self.canvas[slot, self.origin : self.origin + end].tolist()

    def span(self, width: int) -> Tensor:
        """The positions [finished, finished + width) of every sequence, ``[S, width]``."""
        return self.finished[:, None] + torch.arange(width, device=self.canvas.device)

    def masked(self, width: int) -> Tensor:
        """Which positions of `span` are appended and still masked, ``[S, width]`` bool."""
        span = self.span(width)
        return (self.canvas.gather(1, self.origin + span) == self.vocabulary.mask_id) & (span < self.end[:, None])

    def lengths(self) -> Lengths:
        """Copy what the host must know: 9 integers a sequence, one transfer."""
        c = self.canvas
        generated = torch.arange(c.shape[1] - self.origin, device=c.device)
        inside = (generated >= self.finished[:, None]) & (generated < self.end[:, None])
        masked = ((c[:, self.origin :] == self.vocabulary.mask_id) & inside).sum(1)
        first = c.gather(1, self.origin + self.finished[:, None])[:, 0]
        rows = (
            self.prompt,
            self.committed,
            self.finished,
            self.end,
            masked,
            self.branches * ~self.done,
            (first == self.vocabulary.mask_id).long(),
            self.winner,
            self.done.long(),
        )
        return Lengths(*torch.stack(rows).cpu().numpy())

    def edited(self, width: int) -> Tensor:
        """Which positions of `span` each branch has filled beyond the anchor, ``[S, K, width]`` bool."""
        offset = self.edit_position - self.finished[:, None, None]
        return (offset[..., None] == torch.arange(width, device=offset.device)).any(2)
