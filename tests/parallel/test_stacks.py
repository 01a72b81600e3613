"""A process tells where it is: at SIGQUIT, and before it ends because it waits in vain."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from lopa_dist.parallel.failures import main_thread

PROGRAM = """
import sys
from types import SimpleNamespace
from lopa_dist.__main__ import main

def waits_for_a_line():
    print("ready", flush=True)
    return sys.stdin.readline()

sys.modules["lopa_dist.cli"] = SimpleNamespace(main=lambda: print("went on with", waits_for_a_line()))
main()
"""


def test_stacks_are_printed_and_the_process_goes_on() -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGQUIT)
    while "waits_for_a_line" not in process.stderr.readline():
        assert process.poll() is None
    printed, _ = process.communicate("a line\n")
    assert printed == "went on with a line\n\n"
    assert process.returncode == 0


def test_another_thread_sees_where_the_main_thread_is() -> None:
    seen: list[str] = []

    def waits_for_the_other() -> None:
        thread = threading.Thread(target=lambda: seen.append(main_thread()))
        thread.start()
        thread.join()

    waits_for_the_other()
    assert "in waits_for_the_other" in seen[0]
    assert len(seen[0].splitlines()) <= 3 * 8
