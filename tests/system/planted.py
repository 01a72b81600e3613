"""`python -m tests.system.planted STAGE RANK HOW WHOM [overrides]`: the main job, in which something happens.

At STAGE, RANK does HOW (a signal's name, or raise) to WHOM: itself, its launcher, or MPICH's proxy, which starts the
ranks of a node for mpirun.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

BEGINS = "the fault begins"


def main(stage: str, rank: int, how: str, whom: str) -> None:
    """Have the fault happen in this process, if it is `rank`, when it comes to `stage`."""
    from lopa_dist.engine.loop import Engine
    from lopa_dist.engine.runner import Runner
    from lopa_dist.jobs.run import job as run
    from lopa_dist.jobs.run import recorder
    from lopa_dist.parallel.launcher import detect
    from lopa_dist.parallel.neighbours import parent_of

    world = detect()
    if world.rank != rank:
        return
    place: dict[str, tuple[Any, str, int]] = {  # what is called, and the how manieth call it is
        "joining": (run, "Group", 1), "grouping": (run.Group, "_split", 1), "reading": (run, "JobInput", 1),
        "loading": (run.EngineBuilder, "load", 1), "compiling": (Engine, "prepare", 1),
        "first step": (Runner, "forward", 1), "generating": (Runner, "forward", 12),
        "judging": (recorder.Judges, "submit", 3), "writing": (recorder.Recorder, "write_verdicts", 8),
        "merging": (run, "merge", 1), "pages": (run.Job, "write_page", 1),
    }  # fmt: skip
    where, name, number = place[stage]
    real: Callable[..., Any] = getattr(where, name)
    calls = 0

    def faulty(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.write(2, f"{BEGINS}\n".encode())
            if how == "raise":
                raise MemoryError("planted fault")
            parent = str(os.getppid())
            mpirun = parent if "OMPI_COMM_WORLD_SIZE" in os.environ else parent_of(parent)  # Open MPI has no proxy
            launcher = {"srun": os.environ.get("SRUN", ""), "mpirun": mpirun}.get(world.launcher, parent)
            target = {"itself": str(os.getpid()), "launcher": launcher, "proxy": parent}[whom]
            os.kill(int(target), signal.Signals[how])
            time.sleep(0.5)
        return real(*arguments, **named)

    setattr(where, name, faulty)


if __name__ == "__main__":
    from lopa_dist.__main__ import main as command_line

    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    sys.argv[1:5] = []
    command_line()
