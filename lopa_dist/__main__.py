"""`lopa-dist`, and `python -m lopa_dist`."""

import faulthandler
import io
import signal
import sys

from lopa_dist.parallel.stop import INTERRUPTED, leave_at_signals


def main() -> None:
    """The command line, ready for signals before its imports, which take seconds."""
    leave_at_signals()
    for stream in (sys.stdout, sys.stderr):  # a terminal or a file that cannot show a character ends nothing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # Ctrl-\ prints all stacks, and the process goes on
    try:
        from lopa_dist.cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("lopa-dist: interrupted\n")
        sys.exit(INTERRUPTED)
    command_line()


if __name__ == "__main__":
    main()
