"""Compile Triton kernels for GPUs that are not there, and read what they use.

Triton decides at import whether kernels are interpreted, and the other kernel tests interpret them, so compiling runs
in a process of its own, which starts when it is first needed and ends with this one: `compile_all` sends it many
variants at once, `compiled` one. Kernels are named, not passed:
``"lopa_dist.kernels.meta_attention:attend_kernel"``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from lopa_dist.kernels.dispatch import OPTIONS

# bytes that one block may have, by capability
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@dataclass
class Variant:
    """One way to compile a kernel.

    Attributes:
        kernel: ``module:name``.
        signature: types of the arguments that are not constexpr, by name: ``*bf16``, ``i32``, ``fp32``.
        constexprs: values of the constexpr arguments, by name.
        aligned: arguments that are multiples of 16, pointers included. At run time Triton finds them out by value;
            loads are only pipelined where addresses and strides are.
        arch: compute capability: 80, 90.
        options: of the launch, beside those of every launch (`dispatch.OPTIONS`): num_warps, num_stages, maxnreg.
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: Sequence[str] = ()
    arch: int = 90
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Compiled:
    """What a compiled kernel uses, per thread (registers, stack) and per block (shared); spills lie in the stack."""

    registers: int
    stack: int  # bytes
    shared: int  # bytes
    ptx: str
    ttgir: str


def compiled(
    kernel: str,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    arch: int = 90,
    aligned: Iterable[str] = (),
    **options: Any,
) -> Compiled:
    """Compile one variant; see `Variant`."""
    return compile_all([Variant(kernel, signature, constexprs, tuple(aligned), arch, options)])[0]


def compile_all(variants: list[Variant]) -> list[Compiled]:
    """Compile variants without the interpreter.

    Raises:
        RuntimeError: with the compiler's message.
    """
    compiler = started()
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    compiler.stdin.write(json.dumps([asdict(variant) for variant in variants]) + "\n")
    compiler.stdin.flush()
    answer = compiler.stdout.readline()
    if not answer:
        started.cache_clear()
        raise RuntimeError("cross-compiling failed: the process that compiles has ended; its last words are above")
    found = json.loads(answer)
    if isinstance(found, str):
        raise RuntimeError(f"cross-compiling failed:\n{found[-4000:]}")
    return [Compiled(**one) for one in found]


@cache
def started() -> subprocess.Popen[str]:
    """Start the process that compiles; at the end of its input, as when this process ends, it ends."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.cross_compile"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def serve() -> None:
    """Answer each line of variants with a line of what they use, or of what went wrong."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        try:
            answer: Any = [asdict(compile_here(Variant(**variant))) for variant in json.loads(line)]
        except Exception:
            answer = traceback.format_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # without the compiler's words on what it leaked


def compile_here(variant: Variant) -> Compiled:
    """Compile in this process, which must not interpret."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = variant.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    unknown = {*variant.signature, *variant.constexprs} ^ set(kernel.arg_names)
    if unknown:
        raise ValueError(f"{variant.kernel}: arguments that only the kernel or only the variant has: {sorted(unknown)}")
    signature = {argument: variant.signature.get(argument, "constexpr") for argument in kernel.arg_names}
    attributes = {(kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in variant.aligned}
    constexprs = {(kernel.arg_names.index(argument),): value for argument, value in variant.constexprs.items()}
    source = ASTSource(kernel, signature, constexprs, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", variant.arch, 32), options=OPTIONS | variant.options)
    usage = resource_usage(binary.asm["cubin"])
    return Compiled(usage["REG"], usage["STACK"], binary.metadata.shared, binary.asm["ptx"], str(binary.asm["ttgir"]))


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers (REG) and bytes of stack (STACK) of a compiled kernel, by Triton's own cuobjdump."""
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", printed)}


if __name__ == "__main__":
    serve()
