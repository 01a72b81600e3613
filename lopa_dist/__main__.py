"""The entry point of `lopa-dist` and `python -m lopa_dist`."""

import faulthandler
import io
import os
import signal
import sys

from lopa_dist.imports import no_garbage
from lopa_dist.parallel.stop import INTERRUPTED, leave_at_signals


def main() -> None:
    """Run the command line; signals are handled before its imports, which take seconds."""
    leave_at_signals()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a character that they cannot show is no error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # Ctrl-\ prints all stacks, and the process goes on
    try:
        with no_garbage():
            from lopa_dist.cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("lopa-dist: interrupted\n")
        sys.exit(INTERRUPTED)
    command_line()


if __name__ == "__main__":
    main()
