"""How much of a GPU's free memory a generation takes, worked out before it begins.

Only the K/V of running sequences and the rows of a forward grow with the work. Both are bounded here, and their memory
is allocated at the start: a growing pool would hold two copies for a moment, and invalidate every CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.buckets import hidden_rows
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.prefix_rules import PrefixRules
from lopa_dist.engine.request import Request
from lopa_dist.engine.sizes import most_rows, share_of
from lopa_dist.kernels.experts import TALL
from lopa_dist.models.config import Experts, ModelConfig
from lopa_dist.models.tensor_parallel import with_own_kv_heads
from lopa_dist.ragged import Ints

SHARE = 0.9  # of the free memory that may be used
RESERVED = 512 << 20  # bytes for the tables of graphs, the libraries' workspaces and all that is not modelled
MOST_ROWS = 8192  # the most rows of a forward, unless the user says how many, or one sequence has more
FEW_ROWS = 2048  # forwards with this many rows keep a GPU busy: fewer, to fit more sequences, would not pay
SPARE = 8  # the K/V space has room for one spare largest request per this many slots, against fragmentation
READY = 4  # there is one more slot, in which a request becomes ready to begin, per this many sequences
TILE = 128  # for each tile of this many tokens of the vocabulary, the record head stores sums of 28 bytes


@dataclass(frozen=True)
class Plan:
    """The sizes of a generation."""

    sequences: int  # running at once
    row_limit: int | None  # of one forward; None: no bound
    scratch: int | None = None  # rows that no forward exceeds; None: not known
    bytes: int = 0  # what K/V, rows and the buffer of hidden states take
    ready: int = 0  # further sequences that have K/V space, but do not run yet


class TooLarge(ValueError):
    """Not even one sequence fits in the free memory."""


def short_of_memory(error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
    """Return a forward's out-of-memory error with advice: the plan leaves some room, but cannot foresee everything."""
    return torch.OutOfMemoryError(
        f"{error}\nTake fewer rows or sequences (engine.max_rows, engine.max_sequences), model.quantization, or "
        "parallel.tensor. Memory was planned from what was free when the engine began: if another process on the GPU "
        "took some since, end it (nvidia-smi lists them)"
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a GPU; None on a CPU, where nothing is planned."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def release_cached(device: torch.device) -> None:
    """Give a GPU's cached memory back to the driver.

    Otherwise, tensors that are made now and stay would lie inside large freed blocks. The next K/V space needs a single
    block, and would no longer fit there.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def token_bytes(model: ModelConfig, element: int) -> int:
    """Return the bytes of a token's K/V in all layers, at `element` bytes a number."""
    return 2 * model.layers * model.kv_heads * model.head_dim * element


def row_bytes(model: ModelConfig, element: int) -> int:
    """Return about how many bytes a row of a forward takes: its K/V in all layers, and the largest layer's numbers.

    The buffer of hidden states that forwards with graphs write is not counted (`plan`).
    """
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    inner = 3 * model.intermediate_size
    if model.experts is not None:  # each expert that a row chooses has a row for it
        inner = model.experts.chosen * choice_numbers(model, model.experts)
    numbers = 5 * model.hidden_size + heads + inner
    return token_bytes(model, element) + numbers * element + 28 * -(-model.vocab_size // TILE)


def choice_numbers(model: ModelConfig, experts: Experts) -> int:
    """Return how many numbers a row of one expert takes: input, gate, up and output."""
    return 2 * model.hidden_size + 3 * experts.size


def filling_bytes(model: ModelConfig, element: int) -> int:
    """Return the most bytes taken by the rows that fill up each expert's last tile in a forward."""
    experts = model.experts
    return 0 if experts is None else experts.count * (TALL - 1) * choice_numbers(model, experts) * element


@runtime_checkable
class Shuffled(Protocol):
    """Requests stored on disk in another order; reading all of them in their own takes a hundred times as long."""

    def in_any_order(self) -> Iterator[Request]:
        """Return all of them, in the order that is fastest to read."""


def space_needed(requests: Sequence[Request], caches_kv: bool = True) -> tuple[int, int, Ints]:
    """Return the most given tokens of a request, the most tokens of a suffix, and the K/V space of each request.

    Given tokens are those of prompt and suffix. K/V space is in tokens, in descending order; without `caches_kv` it
    is 0.
    """
    every = requests.in_any_order() if isinstance(requests, Shuffled) else requests
    each = ((request.given_tokens, len(request.suffix), request.all_tokens) for request in every)
    given, suffix, all_tokens = np.fromiter(chain.from_iterable(each), np.int64, 3 * len(requests)).reshape(-1, 3).T
    return int(given.max()), int(suffix.max()), caches_kv * np.sort(all_tokens)[::-1]


def ready_slots(sequences: int, static: bool) -> int:
    """Return for how many requests there is room to become ready while `sequences` run.

    Without the static runner there is none, because idle slots would take time.
    """
    return sequences // READY if static else 0


def kv_budget(needs: Ints, slots: int, limit: int | None) -> int:
    """Return how many tokens of K/V space to allocate: enough for the largest `slots` requests, at most `limit`.

    Requests come and go, and each needs its space in one piece. If they need unequal amounts, gaps remain that are too
    small. So there is spare space for an eighth more requests of the largest size; without it one slot in ten stays
    empty.

    Args:
        needs: tokens of all requests, in descending order.
        slots: requests that run, or are ready to, at once.
        limit: `engine.kv_tokens`.

    Raises:
        ValueError: the largest request alone does not fit.
    """
    asked = int(needs[:slots].sum())
    if len(needs) > slots and needs[0] > needs[-1]:
        asked += -(-(slots - 1) // SPARE) * int(needs[0])
    if limit is None:
        return asked
    if needs[0] > limit:
        raise ValueError(
            f"engine.kv_tokens={limit}: a request needs {needs[0]}; raise it or shorten prompts or answers"
        )
    return min(limit, asked)


def plan_for(
    shape: ModelConfig, config: DecodeConfig, options: EngineConfig, requests: tuple[int, int, Ints], sequences: int,
    element: int, free: int, branch: int, tensor: int, static: bool,
) -> Plan:  # fmt: skip
    """Return what fits in `free` bytes of a rank: how many sequences run at once, and how large a forward gets.

    Args:
        shape: of the whole model.
        config, options: without any ``auto``.
        requests: what `space_needed` returns for them.
        sequences: how many should run at once.
        element: bytes of a number of the model's precision.
        free: bytes, with the weights already loaded.
        branch, tensor: ranks on these axes of the mesh.
        static: whether forwards run over the fixed buffers of graphs.

    Raises:
        TooLarge: not even one sequence fits.
    """
    longest, suffix, needs = requests
    at_once = PrefixRules(config, options.prefix_cache, options.prefill_chunk).at_once(longest)
    branches = share_of(config, 0, branch).at_once(config.max_branches)
    rows = most_rows(config, branches, at_once, suffix)
    local = with_own_kv_heads(shape, tensor)

    def buffer(forward: int) -> int:
        return hidden_rows(forward, options.reproducible) if static else 0

    ready = ready_slots(sequences, static)
    return plan(local, element, free, needs, sequences, options.max_rows, options.kv_tokens, rows, buffer, ready)


def plan(
    model: ModelConfig, element: int, free: int, needs: Ints, sequences: int, limit: int | None,
    kv_limit: int | None, longest: int, hidden_rows: Callable[[int], int], ready: int = 0,
) -> Plan:  # fmt: skip
    """Return what fits in `free` bytes: first forwards get smaller while that costs no speed, then fewer sequences run.

    Requests are ready only if neither is the price.

    Args:
        model: with this rank's share of the K/V heads.
        element: bytes of a number of the model's precision.
        free: bytes.
        needs: K/V tokens of the requests, in descending order.
        sequences: how many should run at once.
        limit: `engine.max_rows`; None: as many as fit, up to `MOST_ROWS`.
        kv_limit: `engine.kv_tokens`; None: no bound.
        longest: the most rows of one sequence in a forward; it runs alone if they exceed the limit.
        hidden_rows: takes the rows of the largest forward, and returns those of the buffer of hidden states that graphs
            write.
        ready: from `ready_slots`.

    Raises:
        TooLarge: not even one sequence fits; the message says what one takes.
    """
    usable = int(SHARE * free) - RESERVED
    of_token, of_row = token_bytes(model, element), row_bytes(model, element)
    of_hidden = model.hidden_size * element

    def planned(count: int, rows: int, ready: int = 0) -> Plan:
        tokens = kv_budget(needs, count + ready, kv_limit)
        scratch = min(count * longest, max(rows, longest))
        taken = tokens * of_token + scratch * of_row + hidden_rows(scratch) * of_hidden + filling_bytes(model, element)
        return Plan(count, rows, scratch, taken, ready)

    limits = [limit] if limit is not None else [MOST_ROWS, MOST_ROWS // 2, FEW_ROWS]
    for rows, more in product(limits, (ready, 0)):
        if (found := planned(sequences, rows, more)).bytes <= usable:
            return found
    for count in range(sequences - 1, 0, -1):
        if (found := planned(count, limits[-1])).bytes <= usable:
            return found
    one = planned(1, limits[-1]).bytes / 2**30
    raise TooLarge(
        f"of the GPU's memory {free / 2**30:.3g} GiB are free and {max(usable, 0) / 2**30:.3g} can be used, but one "
        f"sequence takes {one:.3g}: {needs[0]} tokens of K/V, and up to {longest} rows in a forward. Take fewer "
        "decode.branches, shorter prompts or answers, model.quantization, or parallel.tensor"
    )
