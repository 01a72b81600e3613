"""Run torchrun, and end with the ranks' status and without a traceback if they were stopped in order.

    python -m lopa_dist.parallel.torchrun --nproc-per-node 8 -m lopa_dist ...

Plain torchrun takes every status but 0 for a failure, and reports it on a page per node.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from lopa_dist.parallel.stop import STOPPED

ENDED = (-15, 143)  # statuses of ranks that the agent ends after another has left


def main() -> None:
    """Run torchrun with the arguments of the command line."""
    try:
        torchrun()
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        if STOPPED not in statuses or not statuses <= {STOPPED, *ENDED}:
            raise
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
