"""K/V space and the runner over it, reused by later generations: on a GPU, capturing its graphs takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.memory import Plan, kv_budget
from lopa_dist.engine.runner import Runner
from lopa_dist.ragged import Ints


@dataclass
class Workspace:
    """K/V space and a runner, made for some requests, and usable for others that need no more."""

    asked: int  # sequences that should run at once; `plan` may have fewer
    longest: int  # the most tokens given to a request
    suffix: int  # the most of these that follow its answer
    plan: Plan
    pool: KVPool
    runner: Runner

    def holds(self, asked: int, longest: int, suffix: int, needs: Ints, kv_tokens: int | None) -> bool:
        """Return whether a generation of these sizes fits; `needs` are as returned by `space_needed`.

        Raises:
            ValueError: the largest request alone needs more than `kv_tokens`.
        """
        if asked > self.asked or longest > self.longest or suffix > self.suffix:
            return False
        return kv_budget(needs, self.plan.sequences + self.plan.ready, kv_tokens) <= self.pool.scratch

    def clear(self) -> None:
        """Forget the sequences of the last generation, some of which may have been dropped unfinished."""
        self.pool.clear()
        self.runner.request_sampling.clear()
