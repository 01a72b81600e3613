"""The stages of `gpu_first`. On a CPU the same functions run with toy shapes, in torch's forms, and measure nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_facts import Fact, StageOf, main
from benchmarks.first_graphs import graphs
from benchmarks.first_kernels import kernels, preflight
from benchmarks.first_model import layers
from benchmarks.first_ranks import DECODING, GRAPHS, LOOKAHEAD, agreement, count_on, ranks, tokens_of
from benchmarks.first_speed import speed
from benchmarks.gpu_shapes import CPU, has_fp8
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED

EQUAL = {"fp32": 0.97, "fp32 eager": 0.97, "fp32 torch": 0.97, "bf16": 0.85, "int8": 0.6, "fp8": 0.6}  # of tokens
SANITIZER = "compute-sanitizer"
SANITIZER_FOLDERS = "/usr/local/cuda/bin", "/opt/cuda/bin"  # where it is, beside the search path
SANITIZED = "small kernels"  # the stage that runs under it


def environment(device: torch.device) -> Iterator[Fact]:
    """What the machine is."""

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
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=10)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {"gpu": str(properties), "free": free, "total": total, "NCCL": nccl, "nvidia-smi": said.stdout}

    yield "software", software
    yield "compiler", compiler
    yield "disk", lambda: {"free": shutil.disk_usage(".").free}
    if device.type == "cuda":
        yield from (("Triton", triton), ("GPU", gpu))


def texts(device: torch.device) -> Iterator[Fact]:
    """Token ids of the embedded model, those of this machine's CPU in fp32 against the device's."""
    gpu = device.type == "cuda"
    count = 2 * count_on(device) if gpu else count_on(device)
    eager, torch_only = EngineConfig(attention="meta", graphs="never"), EngineConfig(kernels="torch")
    ways: dict[str, tuple[torch.dtype, EngineConfig, str]] = {
        "fp32": (torch.float32, GRAPHS, "none"), "fp32 eager": (torch.float32, eager, "none"),
        "fp32 torch": (torch.float32, torch_only, "none"), "bf16": (torch.bfloat16, GRAPHS, "none"),
        "int8": (torch.float32, GRAPHS, "int8"),
    }  # fmt: skip
    if gpu and has_fp8(device):
        ways["fp8"] = torch.bfloat16, GRAPHS, "fp8"
    verified = DecodeConfig(**DECODING)
    decodings = {
        "verified": verified,
        "LoPA k=7": LOOKAHEAD,
        "temperature 0.8": DecodeConfig(temperature=0.8, **DECODING),
    }

    def check(decode: DecodeConfig, way: str) -> dict[str, Any]:
        dtype, options, quantization = ways[way]
        wanted = tokens_of(load_model(EMBEDDED, torch.float32, CPU), EngineConfig(), decode, count)
        found = tokens_of(load_model(EMBEDDED, dtype, device, quantization=quantization), options, decode, count)
        equal = agreement(wanted, found)
        return {"ok": equal >= EQUAL[way], "equal": equal, "bound": EQUAL[way], "tokens": sum(map(len, wanted))}

    def reproducible() -> dict[str, Any]:
        model = load_model(EMBEDDED, torch.bfloat16 if gpu else torch.float32, device)
        by_size = {
            sequences: tokens_of(model, EngineConfig(sequences, reproducible=True), LOOKAHEAD, count)
            for sequences in ((1, 5, count) if gpu else (1, count))
        }
        equal = [made == by_size[count] for made in by_size.values()]
        return {"ok": all(equal), "sequences": list(by_size), "equal": equal}

    for of_decoding, decode in decodings.items():
        for way in ways:
            if gpu or way == "fp32":  # the bits of others differ between CPUs
                yield f"{of_decoding}, {way}", partial(check, decode, way)
    yield "reproducible, by sequences at a time", reproducible


def small_kernels(device: torch.device) -> Iterator[Fact]:
    """Every kernel at small shapes, which a tool that watches each access is done with in time."""
    return kernels(device, small=True)


def sanitizer(device: torch.device) -> Iterator[Fact]:
    """Accesses out of bounds, then races, by the CUDA toolkit's own tool where it is there."""
    found = shutil.which(SANITIZER) or shutil.which(SANITIZER, path=os.pathsep.join(SANITIZER_FOLDERS))

    def watched(tool: str) -> dict[str, Any]:
        if found is None:
            return {"tool": None}
        command = [found, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", "--target-processes", "all"]
        toy = ["--toy"] * (device.type == "cpu")
        # each tensor is an allocation of its own: in a cached block, what is out of bounds is somebody else's
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
    "preflight": preflight,
    "kernels": kernels,
    "graphs": graphs,
    "texts": texts,
    "layers": layers,
    "speed": speed,
    "ranks": ranks,
    "sanitizer": sanitizer,
}

if __name__ == "__main__":
    main({**STAGES, SANITIZED: small_kernels})
