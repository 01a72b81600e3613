"""How much faster a job would be if its masks were accepted at the rates of a measurement."""

from __future__ import annotations

from copy import copy

from lopa_dist.engine.lookahead import Acceptance, LookaheadPolicy


def gain(policy: LookaheadPolicy, shares: list[float], chains: float) -> float:
    """Return the most tokens per second to expect with other masks, as a multiple of the present ones.

    With ``drafts=auto`` the times of this job's own steps decide. With a fixed number of drafts, all forwards count as
    equally long.

    Args:
        policy: of the running job.
        shares: by depth, the share of tried drafts that would be accepted.
        chains: how many chains the shares were measured on; if 0, nothing is known and 1 is returned.
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
    if policy.auto and policy.times.all.points:
        sequences = policy.sequences
        best, now = (max(p.tokens_a_second(c, sequences) for c in p.choices()) for p in (other, policy))
        return best / now
    lengths = [sum(d * p for d, p in enumerate(p.acceptance.ends(deepest))) for p in (other, policy)]
    text = sum(d * p for d, p in enumerate(policy.bare.ends(deepest * policy.text)))
    return (1 + max(lengths[0], text)) / (1 + max(lengths[1] * policy.masks, text))
