"""Scripted cases for what is easy to get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lopa_dist.decode import Admitted, DecodeConfig, Records, State, Vocabulary
from lopa_dist.decode.advance import advance
from tests.decode.admission import admit, admit_all, records_of
from tests.rules.steps import layout, spawn, unpack, verify

MASK, EOS = 63, 62
LOW, HIGH = 0.2, 0.99
CONFIG = DecodeConfig(
    verify="confidence",
    drafts=0,
    branches=3,
    block_size=32,
    max_new_tokens=128,
    tau_add=0.1,
    tau_act=0.95,
    tau_conf=0.9,
)


def started(config: DecodeConfig, blocks: int = 1) -> State:
    """One sequence after its prefill, with `blocks` blocks appended and nothing filled."""
    state = State.empty(config, Vocabulary(MASK, (EOS,), True), 1, 3, torch.device("cpu"))
    admit(state, 0, [1, 2, 3], config.max_new_tokens, 0)
    state.committed[0] = 0
    state.end[0] = blocks * config.block_size
    return state


def put(state: State, positions: range, token: int = 5) -> None:
    state.canvas[0, state.origin + positions.start : state.origin + positions.stop] = token


def records(state: State, token: int = 7, probability: float = LOW, confidence: float = -2.0) -> Records:
    """The same answer at every position and in every branch."""
    size = state.config.block_size
    width = -(-int(state.end[0] - state.complete[0]) // size) * size
    shape = (1, state.config.max_branches, width)
    return records_of(
        torch.full(shape, token, dtype=torch.int32), torch.full(shape, probability), torch.full(shape, confidence)
    )


def step(state: State, found: Records) -> int:
    winner = verify(state, found)
    spawn(state, winner, advance(state, winner))
    return int(winner.branch[0])


def filled(state: State) -> list[int]:
    tokens = state.generated([0], state.to_host().known, np.array([state.config.max_new_tokens]))[0]
    return [i for i, t in enumerate(tokens) if t != MASK]


@pytest.mark.parametrize(("before", "appended"), [(2, False), (3, True)])
def test_a_block_is_appended_at_4_of_32(before: int, appended: bool) -> None:
    """tau_add 0.1 of 32 is 3.2: with the forced fill of this step, 3 do not suffice and 4 do."""
    state = started(CONFIG)
    put(state, range(before))
    step(state, records(state))
    assert len(filled(state)) == before + 1
    assert int(state.end[0]) == (64 if appended else 32)


def test_one_block_a_round() -> None:
    """Even when everything is filled at once, one block comes at a time, and a fresh one does not earn another."""
    state = started(CONFIG)
    found = records(state, probability=HIGH)
    for end in (64, 96, 128, 128):
        step(state, found)
        assert int(state.end[0]) == end
        found = records(state, probability=HIGH)


@pytest.mark.parametrize(
    ("size", "already", "forced"), [(32, 30, False), (32, 31, True), (16, 15, False), (16, 16, True)]
)
def test_activation_at_31_of_32_and_16_of_16(size: int, already: int, forced: bool) -> None:
    """tau_act 0.95: the second block is forced only when the first is nearly full before this step's fill."""
    state = started(replace(CONFIG, block_size=size), blocks=2)
    put(state, range(already))
    found = records(state)
    step(state, found)
    assert any(p >= size for p in filled(state)) == forced


def test_semi_active_blocks_are_never_forced_but_fill_above_the_threshold() -> None:
    state = started(CONFIG, blocks=2)
    found = records(state)
    step(state, found)
    assert [p for p in filled(state) if p >= 32] == []
    state = started(CONFIG, blocks=2)
    found = records(state)
    found.probability[0, :, 40] = HIGH
    step(state, found)
    assert [p for p in filled(state) if p >= 32] == [40]


def test_every_fully_active_block_is_forced() -> None:
    """Fall-back is per block, not per window: block 0 passes, block 1 is forced all the same."""
    state = started(CONFIG, blocks=2)
    put(state, range(31))
    found = records(state)
    found.probability[0, :, 31] = HIGH
    found.confidence[0, :, 50] = -1.0
    step(state, found)
    assert filled(state) == [*range(32), 50]


