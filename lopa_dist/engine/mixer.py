"""Choosing one proposal out of many: each voter names a token, and its vote has the weight that it has earned.

Voters that look at the same text in different ways are mixed as in data compressors (M. Mahoney, Adaptive Weighing of
Context Models for Lossless Data Compression, 2005): the log odds that each voter's proposal is right are added up. Each
voter has one weight for proposals that agree with what is drafted, and one for those that do not. After each token, the
weights move in the direction in which the sum would have been better. They never fall below 0: log odds change their
sign when a voter improves, and its proposals would then count against their tokens.

Only sums, products and quotients are computed, and logarithms come from rounded tables, so every machine gets the same
results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

DECAY = 0.998  # a proposal's count is multiplied by this with each later proposal of its kind
AGREES, DIFFERS = 0.3, 0.15  # a voter's initial weights, for proposals that agree with the draft and for others
TRUSTED = 1.0  # instead of AGREES, for a voter that knows its own chance of being right
RATE = 0.02  # learning rate of the weights
DOUBT = -1.0  # for tokens other than the proposed one, a lean below this counts as this
DIFFERENT = 4  # sets of weights are for one, two, three, or more different tokens that are proposed
SETS = 2 * DIFFERENT  # and for few voters or many that propose any (`Mixer.set_of`)
# `LEANS` has the log odds of chances, in STEPS steps; `CHANCES` the chances of sums from -WIDE to WIDE, in steps of
# 1 / SCALE
STEPS, SCALE, WIDE = 1024, 32, 12

LEANS = tuple(round(math.log((i + 0.5) / (STEPS - i - 0.5)) * 2**16) / 2**16 for i in range(STEPS))
CHANCES = tuple(round(2**24 / (1 + math.exp(WIDE - (i + 0.5) / SCALE))) / 2**24 for i in range(2 * WIDE * SCALE))


class Proposal(NamedTuple):
    """A token that a voter proposes: with the voter's number, the proposal's kind, and the log odds of that kind."""

    token: int
    voter: int
    kind: int
    lean: float


class Decision(NamedTuple):
    """What was decided: the token, the chance that it is right, the proposals, and the number of the set of weights."""

    token: int
    chance: float
    proposals: tuple[Proposal, ...] = ()
    weights: int = 0


class Mixer:
    """Decides between proposals, and learns from the tokens that follow.

    Args:
        voters: how many there are.
        hope: for each kind of proposal, the chance that it is right, before any of its kind was made.
        trusted: number of the voter that knows its own chance of being right.
    """

    def __init__(self, voters: int, hope: Sequence[float], trusted: int) -> None:
        self.voters, self.hope, self.trusted = voters, hope, trusted
        self.tried, self.right = [0.0] * len(hope), [0.0] * len(hope)
        self.chance = list(hope)
        self.weights = [self.first() for _ in range(SETS)]

    def first(self) -> list[float]:
        """Return a set's initial weights: of each voter where it agrees, of each where it differs, and a constant."""
        agrees = [TRUSTED if voter == self.trusted else AGREES for voter in range(self.voters)]
        return [*agrees, *([DIFFERS] * self.voters), 0.0]

    def proposal(self, token: int, voter: int, kind: int) -> Proposal:
        """Return a voter's proposal of `token`, with the log odds of its kind."""
        return Proposal(token, voter, kind, LEANS[min(int(self.chance[kind] * STEPS), STEPS - 1)])

    def set_of(self, different: int, proposals: int) -> int:
        """Return the number of the set of weights for so many `proposals`, with so many `different` tokens."""
        return min(different, DIFFERENT) - 1 + DIFFERENT * (proposals > self.voters // 2)

    def decide(self, proposals: Sequence[Proposal]) -> Decision:
        """Return the decision for the token with the most support; -1 with a chance of 0 if there is no proposal."""
        votes: dict[int, float] = {}
        for token, *_ in proposals:
            votes[token] = 0.0
        if not votes:
            return Decision(-1, 0.0)
        number = self.set_of(len(votes), len(proposals))
        weights, voters, against = self.weights[number], self.voters, 0.0
        for token, voter, _, lean in proposals:
            doubt = weights[voters + voter] * max(lean, DOUBT)
            votes[token] += weights[voter] * lean + doubt
            against += doubt
        best = max(votes, key=votes.__getitem__)
        total = min(max(weights[-1] + votes[best] - against, -WIDE), WIDE)
        chance = CHANCES[min(int((total + WIDE) * SCALE), len(CHANCES) - 1)]
        return Decision(best, chance, tuple(proposals), number)

    def learn(self, decision: Decision, token: int) -> None:
        """Learn from a decision, when `token` is what the model wrote there."""
        drafted, chance, proposals, number = decision
        weights, step = self.weights[number], RATE * ((drafted == token) - chance)
        for proposed, voter, kind, lean in proposals:
            self.tried[kind] = tried = DECAY * self.tried[kind] + 1
            self.right[kind] = right = DECAY * self.right[kind] + (proposed == token)
            self.chance[kind] = (right + self.hope[kind]) / (tried + 1)
            if proposed == drafted:
                weights[voter] = max(weights[voter] + step * lean, 0.0)
            else:
                differs = self.voters + voter
                weights[differs] = max(weights[differs] - step * max(lean, DOUBT), 0.0)
        weights[-1] += step * 0.5

    def forget(self, kinds: int) -> None:
        """Forget what was learned of the trusted voter, whose proposals have the kinds from number `kinds` on."""
        nothing = [0.0] * (len(self.hope) - kinds)
        self.tried[kinds:], self.right[kinds:], self.chance[kinds:] = nothing, nothing, list(self.hope[kinds:])
        first = self.first()
        for weights in self.weights:
            for number in (self.trusted, self.voters + self.trusted):
                weights[number] = first[number]
