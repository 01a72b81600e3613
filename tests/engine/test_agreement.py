"""Ranks of a replica that decide differently, as the user's own code may, end the job instead of mixing their texts."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lopa_dist.checks import UserError
from lopa_dist.decode import State, Vocabulary
from lopa_dist.engine.agreement import Agreement, fingerprint
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.runner import Runner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, PeerFailure, Solo
from tests.engine.ranks import on_mesh, on_ranks
from tests.engine.test_loop import BASE, random_requests, texts

PLAIN = replace(BASE, verify="confidence", drafts=0, branches=1)
FILL = """
import threading
ranks = {}
def by_rank(probability, confidence, masked):
    number = ranks.setdefault(threading.get_ident(), len(ranks))
    return masked & (probability > (0.5 if number else 0.3))
def alike(probability, confidence, masked):
    return masked & (probability > 0.3)
"""


def state_of() -> State:
    state = State.empty(BASE, Vocabulary(47, (46,), True, 48), 3, 20, torch.device("cpu"))
    state.canvas.copy_(torch.arange(state.canvas.numel()).view_as(state.canvas) % 46)
    return state


def test_a_fingerprint_tells_states_apart() -> None:
    state = state_of()
    before = fingerprint(state)
    assert (before.dtype, before.shape) == (torch.int32, (1,))
    assert torch.equal(fingerprint(state_of()), before)
    two = state.canvas[1, [3, 4]]
    for other in (two.flip(0), two + 1, two + torch.tensor([1, -1])):
        state = state_of()
        state.canvas[1, [3, 4]] = other
        assert not torch.equal(fingerprint(state), before)
    state = state_of()
    state.branches[2] += 1
    assert not torch.equal(fingerprint(state), before)
    state = state_of()
    state.edit_position[0, 1, 0], state.edit_token[0, 1, 0] = 5, 7
    edited = fingerprint(state)
    state.edit_token[0, 1, 0] = 8
    assert len({int(before), int(edited), int(fingerprint(state))}) == 3


@pytest.mark.parametrize("different", [None, (0, 0), (1, 0), (0, 1)])
def test_all_ranks_of_a_replica_are_compared(different: tuple[int, int] | None) -> None:
    def work(comm: Communicator, tensor: Communicator) -> str:
        agreement, state = Agreement({"decode.rule": "x:Y"}, comm, tensor), state_of()
        if (comm.rank, tensor.rank) == different:
            state.canvas[0, 0] += 1
        found = agreement.gather(state)
        assert found.shape == (4,)
        try:
            agreement.check(found.numpy())
        except UserError as error:
            return str(error)
        return ""

    said = on_mesh(2, 2, work)
    assert all(text.startswith("decode.rule=x:Y: ranks of a replica") == bool(different) for text in said), said


def test_nothing_is_compared_without_the_user_s_code_or_other_ranks() -> None:
    def gathered(comm: Communicator, own_parts: dict[str, str]) -> Tensor:
        return Agreement(own_parts, comm, Solo()).gather(state_of())

    assert [len(one) for one in on_ranks(2, lambda comm: gathered(comm, {}))] == [0, 0]
    assert [len(one) for one in on_ranks(1, lambda comm: gathered(comm, {"decode.fill": "x:y"}))] == [0]


def test_a_fill_that_depends_on_the_rank_is_named(small_model: Transformer, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILL)
    requests = random_requests(3, 5, BASE.max_new_tokens)
    alike, by_rank = (replace(PLAIN, fill=f"{tmp_path}/own.py:{name}") for name in ("alike", "by_rank"))
    alone = texts(small_model, alike, requests)
    assert on_ranks(2, lambda comm: texts(small_model, alike, requests, comm)) == [alone, alone]
    with pytest.raises(UserError, match=r"decode\.fill=.*own\.py:by_rank: ranks of a replica have decided differ"):
        on_ranks(2, lambda comm: texts(small_model, by_rank, requests, comm))


def test_a_rank_whose_forward_fails_keeps_no_other_waiting(
    small_model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(FILL)
    config = replace(PLAIN, fill=f"{tmp_path}/own.py:alike")
    requests = random_requests(3, 5, BASE.max_new_tokens)
    failing, forward, calls = list[int](), Runner.forward, dict[int, int]()

    def broken(self: Runner, prepared: object) -> Tensor:
        own = threading.get_ident()
        calls[own] = calls.get(own, 0) + 1
        if own in failing and calls[own] == 2:
            raise MemoryError("planted")
        return forward(self, prepared)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "forward", broken)

    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            failing.append(threading.get_ident())
        engine = Engine(small_model, config, comm, EngineConfig(4))
        try:
            list(engine.generate(requests))
        except (MemoryError, PeerFailure) as error:
            return str(error)
        return ""

    assert on_ranks(2, work) == ["the forward of branch rank 1 failed", "planted"]
