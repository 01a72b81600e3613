"""Steps of other sizes compile nothing new, and Triton's own dispatch takes what the kernels are launched with."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_every_kernel_is_compiled_once() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.launches"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert not done.returncode, done.stderr[-4000:]
    first, *others = json.loads(done.stdout.splitlines()[-1])
    assert sorted(first) == [
        "add_rms_norm_fp8_kernel", "add_rms_norm_kernel", "attend_kernel", "attend_kernel", "choose_kernel",
        "embed_rms_norm_kernel", "expert_kernel", "filter_kernel", "logit_sums_kernel", "merge_kernel", "place_kernel",
        "quantize_rows_kernel", "records_kernel", "rope_and_store_kernel", "rope_and_store_kernel", "share_sums_kernel",
        "share_sums_kernel", "share_sums_kernel", "sum_kernel", "swiglu_fp8_kernel", "swiglu_kernel",
        "tile_sums_kernel", "tile_sums_kernel", "vgemm_kernel", "vgemm_kernel",
    ]  # fmt: skip
    assert others == [[], []]
