"""A port for a test's own server: one that no connection of another program takes meanwhile."""

from __future__ import annotations

import random
import socket

ANY = random.SystemRandom()  # other processes draw too, and no result depends on it


def free_port() -> int:
    """One that is free now, of those that Linux gives to no connection by itself; Slurm's tests begin at 20,000."""
    while True:
        port = ANY.randrange(10_000, 20_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
