"""Routing in two kernels: the first chooses experts and counts the choices per block of rows, the second places them.

In the second kernel, every program sums the counts of all blocks, so no program waits for another, no sum depends on
the order in which programs run, and places are those of `routing.grouped`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_dist.kernels.dispatch import OPTIONS
from lopa_dist.kernels.routing import Groups, Router, room_for

FEW = 256  # up to this many rows, blocks are small, so that there are enough of them
NUMBERS = 4096  # scores that a program holds at most
LOWEST = tl.constexpr(-(2**31))  # key of an expert or group that cannot be chosen any more


def takes(router: Router, experts: int) -> bool:
    """Return whether the kernels take this router: with groups, numbers of experts and groups must be powers of two."""
    powers = experts & (experts - 1) == 0 and router.groups & (router.groups - 1) == 0
    return experts <= NUMBERS and (router.groups == 1 or powers)


def warps_for(numbers: int) -> int:
    """Return how many warps hold `numbers` scores, and what is computed from them, in registers."""
    return 8 if numbers > NUMBERS // 2 else 4


def routed(
    logits: Tensor, bias: Tensor | None, router: Router, height: int, real: Tensor | None = None
) -> tuple[Tensor, Groups]:
    """Compute `routing.routed`. On a tie the lower expert wins, and a row of NaN still chooses experts."""
    (rows, experts), device = logits.shape, logits.device
    width = triton.next_power_of_2(experts)
    block = max(min(4 if rows <= FEW else 16, NUMBERS // width), 1)
    blocks, warps = triton.cdiv(rows, block), warps_for(block * width)
    room = room_for(rows * router.chosen, experts, height)
    weights = torch.empty(rows, router.chosen, dtype=torch.float32, device=device)
    chosen, counts = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (weights.shape, (blocks, experts))
    )
    place, choice, row = (torch.empty(size, dtype=torch.int64, device=device) for size in (weights.shape, room, room))
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    if not rows:
        ends.zero_()
    else:
        logits = logits.contiguous()
        choose_kernel[(blocks,)](
            logits, logits if bias is None else bias, logits if real is None else real, chosen, weights, counts, choice,
            row, rows, room,
            E=experts, WIDTH=width, CHOSEN=router.chosen, CHOICES=triton.next_power_of_2(router.chosen),
            GROUPS=router.groups, CHOSEN_GROUPS=router.chosen_groups, SIGMOID=router.sigmoid,
            RENORMALISE=router.renormalise and (router.chosen > 1 or not router.sigmoid), SCALE=router.scale,
            BLOCK=block, PADDED=real is not None, num_warps=warps, **OPTIONS,
        )  # fmt: skip
        place_kernel[(blocks,)](
            chosen, counts, chosen if real is None else real, place, choice, row, ends, rows, blocks,
            E=experts, WIDTH=width, CHOSEN=router.chosen, BLOCK=block, AT_ONCE=max(NUMBERS // width, 1), HEIGHT=height,
            PADDED=real is not None, num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return weights, Groups(place, choice, row, ends, height)


@triton.jit
def number_of(real: tl.tensor, rows: tl.tensor, PADDED: tl.constexpr) -> tl.tensor:
    """Return how many rows go to experts: those that `real` counts if PADDED, but at least one, else all.

    If no row were real, as when a graph is first run, all groups would be empty, which no library promises to accept.
    """
    if PADDED:
        return tl.maximum(tl.load(real), 1)
    return rows


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Return integers that order as the floats `x` do, all above `LOWEST`; NaN has a place in the order, too."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.maximum(tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF), LOWEST + 1)


@triton.jit(do_not_specialize=["rows", "room"])
def choose_kernel(
    logits: tl.tensor,  # [R, E]
    bias: tl.tensor,  # [E], read with SIGMOID
    real_rows: tl.tensor,  # [1], read if PADDED
    chosen: tl.tensor,  # [R, CHOSEN]
    weights: tl.tensor,  # [R, CHOSEN]
    counts: tl.tensor,  # [blocks, E] how often the rows of a block choose each expert
    choice: tl.tensor,  # [room] set to 0, like the next
    row_of: tl.tensor,  # [room]
    rows: tl.tensor,
    room: tl.tensor,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Choose the experts of BLOCK rows, and count the choices of real ones. Grid ``(blocks of BLOCK rows,)``."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)
    real, inside = row < rows, expert < E
    at = row[:, None].to(tl.int64) * E + expert[None]
    number = tl.load(logits + at, real[:, None] & inside[None], 0).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-number))
        rank = score + tl.load(bias + expert, inside, 0).to(tl.float32)[None]
    else:
        number = tl.where(inside[None], number, float("-inf"))
        score = tl.exp(number - tl.max(number, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
        rank = score
    key = tl.where(inside[None], ordered(rank), LOWEST)

    if GROUPS > 1:
        each: tl.constexpr = E // GROUPS
        by_group = tl.reshape(rank, [BLOCK, GROUPS, each])
        best = tl.argmax(ordered(by_group), 2)
        others = tl.where(tl.arange(0, each)[None, None] == best[:, :, None], float("-inf"), by_group)
        group_key = ordered(tl.max(by_group, 2) + tl.max(others, 2))
        group = tl.arange(0, GROUPS)[None]
        closed = tl.full([BLOCK, GROUPS], 1, tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            found = group == tl.argmax(group_key, 1)[:, None]
            group_key = tl.where(found, LOWEST, group_key)
            closed = tl.where(found, 0, closed)
        of_expert = tl.reshape(tl.broadcast_to(closed[:, :, None], [BLOCK, GROUPS, each]), [BLOCK, WIDTH])
        key = tl.where(of_expert == 0, key, LOWEST)

    counted = row < number_of(real_rows, rows, PADDED)
    taken = tl.zeros([BLOCK, WIDTH], tl.int32)
    weight = tl.zeros([BLOCK, CHOICES], tl.float32)
    place = tl.arange(0, CHOICES)[None]
    for j in tl.static_range(CHOSEN):
        most = tl.argmax(key, 1)
        found = expert[None] == most[:, None]
        key = tl.where(found, LOWEST, key)
        taken += tl.where(found & counted[:, None], 1, 0)
        weight = tl.where(place == j, tl.sum(tl.where(found, score, 0.0), 1)[:, None], weight)
        tl.store(chosen + row.to(tl.int64) * CHOSEN + j, most.to(tl.int32), real)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, 1) + (1e-20 if SIGMOID else 0.0))[:, None]
    if SIGMOID:
        weight = weight * SCALE
    tl.store(weights + row[:, None].to(tl.int64) * CHOSEN + place, weight, real[:, None] & (place < CHOSEN))
    tl.store(counts + tl.program_id(0).to(tl.int64) * E + expert, tl.sum(taken, 0), inside)

    numbers = tl.arange(0, 1024)
    for start in range(tl.program_id(0) * 1024, room, tl.num_programs(0) * 1024):
        tl.store(choice + start + numbers, tl.zeros([1024], tl.int64), start + numbers < room)
        tl.store(row_of + start + numbers, tl.zeros([1024], tl.int64), start + numbers < room)


@triton.jit(do_not_specialize=["rows", "blocks"])
def place_kernel(
    chosen: tl.tensor,  # [R, CHOSEN]
    counts: tl.tensor,  # [blocks, E]
    real_rows: tl.tensor,  # [1], read if PADDED
    place: tl.tensor,  # [R, CHOSEN]
    choice: tl.tensor,  # [room]
    row_of: tl.tensor,  # [room]
    ends: tl.tensor,  # [E]
    rows: tl.tensor,
    blocks: tl.tensor,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEIGHT: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Place the choices of BLOCK rows among the grouped rows; those of padding get place 0. Grid ``(blocks,)``."""
    own = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    inside = expert < E
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    for start in range(0, blocks, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)[:, None]
        count = tl.load(counts + block.to(tl.int64) * E + expert[None], (block < blocks) & inside[None], 0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(block < own, count, 0), 0)
    sizes = (total + HEIGHT - 1) // HEIGHT * HEIGHT
    end = tl.cumsum(sizes, 0)
    if own == 0:
        tl.store(ends + expert, end, inside)

    row = own * BLOCK + tl.arange(0, BLOCK)
    real, counted = row < rows, row < number_of(real_rows, rows, PADDED)
    at = row.to(tl.int64) * CHOSEN
    taken = tl.zeros([BLOCK, WIDTH], tl.int32)  # a row chooses an expert at most once
    for j in tl.static_range(CHOSEN):
        taken += tl.where(expert[None] == tl.load(chosen + at + j, counted, -1)[:, None], 1, 0)
    number = (end - sizes + before)[None] + tl.cumsum(taken, 0) - taken
    for j in tl.static_range(CHOSEN):
        found = expert[None] == tl.load(chosen + at + j, counted, -1)[:, None]
        stands = tl.sum(tl.where(found, number, 0), 1).to(tl.int64)
        tl.store(place + at + j, stands, real)
        tl.store(choice + stands, at + j, counted)
        tl.store(row_of + stands, row.to(tl.int64), counted)
