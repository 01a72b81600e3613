"""The log on the terminal, and in a file."""

from __future__ import annotations

import logging
import sys

from lopa_dist.encodable import visible


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to a terminal or pipe.

    Where they cannot be written, as after `| head` or to a full disk, they go to `cli.log` alone.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without control characters that texts of the user's may have."""
        return visible(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an error of writing, unless nothing can be written there."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class LogFile(logging.FileHandler):
    """Writes log lines to `cli.log`, as long as its disk has room: a job without room says so in its last line."""

    def format(self, record: logging.LogRecord) -> str:
        """See `ConsoleHandler`."""
        return visible(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an error of writing, unless the file cannot be written to."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
