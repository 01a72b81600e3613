"""Small random checkpoints, and what the authors' own programs wrote with them (`scripts/authors_texts.py`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.models.small_checkpoints import KINDS, MOE_KINDS, SAME_KINDS, Kind, reference, weights_of

FOLDER = Path(__file__).parent / "authors_texts"
EOS, MASK, PAD = 78, 79, 77
TOKENS = 77
"""Prompts are of the ids below this."""


class Setting(NamedTuple):
    """One way in which the authors decode."""

    decode: tuple[str, ...]  # as overrides of ours
    authors: dict[str, Any]  # as arguments of their program
    prompts: int
    block: int = 1  # answers end where a block ends: there, both programs have the same number of masks
    from_prompt: bool = False  # blocks are counted from the prompt's first token
    whole: bool = False  # prompts are whole blocks
    one: bool = False  # answers are one block


@dataclass(frozen=True)
class Comparison:
    """One program of the authors."""

    program: str  # its repository and commit
    family: str  # key of `families.FAMILIES`
    kind: Kind
    settings: tuple[Setting, ...]
    sharpness: float = 3.0  # of the head's weights, so that probabilities lie on both sides of the thresholds
    suffix: tuple[int, ...] = ()  # what their program has after the answer

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors; numbers of numpy's frozen generator, so that they are the same everywhere."""
        draw, found = np.random.RandomState(0), {}
        for name, one in sorted(weights_of(self.kind, reference(self.kind)).items()):
            noise = torch.from_numpy(draw.standard_normal(tuple(one.shape)).astype(np.float32))
            if "norm" in name or "ln_f" in name:
                found[name] = 1 + 0.3 * noise
            elif one.ndim == 1:
                found[name] = 0.5 * noise
            elif "embed" in name or "wte" in name:
                found[name] = noise
            else:
                head = name in ("lm_head.weight", "model.transformer.ff_out.weight")
                found[name] = noise * ((self.sharpness if head else 1.0) * 1.5 * one.shape[-1] ** -0.5)
        return found

    def requests(self, setting: Setting) -> Any:
        """Yield prompts and the lengths of their answers, without end."""
        draw = np.random.RandomState(5)
        while True:
            length = draw.randint(1, 70)
            prompt = draw.randint(0, TOKENS, setting.block if setting.whole else length).tolist()
            most = int(draw.randint(20, 90))
            most = setting.block if setting.one else most
            known = len(prompt) if setting.from_prompt else 0
            yield prompt, -(-(known + most) // setting.block) * setting.block - known


def texts(name: str) -> list[list[dict[str, Any]]]:
    """Return what the authors' program wrote, by setting."""
    return json.loads((FOLDER / f"{name}.json").read_text())  # type: ignore[no-any-return]


def one_of(kind: Kind, **config: Any) -> Kind:
    """Return the kind with other entries in its `config.json`."""
    return replace(kind, config=kind.config | config)


def blocks(sizes: tuple[int, ...], thresholds: tuple[float, ...], prompts: int) -> tuple[Setting, ...]:
    """Return SDAR's settings."""
    return tuple(
        Setting(
            ("decode=threshold", f"decode.block_size={size}", f"decode.tau_conf={tau}"),
            {"block": size, "threshold": tau}, prompts, size, from_prompt=True,
        )
        for size in sizes for tau in thresholds
    )  # fmt: skip


def by_entropy(levels: tuple[float, ...]) -> tuple[Setting, ...]:
    """Return dParallel's settings."""
    return tuple(
        Setting(
            ("decode=low_entropy", f"decode.tau_entropy={level}"), {"block": 32, "threshold": level}, 20, 32
        )
        for level in levels
    )  # fmt: skip


def released(branches: int, block: int, add: float, threshold: float, prompts: int, one: bool = False) -> Setting:
    """Return a setting of LoPA's program, which gives every branch a block of its own as soon as it may have one."""
    decode = "decode=lopa_released", f"decode.branches={branches}", f"decode.block_size={block}"
    theirs = {"branches": branches, "block": block, "add": add, "threshold": threshold}
    thresholds = f"decode.tau_add={add}", f"decode.tau_conf={threshold}"
    return Setting((*decode, *thresholds), theirs, prompts, block, one=one)


ONE_BLOCK = Setting(("decode=vanilla",), {}, 30)
IN_BLOCKS = Setting(("decode=vanilla", "decode.block_size=32"), {"block": 32}, 30, 32)
A2D_BLOCK = ONE_BLOCK._replace(authors={"block": 512})

COMPARISONS = {
    "rnd1": Comparison(
        "RadicalNumerics/RND1 87d5f46", "rnd1", MOE_KINDS["rnd1"],
        # other lengths make their number of tokens per step come out wrong by one, in rounding
        (Setting(("decode=vanilla_entropy",), {}, 50, block=16),), suffix=(PAD,),
    ),
    "sdar": Comparison(
        "JetAstra/SDAR c2041a8", "sdar", KINDS["sdar"],
        blocks((4, 8, 16, 32), (0.3, 0.5, 0.9, 0.95, 1.0), 10),
    ),
    "sdar_moe": Comparison(
        "JetAstra/SDAR c2041a8 with the model of PKU-SEC-Lab/TEAM-MoE-dLLM e9c502e", "sdar_moe", MOE_KINDS["sdar_moe"],
        blocks((4, 16), (0.3, 0.6, 0.9, 1.0), 10),
    ),
    "trado": Comparison(
        "Gen-Verse/dLLM-RL 10b4fd1", "sdar", KINDS["sdar"], blocks((4,), (0.3, 0.6, 0.9), 20),
    ),
    "fast_dllm_v2": Comparison(
        "Satgoy152/DualDiffusion 9587d1e", "Fast_dLLM_Qwen",
        one_of(KINDS["fast_dllm_v2"], tie_word_embeddings=False, bd_size=32),
        tuple(
            Setting(
                ("decode=threshold", f"decode.tau_conf={tau}", f"decode.sub_block_size={small}"),
                {"threshold": tau, "small": small}, 10, 32, from_prompt=True,
            )
            for tau in (0.3, 0.5, 0.9, 1.0) for small in (4, 8, 32)
        ),
    ),
    "a2d_qwen3": Comparison(
        "ZHZisZZ/dllm ca17675", "a2d-qwen3", one_of(SAME_KINDS["a2d_qwen3"], tie_word_embeddings=False),
        (A2D_BLOCK, IN_BLOCKS),
    ),
    "a2d_qwen2": Comparison(
        "ZHZisZZ/dllm ca17675", "a2d-qwen2", one_of(SAME_KINDS["a2d_qwen2_bd3lm"], block_size=0),
        (A2D_BLOCK, IN_BLOCKS),
    ),
    "a2d_qwen2_bd3lm": Comparison(
        "ZHZisZZ/dllm ca17675", "a2d-qwen2-bd3lm", SAME_KINDS["a2d_qwen2_bd3lm"],
        (Setting(("decode=threshold", "decode.tau_conf=1.0"), {"block": 8}, 20, 8, from_prompt=True, whole=True),),
    ),
    "lopa": Comparison(
        "zhijie-group/LoPA 433177a", "Dream", KINDS["dream"],
        (
            released(0, 8, 0.1, 0.9, 20), released(0, 32, 0.1, 0.5, 20), released(0, 8, 0.5, 0.3, 20),
            released(2, 32, 0.1, 0.9, 20, one=True), released(4, 32, 0.1, 0.5, 20, one=True),
            released(2, 8, 0.0, 0.9, 20), released(4, 8, 0.0, 0.5, 20),
        ),
    ),
    "dream": Comparison(
        "Dream's own sampler, in NVlabs/Fast-dLLM 24cc59e", "Dream", KINDS["dream"],
        (
            Setting(("decode=vanilla_entropy",), {"order": "entropy"}, 20),
            Setting(("decode=vanilla",), {"order": "maskgit_plus"}, 20),
            Setting(("decode=vanilla", "decode.confidence=margin"), {"order": "topk_margin"}, 20),
        ),
    ),
    "dparallel_dream": Comparison("czg1225/dParallel 2ca4d14", "Dream", KINDS["dream"], by_entropy((0.3, 0.5, 1.0))),
    "dparallel": Comparison("czg1225/dParallel 2ca4d14", "llada", KINDS["llada"], by_entropy((0.3, 0.5, 1.0))),
    "d3llm": Comparison("hao-ai-lab/d3LLM e5bfcac", "llada", KINDS["llada"], by_entropy((0.5, 1.0))),
    "llada": Comparison("ML-GSAI/LLaDA b7e6c35", "llada", KINDS["llada"], (ONE_BLOCK, IN_BLOCKS)),
    "illada": Comparison(
        "ML-GSAI/LLaDA b7e6c35", "illada", one_of(KINDS["illada"], tie_word_embeddings=False), (ONE_BLOCK, IN_BLOCKS)
    ),
}  # fmt: skip
"""By the names of their files in `FOLDER`."""
