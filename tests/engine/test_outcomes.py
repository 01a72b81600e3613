"""What steps have brought is counted once, over all generations."""

from __future__ import annotations

from collections import Counter

from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.draft_kinds import MASKS
from lopa_dist.engine.lookahead import LookaheadPolicy
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.outcomes import FEWEST_ROWS
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.rows.lookahead import Lookahead
from tests.engine.test_causal import causal, requests_of
from tests.engine.test_lookahead import host


def test_masks_are_useless_by_what_they_brought_in_all_generations() -> None:
    """A policy may be older than the engine that has it (`LLM`), or younger (after a lesson)."""

    def generation(policy: LookaheadPolicy, accepted: int) -> bool:
        policy.start()
        for _ in range(FEWEST_ROWS // 128 + 1):
            policy.begin(Lookahead(2), host(64), chunk=False)
        policy.outcomes.accepted(Counter({MASKS: accepted}))
        return policy.outcomes.useless()

    policy = LookaheadPolicy(causal(drafts=2))
    assert [generation(policy, 200), generation(policy, 0), generation(policy, 0)] == [False] * 3
    assert generation(LookaheadPolicy(causal(drafts=2)), 0)


def test_rows_of_all_groups_count_against_masks_that_bring_nothing(small_model: Transformer) -> None:
    engine = Engine(small_model, causal(drafts=3), Solo(), EngineConfig(max_sequences=3))
    ran = []

    def look(engine: Engine) -> None:
        assert engine.ended is not None
        step, rows = engine.ended.step, engine.ended.rows
        counts = step.before.drafts + (step.before.branches > 0)
        ran.append(int(rows.table.rows[rows.table.branch >= 0].sum() - counts.sum()))

    engine.on_step.append(look)
    list(engine.generate(requests_of(5, 8)))
    # masks after an answer's limit are counted, and do not run
    assert 0 < sum(ran) <= engine.lookahead.outcomes.mask_rows


def test_every_step_s_drafts_are_counted_once_also_by_a_policy_of_an_earlier_engine(small_model: Transformer) -> None:
    """Those of a generation's last step, too; `LLM` has an engine for each call."""
    engines = [Engine(small_model, causal(drafts=2), Solo(), EngineConfig(2)) for _ in range(3)]
    for earlier, engine in zip([None, *engines], engines, strict=False):
        if earlier:
            engine.take_over(earlier)
        for _ in range(2):
            list(engine.generate(requests_of(3, 2)))
    accepted = [engine.statistics.accepted_from[MASKS] for engine in engines]
    assert all(accepted)
    assert engines[-1].lookahead.outcomes.from_masks == sum(accepted)
