"""Checks of what computes: torch, the GPU or the CPU's cores, and Triton's kernels."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import torch
import transformers

from lopa_dist.engine.kernel_choice import widths_of
from lopa_dist.jobs.commands.doctor.checkpoint import parameters
from lopa_dist.jobs.commands.doctor.finding import GIB, Finding, Machine, broken, fine, slow
from lopa_dist.jobs.setup.device import cores
from lopa_dist.jobs.setup.resolve import choose_dtype
from lopa_dist.kernels import native, preflight
from lopa_dist.kernels.dispatch import KERNELS, TRITON
from lopa_dist.kernels.experts import by_library
from lopa_dist.kernels.preflight import Widths, faults
from lopa_dist.kernels.row_bits import fault
from lopa_dist.models.checkpoint import DTYPES
from lopa_dist.models.families import FAMILIES
from lopa_dist.models.quantize import STORED
from lopa_dist.parallel.launcher import detect


def library(machine: Machine) -> Finding:
    """Return the versions of torch and transformers, and whether torch can use a GPU that is there."""
    version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return fine(version)
    if torch.version.cuda is None:
        return slow(f"{version} is built for CPUs, but this machine has a GPU: install torch's CUDA build")
    return slow(
        f"{version} finds no GPU, although nvidia-smi is there: the driver may be older than {torch.version.cuda}"
    )


def device(machine: Machine) -> Finding:
    """Return which GPU, or how many cores, a job would compute on, and whether that is what it needs."""
    asked = machine.config.model.device
    if asked.startswith("cuda") and machine.device.type == "cpu":
        return broken(f"model.device={asked}, but torch sees no GPU", "model.device=auto, or ask for a node with one")
    if machine.device.type == "cuda":
        if (machine.device.index or 0) >= torch.cuda.device_count():
            return broken(f"there is no {asked}", f"there are {torch.cuda.device_count()} GPUs, counted from 0")
        properties = torch.cuda.get_device_properties(machine.device)
        text = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / GIB:.0f} GiB"
        if (properties.major, properties.minor) < (8, 0):
            return slow(f"{text}: older than the GPUs that the kernels are made for (A100, H100)")
        return fine(text)
    number, why, _ = cores(detect())
    text = f"CPU, {number} {'core' if number == 1 else 'cores'} ({why})"
    small = machine.shape is not None and parameters(machine.shape) < 5e8
    return fine(text) if small else slow(f"there is no GPU, and models of billions of weights need one: {text}")


def compiler(machine: Machine) -> Finding:
    """Return whether Triton is here with what it needs: a C compiler and Python's headers."""
    if machine.device.type == "cpu":
        return fine("Triton is not used on a CPU")
    if machine.config.engine.kernels == "torch":
        return slow("engine.kernels=torch: no kernel of Triton's runs, and no CUDA graph")
    if not TRITON:
        return slow("Triton is not installed, so operations run one by one: pip install triton")
    found = preflight.compiler()
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [name for name, there in (("C compiler", found), (str(headers), headers.exists())) if not there]
    if missing:
        return slow(f"Triton cannot run without {' and '.join(missing)}: apt install gcc python3-dev, or alike")
    import triton

    return fine(f"Triton {triton.__version__}, {found}")


def on_cpu(dtype: str, kernels: str) -> Finding:
    """Return what computes on a CPU in the precision `dtype`, with `kernels` as `engine.kernels`."""
    if native.form(torch.device("cpu"), dtype, kernels) == "C":
        faster = "; with model.dtype=bf16, which it multiplies, it is 1.4 times as fast" if native.has_bf16() else ""
        return fine("operations run in C, compiled for this CPU" + faster * (dtype == "fp32"))
    if dtype in native.NAMES and kernels != "torch" and (why := native.fault(native.NAMES[dtype])):
        return slow(why)
    found = fault(DTYPES[dtype])
    return slow(found) if found else fine("torch's operations compute everything here")


def kernels(machine: Machine) -> Finding:
    """Return what computes; on a GPU, launch each of Triton's kernels and compare its results with torch's."""
    if machine.device.type == "cpu":
        return on_cpu(choose_dtype(machine.config.model, machine.device), machine.config.engine.kernels)
    if machine.config.engine.kernels == "torch":
        return fine("torch's operations compute everything here")
    shape = machine.shape
    widths = Widths(1024, 2048, 16, 4, 64, 16)
    dtype = DTYPES[choose_dtype(machine.config.model, machine.device)]
    if shape is not None:
        stored = weight_of_experts(machine, dtype)
        ours = () if stored is None or by_library(machine.device, dtype, stored) else (stored,)
        causal = FAMILIES[shape.family].causal
        whole = not machine.config.engine.reproducible
        widths = widths_of(shape, 64 // (shape.heads // shape.kv_heads) or 1, 1, causal, whole, ours)
    fp8 = torch.cuda.get_device_capability(machine.device) >= (8, 9)
    wanted = tuple(name for name in KERNELS if name != "fp8" or fp8)
    tall = widths._replace(tile_rows=2 * widths.tile_rows)  # windows of masked models usually have these tiles
    failing = faults(tall, dtype, machine.device, ("attention",)) | faults(widths, dtype, machine.device, wanted)
    if not failing:
        return fine(f"{len(wanted)} compile here and agree with torch{experts_by(machine, dtype)}")
    said = "; ".join(f"{name}: {fault}" for name, fault in failing.items())
    if machine.config.engine.kernels == "triton":
        return broken(said, "engine.kernels=auto does without them")
    return slow(f"these run in torch's form: {said}")


def weight_of_experts(machine: Machine, dtype: torch.dtype) -> torch.dtype | None:
    """Return the type in which the weights of the model's experts are stored; None if it has none, or is unknown."""
    if machine.shape is None or machine.shape.experts is None:
        return None
    return STORED.get(machine.config.model.quantization, dtype)


def experts_by(machine: Machine, dtype: torch.dtype) -> str:
    """Return in words what multiplies with the model's experts; empty if it has none, or is unknown."""
    stored = weight_of_experts(machine, dtype)
    if stored is None:
        return ""
    if by_library(machine.device, dtype, stored):
        return "; experts: by torch's grouped product"
    return "; experts: by Triton's kernel, since torch's product would ask the GPU for every group's size here"