def test_threshold_is_strict_and_on_probability_not_on_confidence() -> None:
    state = started(replace(CONFIG, tau_conf=0.5))
    found = records(state, probability=0.5, confidence=0.0)
    found.confidence[0, :, 9] = 0.5
    found.probability[0, :, 3] = 0.5001
    found.confidence[0, :, 3] = -11.0
    step(state, found)
    assert filled(state) == [3]


def test_lookaheads_take_tokens_of_the_records_before_the_fill() -> None:
    """Spawned after the anchor's fill, from the same records: the next best positions, one token each."""
    state = started(CONFIG)
    found = records(state)
    for rank, position in enumerate((9, 4, 20, 11)):
        found.confidence[0, :, position] = -0.1 * (rank + 1)
        found.token[0, :, position] = 30 + rank
    step(state, found)
    assert filled(state) == [9]
    assert state.edit_position[0, 1:4, 0].tolist() == [4, 20, 11]
    assert state.edit_token[0, 1:4, 0].tolist() == [31, 32, 33]
    assert int(state.branches[0]) == 4


def test_drafts_are_accepted_until_one_gives_way() -> None:
    """Three drafts, of which two are predicted again; the third gives way to another token, however improbable."""
    state = started(replace(CONFIG, branches=0, verify="agreement", drafts=3))
    found = records(state)
    for rank, position in enumerate((9, 4, 11, 20)):
        found.confidence[0, :, position] = -0.1 * (rank + 1)
    found.drafts = Records(torch.zeros(3, 1, 3, dtype=torch.int32))
    step(state, found)  # forces 9; the drafts are the next three
    assert state.chain[0, 0].tolist() == [4, 11, 20]
    again = records(state)
    again.confidence[0, :, 1] = -0.05
    probability = torch.tensor([[0.8, 0.5, 0.4]])
    again.drafts = records_of(torch.tensor([[7, 7, 8]], dtype=torch.int32), probability, probability - 1)
    step(state, again)
    assert filled(state) == [4, 9, 11, 20]
    assert int(state.accepted[0]) == 2
    assert int(state.answers[0, 20]) == 8


def test_what_is_no_number_verifies_nothing() -> None:
    """A draft's rows may overflow: neither the draft nor what was predicted there is written."""
    state = started(replace(CONFIG, branches=0, verify="agreement", drafts=3))
    found = records(state)
    found.confidence[0, :, 9] = -0.1
    found.drafts = Records(torch.zeros(3, 1, 3, dtype=torch.int32))
    step(state, found)
    again = records(state)
    again.confidence[0, :, 20] = -0.05
    probability = torch.full((1, 3), torch.nan)
    again.drafts = records_of(torch.zeros(1, 3, dtype=torch.int32), probability, probability)
    step(state, again)
    assert filled(state) == [9, 20]


def test_ties_go_to_the_first_lookahead_and_to_the_anchor_last() -> None:
    state = started(CONFIG)
    step(state, records(state))
    assert step(state, records(state)) == 1
    found = records(state)
    found.confidence[0, 0] = -1.5
    assert step(state, found) == 0


def test_a_lookahead_that_fills_everything_scores_one_and_waits_a_round() -> None:
    """It wins with nothing left to score; its block is complete only after this round, not before."""
    state = started(replace(CONFIG, max_new_tokens=32))
    put(state, range(30))
    step(state, records(state))
    assert filled(state) == list(range(31))
    assert state.edit_position[0, 1, 0] == 31
    assert int(state.complete[0]) == 0
    found = records(state, confidence=0.0)
    winner = verify(state, found)
    assert int(winner.branch[0]) == 1
    assert winner.scores[0, :2].tolist() == [0.0, 1.0]
    advance(state, winner)
    assert int(state.complete[0]) == 32
    assert bool(state.done[0])


def test_a_completed_block_is_forwarded_once_more_before_it_is_committed() -> None:
    state = started(CONFIG)
    step(state, records(state, probability=HIGH))
    assert (int(state.committed[0]), int(state.complete[0])) == (0, 32)
    batch = layout(state, state.to_host())
    assert batch.table.first.tolist()[0] == 0
    step(state, records(state))
    assert (int(state.committed[0]), int(state.complete[0])) == (32, 32)


