"""What each family is: checkpoints, presets, its authors' way of decoding, and what its numbers were compared with.

`lopa-dist models` prints this table, and docs/models.md has it (`scripts/models.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

QWEN2, QWEN3, QWEN3_MOE = "transformers' Qwen2", "transformers' Qwen3", "transformers' Qwen3-MoE"
LLAMA = "transformers' Llama"
GREEDY = "transformers' greedy text"
DRAFTED = f"{GREEDY}, with drafts and without"
LLADA2 = "the authors' own file (`scripts/llada2_logits.py`)"


@dataclass(frozen=True)
class Compared:
    """One family."""

    checkpoints: str
    presets: tuple[str, ...]  # names, or patterns of names, of `conf/model`
    rule: str  # the authors' way of decoding, in our settings
    logits: str  # what they were compared with, in fp32, on small random checkpoints with published files and names
    difference: float | None  # the largest; null: another family's comparison holds for this one
    texts: str = ""  # whose were compared, too, token for token
    run: str = ""  # which checkpoints have run here: of the published ones, none


BLOCKWISE = "decode=threshold"
COMPARED = {
    "Dream": Compared(
        "Dream 7B, Dream-Coder 7B, DiffuCoder 7B, D2F-Dream, D2F-DiffuCoder, d3LLM-Dream, dParallel-Dream, the models "
        "in the package",
        ("dream_*", "diffucoder_*", "d2f_*", "d3llm_dream", "d3llm_coder", "dparallel_dream", "embedded", "lists"),
        "decode=vanilla_entropy; D2F's: decode=d2f",
        QWEN2,
        6e-6,
        run="the embedded model, the list model",
    ),
    "llada": Compared(
        "LLaDA 8B, LLaDA 1.5, d3LLM-LLaDA, dParallel-LLaDA",
        ("llada_*", "d3llm_llada", "dparallel_llada"),
        "decode=vanilla",
        LLAMA,
        6e-6,
    ),
    "illada": Compared("iLLaDA 8B", ("illada_*",), "decode=vanilla", LLAMA, 2e-5),
    "sdar": Compared(
        "SDAR 1.7B, 4B, 8B (b4 to b64), TraDo 4B, 8B",
        ("sdar_1_7b", "sdar_4b", "sdar_8b", "trado_*"),
        BLOCKWISE,
        QWEN3,
        4e-6,
    ),
    "sdar_moe": Compared("SDAR-30B-A3B", ("sdar_30b_a3b",), BLOCKWISE, QWEN3_MOE, 5e-6),
    "rnd1": Compared("RND1-Base 30B-A3B", ("rnd1_base",), "decode=vanilla_entropy", QWEN3_MOE, 4e-6),
    "llada2_moe": Compared(
        "LLaDA2.0-mini, -flash, and their CAP forms",
        ("llada2_0_*",),
        "decode=threshold decode.tau_conf=0.95",
        LLADA2,
        6e-6,
        "the authors' `generate`: 100 of 100",
    ),
    "LLaDA2.1": Compared(
        "LLaDA2.1-mini, -flash",
        ("llada2_1_*",),
        "decode=threshold decode.tau_conf=0.7 decode.tau_edit=0.5",
        "as `llada2_moe`, whose layout it has",
        None,
        "the authors' `generate`: 160 of 160",
    ),
    "Fast_dLLM_Qwen": Compared("Fast-dLLM v2 1.5B, 7B", ("fast_dllm_v2_*",), BLOCKWISE, QWEN2, 3e-5),
    "Stable-DiffCoder": Compared("Stable-DiffCoder 8B", ("stable_diffcoder_instruct",), BLOCKWISE, LLAMA, 4e-6),
    "a2d-qwen2": Compared("A2D (mdlm) of Qwen2.5-Coder 0.5B", (), "decode=vanilla", QWEN2, 2e-5),
    "a2d-qwen2-bd3lm": Compared("A2D (bd3lm) of the same", (), BLOCKWISE, QWEN2, 6e-6),
    "a2d-qwen3": Compared("A2D (mdlm) of Qwen3 0.6B", ("a2d_qwen3_0_6b",), "decode=vanilla", QWEN3, 2e-5),
    "a2d-qwen3-bd3lm": Compared("A2D (bd3lm) of the same", ("a2d_qwen3_0_6b_blocks",), BLOCKWISE, QWEN3, 6e-6),
    "I-DLM": Compared(
        "I-DLM 8B, 32B", ("i_dlm_8b", "i_dlm_32b"), "decode=causal", f"{QWEN3}, causal", 4e-6, DRAFTED
    ),
    "nemotron_labs_diffusion": Compared(
        "Nemotron-Labs-Diffusion 3B, 8B, 14B, also Base",
        ("nemotron_diffusion_*",),
        "decode=causal",
        "transformers' Ministral 3, causal",
        4e-6,
        DRAFTED,
    ),
    "lopa_causal": Compared(
        "the causal model in the package",
        ("causal",),
        "decode=causal",
        "as `Dream`, whose layout it has",
        None,
        run="the causal model",
    ),
    "qwen2": Compared("Qwen2.5", ("qwen2_5_7b",), "decode=causal", f"{QWEN2}, causal", 3e-5, GREEDY),
    "qwen3": Compared(
        "Qwen3, also with I-DLM's adapter", ("qwen3_8b", "i_dlm_8b_lora"), "decode=causal", f"{QWEN3}, causal", 3e-5,
        GREEDY,
    ),
    "llama": Compared("Llama 2 to 3.2", ("llama_3_1_8b",), "decode=causal", f"{LLAMA}, causal", 4e-6, GREEDY),
}  # fmt: skip
"""By the keys of `families.FAMILIES`."""


def presets(family: str, names: list[str]) -> list[str]:
    """Return which of the presets `names` are of a family."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in COMPARED[family].presets)]
