"""Launch the kernels as a GPU's process does, up to the launch itself: Triton's own dispatch, without a GPU.

Cross-compiling names a variant's types and alignments; here Triton finds them out from the arguments, as in a run. A
process of its own, in which nothing is interpreted: it prints the kernels that were compiled, by step.
"""

from __future__ import annotations

import json
from typing import Any

import torch


class Driver:
    """Says that there is an H100."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def step(rows: int, scratch: int, slots: int) -> None:
    """The kernels of a forward, with the widths of small models; all that differs between steps is an argument."""
    from lopa_dist.kernels import (
        experts_triton,
        filters_triton,
        meta_attention,
        record_head_triton,
        rope_triton,
        routing_triton,
        rows_triton,
        virtual_gemm_triton,
    )  # fmt: skip
    from lopa_dist.kernels.routing import Router
    from lopa_dist.kernels.sampling import Sampling

    real = zeros(1, dtype=torch.int32)
    rows_triton.add_rms_norm(zeros(rows, 256), zeros(rows, 256), zeros(256), 1e-6)
    keys, values = zeros(2, slots, 2, 64)
    for wide in (torch.bfloat16, torch.float32):
        table = zeros(rows, 64, dtype=wide)
        rope_triton.rope_and_store(zeros(rows, 8 * 64), table, table, keys, values, scratch, real, None, 1e-6)
    rows_triton.add_rms_norm_fp8(zeros(rows, 256), zeros(rows, 256), zeros(256), 1e-6)
    rows_triton.embed_rms_norm(zeros(rows, dtype=torch.long), zeros(30, 256), zeros(256), 1e-6)
    rows_triton.swiglu(zeros(rows, 2 * 512))
    rows_triton.swiglu_fp8(zeros(rows, 2 * 512))
    rows_triton.quantize_rows(zeros(rows, 256))
    virtual_gemm_triton.vgemm(zeros(rows, 256), zeros(512, 256), real)
    int8, scale = zeros(512, 256, dtype=torch.int8), zeros(512, dtype=torch.float32)
    virtual_gemm_triton.vgemm(zeros(rows, 256), int8, real, None, scale)
    # a mixture's layer; of more rows than make small blocks
    router = Router(4, True, sigmoid=True, groups=4, chosen_groups=2)
    logits, bias = zeros(4 * rows, 32, dtype=torch.float32), zeros(32, dtype=torch.float32)
    weights, groups = routing_triton.routed(logits, bias, router, 16)
    grouped = zeros(len(groups.choice), 256)
    experts_triton.expert_linear(grouped, zeros(32, 128, 256), None, groups.ends, 16)
    experts_triton.weighted_sum(grouped, groups.place, weights)
    for temperature in (0.0, 0.7):
        random_keys = zeros(rows, dtype=torch.long) if temperature else None
        sampling = Sampling("neg_entropy", temperature)
        record_head_triton.share_sums(zeros(rows, 256), zeros(8 * 200, 256), 0, 8, 5, random_keys, sampling, real)
    record_head_triton.merged_records(zeros(7, rows, 8, dtype=torch.float32), "neg_entropy")
    filtered = Sampling("probability", 0.7, top_p=0.9, top_k=20 + rows % 3)
    logits = zeros(64, 1600, dtype=torch.float32)
    filters_triton.filtered_sums(logits, 5, zeros(rows, dtype=torch.long), filtered, real, second_choices=False)
    room = meta_attention.Capacity(rows // 8, rows // 16, rows // 8)
    plan = meta_attention.MetaPlan(rows, room, 4, 2, 64, 16, scratch, torch.device("cpu"))
    meta_attention.attend_meta(zeros(rows, 4, 64), keys, values, plan)
    causal = meta_attention.MetaPlan(rows, room, 4, 2, 64, 16, scratch, torch.device("cpu"), bounded=True)
    meta_attention.attend_meta(zeros(rows, 4, 64), keys, values, causal)


def main() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from lopa_dist.kernels import meta_attention

    driver.set_active(Driver())  # type: ignore[arg-type]
    meta_attention.require_triton = lambda device: None
    run, compiled = JITFunction.run, []

    def until_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        before = len(self.device_caches[0][0]) if 0 in self.device_caches else 0
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.extend([self.fn.__name__] * (len(self.device_caches[0][0]) - before))
        assert kernel.metadata.global_scratch_size == 0, "a graph cannot be captured with memory that Triton allocates"
        return kernel

    JITFunction.run = until_launch
    found = []
    for sizes in ((128, 1000, 5000), (96, 1600, 5001), (81, 777, 6016)):
        step(*sizes)
        found.append(list(compiled))
        compiled.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
