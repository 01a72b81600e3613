"""`python -m tests.system.faulty RANK STEP HOW [overrides]`: the main job, with a fault in one rank at one step.

HOW is kill (SIGKILL), stop (SIGSTOP), hang (alive, but for ever in its forward) or raise. With `late-` before it, the
collective of that step is NCCL's: it returns at once on every rank, raises nothing, and the copy to the host after it
never comes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from lopa_dist import cli
from lopa_dist.decode import State
from lopa_dist.engine.runner import Runner
from lopa_dist.parallel.communicator import TorchCommunicator
from lopa_dist.parallel.launcher import detect

rank, step, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sys.argv[1:4] = []
late, how = how.startswith("late-"), how.removeprefix("late-")
forward, all_gather, to_host_with = Runner.forward, TorchCommunicator.all_gather, State.to_host_with
steps = 0


def faulty(self: Runner, prepared: Any) -> Any:
    global steps
    steps += 1
    if detect().rank == rank and steps == step:
        print("the fault begins", file=sys.stderr, flush=True)  # the test measures from here
        if how == "raise":
            raise MemoryError("planted fault")
        while how == "hang":
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return forward(self, prepared)


def queued(self: TorchCommunicator, records: torch.Tensor) -> torch.Tensor:
    if steps < step:
        return all_gather(self, records)
    return records.new_zeros(self.size, *records.shape)  # whatever lies where the records will never arrive


def synchronised(self: State, *extra: torch.Tensor) -> Any:
    while steps >= step:
        time.sleep(1)
    return to_host_with(self, *extra)


Runner.forward = faulty  # type: ignore[method-assign]
if late:
    TorchCommunicator.all_gather = queued  # type: ignore[method-assign]
    State.to_host_with = synchronised  # type: ignore[method-assign]
cli.main()
