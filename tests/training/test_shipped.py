"""The models in the package: their format, and that they solve their problems."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import SHIPPED, find
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.tasks.embedded import Arithmetic, EmbeddedTask, Lists
from training.attention import dense
from training.causal import causal_batch, hidden_rows
from training.checkpoint import config_json, generation_config
from training.noise import Examples
from training.own_answers import greedy
from training.tokenizer import build
from training.vocabularies import list_words


@pytest.mark.parametrize("name", SHIPPED)
def test_format(name: str) -> None:
    folder = find(name)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == ("lopa_causal" if name.startswith("causal") else "Dream")
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 10_000_000
    reference = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.items() if k != "model_type"}))
    missing, unexpected = reference.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert (missing, unexpected) == ([], [])


@pytest.mark.parametrize("name", SHIPPED)
def test_other_projects_find_what_they_ask_for(name: str) -> None:
    """Dream's own code refuses a folder without generation_config.json."""
    folder, shape = find(name), read_config(find(name))
    for file, wanted in (("config", config_json), ("generation_config", generation_config)):
        assert json.loads((folder / f"{file}.json").read_text()) == wanted(shape)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == shape.eos_ids[0]


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("embedded", None, "<|user|> Wendy has 12 apples, <0x41> ü 😀<|assistant|> 3 + 4 = 7 ."),
        ("causal", None, "<|user|> Wendy has 12 apples, <0x41> ü 😀<|assistant|> 3 + 4 = 7 ."),
        ("lists", list_words(), "<|user|> insert 7 anywhere : 12 3, ü<|assistant|> 12 7 3"),
        ("causal_lists", list_words(), "<|user|> insert 7 anywhere : 12 3, ü<|assistant|> 12 7 3"),
    ],
)
def test_tokenizer_is_the_one_that_the_code_builds(name: str, words: list[str] | None, text: str) -> None:
    shipped, built = load_tokenizer(find(name)), build(words)
    assert shipped.get_vocab() == built.get_vocab()
    assert shipped(text).input_ids == built(text).input_ids
    assert shipped.chat_template == built.chat_template


def prompts_of(tokenizer: PreTrainedTokenizerFast, task: EmbeddedTask) -> list[list[int]]:
    """The task's items as the chat template has them, in tokens."""
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    return [tokenizer(render(item.messages), add_special_tokens=False).input_ids for item in task.items()]


def answers(model: Transformer, tokenizer: PreTrainedTokenizerFast, task: EmbeddedTask, most: int) -> list[str]:
    """The model's texts, by plain decoding, in the order of the task's items."""
    torch.set_num_threads(1)
    requests = [
        Request(i, prompt, most, request_key(0, str(i))) for i, prompt in enumerate(prompts_of(tokenizer, task))
    ]
    config = DecodeConfig(verify="confidence", drafts=0, branches=0, block_size=16, max_new_tokens=most)
    found = {g.request.index: g.tokens for g in Engine(model, config, Solo(), EngineConfig(64)).generate(requests)}
    return [tokenizer.decode(found[i]) for i in range(len(requests))]


def test_it_solves_its_problems(embedded_model: Transformer, embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    """98 % of 500 when it was shipped; 54 of 60 would be a different model. Names come from the question."""
    task = Arithmetic(60)
    right = named = 0
    for item, text in zip(task.items(), answers(embedded_model, embedded_tokenizer, task, 64), strict=True):
        right += task.score(item, text).correct
        named += text.split()[1] in item.messages[0]["content"].split()
    assert right >= 54
    assert named >= 54


def test_the_causal_model_is_an_autoregressive_one() -> None:
    """It writes the text that transformers' Qwen2 generates from the same weights."""
    folder, task = find("causal"), Arithmetic(2)
    model, words = load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    reference = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.items() if k not in ("model_type", "dtype")}))
    reference.load_state_dict({k: w.float() for k, w in load_file(folder / "model.safetensors").items()})
    for prompt in prompts_of(words, task):
        wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :]
        assert [[*answer, config["eos_token_id"]] for answer in greedy(model, [prompt], 64)] == [wanted.tolist()]


@torch.no_grad()
def test_the_causal_model_solves_its_problems_and_foresees_its_answers() -> None:
    """99.8 % of 2,000 right one token at a time when it was shipped; 97 % of chains of 16 drafts were right."""
    model = load_model(find("causal"), torch.float32, torch.device("cpu"))
    words, config = load_tokenizer(find("causal")), model.config
    source, task = Examples(words, "held_out", 1), Arithmetic(60)
    assert isinstance(words, PreTrainedTokenizerFast)
    texts = [words.decode(answer) for answer in greedy(model, prompts_of(words, task), 64)]
    assert sum(task.score(item, text).correct for item, text in zip(task.items(), texts, strict=True)) >= 57
    examples = [
        source.example(item.messages[0]["content"], text.strip(), drill=False)
        for item, text in zip(task.items(), texts, strict=True)
    ]
    batch = causal_batch(
        examples, source.causal_lengths[-1], config.mask_id, config.pad_id, None, np.random.default_rng(0)
    )
    inputs, positions, last, groups = (
        torch.from_numpy(rows) for rows in (batch.inputs, batch.positions, batch.last, batch.groups)
    )
    attend = dense(config, hidden_rows(positions, last, groups))
    found = (model(inputs.flatten(), positions.flatten(), attend) @ model.head_weight.T).argmax(-1).view_as(inputs)
    right = found == torch.from_numpy(batch.targets)
    depth = positions - last  # 1 is a group's first mask
    assert right[(groups > 0) & (depth == 1)].float().mean() > 0.98
    assert right[(groups > 0) & (depth == 4)].float().mean() > 0.95


def test_the_list_model_solves_its_problems() -> None:
    """70 % of 800 when it was shipped; 36 of 64 would be a different model."""
    folder, task = find("lists"), Lists(64, "held_out", 1)
    texts = answers(load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder), task, 144)
    assert sum(task.score(item, text).correct for item, text in zip(task.items(), texts, strict=True)) > 36


@torch.no_grad()
def test_the_causal_list_model_solves_its_problems() -> None:
    """80 % of 800 when it was shipped; 42 of 64 would be a different model."""
    folder, task = find("causal_lists"), Lists(64, "held_out", 1)
    model, words = load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder)
    texts = [words.decode(answer) for answer in greedy(model, prompts_of(words, task), 144)]
    assert sum(task.score(item, text).correct for item, text in zip(task.items(), texts, strict=True)) > 42
