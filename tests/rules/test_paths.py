"""Which paths there are in a tree of drafts; which of them run is compared with the oracle."""

from __future__ import annotations

import pytest
import torch

from lopa_dist.ragged import UNBOUNDED
from lopa_dist.rules.paths import ANCHOR, all_paths


@pytest.mark.parametrize(
    ("drafts", "parents"),
    [
        (2, {"2": "", "11": "", "12": "", "22": "2", "211": "2", "112": "11", "212": "2", "122": "12"}),
        (UNBOUNDED, {"2": "", "12": "", "22": "2", "112": "", "212": "2", "122": "12"}),  # of a causal model
    ],
)
def test_all_paths_and_their_parents(drafts: int, parents: dict[str, str]) -> None:
    found = all_paths(3, drafts, torch.device("cpu"))
    names = [
        "".join("12"[choice] for choice in second[:length])
        for second, length in zip(found.second.tolist(), found.length.tolist(), strict=True)
    ]
    assert names == list(parents)
    assert [names[p] if p != ANCHOR else "" for p in found.parent.tolist()] == list(parents.values())
    assert (found.tie.diff() < 0).all(), "equal weights must be taken in the order of the list"
