"""Decoding state of all running sequences: tensors with a dimension S, and the small copy of it that the host gets.

Positions are relative to the end of the prompt: the first generated token is position 0, prompts have negative ones.
All sequences' generated tokens begin in the same column of `canvas`, so block arithmetic needs no per-sequence offset.

Models that count blocks from the first token of the prompt (context=blocks) need none either: the prompt's tokens
after its last complete block are moved to positions from 0 on, where they count as `known`. So position 0 begins a
block in the model's counting, too, and the first block of the answer has masks from position `known` on only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.ragged import Ints
from lopa_dist.staging import to_device, together


@dataclass(frozen=True)
class Vocabulary:
    """The special tokens that decoding must know, and whether row p-1 predicts position p (`shift`)."""

    mask_id: int
    eos_ids: tuple[int, ...]
    shift: bool
    size: int | None = None  # how many tokens the model can read; None: not known


class Records:
    """What the model predicts: at each position a token (int32), its probability and its confidence (fp32).

    All three have one shape. They are packed in one int32 tensor, ``packed [3, ...]``, also when they travel between
    ranks, so that one operation moves all of them. For a tree of drafts it is ``packed [5, ...]``, with the second
    choice's token and probability.
    """

    def __init__(self, packed: Tensor, drafts: Records | None = None) -> None:
        self.packed = packed
        # masked models: [S, K x m] what is predicted at each draft in the context of those before it. Causal models:
        # [S, K, D, n] what the n masks after each row predict (`rules.causal.verify`)
        self.drafts = drafts

    @cached_property
    def token(self) -> Tensor:
        """Token ids."""
        return self.packed[0]

    @cached_property
    def probability(self) -> Tensor:
        """The tokens' probabilities, which are compared with the fill threshold."""
        return self.packed[1].view(torch.float32)

    @cached_property
    def confidence(self) -> Tensor:
        """What ranks positions and scores branches (`DecodeConfig.confidence`)."""
        return self.packed[2].view(torch.float32)

    @cached_property
    def second_token(self) -> Tensor:
        """Token ids of the second choices (`DecodeConfig.second_choices`)."""
        return self.packed[3]

    @cached_property
    def second_probability(self) -> Tensor:
        """The probabilities of the second choices."""
        return self.packed[4].view(torch.float32)


class Window(NamedTuple):
    """The positions ``[complete, complete + width)`` of every sequence, ``[S, width]``, and which sequences run."""

    span: Tensor  # positions
    token: Tensor
    inside: Tensor  # bool: the position's block was appended, and its sequence is running
    masked: Tensor  # bool: inside and not filled
    running: Tensor  # [S] bool


FAILED = 2  # `HostState.done` of a sequence whose predictions were not numbers


class HostState(NamedTuple):
    """What the host knows of every sequence: integers, numpy [S]. Rows of `State.integers`, in this order.

    Blocks follow from `committed <= complete <= end` (docs/architecture.md, "The state").
    """

    prompt: Ints  # tokens of the prompt, without `known` ones
    committed: Ints  # tokens whose K/V are in the cache; -1: the prompt's are not there yet
    complete: Ints  # end of the leading blocks that have no masks
    end: Ints  # end of the last appended block
    limit: Ints  # where the answer ends at the latest
    known: Ints  # tokens from position 0 on that belong to the prompt
    suffix: Ints  # given tokens from position `limit` on, which the answer leads to
    masked: Ints  # masked positions in [complete, end)
    starts_masked: Ints  # 1 if the window's first position, `complete`, is masked
    branches: Ints  # to run in the next forward, anchor included; 0 for slots that do not run
    drafts: Ints  # the most drafts that the next forward may accept, those of the deepest branch's path included
    expects_eos: Ints  # 1 if the model expects an end-of-text after the drafts: nothing is drafted there (causal)
    winner: Ints  # branch that the last step chose
    accepted: Ints  # drafts that the last step accepted
    done: Ints  # 1 if the slot is empty or its sequence is finished, FAILED if its predictions were not numbers
    step: Ints  # forwards so far

    @property
    def waits_for_prefill(self) -> NDArray[np.bool_]:
        """Whether a sequence runs whose prompt has no K/V in the cache yet, ``[S]``."""
        return (self.committed < 0) & (self.branches > 0)

    def take(self, slots: Ints) -> HostState:
        """Return the values of some slots."""
        return HostState._make(values[slots] for values in self)


