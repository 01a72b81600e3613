"""What the authors of published checkpoints report on tasks that run here, to stand beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """Scores of a checkpoint in percent, by task."""

    preset: str
    scores: Mapping[str, float]
    settings: str  # as far as the source tells
    source: str
    command: str  # that comes closest, before the task


ONE_AT_A_TIME = "decode=vanilla decode.block_size=1024 decode.max_new_tokens=1024"
PUBLISHED: dict[str, Published] = {
    "GSAI-ML/LLaDA-8B-Base": Published(
        "llada_base",
        {"gsm8k": 70.3, "math": 31.4, "humaneval": 35.4, "mbpp": 40.0, "arc_challenge": 45.9, "hellaswag": 70.5,
         "winogrande": 74.8, "piqa": 73.6, "mmlu": 65.9},
        "one token a step, 1,024 steps for 1,024 tokens in one block; likelihoods without guidance",
        "EVAL.md of the authors' repository", ONE_AT_A_TIME,
    ),
    "GSAI-ML/iLLaDA-8B-Base": Published(
        "illada_base", {"gsm8k": 81.9, "math": 38.4, "humaneval": 50.0, "mbpp": 57.8},
        "answers as long as they get (choices are ranked by confidence, which a job does not do)",
        "model card; arXiv 2606.25331", ONE_AT_A_TIME,
    ),
    "Dream-org/Dream-v0-Base-7B": Published(
        "dream_base", {"gsm8k": 77.2, "math": 39.6, "humaneval": 57.9, "mbpp": 56.2},
        "not told", "quoted in iLLaDA's model card", "decode=vanilla_entropy",
    ),
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B": Published(
        "fast_dllm_v2_1_5b",
        {"gsm8k": 62.0, "math": 38.1, "humaneval": 43.9, "humaneval_plus": 40.2, "mbpp": 50.0, "mbpp_plus": 41.3,
         "mmlu": 55.1},
        "not told beside the table", "v2/README.md of the authors' repository; arXiv 2509.26328", "decode=threshold",
    ),
    "Efficient-Large-Model/Fast_dLLM_v2_7B": Published(
        "fast_dllm_v2_7b",
        {"gsm8k": 83.7, "math": 61.6, "humaneval": 63.4, "humaneval_plus": 58.5, "mbpp": 63.0, "mbpp_plus": 52.3,
         "mmlu": 66.6},
        "not told beside the table", "v2/README.md of the authors' repository; arXiv 2509.26328", "decode=threshold",
    ),
    "yifanyu/I-DLM-8B": Published(
        "i_dlm_8b", {"gsm8k": 95.0, "humaneval": 93.3, "mbpp": 92.2, "mmlu": 82.4, "arc_challenge": 95.8},
        "the authors' own prompts and server, so MMLU and ARC-C are answers, not likelihoods",
        "README.md of the authors' repository; arXiv 2604.11035", "decode.max_new_tokens=4096",
    ),
}  # fmt: skip
"""By the checkpoint's id on the hub."""


def published(report: Mapping[str, Any]) -> tuple[Published, float] | None:
    """Return what the authors report of a run's model and task, and the score; None where that is not known here."""
    name, model = report["task"]["name"], report["model"]
    task = report["task"]["harness"] if name == "harness" else name
    known = PUBLISHED.get(model["path"])
    if known is None or model.get("lora") or task not in known.scores:
        return None
    return known, known.scores[task]
