"""torchrun that ends as its ranks do when these were stopped in order: with their status, and without a traceback.

    python -m lopa_dist.parallel.torchrun --nproc-per-node 8 -m lopa_dist ...

torchrun takes every status but 0 for a failure, and tells of it in a page for each node.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from lopa_dist.parallel.stop import STOPPED

ENDED = (-15, 143)  # of a rank that the agent ends behind one that has left first


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
