"""How much faster a job would be if its masks were accepted at the rates of a measurement."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

from lopa_dist.engine.acceptance import Acceptance
from lopa_dist.engine.forecast import Forecast
from lopa_dist.engine.lookahead import LookaheadPolicy


class Rates(NamedTuple):
    """How often drafts of masks were accepted in a measurement."""

    shares: list[float]  # by depth, of the drafts that were tried there
    chains: float  # that were measured; 0: nothing is known


def gain(policy: LookaheadPolicy, after: Rates, before: Rates | None = None, mask_cost: float = 1.0) -> float:
    """Return how many times as fast a job is expected to become if its masks were accepted at the rates `after`.

    With ``drafts=auto`` the times of this job's own steps decide. With a fixed number of drafts, all forwards count as
    equally long, apart from rows that become dearer.

    Args:
        policy: of the running job.
        after: rates of other masks; if they are not known, 1 is returned.
        before: rates of the job's present masks, measured in the same way, so that equal rates give 1. None: those of
            the job itself.
        mask_cost: how many times as long a row of the other masks takes as one of the present masks.
    """
    if not after.chains:
        return 1.0
    own = policy.forecast
    present = with_rates(own, before) if before and before.chains else own
    other = with_rates(own, after)
    other.masks = True
    if policy.auto and own.times.all.points:
        now, as_dear = present.fastest(policy.sequences), other.fastest(policy.sequences)
        other.mask_cost = mask_cost
        # rows that cost more make nothing faster, even if noisy times say so
        return min(other.fastest(policy.sequences), as_dear) / now
    deepest = own.most
    lengths = [sum(d * p for d, p in enumerate(of.outcomes.helped.ends(deepest))) for of in (other, present)]
    text = sum(d * p for d, p in enumerate(own.outcomes.bare.ends(deepest * own.text)))
    # a row of the chain, its drafts, and as many masks
    longer = (1 + deepest + deepest * mask_cost) / (1 + 2 * deepest)
    return (1 + max(lengths[0], text)) / (1 + max(lengths[1] * own.masks, text)) / longer


def with_rates(forecast: Forecast, rates: Rates) -> Forecast:
    """Return a copy of a forecast whose masks are accepted at these rates."""
    deepest, shares = forecast.most, rates.shares
    known = [*shares, *([shares[-1]] * deepest)][:deepest] if shares else [0.0] * deepest
    other = copy(forecast)
    other.outcomes = copy(forecast.outcomes)
    other.outcomes.helped = acceptance = Acceptance(deepest)
    tried = max(rates.chains, 1.0)
    for depth, share in enumerate(known):
        acceptance.tried[depth], acceptance.accepted[depth] = tried, tried * share
        acceptance.drafted[depth] = acceptance.room[depth] = tried
        tried = max(tried * share, 1.0)
    return other
