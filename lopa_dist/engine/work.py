"""What was computed for a request: counted for each request by itself, so that sums over several attempts are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

ENOUGH, VAIN = 2000, 0.02  # after this many drafts, a smaller accepted share than this is reported as in vain


@dataclass
class Work:
    """Counts of one request's forwards, or sums of several requests'."""

    rows: int = 0  # computed for windows, branches and drafts included, on all branch ranks together
    prompt_tokens: int = 0
    prompt_reused: int = 0  # those of them whose K/V another request had computed
    wins: Counter[int] = field(default_factory=Counter)  # by branch: forwards with several branches that it won
    # by number of lookahead branches: drafts that would be accepted with only so many, summed over the same forwards
    accepted_with: Counter[int] = field(default_factory=Counter)
    proposed: Counter[int] = field(default_factory=Counter)  # forwards with drafts, by their number of drafts
    accepted: Counter[int] = field(default_factory=Counter)  # the same forwards, by how many drafts were accepted
    verified_from: Counter[int] = field(default_factory=Counter)  # drafts by their source, `drafter.SOURCES`
    accepted_from: Counter[int] = field(default_factory=Counter)  # of these, the drafts that were accepted

    def totals(self) -> dict[str, Any]:
        """Return the counts that are not zero, ready for JSON, for `add`."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}

    def add(self, totals: dict[str, Any]) -> None:
        """Add what `totals` returned, even if it has been through JSON."""
        for name, value in totals.items():
            if isinstance(value, dict):
                getattr(self, name).update({int(key): count for key, count in value.items()})
            else:
                setattr(self, name, getattr(self, name) + value)

    def acceptance(self) -> list[float]:
        """Return, for each depth, the share of the drafts proposed there that were accepted.

        A draft counts as accepted only with all drafts before it. The list is empty if nothing was drafted.
        """
        deepest = max(self.proposed, default=0)
        reached = [sum(count for drafts, count in self.proposed.items() if drafts >= d) for d in range(1, deepest + 1)]
        passed = [sum(count for drafts, count in self.accepted.items() if drafts >= d) for d in range(1, deepest + 1)]
        return [a / b for a, b in zip(passed, reached, strict=True)]

    @property
    def drafts_verified(self) -> int:
        """How many drafts all forwards had."""
        return sum(drafts * count for drafts, count in self.proposed.items())

    @property
    def drafts_accepted(self) -> int:
        """How many of these drafts were accepted."""
        return sum(drafts * count for drafts, count in self.accepted.items())

    def accepted_share(self) -> float:
        """Return the share of all verified drafts that were accepted; 0 if there were none."""
        return self.drafts_accepted / self.drafts_verified if self.drafts_verified else 0.0

    def in_vain(self) -> str:
        """Return a warning if drafts were hardly ever accepted; empty if they were, or if few were tried."""
        tried, share = self.drafts_verified, self.accepted_share()
        if tried < ENOUGH or share >= VAIN:
            return ""
        return (
            f"of {tried:,} drafts {share:.1%} were accepted: they took time and brought next to nothing. Was this "
            "checkpoint trained to draft (docs/lossless.md)? decode.drafts=0 runs without drafts; causal models can "
            "draft from text with decode.draft_from=text"
        )

    def accepted_per_forward(self) -> float:
        """Return the mean number of accepted drafts in the sequence forwards that had drafts; 0 if none had any."""
        forwards = sum(self.accepted.values())
        return self.drafts_accepted / forwards if forwards else 0.0
