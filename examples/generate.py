"""Answer prompts from Python: ``python examples/generate.py``, or ``torchrun --nproc-per-node 2 examples/generate.py``.

The example uses the embedded model, which can answer only problems like these. For your own model, give the path of a
checkpoint, ``LLM("/path/to/checkpoint")``, a hub id, or a preset, as in ``LLM("dream_instruct")``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from lopa_dist import LLM, Output, SamplingParams

PROBLEMS = [
    "Olga has 8 books . Olga buys 4 more . Then Olga loses 4 books . What is the final number of books ?",
    "Ben starts with 6 flowers . Ben gives 3 away . Ben buys 8 more . How many flowers does Ben have now ?",
]


def show(title: str, outputs: Sequence[Output]) -> None:
    """Print answers with a title. Every rank has all answers, and rank 0 prints them."""
    if os.environ.get("RANK", "0") == "0":
        print(title)
        for output in outputs:
            share = "" if output.acceptance is None else f", {output.acceptance:.0%} of {output.drafts} drafts accepted"
            print(f"  {output.text.strip()}\n    {output.tokens_per_forward:.1f} tokens per forward{share}")


def main() -> None:
    """Generate answers in three ways with the same model."""
    llm = LLM("embedded")
    show("as the model is set up, by verified lookahead:", llm.generate(PROBLEMS))
    show("LoPA as its paper describes it, with 3 branches:", llm.generate(PROBLEMS, decode="embedded_lopa", branches=3))
    chat = [{"role": "user", "content": PROBLEMS[0]}]
    sampling = SamplingParams(temperature=0.7, n=2)
    show("a chat, answered twice at random:", llm.generate([chat], sampling=sampling))


if __name__ == "__main__":
    main()
