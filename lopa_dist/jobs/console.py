"""The log on the terminal, and in a file."""

from __future__ import annotations

import logging
import sys


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to a terminal or pipe. Once nobody reads them, as after `| head`, they go to `cli.log` alone."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an error of writing, unless the reader has gone."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)


class LogFile(logging.FileHandler):
    """Writes log lines to `cli.log`, as long as its disk has room: a job without room says so in its last line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an error of writing, unless the file cannot be written to."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
