"""What was computed for a request: counted for each request alone, so that sums over several attempts are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

ENOUGH, VAIN = 2000, 0.02  # drafts after which one may say that they are accepted too seldom: in a smaller share


@dataclass
class Work:
    """Counts of one request's forwards, or sums of several requests'."""

    rows: int = 0  # computed for windows, branches and drafts included, on all branch ranks together
    prompt_tokens: int = 0
    prompt_reused: int = 0  # those of them whose K/V another request had computed
    wins: Counter[int] = field(default_factory=Counter)  # by branch, of forwards that had a choice
    # by a number of branches: drafts that would have been accepted with these, summed over the same forwards
    accepted_with: Counter[int] = field(default_factory=Counter)
    proposed: Counter[int] = field(default_factory=Counter)  # forwards by their number of drafts (verify=agreement)
    accepted: Counter[int] = field(default_factory=Counter)  # forwards by how many drafts were accepted
    verified_from: Counter[int] = field(default_factory=Counter)  # drafts by their source, `drafter.SOURCES`
    accepted_from: Counter[int] = field(default_factory=Counter)  # of these, the drafts that were accepted

    def totals(self) -> dict[str, Any]:
        """Return the counts that are not zero, JSON-able, for `add`."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}

    def add(self, totals: dict[str, Any]) -> None:
        """Add what `totals` returned, also if it has been through JSON."""
        for name, value in totals.items():
            if isinstance(value, dict):
                getattr(self, name).update({int(key): count for key, count in value.items()})
            else:
                setattr(self, name, getattr(self, name) + value)

    def acceptance(self) -> list[float]:
        """Return, for each depth, how many of the drafts that were proposed there were accepted, as a share.

        A draft counts as accepted with all drafts before it. Empty if nothing was drafted.
        """
        deepest = max(self.proposed, default=0)
        reached = [sum(count for drafts, count in self.proposed.items() if drafts >= d) for d in range(1, deepest + 1)]
        passed = [sum(count for drafts, count in self.accepted.items() if drafts >= d) for d in range(1, deepest + 1)]
        return [a / b for a, b in zip(passed, reached, strict=True)]

    @property
    def drafts_verified(self) -> int:
        """Drafts of all forwards."""
        return sum(drafts * count for drafts, count in self.proposed.items())

    @property
    def drafts_accepted(self) -> int:
        """Of these, the drafts that were accepted."""
        return sum(drafts * count for drafts, count in self.accepted.items())

    def accepted_share(self) -> float:
        """Return how many of all drafts that were verified were accepted, as a share; 0 if there were none."""
        return self.drafts_accepted / self.drafts_verified if self.drafts_verified else 0.0

    def in_vain(self) -> str:
        """Return what to say of drafts that were next to never accepted; empty where they were, or few were tried."""
        tried, share = self.drafts_verified, self.accepted_share()
        if tried < ENOUGH or share >= VAIN:
            return ""
        return (
            f"of {tried:,} drafts {share:.1%} were accepted: they took time and brought next to nothing. Was this "
            "checkpoint trained to draft (docs/lossless.md)? decode.drafts=0 runs without; causal models draft from "
            "text with decode.draft_from=text"
        )

    def accepted_per_forward(self) -> float:
        """Return the mean number of accepted drafts of the sequence forwards that had drafts; 0 if none had."""
        forwards = sum(self.accepted.values())
        return self.drafts_accepted / forwards if forwards else 0.0
