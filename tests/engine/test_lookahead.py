"""What `drafts=auto` knows of text that does not draft, and that it tries other choices."""

from __future__ import annotations

import numpy as np
import pytest

from lopa_dist.decode.state import HostState
from lopa_dist.engine.chains import Chains
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.drafter import drafter_for
from lopa_dist.engine.gain import Rates, gain
from lopa_dist.engine.lookahead import BURST, BURSTS, EXPLORE, FAR, SELDOM, Acceptance, LookaheadPolicy
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.work import Work
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.test_causal import causal, requests_of, texts


def test_an_expected_step_counts_as_the_mean_of_counted_ones() -> None:
    """A chain of two drafts with room for four ends at 0, 1 and 2 with probabilities 1/2, 1/4 and 1/4."""
    expected, counted = Acceptance(4), Acceptance(4)
    ends = np.array([[0.5, 0.25, 0.25, 0, 0]])
    for _ in range(400):
        expected.expect(ends, np.array([2]), np.array([4]))
    for accepted in (0, 0, 1, 2) * 100:
        counted.count(np.array([2]), np.array([accepted]), np.array([4]))
    assert expected.ends(4) == pytest.approx(counted.ends(4), abs=0.01)
    assert expected.length(4) == pytest.approx(counted.length(4))


def host(sequences: int) -> HostState:
    """Sequences that run."""
    return HostState._make([np.ones(sequences, np.int64)] * len(HostState._fields))


def test_of_two_choices_the_other_is_tried_too() -> None:
    """A model without masks may draft from text or not: what was left out once must not be so for ever."""
    policy = LookaheadPolicy(causal(drafts="auto", draft_from="text"))
    proposed = [policy.propose(host(2)).text for _ in range((SELDOM + 1) * EXPLORE)]
    usual = policy.ranked[0].text
    assert policy.speed[policy.ranked[1]] < FAR * policy.speed[policy.ranked[0]]
    tried = [step for step, text in enumerate(proposed, 1) if text != usual and step >= BURSTS[0]]
    assert tried == [*range(BURSTS[0], BURSTS[0] + BURST), SELDOM * EXPLORE]


def test_what_text_would_bring_is_told_while_it_does_not_draft(small_model: Transformer) -> None:
    config = causal(drafts="auto", draft_from="text")
    engine = Engine(small_model, config, Solo(), EngineConfig(2))
    requests = requests_of(3, 2)
    batch = engine.start(requests, lambda most: requests[:most])
    batch.admit()
    drafter = drafter_for(config, small_model.config)
    assert drafter
    chains = Chains(drafter, 2)
    drafter.remember([1, 2, 3, 4, 5, 6])
    for slot in range(2):
        chains.admit(slot, [1, 2], Work())
    before = batch.state.chain_token.clone()
    found = chains.draft(batch.state, batch.host, 0.02, from_text=False, foresee=True)
    assert found is batch.host
    assert before.equal(batch.state.chain_token)
    assert chains.expected is not None
    assert (chains.expected.drafts > 0).all()
    assert chains.expected.ends.sum(1) == pytest.approx(1)


@pytest.mark.parametrize("sequences", [1, 4])
def test_a_job_comes_back_to_text(small_model: Transformer, sequences: int) -> None:
    """Begun without text, as where it brought nothing, it drafts from text when its answers repeat."""
    requests = requests_of(5, 4)
    plain = texts(small_model, causal(), requests)
    engine = Engine(small_model, causal(drafts="auto", draft_from="text"), Solo(), EngineConfig(sequences))
    engine.lookahead.clock = iter(np.arange(0, 1e5, 1.0)).__next__  # every step takes as long: rows cost nothing
    for _ in range(600):
        engine.lookahead.bare.count(np.array([4]), np.array([0]), np.array([8]))
    assert engine.drafter
    for request in requests:
        engine.drafter.remember([*request.prompt, *plain[request.index]])
    found = {g.request.index: g.tokens for g in engine.generate(requests)}
    assert found == plain
    assert engine.statistics.accepted_from.total() > sum(map(len, plain.values())) / 3


@pytest.mark.parametrize("drafts", [8, "auto"])
def test_text_that_is_never_right_does_not_hide_what_masks_would_gain(drafts: int | str) -> None:
    policy = LookaheadPolicy(causal(drafts=drafts), masks=False)
    ends = np.zeros((4, policy.most + 1))
    ends[:, 0] = 1
    for _ in range(300):
        policy.expect(ends, np.ones(4, np.int64), np.full(4, policy.most))
        assert len(policy.bare.expected) <= 64
    assert gain(policy, Rates([0.75] * policy.most, 1000.0)) > 3
