"""`lopa-dist`, and `python -m lopa_dist`."""

import sys

from lopa_dist.parallel.stacks import print_stacks_at_signal
from lopa_dist.parallel.stop import leave_at_signals


def main() -> None:
    """The command line, ready for signals before its imports, which take seconds."""
    leave_at_signals()
    print_stacks_at_signal()
    try:
        from lopa_dist.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit("lopa-dist: interrupted")
    command_line()


if __name__ == "__main__":
    main()
