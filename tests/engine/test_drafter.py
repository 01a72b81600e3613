"""Drafts from text: wrong or right, they change no text, and all ranks of a replica propose the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.draft_kinds import LEVELS, MASKS, OWN, TEXT, level, source_of
from lopa_dist.engine.drafter import Drafter
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.ngram_contexts import NGRAM_CONTEXTS
from lopa_dist.engine.ngrams import NGrams
from lopa_dist.engine.plain_drafter import PlainDrafter
from lopa_dist.engine.request import Request
from lopa_dist.engine.work import Work
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from tests.engine.ranks import on_mesh, on_ranks
from tests.engine.test_causal import SAMPLINGS, causal, requests_of, texts

WORTH = 0.02


class Adversary(NGrams):
    """A table that proposes anything, tokens that end texts and the mask among them."""

    def __init__(self, seed: int, tokens: int) -> None:
        super().__init__()
        self.random, self.tokens = random.Random(seed), tokens

    def after(self, tokens: Sequence[int], backs: Sequence[int]) -> list[tuple[int, int, int]]:
        some = [number for number in range(len(NGRAM_CONTEXTS)) if self.random.random() < 0.5]
        return [(number, self.random.randrange(self.tokens), 3) for number in some]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    drafts=st.sampled_from([1, 3, 16, 40, "auto"]),
    branches=st.sampled_from([0, 0, 2, 5]),
    draft_from=st.sampled_from(["auto", "text"]),
    sampling=st.sampled_from(SAMPLINGS),
    adversarial=st.booleans(),
    max_rows=st.sampled_from([None, 1, 24]),
)
def test_any_table_leaves_the_text_as_it_is(
    small_model: Transformer, seed: int, adversarial: bool, max_rows: int | None, sampling: dict[str, Any], **ahead: Any
) -> None:
    requests = requests_of(seed, 4)
    plain = texts(small_model, causal(**sampling), requests)
    engine = Engine(small_model, causal(**sampling, **ahead), Solo(), EngineConfig(3, max_rows))
    assert engine.drafter is not None
    if adversarial:
        given = engine.drafter
        engine.drafter = PlainDrafter(sorted(given.eos_ids), given.most, given.masks)
        engine.drafter.table = Adversary(seed, small_model.config.vocab_size)
    else:  # the texts themselves, as a resumed job knows them, and those of another model
        for request in requests:
            engine.drafter.remember([*request.prompt, *plain[request.index]], len(request.prompt))
            engine.drafter.remember(plain[request.index][::-1])
    for _ in range(2):  # the second time with what was learned in the first
        assert {g.request.index: g.tokens for g in engine.generate(requests)} == plain


@pytest.mark.parametrize("drafts", [4, "auto"])
@pytest.mark.parametrize("branches", [0, 3])
def test_all_ranks_of_a_replica_draft_alike(small_model: Transformer, drafts: int | str, branches: int) -> None:
    """Otherwise their shares of a forward would not fit together."""
    import copy

    from lopa_dist.models.tensor_parallel import split

    requests = requests_of(5, 6)
    requests += [replace(one, index=100 + one.index) for one in requests]  # whose texts are known by then
    plain = texts(small_model, causal(), requests)
    config = causal(drafts=drafts, branches=branches)
    for found in on_ranks(2, lambda comm: texts(small_model, config, requests, comm, max_sequences=4)):
        assert found == plain

    def work(comm: Communicator, tensor: Communicator) -> dict[int, list[int]]:
        model = copy.deepcopy(small_model)
        split(model, tensor)
        return texts(model, config, requests, comm, tensor, max_sequences=4)

    for found in on_mesh(2, 2, work):
        assert found == plain


def test_known_texts_take_few_forwards(small_model: Transformer) -> None:
    """And the drafts are counted by their source, for each request and together."""
    requests = [replace(one, max_new_tokens=24) for one in requests_of(3, 6)]
    again = [replace(one, index=100 + one.index) for one in requests]
    engine = Engine(small_model, causal(drafts=8, draft_from="text"), Solo(), EngineConfig(max_sequences=3))
    first = {g.request.index: g for g in engine.generate(requests)}
    second = {g.request.index: g for g in engine.generate(again)}
    assert all(second[100 + i].tokens == g.tokens for i, g in first.items())
    tokens = sum(len(g.tokens) for g in first.values())
    assert sum(g.forwards for g in second.values()) < tokens / 3
    total = Work()
    for g in [*first.values(), *second.values()]:
        total.add(g.work.totals())
        assert g.work.accepted_from.total() == g.work.drafts_accepted
        assert g.work.verified_from.total() == g.work.drafts_verified
    assert total.accepted_from == engine.statistics.accepted_from
    assert not total.verified_from[MASKS]


def test_samples_of_a_prompt_help_one_another(small_model: Transformer) -> None:
    requests = [Request(i, [7, 8, 9, 10], 24, key=3) for i in range(8)]  # one key: they write the same text
    engine = Engine(small_model, causal(drafts=8, draft_from="text"), Solo(), EngineConfig(max_sequences=2))
    found = list(engine.generate(requests))
    assert len({tuple(g.tokens) for g in found}) == 1
    assert found[-1].forwards < found[0].forwards


def drafter(masks: bool = False, most: int = 8) -> Drafter:
    return PlainDrafter([0], most, masks)


def tokens(made: Drafter, slot: int = 0, masks: Sequence[tuple[int, float]] = (), most: int = 8) -> list[int]:
    return [draft.token for draft in made.draft(slot, most, WORTH, masks).chain]


def test_a_passage_of_the_prompt_goes_on() -> None:
    made = drafter()
    made.admit(0, [5, 6, 7, 8, 9, 5, 6], Work())
    assert tokens(made)[:3] == [7, 8, 9]
    assert {source_of(draft) for draft in made.texts[0].chain} == {OWN}
    made.admit(1, [5], Work())  # nothing to go by
    assert tokens(made, 1) == []


def test_the_end_of_a_text_is_expected_and_not_drafted() -> None:
    made = drafter()
    made.table.add([9, 1, 2, 3, 0], 0)
    made.admit(0, [9, 1], Work())
    text = made.draft(0, 8, WORTH)
    assert ([draft.token for draft in text.chain], text.expects_eos) == ([2, 3], True)
    assert tokens(made, most=1) == [2]


def test_the_surer_source_drafts() -> None:
    """What was often wrong gives way, and comes back when it is right again."""
    made = drafter(masks=True)
    made.table.add([9, 1, 2], 0)
    for wrong in (2, 3):  # the text first, then the mask
        right = 5 - wrong
        for _ in range(400):
            made.admit(0, [9, 1], Work())
            made.draft(0, 1, WORTH, [(3, 0.6)])
            made.wrote(0, [right])
            made.texts[0].counted += 1  # the table stays as it is
            made.learn(Work())
        made.admit(0, [9, 1], Work())
        [draft] = made.draft(0, 1, WORTH, [(3, 0.6)]).chain
        assert (draft.token, source_of(draft)) == ((3, MASKS) if wrong == 2 else (2, TEXT))
        assert draft.chance > 0.5


def test_unlikely_drafts_are_not_worth_a_row() -> None:
    made = drafter()
    made.table.add([9, 1, 2, 3, 4, 5, 6, 7, 8], 0)
    made.admit(0, [9, 1], Work())
    chances = [draft.chance for draft in made.draft(0, 8, 0.0).chain]
    assert len(chances) == 7
    assert len(made.draft(0, 8, 0.99 * chances[0] * chances[1]).chain) == 2
    assert made.draft(0, 8, 1.1 * chances[0]).chain == []


def test_paths_leave_the_chain_where_another_source_would() -> None:
    made = drafter(masks=True)
    made.table.add([9, 1, 2, 3, 4], 0)
    made.admit(0, [9, 1], Work())
    masks = [(2, 0.9), (9, 0.1), (4, 0.1)]
    assert tokens(made, masks=masks) == [2, 3, 4]
    assert made.paths(0, 5, masks) == [[2, 9, 4]]
    assert made.paths(0, 0, masks) == []


@given(probability=st.floats(0, 1))
def test_levels_of_probabilities(probability: float) -> None:
    found = level(probability)
    assert 0 <= found < LEVELS
    assert 1 - probability <= 2.0**-found
    if found < LEVELS - 1:
        assert 1 - probability > 2.0 ** -(found + 1) * (1 - 1e-9)
