"""How much faster a job would be if its masks were accepted as a measurement says."""

from __future__ import annotations

from copy import copy

from lopa_dist.engine.lookahead import Acceptance, LookaheadPolicy


def gain(policy: LookaheadPolicy, shares: list[float], chains: float) -> float:
    """Return tokens a second with other masks, as a multiple of those now; at most one can expect, by this job's steps.

    Where the number of drafts is fixed, a forward counts as equally long with any text.

    Args:
        policy: of the running job.
        shares: of tried drafts that would be accepted, by depth.
        chains: that they were measured on; with none, nothing is known.
    """
    if not chains:
        return 1.0
    deepest = policy.most
    known = [*shares, *([shares[-1]] * deepest)][:deepest] if shares else [0.0] * deepest
    other = copy(policy)
    other.masks = True
    other.acceptance = acceptance = Acceptance(deepest)
    tried = max(chains, 1.0)
    for depth, share in enumerate(known):
        acceptance.tried[depth], acceptance.accepted[depth] = tried, tried * share
        acceptance.drafted[depth] = acceptance.room[depth] = tried
        tried = max(tried * share, 1.0)
    if policy.auto and policy.times.points:
        sequences = policy.sequences
        best, now = (max(p.tokens_a_second(c, sequences) for c in p.choices()) for p in (other, policy))
        return best / now
    lengths = [sum(d * p for d, p in enumerate(p.acceptance.ends(deepest))) for p in (other, policy)]
    text = sum(d * p for d, p in enumerate(policy.bare.ends(deepest * policy.text)))
    return (1 + max(lengths[0], text)) / (1 + max(lengths[1] * policy.masks, text))
