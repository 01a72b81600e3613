"""The rows of causal models: what each holds, sees and keeps, and where its prediction goes, by loops over the picture.

A wrong row of masks changes no text, only how far the next step gets, so no test of texts would find it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.decode import Admitted, DecodeConfig, HostState, State, Vocabulary
from lopa_dist.rows import ForwardBatch, c_layout
from lopa_dist.rows.causal_rows import CausalRows
from lopa_dist.rows.chain_layout import lay_out_plain, row_counts_plain
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.prefill import prefill_segments
from lopa_dist.rows.share import Share
from tests.decode.admission import admit_all

MASK, EOS = 99, 7


class Row(NamedTuple):
    """A row of a forward. Places are counted from the prompt's first token."""

    sequence: int
    token: int
    place: int
    cached: int  # tokens of its sequence that it sees in the pool
    beside: tuple[tuple[int, int], ...]  # token and place of the rows in scratch that it sees
    kept: bool  # whether its K/V go to its place in the pool
    cell: tuple[int, int, int] | None  # branch, depth, and number of the mask whose prediction it makes; None: nothing


def expected(state: State, host: HostState, ahead: Lookahead, rank: int, ranks: int) -> list[Row]:
    """The rows of a rank, one after the other, as the picture in `causal_rows` has them."""
    rows = []
    for s in range(state.slots):
        if not host.branches[s]:
            continue
        prompt, pending, drafts = int(host.prompt[s]), int(host.prompt[s] + host.complete[s]) - 1, int(host.drafts[s])
        text = state.canvas[s, state.origin - prompt :].tolist()
        if host.committed[s] < 0:
            rows += [Row(s, text[place], place, place + 1, (), True, None) for place in range(prompt)]
        for depth in range(drafts + 1):
            place = pending + depth
            rows.append(Row(s, text[place], place, place + 1, (), True, (0, depth, 0)))

        def masks_after(depth: int, s: int = s, drafts: int = drafts) -> int:
            if ahead.has_group is not None:
                wanted = depth < ahead.has_group.shape[1] and bool(ahead.has_group[s, depth])
            else:
                wanted = depth == drafts or depth in ahead.depths
            if not wanted or depth > drafts - host.expects_eos[s]:
                return 0
            # the answer's last token is never a draft, for no row would verify it
            return max(0, min(ahead.masks, int(host.limit[s]) - 2 - (int(host.complete[s]) + depth)))

        for depth in range(drafts + 1):
            count, last = masks_after(depth), pending + depth
            if not count:
                continue
            if ahead.blocks:
                group = [(text[last], last), *((MASK, last + i) for i in range(1, count + 2))]
                for number, (token, place) in enumerate(group):
                    cell = (0, depth, number - 1) if number > 1 else None
                    rows.append(Row(s, token, place, last, tuple(group), False, cell))
            else:
                group = [(MASK, last + i) for i in range(1, count + 1)]
                for i in range(1, count + 1):
                    rows.append(Row(s, MASK, last + i, last + 1, tuple(group[:i]), False, (0, depth, i)))
        count = masks_after(drafts)
        for branch in range(1, int(host.branches[s])):
            if (branch - 1) % ranks != rank:
                continue
            chain = state.chain_token[s].view(state.config.max_branches, -1)[branch, :drafts].tolist()
            path = [(token, pending + i) for i, token in enumerate([*chain, *[MASK] * count], 1)]
            for i, (token, place) in enumerate(path, 1):
                cell = (branch, min(i, drafts), max(i - drafts, 0))
                rows.append(Row(s, token, place, pending + 1, tuple(path[:i]), False, cell))
    return rows


def found(batch: ForwardBatch, cells: dict[int, tuple[int, int, int]]) -> list[Row]:
    """The rows of a forward; `cells` has the cell of each row that predicts."""
    assert batch.table.seen is not None
    assert batch.table.place is not None
    tokens, places = batch.tokens.tolist(), batch.positions.tolist()
    rows = []
    for start, count, sequence in zip(
        batch.table.start.tolist(), batch.table.rows.tolist(), batch.table.sequence.tolist(), strict=True
    ):
        for row in range(start, start + count):
            seen = range(start, start + int(batch.table.hi[row]))
            beside = tuple((tokens[other], places[other]) for other in seen)
            kept = int(batch.table.place[row])
            assert kept in (-1, places[row])
            cached = int(batch.table.seen[row])
            rows.append(Row(sequence, tokens[row], places[row], cached, beside, kept >= 0, cells.get(row)))
    return rows


def reported(rows: CausalRows, state: State, batches: list[ForwardBatch]) -> list[dict[int, tuple[int, int, int]]]:
    """By rank: the cell in which the record of each row arrives when the ranks' records are gathered and unpacked."""
    columns = batches[0].heads.columns
    gathered = torch.full((len(batches), 1, columns, 3), -5, dtype=torch.int32)
    for rank, batch in enumerate(batches):
        assert batch.heads.columns == columns
        numbers = rank * 100_000 + batch.heads.predictions.rows
        gathered[rank, 0, batch.heads.slots] = numbers.int()[:, None].expand(-1, 3)
    records = rows.unpack(state, batches[0], gathered)
    assert records.drafts is not None
    cells: list[dict[int, tuple[int, int, int]]] = [{} for _ in batches]
    dense = torch.cat([records.token[..., None], records.drafts.token], 3)  # [S, K, D, 1 + n]
    for s, branch, depth, mask in (dense >= 0).nonzero().tolist():
        rank, row = divmod(int(dense[s, branch, depth, mask]), 100_000)
        if branch and not depth:
            assert int(dense[s, branch, 0, 0]) == int(dense[s, 0, 0, 0])  # what the pending token predicts
            continue
        cells[rank][row] = branch, depth, mask
    return cells


