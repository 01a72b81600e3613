"""Rows in groups of their experts: against the plain loop over experts, and in bits that no other row changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels.experts import expert_linear, grouped, weighted_sum
from lopa_dist.ragged import padded

COUNT, CHOSEN, IN, OUT = 9, 3, 40, 24
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(COUNT, OUT, IN, generator=GENERATOR)
ROWS = torch.randn(200, IN, generator=GENERATOR)
SCORES = torch.rand(200, COUNT, generator=GENERATOR)
SHARES, CHOICES = SCORES.topk(CHOSEN, -1)


def products(rows: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    """What the experts of these rows of `ROWS` give."""
    groups = grouped(CHOICES[rows], len(weight))
    out = expert_linear(ROWS[rows][groups.choice // CHOSEN], weight, groups)
    return weighted_sum(out, groups, SHARES[rows])


def loop(rows: Tensor) -> Tensor:
    out = torch.zeros(len(rows), OUT)
    for number, row in enumerate(rows.tolist()):
        for expert, share in zip(CHOICES[row].tolist(), SHARES[row], strict=True):
            out[number] += share * (WEIGHT[expert] @ ROWS[row])
    return out


@pytest.mark.parametrize("count", [1, 5, 16, 200])
def test_it_is_the_loop_over_experts(count: int) -> None:
    rows = torch.arange(count)
    assert (products(rows) - loop(rows)).abs().max() <= 1e-5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 199), min_size=1, max_size=70), st.integers(0, 199))
def test_a_rows_bits_depend_on_itself_alone(others: list[int], row: int) -> None:
    """Among any other rows, at any place, with its expert's group small or large."""
    alone = products(torch.tensor([row]))[0]
    among = products(torch.tensor([*others, row]))[-1]
    first = products(torch.tensor([row, *others]))[0]
    assert torch.equal(among, alone)
    assert torch.equal(first, alone)


@given(st.lists(st.integers(0, 199), min_size=1, max_size=70))
@settings(max_examples=40, deadline=None)
def test_groups_are_whole_tiles_in_the_order_of_experts(rows: list[int]) -> None:
    chosen = CHOICES[rows]
    groups = grouped(chosen, COUNT)
    counts = torch.bincount(chosen.flatten(), minlength=COUNT)
    ends = groups.ends.tolist()
    begins = [0, *ends[:-1]]
    assert [e - b for b, e in zip(begins, ends, strict=True)] == [padded(int(c)) for c in counts]
    assert len(groups.choice) == ends[-1]
    for number, (expert, place) in enumerate(
        zip(chosen.flatten().tolist(), groups.place.flatten().tolist(), strict=True)
    ):
        assert begins[expert] <= place < ends[expert]
        assert groups.choice[place] == number


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
def test_the_grouped_product_of_a_gpu_takes_the_same_groups() -> None:
    """On a CPU it runs, too, also with room behind the last group, as there is where the host does not count."""
    weight = torch.randn(COUNT, 16, 32, generator=GENERATOR).bfloat16()
    groups = grouped(CHOICES[:50], COUNT)
    x = torch.randn(150, 32, generator=GENERATOR).bfloat16()[groups.choice]
    wanted = expert_linear(x, weight, groups)
    longer = torch.cat([x, x.new_zeros(64, 32)])
    found = F.grouped_mm(longer, weight.transpose(1, 2), offs=groups.ends)[: len(x)]
    assert (found.float() - wanted.float()).abs().max() <= 0.05 * wanted.float().abs().max()