def test_blocks_complete_in_order_only() -> None:
    """A full block after an unfinished one stays in the window, without masks."""
    state = started(CONFIG, blocks=2)
    put(state, range(32, 64))
    step(state, records(state))
    assert int(state.complete[0]) == 0
    put(state, range(32))
    state.branches[0] = 1
    step(state, records(state))
    assert int(state.complete[0]) == 64


def test_eos_stops_appending_and_ends_when_nothing_is_masked_before_it() -> None:
    state = started(CONFIG)
    put(state, range(10))
    found = records(state)
    found.probability[0, :, 11], found.token[0, :, 11] = HIGH, EOS
    step(state, found)
    assert bool(state.eos[0])
    assert not bool(state.done[0])
    end = int(state.end[0])
    found = records(state)
    found.probability[0, :, 10] = HIGH
    state.branches[0] = 1
    step(state, found)
    assert bool(state.done[0])
    assert int(state.end[0]) == end


def test_scores_differ_from_the_anchor_by_its_own_masks_only() -> None:
    """All branches have one window: a lookahead that would earn a block is not punished for its masks."""
    state = started(CONFIG)
    put(state, range(2))
    step(state, records(state))
    assert int(state.end[0]) == 32
    found = records(state, confidence=-2.0)
    winner = verify(state, found)
    assert winner.scores[0].tolist() == [-2.0] * 4


def test_the_prompts_tail_begins_the_first_block() -> None:
    """Blocks counted from the prompt's first token: 35 tokens are one block of 32 and three known tokens."""
    config = replace(CONFIG, context="blocks", max_new_tokens=40)
    state = State.empty(config, Vocabulary(MASK, (EOS,), True), 1, 35, torch.device("cpu"))
    admit(state, 0, [*range(34), EOS], 40, 0)
    host = state.to_host()
    assert (host.prompt[0], host.known[0], host.end[0], host.limit[0]) == (32, 3, 32, 43)
    assert (host.masked[0], host.starts_masked[0]) == (29, 0)
    batch = layout(state, host)
    assert batch.positions[:64].tolist() == list(range(64))
    step(state, records(state, probability=HIGH))
    assert not bool(state.done[0])  # the end of text in the prompt is not the answer's
    step(state, records(state, probability=HIGH))  # commits the block, and fills the first position after it
    assert (int(state.complete[0]), bool(state.done[0])) == (32, False)
    step(state, records(state, probability=HIGH))
    assert bool(state.done[0])
    assert int(state.end[0]) == 64  # the last block is whole, as in training, though the answer ends at 43
    assert state.generated([0], state.to_host().known, state.limit.numpy())[0] == [7] * 40


def test_the_canvas_has_room_for_the_prompts_tail() -> None:
    """One sequence at its end, laid out with the widest window of another."""
    config = replace(CONFIG, context="blocks", block_size=4, max_new_tokens=4)
    state = State.empty(config, Vocabulary(MASK, (EOS,), True), 1, 3, torch.device("cpu"))
    admit(state, 0, [1, 2, 3], 4, 0)
    state.complete[0] = state.limit[0]
    assert int(state.window(8).span[0, 0]) == 7


def test_rows_of_every_context() -> None:
    """What goes through the model once a block is complete, and in the step after."""
    rows = {}
    for context in ("vanilla", "d2f", "dual"):
        config = replace(CONFIG, branches=0, context=context, max_active_blocks=1)
        state = started(config)
        put(state, range(32))
        state.committed[0], state.complete[0], state.end[0] = -1 if context == "vanilla" else 0, 32, 64
        spans = []
        for _ in range(2):
            batch = layout(state, state.to_host())
            tail = None if batch.table.tail is None else (int(batch.table.tail[0][0]), int(batch.table.tail[1][0]))
            spans.append((int(batch.windows.begin[0]), int(batch.windows.stop[0]), tail))
            found = records(state)
            found.confidence[0, :, 5] = -1.0  # so that the first position stays masked
            step(state, found)
        rows[context] = spans
    assert rows == {  # d2f computes the row before the window again; dual has filled what it predicts
        "vanilla": [(-3, 128, None), (-3, 128, None)],
        "d2f": [(0, 64, None), (31, 64, None)],
        "dual": [(-3, 128, (131, 0)), (32, 64, (67, 64))],
    }


