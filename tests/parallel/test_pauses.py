"""A process that was suspended knows for how long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

PROGRAM = """
import time
from lopa_dist.parallel import pauses
pauses.LEAST_S = 1.0
watched = pauses.Pauses()
print("ready", flush=True)
input()
time.sleep(2 * pauses.INTERVAL_S)
watched.close()
print(watched.seconds)
"""


def test_a_suspended_process_knows_for_how_long() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    printed, _ = process.communicate("\n", timeout=60)
    assert float(printed) > 1
