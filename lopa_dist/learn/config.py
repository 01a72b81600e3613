"""Options of learning, `learn.*` on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_dist.checks import check_options, option, require_seconds


@dataclass
class LearnConfig:
    """How drafts are learned from answers (`lopa-dist learn`, `job.learn`)."""

    minutes: float = option(20.0, "minutes that learning may take, by rank 0's clock")
    rank: int = option(
        64, "rank of the adapter's matrices: a higher one learns more, but makes rows that draft cost more", least=1
    )

    def __post_init__(self) -> None:
        check_options("learn", self)
        require_seconds("learn.minutes", self.minutes)