class Admitted(NamedTuple):
    """A request that gets a slot."""

    slot: int
    prompt: Sequence[int]
    max_new_tokens: int
    key: int  # of its random numbers
    sampled: bool  # whether it draws any
    suffix: Sequence[int] = ()  # tokens after the answer, where rows see them


class Opening(NamedTuple):
    """What a request begins with in its slot."""

    slot: int
    sampled: bool
    numbers: Ints  # [c] what `State.admission_places` lists
    places: Ints  # [c] where these lie in `State.storage`
    canvas: Ints  # its row of `State.canvas`


SLOT_DIMENSIONS = {
    "canvas": 0, "key": 0, "eos": 0, "settling": 0, "written": 0,
    "integers": 1, "edits": 1, "chain": 1, "paths": 1, "boundary": 1,
}  # fmt: skip
"""The tensors of `State`, and which dimension of each is S."""


@dataclass
class State:
    """S sequence slots. A slot is running, or `done`: empty, or its sequence is finished."""

    config: DecodeConfig
    vocabulary: Vocabulary
    origin: int  # column of position 0 in `canvas`
    canvas: Tensor  # [S, origin + N] prompts right-aligned before `origin`, mask ids where nothing is filled
    eos_ids: Tensor  # [number of EOS ids]
    integers: Tensor  # [fields of HostState, S] what the host must know
    key: Tensor  # [S] int64, the request's random key
    eos: Tensor  # [S] bool: an EOS was filled, in this step or an earlier one; with `tau_edit`, in a settled block
    settling: Tensor  # [S] forwards in a row that found no mask in the window (tau_edit)
    edits: Tensor  # [2, S, K, E] positions where a branch differs from the anchor (-1 for none), and the tokens there
    # [3, S, K x m] of each branch's drafts, in the order of their verification: position; token; and the token of the
    # row that verifies it: with the shift the one before its position (`rules.verified`), without it a mask
    chain: Tensor
    paths: Tensor  # [4, S, K] of each branch's path: `path_depth`, `path_parent`, `path_token`, `path_drafts`
    boundary: Tensor  # [3 or 5, S] record of position `committed`, from the forward that committed the token before it
    sampled: NDArray[np.bool_]  # [S] whether the request draws random numbers
    # one piece of memory that holds all int64 tensors above except `eos_ids`, so that the host can change several of
    # them in one operation; None in a state that `take` returns
    storage: Tensor | None = None
    written: Tensor | None = None  # [S, 3, N + 1] how tokens were written (`decode/written.py`); None: not asked for

    def __post_init__(self) -> None:
        # views of `integers`, written in place, so that one transfer takes them all to the host
        rows = dict(zip(HostState._fields, self.integers, strict=True))
        self.prompt, self.known, self.limit = rows["prompt"], rows["known"], rows["limit"]
        self.committed, self.complete, self.end = rows["committed"], rows["complete"], rows["end"]
        self.masked, self.starts_masked = rows["masked"], rows["starts_masked"]
        self.branches, self.winner = rows["branches"], rows["winner"]
        self.drafts, self.expects_eos, self.accepted = rows["drafts"], rows["expects_eos"], rows["accepted"]
        self.done, self.step = rows["done"], rows["step"]
        self.edit_position, self.edit_token = self.edits
        self.chain_position, self.chain_token, self.chain_verifying = self.chain
        # [S, K] each: choices in a branch's path, the branch that verifies the last one, its token, drafts after it
        self.path_depth, self.path_parent, self.path_token, self.path_drafts = self.paths
        self.answers = self.canvas[:, self.origin :]  # a view that begins with position 0
        self._window: Window | None = None

    @property
    def slots(self) -> int:
        """The number of slots, S."""
        return self.canvas.shape[0]

    @cached_property
    def chain_places(self) -> Ints:
        """Return where the parts of a chain lie in `storage`, ``[2, 4]``.

        Columns: position 0 of the answer, the anchor's first draft, `drafts`, `expects_eos`. Row 0 has the indices for
        slot 0, row 1 the distance from slot to slot.
        """
        tensors = self.answers, self.chain_token, self.drafts, self.expects_eos
        return np.array([[tensor.storage_offset() for tensor in tensors], [tensor.stride(0) for tensor in tensors]])

    @cached_property
    def admission_places(self) -> Ints:
        """Return where the numbers that a new request resets lie in `storage`, ``[2, c]``; rows as in `chain_places`.

        The columns are first those of `HostState`, then those of `key`, `settling`, `paths` and `edit_position`.
        """
        parts: list[Ints] = []
        named = [(getattr(self, name), SLOT_DIMENSIONS[name]) for name in ("integers", "key", "settling", "paths")]
        for tensor, dimension in [*named, (self.edit_position, SLOT_DIMENSIONS["edits"] - 1)]:
            first = tensor.narrow(dimension, 0, 1)
            numbers = np.indices(first.shape).reshape(first.dim(), -1)
            places: Ints = np.array(first.stride()) @ numbers + int(first.storage_offset())
            parts.append(np.stack([places, np.full_like(places, tensor.stride(dimension))]))
        return np.concatenate(parts, 1)

    @classmethod
    def empty(
        cls,
        config: DecodeConfig,
        vocabulary: Vocabulary,
        slots: int,
        max_prompt: int,
        device: torch.device,
        max_suffix: int = 0,
    ) -> State:
        """Return a state of `slots` empty slots; prompts have at most `max_prompt` tokens, suffixes `max_suffix`."""
        columns = config.scope.columns(config.max_new_tokens, config.block_size, config.max_drafts)
        columns = max(columns, config.max_new_tokens + max_suffix)
        k, e = config.max_branches, config.max_edits

        shapes = {
            "canvas": (slots, max_prompt + columns),
            "integers": (len(HostState._fields), slots),
            "key": (slots,),
            "settling": (slots,),
            "edits": (2, slots, k, e),
            "chain": (3, slots, k * config.max_drafts),
            "paths": (4, slots, k),
        }
        storage = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.long, device=device)
        parts = storage.split([math.prod(shape) for shape in shapes.values()])
        state = cls(
            config=config,
            vocabulary=vocabulary,
            origin=max_prompt,
            eos_ids=torch.tensor(vocabulary.eos_ids, device=device),
            eos=torch.zeros(slots, dtype=torch.bool, device=device),
            boundary=torch.zeros(config.record_size, slots, dtype=torch.int32, device=device),
            sampled=np.zeros(slots, bool),
            storage=storage,
            **{name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)},
        )
        state.canvas.fill_(vocabulary.mask_id)
        state.committed.fill_(-1)
        state.done.fill_(1)
        state.edit_position.fill_(-1)
        state.chain_verifying.fill_(vocabulary.mask_id)
        return state

    def openings(self, admitted: Sequence[Admitted]) -> list[Opening]:
        """Return what requests begin with in their slots, worked out ahead of `admit_all`; `admitted` is not empty.

        Each has the frontiers that its context begins with (`Context.opening`), and the anchor as its only branch.
        """
        scope, size, count = self.config.scope, self.config.block_size, len(admitted)
        tokens, limit, suffix, keys = np.array(
            [(len(one.prompt), one.max_new_tokens, len(one.suffix), one.key) for one in admitted]
        ).T
        first, step = self.admission_places
        places = first + np.array([[one.slot] for one in admitted]) * step
        numbers = np.zeros_like(places)
        fields = len(HostState._fields)
        numbers[:, fields] = keys
        numbers[:, len(first) - self.edit_position[0].numel() :] = -1
        new = HostState._make(numbers[:, :fields].T)  # views, written in place
        new.known[:] = known = np.array([scope.known(prompt, size) for prompt in tokens.tolist()])
        new.prompt[:], new.suffix[:] = tokens - known, suffix
        new.limit[:] = limit = limit + known
        new.complete[:], new.end[:] = complete, end = scope.opening(known, limit, suffix, size)
        new.masked[:], new.starts_masked[:] = end - known, (known <= complete) & (complete < end)
        new.committed[:], new.branches[:] = -1, 1
        canvas = np.full((count, self.canvas.shape[1]), self.vocabulary.mask_id)
        for row, one, begin in zip(canvas, admitted, (self.origin - new.prompt).tolist(), strict=True):
            row[begin : begin + len(one.prompt)] = one.prompt
            if one.suffix:
                after = begin + len(one.prompt) + one.max_new_tokens
                row[after : after + len(one.suffix)] = one.suffix
        by_request = zip(admitted, numbers, places, canvas, strict=True)
        return [Opening(one.slot, one.sampled, *rows) for one, *rows in by_request]

    def admit_all(self, openings: Sequence[Opening], host: HostState) -> HostState:
        """Put requests into empty slots.

        All go to the device in one transfer. The host makes the same change in its own copy, so nothing has to come
        back.

        Args:
            openings: not empty.
            host: what the host knows before.

        Returns:
            What the host knows afterwards; `host` is not changed.
        """
        self.forget_window()
        slots, sampled, numbers, places, canvas = zip(*openings, strict=True)
        at, of_all = np.array(slots), np.concatenate(numbers)
        self.sampled[at] = sampled
        sent = together(
            self.canvas.device, slots=at, numbers=of_all, places=np.concatenate(places), canvas=np.concatenate(canvas)
        )
        assert self.storage is not None
        self.storage.index_copy_(0, sent["places"], sent["numbers"])
        self.canvas.index_copy_(0, sent["slots"], sent["canvas"].view(len(at), -1))
        self.eos.index_fill_(0, sent["slots"], 0)
        values = np.concatenate(host).reshape(len(host), -1)
        values[:, at] = of_all.reshape(len(at), -1)[:, : len(host)].T
        return HostState._make(values)

    def finish(self, slots: Sequence[int], host: HostState) -> HostState:
        """Finish the sequences in some slots, and return what the host knows afterwards."""
        self.forget_window()
        at, values = to_device(np.array(slots), self.canvas.device), np.stack(host)
        for field, value in (("done", 1), ("branches", 0), ("drafts", 0)):
            getattr(self, field).index_fill_(0, at, value)
            values[HostState._fields.index(field), slots] = value
        self.path_drafts.index_fill_(0, at, 0)  # otherwise the next step would verify drafts that no forward computed
        return HostState._make(values)

    def limit_branches(self, host: HostState, most: int) -> HostState:
        """Let at most `most` branches of each sequence run, anchor included; return what the host knows afterwards."""
        self.branches.clamp_(max=most)
        return host._replace(branches=np.minimum(host.branches, most))

    def answers_in(self, slots: Sequence[int]) -> Tensor:
        """Return a copy of the answers in `slots`, a row each."""
        return self.answers.index_select(0, to_device(np.array(slots), self.canvas.device))

    def generated(self, slots: Sequence[int], begins: Ints, ends: Ints) -> list[list[int]]:
        """Return the answers in `slots` from the positions `begins` to `ends`, ``[S]`` each, in one transfer."""
        spans = zip(self.answers_in(slots).tolist(), begins[slots].tolist(), ends[slots].tolist(), strict=True)
        return [answer[begin:end] for answer, begin, end in spans]

    def window(self, width: int) -> Window:
        """Return the windows, `width` positions of each; computed once a step."""
        if self._window is None or self._window.span.shape[1] != width:
            span = self.complete[:, None] + arange(width, self.canvas.device)
            token = self.answers.gather(1, span)
            running = self.done == 0
            inside = (span < self.end[:, None]) & running[:, None]
            masked = (token == self.vocabulary.mask_id) & inside
            self._window = Window(span, token, inside, masked, running)
        return self._window

    def wanted(self, width: int) -> Tensor:
        """Return the positions of the windows whose predictions are wanted, ``[S, width]`` bool (`wanted_count`)."""
        span, _, inside, masked, _ = self.window(width)
        return masked if self.config.tau_edit is None else inside & (span >= self.known[:, None])

    def forget_window(self) -> None:
        """Make `window` compute its windows again, because sequences have changed."""
        self._window = None

    def is_eos(self, token: Tensor) -> Tensor:
        """Return which tokens end a text, bool of the shape of `token`."""
        found = token[..., None] == self.eos_ids
        return found[..., 0] if len(self.eos_ids) == 1 else found.any(-1)

    def fillable(self, masked: Tensor) -> Tensor:
        """Return which of the masked positions ``[S, W]`` may be filled in this step.

        Without `DecodeConfig.sub_block_size` these are all. With it, they are each block's masks in the first sub-block
        that has any: Fast-dLLM v2 fills a block from left to right, a sub-block at a time, while it sees all of it.
        """
        size = self.config.sub_block_size
        if size is None:
            return masked
        parts = masked.view(len(masked), -1, self.config.block_size // size, size)
        has = parts.any(3)  # [S, blocks, sub-blocks]
        return (parts & (has & (has.cumsum(2) == 1))[..., None]).view_as(masked)

    def take(self, slots: Ints) -> State:
        """Return a copy of some slots, for a step that runs only these; the others wait for a later step."""
        at = to_device(slots, self.canvas.device)
        parts = {
            name: tensor.index_select(dimension, at)
            for name, dimension in SLOT_DIMENSIONS.items()
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **parts, sampled=self.sampled[slots], storage=None)

    def put(self, slots: Ints, part: State) -> None:
        """Write back what `take` returned, after its step."""
        at = to_device(slots, self.canvas.device)
        for name, dimension in SLOT_DIMENSIONS.items():
            if (tensor := getattr(self, name)) is not None:
                tensor.index_copy_(dimension, at, getattr(part, name))
        self.forget_window()

    def noise_keys(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Return keys of random numbers, from seed, request, position and step alone.

        So they do not depend on rank, batch or order. If drafts are verified, the step is left out: a draft and its
        verification, a step later, draw the same noise.

        Args:
            sequence, position: ``[H]``.
        """
        step = 0 if self.config.verifies else self.step[sequence]
        return (self.key[sequence] * 0x1_0000_0001 + position) * 0x1_0000_0001 + step

    def to_host(self) -> HostState:
        """Return what the host must know, copied in one transfer."""
        return self.to_host_with()[0]

    def to_host_with(self, *extra: Tensor) -> tuple[HostState, list[Ints]]:
        """Return what the host must know and each of `extra`, integers of one dimension, copied in one transfer."""
        sent = torch.cat([self.integers.view(-1), *extra]).cpu().numpy()
        others, begin = [], self.integers.numel()
        for part in extra:
            others.append(sent[begin : begin + len(part)])
            begin += len(part)
        return HostState._make(sent[: self.integers.numel()].reshape(self.integers.shape)), others


def of_branch(values: Tensor, branch: Tensor, dimension: int = 0) -> Tensor:
    """Return each sequence's values in one of its branches; if it has only one, nothing is copied.

    Args:
        values: ``[..., S, K, ...]``.
        branch: ``[S]``.
        dimension: number of the dimension S.
    """
    if values.shape[dimension + 1] == 1:
        return values.select(dimension + 1, 0)
    return values[(slice(None),) * dimension + (arange(len(branch), branch.device), branch)]


def wanted_count(config: DecodeConfig, host: HostState) -> Ints:
    """Return how many positions of each window are predicted, ``[S]``: masks; with `tau_edit`, all of the answer."""
    if config.tau_edit is None:
        return host.masked
    return np.where(host.done == 0, host.end - np.maximum(host.complete, host.known), 0)


@lru_cache(maxsize=256)
def arange(count: int, device: torch.device) -> Tensor:
    """Return ``[0, count)``, made only once."""
    return torch.arange(count, device=device)
