"""The log on the terminal, and in a file."""

from __future__ import annotations

import logging
import sys

from lopa_dist.encodable import visible


class PlainLines(logging.Handler):
    """What both handlers have in common."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without control characters that texts of the user's may have."""
        return visible(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an error of writing, unless nothing can be written there."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class ConsoleHandler(PlainLines, logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to a terminal or pipe.

    Where they cannot be written, as after `| head` or to a full disk, they go to `cli.log` alone.
    """


class LogFile(PlainLines, logging.FileHandler):
    """Writes log lines to `cli.log`, as long as its disk has room: a job without room says so in its last line."""
