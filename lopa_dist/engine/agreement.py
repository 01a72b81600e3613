"""Check that the ranks of a replica decide alike: the user's own code may depend on more than its arguments."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lopa_dist.checks import UserError
from lopa_dist.decode import State
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.ragged import Ints

ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number of 64 bits; products wrap around


class Agreement:
    """Compares what each step leaves to the next one, on all ranks of a replica.

    Args:
        own_parts: the settings that name code of the user's own; without any, nothing is compared.
        comm: the branch group.
        tensor: the group that the model is split over.
    """

    def __init__(self, own_parts: Mapping[str, str], comm: Communicator, tensor: Communicator) -> None:
        self.own_parts, self.comm, self.tensor = own_parts, comm, tensor
        self.compares = bool(own_parts) and comm.size * tensor.size > 1

    def gather(self, state: State) -> Tensor:
        """Return every rank's fingerprint of the state, ``[branch ranks x tensor ranks]`` int32; empty if not compared.

        All ranks make this call after each step. Nothing waits for the device.
        """
        if not self.compares:
            return state.canvas.new_empty(0, dtype=torch.int32)
        return self.comm.all_gather(self.tensor.all_gather(fingerprint(state)).flatten()).flatten()

    def check(self, fingerprints: Ints) -> None:
        """Raise a UserError, on all ranks, if they are not all equal; these are `gather`'s, on the host."""
        if len(set(fingerprints.tolist())) > 1:
            named = " and ".join(f"{key}={value}" for key, value in self.own_parts.items())
            raise UserError(
                f"{named}: ranks of a replica have decided differently in a step. What it returns must depend on "
                "its arguments alone, and be the same on every rank: no unseeded random numbers, no time, no rank"
            )


def fingerprint(state: State) -> Tensor:
    """Return a number ``[1]`` int32 that depends on all tokens, frontiers and branches of a state."""
    edits = torch.where(state.edit_position >= 0, state.edits, -1)
    numbers = torch.cat([part.flatten().long() for part in (state.canvas, state.integers, edits)])
    weights = torch.arange(1, 2 * len(numbers), 2, device=numbers.device) * ODD
    mixed = (numbers + 1) * weights
    total = (mixed ^ (mixed >> 29)).sum()
    return ((total ^ (total >> 32)) & 0x7FFFFFFF).int()[None]
