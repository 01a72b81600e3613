"""Where a process is, for those who wonder why nothing happens."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import traceback

FRAMES = 8  # innermost ones: the outer ones are the same in every job


def print_stacks_at_signal() -> None:
    """From now on, SIGQUIT (Ctrl-\\ in a terminal) prints the stacks of all threads; the process goes on."""
    faulthandler.register(signal.SIGQUIT, all_threads=True)


def main_thread() -> str:
    """Return the innermost lines of the main thread's stack, for another thread that is about to end the process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame, FRAMES)).rstrip()
