"""Write tests/models/llada2_texts.json with the LLaDA2 authors' code: ``python scripts/llada2_texts.py DIR DIR``.

The folders have modeling_llada2_moe.py and its configuration: the first from inclusionAI/LLaDA2.0-mini, the second from
LLaDA2.1-mini. Run this from the root, in the environment of `scripts/llada2_logits.py`. A prompt is left out if two
numbers that decide about its answer differ by less than `NEAR`, so that no text depends on rounding.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(sys.argv[1]).resolve().parent)]

from tests.models import llada2  # noqa: E402

NEAR = 1e-4
BLOCK = 32


def main(folders: list[Path]) -> None:
    """Write the texts of every setting of LLaDA2.0 (the first folder) and LLaDA2.1 (the second one)."""
    texts = []
    for setting in llada2.SETTINGS:
        folder = folders[setting.tau_edit is not None]
        sys.path.insert(0, str(folder.resolve().parent))
        code = importlib.import_module(f"{folder.resolve().name}.modeling_llada2_moe")
        config = {key: value for key, value in llada2.CONFIG.items() if key != "model_type"}
        model = code.LLaDA2MoeModelLM(code.LLaDA2MoeConfig(**config, attn_implementation="sdpa")).eval()
        model.load_state_dict(llada2.weights(setting.sharpness), strict=True)
        texts.append(texts_of(model, setting))
        print(setting, "forwards", sum(one["forwards"] for one in texts[-1]))
    llada2.TEXTS.write_text(json.dumps(texts, separators=(",", ":")).replace("]},", "]},\n") + "\n")


def texts_of(model: Any, setting: llada2.Setting) -> list[dict[str, Any]]:
    """Return the first prompts without near ties, with the answers of `generate` and its numbers of forwards."""
    plain, forwards, near = model.forward, 0, False

    def forward(tokens: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> Any:
        nonlocal forwards, near
        forwards += 1
        found = plain(tokens, attention_mask=attention_mask.float(), **options)
        found.logits[..., llada2.MASK] = -torch.inf  # random weights might predict the mask; trained ones never do
        masked = tokens[0, -BLOCK:] == llada2.MASK
        first, second = found.logits[0, -BLOCK:].softmax(-1).topk(2).values.unbind(1)
        read = torch.ones_like(masked) if setting.tau_edit is not None else masked
        ranked = first[masked].sort(descending=True).values
        gaps = [(first - second)[read], (first - setting.tau_conf)[read].abs(), ranked[:1] - ranked[1:2]]
        if setting.tau_edit is not None:
            gaps.append((first - setting.tau_edit).abs())
        near |= bool(torch.cat(gaps).min() < NEAR)
        return found

    model.forward = forward
    draw, found = np.random.RandomState(5), []
    while len(found) < setting.prompts:
        prompt = draw.randint(0, 77, draw.randint(1, 80)).tolist()
        most = int(draw.randint(BLOCK, 3 * BLOCK))  # for less than a block, the program fills several masks per step
        forwards, near = 0, False
        options = {"gen_length": most, "block_length": BLOCK, "threshold": setting.tau_conf}
        if setting.tau_edit is not None:
            options |= {"editing_threshold": setting.tau_edit, "eos_early_stop": True}
        answer = model.generate(torch.tensor([prompt]), **options, eos_id=llada2.EOS, mask_id=llada2.MASK)[0].tolist()
        if not near:
            found.append({"prompt": prompt, "most": most, "forwards": forwards, "answer": answer})
    return found


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
