"""What new chains of drafts change in the memory of a state. It needs no torch, which takes seconds to import."""

from __future__ import annotations

import numpy as np

from lopa_dist.ragged import Ints


def change_of(places: Ints, slots: Ints, complete: Ints, tokens: Ints, counts: Ints, expects_eos: Ints) -> Ints:
    """Return what new chains of anchors change in `State.storage`, ``[2, c]``: numbers in it, and their new values.

    Args:
        places: `State.chain_places`.
        slots: ``[n]`` of the sequences.
        complete: ``[n]`` as in `HostState`.
        tokens: ``[n, m]`` their drafts; tokens after the last draft are written, too, but nothing reads them.
        counts: ``[n]`` how many drafts they have; none stands at or after the answer's last position.
        expects_eos: ``[n]`` 1 if an end-of-text is expected after them.
    """
    number = np.arange(tokens.shape[1])
    canvas, chain, drafts, eos = places[0, :, None] + places[1, :, None] * slots
    cells = ((canvas + complete)[:, None] + number).ravel(), (chain[:, None] + number).ravel(), drafts, eos
    return np.stack([np.concatenate(cells), np.concatenate([tokens.ravel(), tokens.ravel(), counts, expects_eos])])
