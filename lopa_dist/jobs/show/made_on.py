"""When and on what a run was made, so that its speed can be quoted."""

from __future__ import annotations

import os
import platform
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_dist.code_hash import code_hash
from lopa_dist.jobs.setup.usable_cores import usable_cores

if TYPE_CHECKING:  # runs are shown without torch, which takes seconds to import
    import torch


def made_on(device: torch.device) -> dict[str, Any]:
    """Return the date, the host, the device, the machine's load and the code's hash, as a job finds them."""
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "device": device_name(device),
        "load": load,
        "code": code_hash(),
    }


def made_together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of `made_on` of several jobs as one: first date, all hosts, devices, codes, highest loads."""
    loads = [part["load"] for part in parts if part["load"] is not None]
    names = ("host", "device", "code")  # reports of earlier versions do not have the code
    together = {key: ", ".join(dict.fromkeys(part.get(key, "") for part in parts)) for key in names}
    busy = {"others": max(part["others"] for part in parts)} if all("others" in part for part in parts) else {}
    return {"date": min(part["date"] for part in parts), **together, "load": max(loads, default=None), **busy}


def device_name(device: torch.device) -> str:
    """Return the name of a device; for a CPU also how many cores the process may use."""
    if device.type == "cuda":
        import torch

        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {usable_cores()} cores"


def cpu_name() -> str:
    """Return the name of the CPU, or its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def made_sentence(report: dict[str, Any]) -> str:
    """Return when and on what a run was made, in words; empty for reports of versions that did not say."""
    made = report.get("made")
    if not made:
        return ""
    load = "" if made["load"] is None else f", load {made['load']} at the start"
    others = f", other programs kept {made['others']} cores busy" if made.get("others") else ""
    return f"{made['date'][:16].replace('T', ' ')} UTC on {made['host']} ({made['device']}{load}{others})"
