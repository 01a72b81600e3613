"""The stages of `gpu_first`. On a CPU the same functions run with toy shapes, in torch's forms, and measure nothing."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.first_facts import Fact, StageOf, compared, main
from benchmarks.gpu_model import random_model
from benchmarks.roofline import DREAM, LLADA
from lopa_dist.decode import DecodeConfig
from lopa_dist.decode.context import CONTEXTS
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.kernels.attention import attend_tiles
from lopa_dist.kernels.dispatch import KERNELS
from lopa_dist.kernels.meta_attention import MetaPlan
from lopa_dist.kernels.preflight import Widths, faults
from lopa_dist.kernels.record_head import record_head
from lopa_dist.kernels.rope import rope_and_store, rope_table
from lopa_dist.kernels.rows import add_rms_norm, swiglu
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import Capacity, Split, tile, tile_rows_for
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.tasks.word_problems import problems

CPU = torch.device("cpu")
BOUND = {torch.bfloat16: 4e-3, torch.float32: 1e-5}  # relative norm of an error
FAR = (1 << 31) + 4096  # numbers of a pool that 32 bits do not count
EQUAL = {"fp32": 0.97, "fp32 eager": 0.97, "fp32 torch": 0.97, "bf16": 0.85, "int8": 0.6, "fp8": 0.6}  # of tokens


def toy(shape: ModelConfig) -> ModelConfig:
    """Return a small model with as many query heads a K/V head."""
    kv_heads = max(1, 7 * shape.kv_heads // shape.heads)
    return replace(
        shape, vocab_size=512, hidden_size=64, layers=2, heads=7, kv_heads=kv_heads, head_dim=16, intermediate_size=96,
        mask_id=511, eos_ids=(510,), pad_id=510,
    )  # fmt: skip


def models(device: torch.device) -> dict[str, ModelConfig]:
    """Return the shapes of the models, by name; toys of them on a CPU."""
    both = {"Dream-7B": DREAM, "LLaDA-8B": LLADA}
    return both if device.type == "cuda" else {name: toy(shape) for name, shape in both.items()}


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the precision that is checked."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


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
        return {"gpu": str(properties), "free": free, "total": total, "nvidia-smi": said.stdout}

    yield "software", software
    yield "compiler", compiler
    yield "disk", lambda: {"free": shutil.disk_usage(".").free}
    if device.type == "cuda":
        yield from (("Triton", triton), ("GPU", gpu))


def preflight(device: torch.device) -> Iterator[Fact]:
    """Each kernel launched once, at the widths of the models and at those of the embedded one."""
    if device.type == "cpu":
        yield "not on a CPU", dict
        return
    widths = {
        f"{name}, tiles of {rows}": Widths(s.hidden_size, s.intermediate_size, s.heads, s.kv_heads, s.head_dim, rows)
        for name, s in models(device).items()
        for rows in sorted({max(1, height // (s.heads // s.kv_heads)) for height in (16, 64, 128)})
    }

    def check(kernel: str, of_model: Widths) -> dict[str, Any]:
        found = faults(of_model, torch.bfloat16, device, (kernel,))
        return {"ok": not found, "fault": str(found.get(kernel, ""))}

    old = torch.cuda.get_device_capability(device) < (8, 9)
    for name, of_model in widths.items():
        for kernel in (one for one in KERNELS if not (old and one == "fp8")):
            yield f"{kernel}, {name}", partial(check, kernel, of_model)


def noise(device: torch.device, *shape: int) -> Tensor:
    """Return normal numbers in the precision that is checked."""
    return torch.randn(shape, device=device, dtype=dtype_of(device))


def attention(
    device: torch.device, shape: ModelConfig, rows: int, prefix: int, branches: int, split: bool
) -> dict[str, Any]:
    """Windows behind one prefix against a dense product in fp64."""
    heads, kv_heads, dim, group = shape.heads, shape.kv_heads, shape.head_dim, shape.heads // shape.kv_heads
    each = rows // branches
    starts, same = np.arange(branches) * each, np.ones(branches, int)
    hi = np.full(each * branches, each)
    segments = Segments(starts, each * same, 0 * same, prefix * same, prefix + starts, hi)
    q, keys, values = (noise(device, n, h, dim) for n, h in ((rows, heads), *2 * [(prefix + rows, kv_heads)]))
    tiles = tile(segments, tile_rows_for(group, rows), Split(8) if split else None)
    room = Capacity(len(tiles.table), len(tiles.merges), tiles.parts)
    plan = MetaPlan(rows, room, heads, kv_heads, dim, tiles.tile_rows, tiles.scratch, device)
    plan.fill(tiles)
    found = attend_tiles(q, keys, values, plan)
    wanted = torch.zeros_like(q, dtype=torch.float64)
    for start in starts:
        seen = torch.cat([torch.arange(prefix), torch.arange(each) + prefix + int(start)]).to(device)
        k, v = (x[seen].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("rhd,chd->hrc", q[start : start + each].double(), k) * dim**-0.5
        wanted[start : start + each] = torch.einsum("hrc,chd->rhd", scores.softmax(-1), v)
    return compared(found[: each * branches], wanted[: each * branches], BOUND[q.dtype])


def head(device: torch.device, shape: ModelConfig, rows: int) -> dict[str, Any]:
    """Probabilities against a softmax in fp64; tokens where they are not tied."""
    hidden, weight = noise(device, rows, shape.hidden_size), noise(device, shape.vocab_size, shape.hidden_size)
    hidden *= 3 * shape.hidden_size**-0.5
    records = record_head(hidden, weight, shape.mask_id, None, Sampling())
    logits = torch.cat([part.double() @ weight.double().T for part in hidden.split(64)])
    logits[:, shape.mask_id] = -torch.inf
    top = logits.topk(2, 1)
    clear = top.values[:, 0] - top.values[:, 1] > 0.05
    tokens = float((records[:, 0] == top.indices[:, 0])[clear].double().mean())
    wanted = logits.softmax(1).amax(1)
    found = records[:, 1].contiguous().view(torch.float32)
    result = compared(found[clear, None], wanted[clear, None], 10 * BOUND[hidden.dtype])
    return result | {"ok": result["ok"] and tokens == 1, "equal tokens": tokens, "not tied": int(clear.sum())}


def norm(device: torch.device, shape: ModelConfig, rows: int) -> dict[str, Any]:
    """A norm behind a residual sum."""
    x, residual, weight = (noise(device, *size, shape.hidden_size) for size in ((rows,), (rows,), ()))
    total = (x + residual).double()
    wanted = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    return compared(add_rms_norm(x, residual, weight, 1e-6)[0], wanted, BOUND[x.dtype])


def gate(device: torch.device, shape: ModelConfig, rows: int) -> dict[str, Any]:
    """SwiGLU."""
    both = noise(device, rows, 2 * shape.intermediate_size)
    left, right = both.double().chunk(2, 1)
    wanted = left * left.sigmoid() * right
    return compared(swiglu(both), wanted, BOUND[both.dtype])


def rotation(device: torch.device, shape: ModelConfig, rows: int) -> dict[str, Any]:
    """Rotated keys in the last slots of a pool whose numbers 32 bits cannot count (on a GPU)."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    slots = FAR // (kv_heads * dim) + rows if device.type == "cuda" else 3 * rows
    keys = torch.zeros(slots, kv_heads, dim, dtype=dtype_of(device), device=device)
    qkv = noise(device, rows, (heads + 2 * kv_heads) * dim)
    cos, sin = rope_table(torch.arange(rows, device=device) * 9, dim, shape.rope_theta, torch.float32)
    count = torch.tensor([rows], dtype=torch.int32, device=device)
    values = torch.zeros_like(keys)
    rope_and_store(qkv, cos, sin, keys, values, slots - rows, count)
    k = qkv.unflatten(1, (-1, dim))[:, heads : heads + kv_heads].double()
    half = torch.cat([-k[..., dim // 2 :], k[..., : dim // 2]], -1)
    wanted = k * cos.double() + half * sin.double()
    return compared(keys[slots - rows :], wanted, BOUND[keys.dtype]) | {"slots": slots}


def kernels(device: torch.device) -> Iterator[Fact]:
    """The operations at the shapes that run, against fp64 on the same device."""
    gpu = device.type == "cuda"
    for name, shape in models(device).items():
        for rows in (64, 94, 520, 2048) if gpu else (24,):
            for kernel in (norm, gate, rotation, head):
                if kernel is not head or rows <= 520:
                    yield f"{kernel.__name__}, {name}, {rows} rows", partial(kernel, device, shape, rows)
        cases = [(24, 0, 1, False), (24, 40, 3, False), (24, 300, 1, True)]
        if gpu:
            prefixes = (0, 1, 1023, 1024, 4096)
            cases = [(rows, p, b, s) for rows in (64, 94, 520) for p in prefixes for b in (1, 8) for s in (False, True)]
        for rows, prefix, branches, split in cases:
            case = f"{rows} rows, prefix {prefix}, {branches} branches{', split' if split else ''}"
            yield f"attention, {name}, {case}", partial(attention, device, shape, rows, prefix, branches, split)


def tokens_of(model: Transformer, options: EngineConfig, decode: DecodeConfig, count: int) -> list[list[int]]:
    """Return the answers to a few word problems, which the embedded model was trained for."""
    words = load_tokenizer(EMBEDDED)
    requests = []
    for i, problem in enumerate(islice(problems("held_out", 1), count)):
        ask = [{"role": "user", "content": problem.question}]
        text = str(words.apply_chat_template(ask, tokenize=False, add_generation_prompt=True))
        ids = words(text, add_special_tokens=False).input_ids
        requests.append(Request(i, ids, decode.max_new_tokens, 77 + i))
    made = sorted(Engine(model, decode, Solo(), options).generate(requests), key=lambda one: one.request.index)
    return [one.tokens for one in made]


def agreement(wanted: list[list[int]], found: list[list[int]]) -> float:
    """Return the share of positions that have the same token; where one answer has ended, they differ."""
    pairs = list(zip(wanted, found, strict=True))
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
    return same / max(1, sum(max(len(one), len(other)) for one, other in pairs))


def texts(device: torch.device) -> Iterator[Fact]:
    """Token ids of the embedded model, those of this machine's CPU in fp32 against the device's."""
    gpu = device.type == "cuda"
    count = 16 if gpu else 2
    always = EngineConfig(attention="meta", graphs="always")
    eager, torch_only = EngineConfig(attention="meta", graphs="never"), EngineConfig(kernels="torch")
    ways: dict[str, tuple[torch.dtype, EngineConfig, str]] = {
        "fp32": (torch.float32, always, "none"), "fp32 eager": (torch.float32, eager, "none"),
        "fp32 torch": (torch.float32, torch_only, "none"), "bf16": (torch.bfloat16, always, "none"),
        "int8": (torch.float32, always, "int8"),
    }  # fmt: skip
    if gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        ways["fp8"] = torch.bfloat16, always, "fp8"
    context: dict[str, Any] = {"context": "d2f", "block_size": 16, "max_new_tokens": 64}
    decodings = {
        "verified": DecodeConfig(**context),
        "LoPA k=7": DecodeConfig(branches=7, verify="confidence", drafts=0, **context),
        "temperature 0.8": DecodeConfig(temperature=0.8, **context),
    }

    def check(decode: DecodeConfig, way: str) -> dict[str, Any]:
        dtype, options, quantization = ways[way]
        wanted = tokens_of(load_model(EMBEDDED, torch.float32, CPU), EngineConfig(), decode, count)
        found = tokens_of(load_model(EMBEDDED, dtype, device, quantization=quantization), options, decode, count)
        equal = agreement(wanted, found)
        return {"ok": equal >= EQUAL[way], "equal": equal, "bound": EQUAL[way], "tokens": sum(map(len, wanted))}

    for of_decoding, decode in decodings.items():
        for way in ways:
            if gpu or way == "fp32":  # the bits of others differ between CPUs
                yield f"{of_decoding}, {way}", partial(check, decode, way)


def speed(device: torch.device) -> Iterator[Fact]:
    """Steps of the default decoding with random weights, whose texts are noise, and where their time goes."""
    gpu = device.type == "cuda"
    made: list[Transformer] = []
    prompt, length = (1024, 64) if gpu else (12, 32)
    dual: dict[str, Any] = {"context": "dual", "max_active_blocks": CONTEXTS["dual"].max_active_blocks}
    default = DecodeConfig(max_new_tokens=length, stop_at_eos=False, **dual)
    lookahead = replace(default, branches=7, verify="confidence", drafts=0)

    def build() -> dict[str, Any]:
        made.append(random_model(models(device)["Dream-7B"], device))
        return {}

    def run(decode: DecodeConfig, sequences: int, on_step: Callable[[Engine], None] | None = None) -> dict[str, Any]:
        options = EngineConfig(sequences) if gpu else EngineConfig(sequences, attention="meta", graphs="always")
        engine = Engine(made[0], decode, Solo(), options)
        requests = [Request(i, [7] * prompt, length, i) for i in range(sequences)]
        began = time.perf_counter()
        engine.prepare(requests)
        prepared, marks = time.perf_counter() - began, [time.perf_counter()]
        engine.on_step = [lambda engine: marks.append(time.perf_counter())] + ([on_step] if on_step else [])
        list(engine.generate(requests))
        times = [1e3 * (after - before) for before, after in pairwise(marks)]
        found: dict[str, Any] = {"steps": len(times), "ms a step": None, "prepare s": None, "host s": None}
        if gpu:
            host = {name: round(seconds, 4) for name, seconds in engine.statistics.seconds.items()}
            found |= {"ms a step": statistics.median(times[len(times) // 4 :]), "prepare s": prepared, "host s": host}
            found |= {"reserved": torch.cuda.max_memory_reserved(device)}
        return found

    def profiled() -> dict[str, Any]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if gpu else []
        with torch.profiler.profile(activities=activities) as profile:
            run(default, 1)
        order = "self_device_time_total" if gpu else "self_cpu_time_total"
        return {"table": profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)}

    yield "model", build
    for sequences in (1, 8, 16, 64) if gpu else (1, 2):
        yield f"default decoding, {sequences} sequences", partial(run, default, sequences)
    yield "LoPA k=7, 1 sequence", partial(run, lookahead, 1)
    yield "profile", profiled


STAGES: dict[str, StageOf] = {
    "environment": environment,
    "preflight": preflight,
    "kernels": kernels,
    "texts": texts,
    "speed": speed,
}

if __name__ == "__main__":
    main(STAGES)
