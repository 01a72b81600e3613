"""What our decoding is compared with: transformers' own `generate`, with the same weights, prompts and threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_shapes import qwen2
from lopa_dist.engine.request import Request
from lopa_dist.models.transformer import Transformer


def transformers_texts(
    model: Transformer, requests: Sequence[Request], in_flight: int
) -> tuple[list[list[int]], float]:
    """Return the greedy texts of a causal model with Qwen2's layout, and the processor time in seconds.

    Args:
        model: the model, on the CPU.
        requests: the requests, which all have the same `max_new_tokens`.
        in_flight: how many prompts are in a batch, padded on the left to one length.
    """
    theirs, pad = qwen2(model, torch.device("cpu")), model.config.eos_ids[0]
    for layer in theirs.model.layers:
        layer.self_attn.is_causal = True
    texts: list[list[int]] = []
    began = time.process_time()
    for at in range(0, len(requests), in_flight):
        some = requests[at : at + in_flight]
        width = max(len(one.prompt) for one in some)
        ids = torch.tensor([[pad] * (width - len(one.prompt)) + list(one.prompt) for one in some])
        mask = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in some])
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        found = theirs.generate(
            **given, max_new_tokens=some[0].max_new_tokens, do_sample=False, pad_token_id=pad, eos_token_id=pad
        )
        texts += [row[: row.index(pad)] if pad in row else row for row in found[:, width:].tolist()]
    return texts, time.process_time() - began
