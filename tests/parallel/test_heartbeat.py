"""Ranks that fall silent are seen, and so is a store that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from lopa_dist.parallel import heartbeat
from lopa_dist.parallel import store_keys as keys
from lopa_dist.parallel.heartbeat import INTERVAL_S, Heartbeat
from tests.ports import free_port

HOST = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import HashStore, TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, timedelta(seconds=60), False)
time.sleep(120)
"""


def test_a_store_that_falls_silent_is_noticed_while_an_operation_hangs() -> None:
    port = free_port()
    host = subprocess.Popen([sys.executable, "-c", HOST, str(port)])
    try:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
        cut_off = threading.Event()
        heart = Heartbeat(store, 0, 2, 2.0, cut_off.set)
        assert not cut_off.wait(3), "the store answers"
        assert heart.silent() == [1]
        host.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        threading.Thread(target=lambda: store.check(["x"]), daemon=True).start()  # as a rank would be caught
        assert cut_off.wait(30)
        assert time.monotonic() - stopped > 2.0 - INTERVAL_S
        host.send_signal(signal.SIGCONT)
        heart.close()
    finally:
        os.kill(host.pid, signal.SIGKILL)
        host.wait()


@pytest.mark.timeout(60)
def test_a_store_that_has_just_gone_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "CONNECT", timedelta(seconds=0.5))
    host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
    store = TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=300))
    del host
    with pytest.raises(RuntimeError):
        Heartbeat(store, 1, 2, 2.0, lambda: None)


def test_rank_0_is_silent_from_when_all_have_joined_also_if_it_has_never_told_of_others() -> None:
    """It was stopped right after joining; torchrun's agent keeps the store, which goes on answering."""
    store = HashStore()
    heart = Heartbeat(store, 1, 2, INTERVAL_S, lambda: None)
    try:
        time.sleep(6 * INTERVAL_S)
        assert heart.overdue == [], "it may still import torch"
        store.add(keys.JOINED, 2)
        end = time.monotonic() + 60
        while not heart.overdue and time.monotonic() < end:
            time.sleep(0.05)
        assert heart.overdue == [0]
    finally:
        heart.close()
