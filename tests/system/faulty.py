"""`python -m tests.system.faulty RANK STEP HOW [overrides]`: the main job, with a fault in one rank at one step.

HOW is kill (SIGKILL), stop (SIGSTOP) or raise.
"""

from __future__ import annotations

import os
import signal
import sys

from lopa_dist import cli
from lopa_dist.engine.runner import Runner
from lopa_dist.parallel.launcher import detect

rank, step, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sys.argv[1:4] = []
forward = Runner.forward
steps = 0


def faulty(self, batch):  # type: ignore[no-untyped-def]
    global steps
    steps += 1
    if detect().rank == rank and steps == step:
        if how == "raise":
            raise MemoryError("planted fault")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return forward(self, batch)


Runner.forward = faulty  # type: ignore[method-assign]
cli.main()
