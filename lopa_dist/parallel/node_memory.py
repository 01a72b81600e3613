"""The memory of this node on a CPU: how much is free, and how much of it the job may use."""

from __future__ import annotations

import math
import os
import resource
import sys
from pathlib import Path


def available_memory() -> int:
    """Return the free bytes of this machine's memory; all of its bytes where the system does not say."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if Path("/proc/meminfo").exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allotted_memory() -> float:
    """Return the bytes that Slurm lets the processes of a job have on this node; infinity where it does not say."""
    texts = [os.environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")]
    a_node, a_cpu, cpus = (int(text) if text.isdecimal() else 0 for text in texts)
    return (a_node or a_cpu * cpus) * 2.0**20 or math.inf


def resident_memory() -> int:
    """Return the bytes of memory that this process has now; the most that it has had where the system does not say."""
    if (file := Path("/proc/self/statm")).exists():
        return int(file.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def memory_left(ranks: int) -> int:
    """Return the bytes that this process may still take if the `ranks` processes of this node share its memory."""
    allotted = allotted_memory() / ranks - resident_memory()
    return max(int(min(available_memory() / ranks, allotted)), 0)