def test_requests_that_come_together_are_as_if_they_came_one_by_one() -> None:
    """And what the host says of them is what the device has."""
    for context in ("d2f", "blocks"):
        config = replace(CONFIG, context=context, max_new_tokens=40)
        one_by_one, together = (
            State.empty(config, Vocabulary(MASK, (EOS,), True), 4, 40, torch.device("cpu")) for _ in range(2)
        )
        come = [Admitted(2, [1, 2, 3], 40, 2**62, False), Admitted(0, [*range(35)], 7, 5, True)]
        for state in (one_by_one, together):  # slots that others had before
            admit_all(state, [Admitted(0, [9] * 40, 40, 1, False), Admitted(2, [8], 1, 3, True)], state.to_host())
            state.eos.fill_(True)
            state.edits.fill_(3)
        for request in come:
            admit(one_by_one, *request[:5])
        before = together.to_host()
        host = admit_all(together, come, before)
        assert np.array_equal(host, together.to_host())
        assert np.array_equal(host, one_by_one.to_host())
        assert not np.array_equal(host, before)
        for name in ("canvas", "key", "eos", "edits", "sampled"):
            assert np.array_equal(getattr(one_by_one, name), getattr(together, name)), name
        assert together.sampled.tolist() == [True, False, False, False]
        assert together.eos.tolist() == [False, True, False, True]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("knobs", [{}, {"verify": "agreement", "drafts": 3}, {"temperature": 0.8}], ids=str)
@pytest.mark.parametrize("wrong", [-3, 2, 200])
def test_masks_that_the_host_counts_wrongly_stay_inside_every_tensor(
    knobs: dict[str, Any], wrong: int, shift: bool
) -> None:
    """On a GPU an index out of range is an assertion on the device, after which nothing can be done there."""
    config = replace(CONFIG, **knobs)
    state = State.empty(config, Vocabulary(MASK, (EOS,), shift), 2, 3, torch.device("cpu"))
    for slot in range(2):
        admit(state, slot, [1, 2, 3], config.max_new_tokens, 0, "temperature" in knobs)
    for error in (0, 0, wrong):
        host = state.to_host()
        host.masked[0] += error
        batch = layout(state, host)
        assert int(batch.heads.predictions.rows.max()) < len(batch.tokens)
        gathered = torch.ones(1, batch.heads.branches, batch.heads.columns, config.record_size, dtype=torch.int32)
        winner = verify(state, unpack(state, batch, gathered))
        spawn(state, winner, advance(state, winner))


class NoSynchronisation(TorchDispatchMode):
    """Fails on operations that would wait for a device."""

    allowed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert "_local_scalar_dense" not in name, f"{name}: an .item() in the step"
        assert name not in ("aten.nonzero.default", "aten.masked_select.default"), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "knobs",
    [
        {"context": "d2f"},
        {"context": "dual"},
        {"context": "blocks", "sub_block_size": 8},
    ],
    ids=str,
)
def test_no_host_synchronisation_in_the_step(knobs: dict[str, Any]) -> None:
    state = started(replace(CONFIG, **knobs))
    for _ in range(4):
        host = state.to_host()
        with NoSynchronisation():
            batch = layout(state, host)
            gathered = torch.ones(
                1, batch.heads.branches, batch.heads.columns, state.config.record_size, dtype=torch.int32
            )
            found = unpack(state, batch, gathered)
            winner = verify(state, found)
            spawn(state, winner, advance(state, winner))


def test_a_sequence_that_a_stop_string_ends_has_no_window() -> None:
    """Also if a rule has looked at it since the last step: its positions would be taken for another's."""
    state = started(CONFIG)
    host = state.to_host()
    assert state.window(CONFIG.block_size).inside.any()
    state.finish([0], host)
    assert not state.window(CONFIG.block_size).inside.any()
