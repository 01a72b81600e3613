"""The text of a finished request, cut at its stop strings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from lopa_dist.engine.request import Generation
from lopa_dist.tasks.stop import cut


def finished_text(
    tokenizer: PreTrainedTokenizerFast, generation: Generation, stops: Sequence[str]
) -> tuple[Generation, str]:
    """The text before the earliest stop string, and the generation as if it had ended there.

    Its tokens are the shortest run whose text reaches the cut, so that tokens nobody gets are not counted; forwards
    and seconds stay what they were.
    """

    def text_of(count: int) -> str:
        return str(tokenizer.decode(generation.tokens[:count], skip_special_tokens=True))

    whole = text_of(len(generation.tokens))
    text = cut(whole, stops)
    if text is None:
        return generation, whole
    count = bisect_left(range(len(generation.tokens)), len(text), key=lambda n: len(text_of(n)))
    return replace(generation, tokens=generation.tokens[:count], finish_reason="stop"), text
