"""The model in the package: its format, and that it solves its problems."""

from __future__ import annotations

import json
from functools import partial

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lopa_dist.decode import DecodeConfig
from lopa_dist.embedded.checkpoint import dream_config, generation_config
from lopa_dist.embedded.tokenizer import build
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.tasks.arithmetic import Arithmetic


def test_format() -> None:
    config = json.loads((EMBEDDED / "config.json").read_text())
    assert config["model_type"] == "Dream"
    assert sum(f.stat().st_size for f in EMBEDDED.iterdir()) <= 12 * 2**20
    reference = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.items() if k != "model_type"}))
    missing, unexpected = reference.load_state_dict(load_file(EMBEDDED / "model.safetensors"), strict=False)
    assert (missing, unexpected) == ([], [])


def test_other_projects_find_what_they_ask_for(embedded_model: Transformer) -> None:
    """Dream's own code refuses a folder without generation_config.json."""
    for name, wanted in (("config", dream_config), ("generation_config", generation_config)):
        assert json.loads((EMBEDDED / f"{name}.json").read_text()) == wanted(embedded_model.config)
    assert GenerationConfig.from_pretrained(EMBEDDED).eos_token_id == embedded_model.config.eos_ids[0]


def test_tokenizer_is_the_one_that_the_code_builds(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<|user|> Wendy has 12 apples, <0x41> ü 😀<|assistant|> 3 + 4 = 7 ."
    built = build()
    assert embedded_tokenizer.get_vocab() == built.get_vocab()
    assert embedded_tokenizer(text).input_ids == built(text).input_ids
    assert embedded_tokenizer.chat_template == built.chat_template


def test_it_solves_its_problems(embedded_model: Transformer, embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    """98 % of 500 when it was shipped; 54 of 60 would be a different model. Names come from the question."""
    torch.set_num_threads(1)
    task = Arithmetic(60)
    items = list(task.items())
    render = partial(embedded_tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    texts = [render(i.messages) for i in items]
    requests = [
        Request(i, embedded_tokenizer(text, add_special_tokens=False).input_ids, 64, request_key(0, str(i)))
        for i, text in enumerate(texts)
    ]
    config = DecodeConfig(branches=0, block_size=16, max_new_tokens=64)
    right = named = 0
    for generation in Engine(embedded_model, config, Solo(), EngineConfig(60)).generate(requests):
        text = embedded_tokenizer.decode(generation.tokens)
        right += task.score(items[generation.request.index], text).correct
        named += text.split()[1] in texts[generation.request.index].split()
    assert right >= 54
    assert named >= 54