@st.composite
def chains(draw: st.DrawFn) -> tuple[State, HostState, Lookahead]:
    """Sequences in the middle of their answers, or at the beginning, with drafts, and what is wanted after them."""
    drafts, branches = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    config = DecodeConfig(branches=branches, context="causal", drafts=drafts, max_new_tokens=12)
    slots = draw(st.integers(1, 3))
    state = State.empty(config, Vocabulary(MASK, (EOS,), True), slots, 5, torch.device("cpu"))
    host = state.to_host()
    for slot in range(slots):
        prompt = [10 + i for i in range(draw(st.integers(1, 5)))]
        host = admit_all(state, [Admitted(slot, prompt, draw(st.integers(1, 12)), 1, False)], host)
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    state.answers.copy_(torch.randint(20, 50, state.answers.shape, generator=random))
    state.chain_token.copy_(torch.randint(50, 90, state.chain_token.shape, generator=random))
    for slot in range(slots):
        written = draw(st.integers(0, int(state.limit[slot]) - 2))
        state.complete[slot] = 1 + written
        state.committed[slot] = written if written or draw(st.booleans()) else -1
        room = max(0, min(drafts, int(state.limit[slot]) - 1 - int(state.complete[slot])))
        state.drafts[slot] = draw(st.integers(0, room))
        state.expects_eos[slot] = draw(st.integers(0, 1))
        state.branches[slot] = draw(st.integers(0, branches + 1)) if state.drafts[slot] else draw(st.integers(0, 1))
    masks, blocks = draw(st.integers(0, 4)), draw(st.booleans())
    depths: Any = draw(st.sampled_from([(), (0,), (0, 2), tuple(range(drafts + 1))]))
    has_group = None
    if depths == () and draw(st.booleans()):
        width = draw(st.integers(1, drafts + 2))  # depths after the last of them have no group
        flags = draw(st.lists(st.booleans(), min_size=slots * width, max_size=slots * width))
        has_group = np.array(flags).reshape(slots, width)
    return state, state.to_host(), Lookahead(masks, depths, blocks, has_group)


@settings(max_examples=300, deadline=None)
@given(case=chains(), ranks=st.sampled_from([1, 2, 3]))
def test_rows_are_those_of_the_picture(case: tuple[State, HostState, Lookahead], ranks: int) -> None:
    state, host, ahead = case
    rows = CausalRows()
    shares = [Share(rank, ranks, rows.everywhere) for rank in range(ranks)]
    batches = [rows.layout(state, host, share, None, ahead, {}) for share in shares]
    cells = reported(rows, state, batches)
    computed = np.zeros(state.slots, int)
    for rank, batch in enumerate(batches):
        wanted = expected(state, host, ahead, rank, ranks)
        if rank:  # what runs everywhere is reported by the first rank
            wanted = [row._replace(cell=None) if row.cell and not row.cell[0] else row for row in wanted]
        assert sorted(found(batch, cells[rank]), key=repr) == sorted(wanted, key=repr)
        computed += np.bincount([row.sequence for row in wanted], minlength=state.slots)
    prompts = np.where((host.committed < 0) & (host.branches > 0), host.prompt, 0)
    assert (batches[0].computed == computed - prompts * ranks).all()
    own = [sum(row.sequence == s for row in expected(state, host, ahead, 0, ranks)) for s in range(state.slots)]
    assert rows.in_step(state, host, ahead, shares[0]).tolist() == (np.array(own) - prompts).tolist()


@settings(max_examples=300, deadline=None)
@given(case=chains(), ranks=st.sampled_from([1, 2, 3]), waits=st.booleans(), one=st.booleans())
def test_c_lays_out_as_numpy_does(case: tuple[State, HostState, Lookahead], ranks: int, waits: bool, one: bool) -> None:
    """With one branch of each sequence, and with paths. It is C's layout that was compared with the picture."""
    state, host, ahead = case
    library = c_layout.found()
    assert not isinstance(library, str), "there is a C compiler wherever tests run"
    if waits:
        host = host._replace(committed=np.full_like(host.committed, -1), complete=np.ones_like(host.complete))
    host = host._replace(branches=np.minimum(host.branches, 1)) if one else host
    counts, prefill = c_layout.row_counts(library, host, ahead), prefill_segments(state.config, host, None)
    for found_count, wanted_count in zip(counts, row_counts_plain(host, ahead), strict=True):
        assert np.array_equal(found_count, wanted_count)
    of_step = state, host, Share(ranks - 1, ranks, 1), ahead, prefill, counts
    made, wanted = c_layout.lay_out(library, *of_step), lay_out_plain(*of_step)
    assert made.indices.keys() == wanted.indices.keys()
    pairs = [*zip(made[:-1], wanted[:-1], strict=True)]
    pairs += [(made.indices[name], wanted.indices[name]) for name in wanted.indices]
    for one_made, one_wanted in pairs:
        assert np.array_equal(one_made, one_wanted)
        assert np.asarray(one_made).dtype == np.asarray(one_wanted).dtype
