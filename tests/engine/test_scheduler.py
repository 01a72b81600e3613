"""Who takes part in a step changes no text, and keeps the bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.memory import kv_budget, space_needed
from lopa_dist.engine.request import Request
from lopa_dist.engine.runner import Prepared, Runner
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import BASE, random_requests, texts
from tests.strategies import engine_configs

QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bounded(
    model: Transformer,
    config: DecodeConfig,
    requests: list[Request],
    max_rows: int | None,
    kv_tokens: int | None,
    comm: Communicator | None = None,
) -> dict[int, tuple[list[int], int]]:
    engine = Engine(model, config, comm or Solo(), EngineConfig(4, max_rows, kv_tokens))
    return {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}


@QUICK
@given(
    config=engine_configs(BASE),
    seed=st.integers(0, 10**6),
    max_rows=st.sampled_from([1, 20, 50]),
    spare=st.sampled_from([0, 9, 40]),
)
def test_waiting_changes_no_text(
    small_model: Transformer, config: DecodeConfig, seed: int, max_rows: int, spare: int
) -> None:
    requests = random_requests(seed, 7, 18)
    tight = max(len(r.prompt) + r.max_new_tokens for r in requests) + spare
    assert bounded(small_model, config, requests, max_rows, tight) == texts(small_model, config, requests)


def test_waiting_ranks_agree(small_model: Transformer) -> None:
    requests = random_requests(5, 7, 18)
    expected = texts(small_model, BASE, requests)
    for found in on_ranks(2, lambda comm: bounded(small_model, BASE, requests, 24, 60, comm)):
        assert found == expected


def test_rows_stay_below_the_bound(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[int, int]] = []
    forward = Runner.forward

    def counted(self: Runner, prepared: Prepared) -> torch.Tensor:
        rows.append((int(prepared.batch.table.rows.sum()), len(np.unique(prepared.batch.table.sequence))))
        return forward(self, prepared)

    monkeypatch.setattr(Runner, "forward", counted)
    requests = random_requests(1, 12, 18)
    bounded(small_model, BASE, requests, None, None)
    free, most = len(rows), max(r for r, _ in rows)
    rows.clear()
    bounded(small_model, BASE, requests, 20, None)
    assert most > 20
    assert all(total <= 20 or sequences == 1 for total, sequences in rows)
    assert len(rows) > free


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from([0, 0, 3, 5]), st.booleans()), max_size=40
    )
)
def test_ranges_never_overlap(small_model: Transformer, moves: list[tuple[int, int, int, bool]]) -> None:
    """Prompts are known by their length here: those of 3 tokens are all equal, and those of 5."""
    pool = KVPool(small_model.config, 6, 24, torch.float32, torch.device("cpu"))
    needs: dict[int, tuple[int, int]] = {}
    for sequence, answer, prompt, computed in moves:
        if sequence in needs:
            pool.free(sequence)
            del needs[sequence]
        elif pool.allocate(sequence, prompt + answer, tuple(range(prompt))):
            needs[sequence] = (prompt, answer)
            if prompt and computed:
                pool.store_prefix(sequence)
        else:
            shared = prompt in [p for p, _ in needs.values()]
            taken = np.zeros(24, bool)
            for other, (p, a) in needs.items():
                taken[pool.slots(np.full(p + a, other), np.arange(p + a))] = True
            runs = "".join("x" if t else "." for t in taken).split("x")
            assert max(map(len, runs)) < answer + (0 if shared else prompt)
        owners = [set() for _ in range(24)]
        for other, (p, a) in needs.items():
            for token, slot in enumerate(pool.slots(np.full(p + a, other), np.arange(p + a))):
                owners[slot].add(("prompt", p, token) if token < p else ("answer", other, token))
        assert all(len(of) <= 1 for of in owners)
        assert sum(map(len, owners)) == sum(a for _, a in needs.values()) + sum({p for p, _ in needs.values()})
        used = {entry.hidden_slot for entry in pool.prefixes.values()}
        assert len(used) == len(pool.prefixes)
        assert used <= set(range(-pool.most_prefixes, 0))
    for sequence in needs:
        pool.free(sequence)
    assert all(entry.stored and not entry.ref_count for entry in pool.prefixes.values())
    assert pool.find_free(24, ()) == 0
    assert not pool.prefixes
    assert not pool.unused
    assert pool.gaps == [(0, 24)]
    assert sorted(pool.hidden_slots) == [*range(-pool.most_prefixes, 0)]


@QUICK
@given(
    config=engine_configs(BASE),
    seed=st.integers(0, 10**6),
    max_rows=st.sampled_from([None, 30]),
    ranks=st.sampled_from([1, 2]),
)
def test_samples_of_one_prompt_share_its_room_and_nothing_else(
    small_model: Transformer, config: DecodeConfig, seed: int, max_rows: int | None, ranks: int
) -> None:
    config = replace(config, temperature=0.7)
    few = random_requests(seed, 3, 18)
    samples = [replace(few[i // 3], index=i, key=few[i // 3].key + i) for i in range(9)]
    wanted = {}
    for request in samples:
        wanted |= texts(small_model, config, [request])
    tight = 3 * max(len(r.prompt) + r.max_new_tokens for r in few)
    for found in on_ranks(ranks, lambda comm: bounded(small_model, config, samples, max_rows, tight, comm)):
        assert found == wanted


def test_more_samples_of_a_long_prompt_are_in_flight(small_model: Transformer) -> None:
    prompt = random_requests(1, 1, 1)[0].prompt * 8
    samples = [Request(i, prompt, 8, i) for i in range(4)]
    together: list[int] = []
    for sampled in (samples, [replace(r, prompt=[r.index, *prompt[1:]]) for r in samples]):
        engine = Engine(small_model, BASE, Solo(), EngineConfig(4, kv_tokens=len(prompt) + 4 * 8))
        sizes: list[int] = []
        engine.on_step = [lambda engine, sizes=sizes: sizes.append(int((engine.batch.host.step > 0).sum()))]
        list(engine.generate(sampled))
        together.append(max(sizes))
    assert together == [4, 1]


def test_a_request_that_waits_for_space_has_not_begun(small_model: Transformer) -> None:
    """A crash is blamed on requests that run, not on those that were merely handed out."""
    prompt = random_requests(1, 1, 1)[0].prompt * 8
    requests = [Request(i, [i + 2, *prompt[1:]], 8, i) for i in range(4)]
    engine = Engine(small_model, BASE, Solo(), EngineConfig(4, kv_tokens=len(prompt) + 4 * 8))
    begun: list[int] = []
    running: list[list[int]] = []
    engine.on_step = [lambda _: running.append(list(begun))]
    ended = [
        one.request.index for one in engine.generate(requests, begin=lambda some: begun.extend(r.index for r in some))
    ]
    assert begun == ended == [0, 1, 2, 3]
    assert running[0] == [0]


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.kv_tokens=20: a request needs 25"):
        kv_budget(space_needed([Request(0, [1] * 5, 20, 0)])[2], 1, 20)


def test_requests_bring_their_own_sampling(small_model: Transformer) -> None:
    """A mixed batch gives each request what it gets alone under its own rules."""
    kinds = [None, Sampling(temperature=0.8), Sampling(temperature=1.3, top_k=5), Sampling(temperature=0.8, top_p=0.7)]
    requests = [replace(r, sampling=kinds[r.index % 4]) for r in random_requests(3, 8, 18)]
    config = replace(BASE, confidence="neg_entropy")
    mixed = texts(small_model, config, requests)
    for kind in kinds[1:]:
        assert kind is not None
        own = replace(config, temperature=kind.temperature, top_p=kind.top_p, top_k=kind.top_k)
        alike = [replace(r, sampling=None) for r in requests if r.sampling == kind]
        assert texts(small_model, own, alike) == {r.index: mixed[r.index] for r in alike}
    greedy = [r for r in requests if r.sampling is None]
    assert texts(small_model, config, greedy) == {r.index: mixed[r.index] for r in greedy}
