"""Write tests/models/llada2_logits.npy with the LLaDA2 authors' own code: ``python scripts/llada2_logits.py DIR``.

DIR has configuration_llada2_moe.py and modeling_llada2_moe.py from inclusionAI/LLaDA2.0-mini. They need an older
version of transformers than this package. Run this from the root, in an environment with transformers 4.57.1.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(sys.argv[1]).resolve().parent)]

from tests.models import llada2  # noqa: E402


def main(folder: Path) -> None:
    """Write the logits of the small checkpoint, computed by the code in `folder`."""
    code = importlib.import_module(f"{folder.resolve().name}.modeling_llada2_moe")
    settings = {key: value for key, value in llada2.CONFIG.items() if key != "model_type"}
    model = code.LLaDA2MoeModelLM(code.LLaDA2MoeConfig(**settings, attn_implementation="eager")).eval()
    missing = model.load_state_dict(llada2.weights(), strict=True)
    assert not missing.missing_keys
    place = torch.arange(llada2.LENGTH)
    seen = place[:, None] // llada2.BLOCK >= place // llada2.BLOCK
    mask = seen.float()[None, None]  # in this eager attention, 1 means that a key is seen
    with torch.no_grad():
        logits = model(input_ids=llada2.tokens()[None], attention_mask=mask, position_ids=place[None]).logits[0]
    np.save(llada2.LOGITS, logits.numpy().astype(np.float32))
    print(f"{llada2.LOGITS}: {list(logits.shape)}, standard deviation {float(logits.std()):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
