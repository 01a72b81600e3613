"""Which prompts, or parts of prompts, are segments of their own in a forward.

A prompt that never sees its answer (`Context.prefills_apart`) is prefilled apart from the window: as one segment,
or as two if its first tokens are a prefix whose K/V serve other sequences, too. The prefix and the rest are separate
segments in every prefill, so a row has the same bits whether the prefix was computed in this forward or found in the
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import HostState
from lopa_dist.ragged import Ints


@dataclass
class SharedPrefixes:
    """The first tokens of each sequence's prompt whose K/V may serve other sequences, too; [S] each."""

    length: Ints  # tokens of the prefix; 0: there is none
    source: Ints  # the sequence that computes the prefix in this forward; -1: none has to, it is in the cache
    hidden_slot: Ints  # index of the last prefix row among the stored hidden states, as a negative row number

    def whole(self, host: HostState) -> NDArray[np.bool_]:
        """Return whether the prefix is the whole prompt, ``[S]``."""
        return (self.length > 0) & (self.length == host.prompt)


@dataclass
class Prefill:
    """The segments of prompts in one forward."""

    sequence: Ints  # [P] sequence of each segment; shared prefixes come first
    first: Ints  # [P] position of its first row
    stop: Ints  # [P] position after its last row
    num_prefixes: int  # segments that are shared prefixes
    waiting: NDArray[np.bool_]  # [S] sequences whose prompt is not in the cache before this forward
    prefix_row: Ints  # [S] packed row where the sequence's shared prefix begins; -1: it is not in this forward
    suffix_row: Ints  # [S] packed row where the prompt goes on after the prefix; -1: it is not in this forward
    hidden_to_store: tuple[Ints, Ints] | None = None  # rows whose hidden states are stored, and their `hidden_slot`s
    reads_stored: bool = False  # whether a prediction of the forward takes a stored hidden state (`Predictions.rows`)


def prefill_segments(config: DecodeConfig, host: HostState, shared: SharedPrefixes | None) -> Prefill | None:
    """Return the segments of the prompts that wait for their prefill; None if no prompt waits."""
    waiting = host.waits_for_prefill
    if not config.scope.prefills_apart or not waiting.any():
        return None
    slots = np.arange(len(waiting))
    length, source = (shared.length, shared.source) if shared else (np.zeros_like(host.prompt), np.full_like(slots, -1))
    prefixes = np.nonzero(waiting & (source == slots))[0]
    suffixes = np.nonzero(waiting & (host.prompt > length))[0]
    after_prefix = length - host.prompt
    return Prefill(
        sequence=np.concatenate((prefixes, suffixes)),
        first=np.concatenate((-host.prompt[prefixes], after_prefix[suffixes])),
        stop=np.concatenate((after_prefix[prefixes], np.zeros_like(suffixes))),
        num_prefixes=len(prefixes),
        waiting=waiting,
        prefix_row=np.full_like(slots, -1),
        suffix_row=np.full_like(slots, -1),
    )


def note_rows(prefill: Prefill, start: Ints, shared: SharedPrefixes | None) -> None:
    """Note in which packed rows the prompts are; `start` has the first row of each segment, the prompts' first."""
    prefixes, suffixes = np.split(prefill.sequence, [prefill.num_prefixes])
    prefill.suffix_row[suffixes] = start[len(prefixes) : len(prefill.sequence)]
    if shared:
        prefill.prefix_row[prefixes] = start[: len(prefixes)]
        prefill.prefix_row = np.where(shared.source >= 0, prefill.prefix_row[shared.source], -1)


def note_hidden_states(prefill: Prefill, host: HostState, shared: SharedPrefixes) -> None:
    """Note which hidden states of shared prefixes are stored, and whether stored ones are read."""
    prefixes = prefill.sequence[: prefill.num_prefixes]
    prefill.hidden_to_store = prefill.prefix_row[prefixes] + shared.length[prefixes] - 1, shared.hidden_slot[prefixes]
    prefill.reads_stored = bool((shared.whole(host) & prefill.waiting).any())


def last_rows(prefill: Prefill, host: HostState, shared: SharedPrefixes | None) -> Ints:
    """Return where the hidden state of each prompt's last row will be, ``[S]``: a packed row, or a `hidden_slot`."""
    if not shared:
        return prefill.suffix_row + host.prompt - 1
    in_suffix = prefill.suffix_row + host.prompt - shared.length - 1
    return np.where(shared.whole(host), shared.hidden_slot, in_suffix)
