"""What generations run in: K/V space and the runner over it, which on a GPU has graphs that took seconds to capture."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.memory import Plan
from lopa_dist.engine.runner import Runner


@dataclass
class Room:
    """K/V space and a runner, made for some requests, and good for others that need no more."""

    asked: int  # sequences that should run at once; `plan` may have fewer
    longest: int  # tokens of a prompt
    budget: int  # tokens of K/V
    plan: Plan
    pool: KVPool
    runner: Runner

    def holds(self, asked: int, longest: int, budget: int) -> bool:
        """Return whether a generation fits that would ask for a room of these sizes."""
        return asked <= self.asked and longest <= self.longest and budget <= self.budget

    def clear(self) -> None:
        """Forget the sequences of the last generation, of which some may have been dropped before they were over."""
        self.pool.clear()
        self.runner.request_sampling.clear()
