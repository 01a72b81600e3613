"""What tests of the rules make: a state with a request in it, and records."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopa_dist.decode.state import Admitted, HostState, Records, State


def admit_all(state: State, admitted: Sequence[Admitted], host: HostState) -> HostState:
    """Put requests into empty slots, and return what the host knows afterwards, see `State.admit_all`."""
    return state.admit_all(state.openings(admitted), host)


def admit(state: State, slot: int, prompt: Sequence[int], max_new_tokens: int, key: int, sampled: bool = False) -> None:
    """Put a request into an empty slot, see `State.admit_all`."""
    admit_all(state, [Admitted(slot, prompt, max_new_tokens, key, sampled)], state.to_host())


def records_of(token: Tensor, probability: Tensor, confidence: Tensor) -> Records:
    """Make records of three tensors of one shape."""
    return Records(torch.stack([token, probability.view(torch.int32), confidence.view(torch.int32)]))
