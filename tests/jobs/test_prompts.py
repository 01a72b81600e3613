"""From items to token ids: what a prompt may not contain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lopa_dist.config import Config
from lopa_dist.engine.request import Request
from lopa_dist.jobs.prompts import Encoder, Rejection
from lopa_dist.tasks.task import Item
from tests.conftest import SMALL


@pytest.mark.parametrize("called", [None, "<|mdm_mask|>"], ids=["LLaDA", "Dream"])
def test_a_literal_mask_token_is_that_requests_error(called: str | None) -> None:
    """Whether or not the tokenizer calls it its mask token; LLaDA's and iLLaDA's do not."""
    raw = Tokenizer(models.WordLevel({"say": 0, "it": 1, "?": 2}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken("<|mdm_mask|>", normalized=False, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, mask_token=called)
    encoder = Encoder(Config(), replace(SMALL, mask_id=raw.token_to_id("<|mdm_mask|>")), tokenizer)
    rejection = encoder.encode(4, Item("a", prompt="say <|mdm_mask|> it"))
    assert rejection == Rejection(4, "the prompt contains the mask token '<|mdm_mask|>'; remove it")
    accepted = encoder.encode(5, Item("b", prompt="say it", max_new_tokens=8))
    assert isinstance(accepted, Request)
    assert list(accepted.prompt) == [0, 1]
