"""The batched tensor code walks through the same states as the plain oracle, step by step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig, Records, State, Vocabulary
from lopa_dist.decode.advance import advance
from lopa_dist.rows.structure import record_of_commit
from tests.decode.admission import admit, records_of
from tests.decode.oracle import Oracle, OracleConfig, Record
from tests.rules.steps import spawn, verify
from tests.strategies import decode_configs

MASK, EOS = 63, 62
GRID = 64  # probabilities and confidences are multiples of 1/64, so that sums are exact in any order


def oracle_config(config: DecodeConfig, shift: bool) -> OracleConfig:
    options = vars(config.scope) | vars(config)
    shared = {name: options[name] for name in OracleConfig.__dataclass_fields__ if name in options}
    return OracleConfig(**shared, mask_id=MASK, eos_ids={EOS}, shift=shift)


def scripted(rng: np.random.Generator, state: State, width: int) -> Records:
    """Random records on the grid; EOS now and then, few distinct values so that ties are common."""
    shape = (state.slots, state.config.max_branches, width)
    few = int(rng.choice([1, 2, 50]))  # few tokens: then drafts are often predicted again
    token = np.where(rng.random(shape) < 0.04, EOS, rng.integers(0, few, shape))
    coarse = int(rng.choice([4, 16, GRID]))
    probability = rng.integers(0, coarse + 1, shape) / coarse
    confidence = -rng.integers(0, coarse + 1, shape) / coarse
    first = records_of(
        torch.from_numpy(token).int(),
        torch.from_numpy(probability).float(),
        torch.from_numpy(confidence).float(),
    )
    if not state.config.second_choices:
        return first
    second = np.where(token == 0, 1, token - 1), probability * rng.integers(0, coarse + 1, shape) / coarse
    more = torch.from_numpy(second[0]).int(), torch.from_numpy(second[1]).float().view(torch.int32)
    return Records(torch.cat([first.packed, torch.stack(more)]))


def scripted_drafts(
    rng: np.random.Generator, state: State, records: Records, verified: list[dict[tuple[int, int], Record]]
) -> Records:
    """Records of the drafts: the branch's own of its first one, invented ones (`verified`) of most others."""
    size, (position, token) = state.config.drafts, state.chain[:2]
    packed = torch.zeros(state.config.record_size, *position.shape, dtype=torch.int32)
    for slot in range(state.slots):
        for number in range(int(state.branches[slot]) * size):
            branch, nth = divmod(number, size)
            if nth >= state.paths[3, slot, branch]:
                continue
            own = records.packed[:, slot, branch, int(position[slot, number] - state.complete[slot])]
            packed[:, slot, number] = own
            if nth and rng.random() < 0.9:  # else as where no row was computed for it
                said = int(token[slot, number]) if rng.random() < 0.8 else rejected(rng, state, slot)
                probability = int(rng.integers(0, 9)) / 8
                packed[:2, slot, number] = torch.tensor([said, np.float32(probability).view(np.int32)])
                verified[slot][branch, nth] = (said, probability, -0.5, 0, 0.0)
    return Records(packed)


def second_choice(records: Records, slot: int, j: int, w: int) -> tuple[int, float]:
    if len(records.packed) == 3:
        return 0, 0.0
    return int(records.second_token[slot, j, w]), float(records.second_probability[slot, j, w])


def rejected(rng: np.random.Generator, state: State, slot: int) -> int:
    """A token that is said instead of a draft: often the one with which a path goes on."""
    return int(rng.choice([*state.paths[2, slot].tolist(), *rng.integers(0, 50, state.config.max_branches).tolist()]))


def check(state: State, slot: int, oracle: Oracle) -> None:
    """Everything that both sides know of one sequence."""
    assert bool(state.done[slot]) == oracle.done
    limit = oracle.max_new_tokens
    assert (
        state.generated([slot], state.to_host().known, np.full(state.slots, limit))[0]
        == oracle.tokens[oracle.known : limit]
    )
    assert int(state.committed[slot]) == oracle.committed
    assert int(state.complete[slot]) == oracle.complete
    assert int(state.end[slot]) == oracle.end
    assert bool(state.eos[slot]) == oracle.eos
    if not oracle.done:
        count = int(state.branches[slot])
        assert count == len(oracle.edits)
        for j in range(count):
            pairs = zip(state.edit_position[slot, j].tolist(), state.edit_token[slot, j].tolist(), strict=True)
            assert {p: t for p, t in pairs if p >= 0} == oracle.edits[j]
        size = state.config.drafts
        for j, drafts in enumerate(oracle.window()["drafts"]):
            mine = state.chain[:2, slot, j * size : j * size + int(state.paths[3, slot, j])]
            assert mine.T.tolist() == [list(draft) for draft in drafts]


@settings(max_examples=60, deadline=None)
@given(config=decode_configs(), shift=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_same_states(config: DecodeConfig, shift: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = 3
    state = State.empty(config, Vocabulary(MASK, (EOS,), shift), slots, 9, torch.device("cpu"))
    oracles: dict[int, Oracle] = {}
    to_admit = 5  # so that slots are used again
    for step in range(2000):
        for slot in range(slots):
            if bool(state.done[slot]) and to_admit and (slot != 2 or step > 3):  # the third joins late
                limit = int(rng.integers(1, config.max_new_tokens + 1))
                prompt = rng.choice([*range(50), EOS], rng.integers(1, 10)).tolist()
                admit(state, slot, prompt, limit, to_admit)
                known = len(prompt) % config.block_size if config.scope.prompt_attention == "blocks" else 0
                whole, tail = prompt[: len(prompt) - known], prompt[len(prompt) - known :]
                oracles[slot] = Oracle(oracle_config(config, shift), len(whole), limit, known=tail)
                to_admit -= 1
        if bool(state.done.all()) and not to_admit:
            return
        host = state.to_host()
        width = -(-int((host.end - host.complete).max()) // config.block_size) * config.block_size
        records = scripted(rng, state, width)
        kept = record_of_commit(state, host)
        if kept.any():  # as `unpack` does it
            first, old = records.packed[..., 0], state.boundary[..., None]
            first.copy_(torch.where(torch.from_numpy(kept)[:, None], old, first))
        verified: list[dict[tuple[int, int], Record]] = [{} for _ in range(slots)]
        if config.verify == "agreement":
            records.drafts = scripted_drafts(rng, state, records, verified)
        running = [s for s in range(slots) if not bool(state.done[s])]
        winner = verify(state, records)
        before = {s: int(state.complete[s]) for s in running}
        spawn(state, winner, advance(state, winner))
        for slot in running:
            oracle = oracles[slot]
            assert host.masked[slot] == len(oracle.window_masks())
            branches = [
                {
                    before[slot] + w: (
                        int(records.token[slot, j, w]),
                        float(records.probability[slot, j, w]),
                        float(records.confidence[slot, j, w]),
                        *second_choice(records, slot, j, w),
                    )
                    for w in range(width)
                }
                for j in range(len(oracle.edits))
            ]
            oracle.step(branches, verified[slot])
            assert int(winner.branch[slot]) == oracle.wins[-1]
            if winner.scores is not None:
                expected = np.array(oracle.last_scores)
                assert np.allclose(winner.scores[slot, : len(expected)].numpy(), expected, atol=1e-12)
            if winner.accepted is not None:
                assert int(state.accepted[slot]) == oracle.accepted[-1]
            if winner.accepted_with is not None:
                assert winner.accepted_with[slot, : len(branches)].tolist() == oracle.accepted_with
            check(state, slot, oracle)
    raise AssertionError("did not finish")
