"""The stages of `gpu_first`. On a CPU the same functions run with toy shapes and torch's forms, and measure nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_engines import engines
from benchmarks.first_facts import Fact, StageOf, main
from benchmarks.first_graphs import graphs
from benchmarks.first_kernels import kernels, preflight
from benchmarks.first_model import layers
from benchmarks.first_ranks import ranks
from benchmarks.first_speed import speed
from benchmarks.first_texts import texts
from lopa_dist.jobs.setup.usable_cores import usable_cores

AHEAD = {"preflight": 3, "engines": 3, "texts": 3, "kernels": 4}  # stages to compile ahead, and processes for each
AHEAD_SECONDS = 60.0
SANITIZER = "compute-sanitizer"
SANITIZER_FOLDERS = "/usr/local/cuda/bin", "/opt/cuda/bin"  # searched after the search path
SANITIZED = "small kernels"  # the stage that runs under the sanitizer


def environment(device: torch.device) -> Iterator[Fact]:
    """Yield the facts about the machine and its software."""

    def software() -> dict[str, Any]:
        cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return {"python": sys.version, "system": platform.platform(), "torch": torch.__version__, **cuda}

    def compiler() -> dict[str, Any]:
        found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
        return {"ok": device.type == "cpu" or bool(found and headers), "compiler": found, "Python.h": headers}

    def triton() -> dict[str, Any]:
        import triton

        return {"triton": triton.__version__}

    def gpu() -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        try:
            said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError) as error:  # some containers have no nvidia-smi
            said = str(error)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {"gpu": str(properties), "free": free, "total": total, "NCCL": nccl, "nvidia-smi": said}

    yield "software", software
    yield "compiler", compiler
    yield "disk", lambda: {"free": shutil.disk_usage(".").free}
    if device.type == "cuda":
        yield from (("Triton", triton), ("GPU", gpu))


def compiled(device: torch.device) -> Iterator[Fact]:
    """Yield a fact whose function compiles the kernels of later stages in several processes, into the cache on disk."""
    if device.type == "cpu":
        yield "not on a CPU", dict
        return
    yield "by several processes", partial(ahead, device, AHEAD, AHEAD_SECONDS)


def ahead(device: torch.device, stages: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """Run `stages` for what they compile, each in the given number of processes; return the processes' exit statuses.

    Their facts are dropped. The stage itself finds all facts later, also those that fail here or are not found within
    `seconds`.
    """
    end, toy = time.monotonic() + seconds, ["--toy"] * (device.type == "cpu")
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, usable_cores() // sum(stages.values())))}
    children = {
        f"{stage} {number}": subprocess.Popen(
            [sys.executable, "-m", "benchmarks.first_stages", stage, "--share", str(number), str(processes), *toy],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
        )
        for stage, processes in stages.items() for number in range(processes)
    }  # fmt: skip
    ended: dict[str, int | None] = {}
    try:
        for name, child in children.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(end - time.monotonic(), 0))
            ended[name] = child.poll()
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return {"exit statuses": ended}


def small_kernels(device: torch.device) -> Iterator[Fact]:
    """Return the facts about kernels at small shapes, because a tool that checks each access is slow."""
    return kernels(device, small=True)


def sanitizer(device: torch.device) -> Iterator[Fact]:
    """Yield what the CUDA toolkit's sanitizer finds, if it is installed: accesses out of bounds, then races."""
    found = shutil.which(SANITIZER) or shutil.which(SANITIZER, path=os.pathsep.join(SANITIZER_FOLDERS))

    def watched(tool: str) -> dict[str, Any]:
        if found is None:
            return {"tool": None}
        command = [found, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", "--target-processes", "all"]
        toy = ["--toy"] * (device.type == "cpu")
        # every tensor gets its own allocation: in a cached block, an access out of bounds would hit another tensor
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(
            [*command, sys.executable, "-m", "benchmarks.first_stages", SANITIZED, *toy],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        facts = done.stdout.count('"fact"')
        said = "\n".join(line for line in done.stdout.splitlines() if line.startswith("====="))
        ok = not done.returncode and bool(facts) and '"ok": false' not in done.stdout
        last = {} if ok else {"error": f"exit status {done.returncode}", "trace": f"{said}\n{done.stderr}"[-6000:]}
        return {"ok": ok, "tool": found, "facts": facts, "said": said[-2000:]} | last

    for tool in ("memcheck", "racecheck"):
        yield tool, partial(watched, tool)


STAGES: dict[str, StageOf] = {
    "environment": environment,
    "compiled": compiled,
    "preflight": preflight,
    "engines": engines,
    "texts": texts,
    "graphs": graphs,
    "kernels": kernels,
    "speed": speed,
    "ranks": ranks,
    "layers": layers,
    "sanitizer": sanitizer,
}

if __name__ == "__main__":
    main({**STAGES, SANITIZED: small_kernels})
