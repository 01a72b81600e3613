"""A sequence ends at a stop string, with the text that it would have had anyway."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.stop_strings import has_stop
from lopa_dist.jobs.run.answers import finished_text
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.tasks.embedded import Arithmetic
from tests.engine.ranks import on_ranks

STOPS = (" .", "####")
BLOCKS = DecodeConfig(block_size=8, max_new_tokens=64)
SETTINGS = [
    ("embedded", BLOCKS),
    ("embedded", replace(BLOCKS, branches=2, drafts=4, temperature=0.7)),
    ("causal", DecodeConfig(context="causal", max_new_tokens=64, drafts=8, draft_from="masks")),
]


@pytest.fixture(scope="module")
def builders() -> dict[str, EngineBuilder]:
    return {name: EngineBuilder(ModelOptions(path=name), torch.device("cpu")) for name in ("embedded", "causal")}


def requests(builder: EngineBuilder) -> list[Request]:
    """Six problems, of which two have no stop string."""
    made = []
    for i, item in enumerate(Arithmetic(6, "held_out", 5).items()):
        text = builder.tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
        ids = builder.tokenizer(text, add_special_tokens=False).input_ids
        made.append(Request(i, ids, 64, request_key(0, str(i)), stop=STOPS if i % 3 else ()))
    return made


def answers(
    builder: EngineBuilder, config: DecodeConfig, sequences: int, comm: Communicator | None = None, **extra: Any
) -> tuple[list[tuple[str, list[int], str]], list[int]]:
    """Text, tokens and finish reason of each request's answer, cut at its stop strings; and their forwards."""
    engine = Engine(builder.load(warn=False), config, comm or Solo(), EngineConfig(sequences), **extra)
    done = sorted(engine.generate(requests(builder)), key=lambda g: g.request.index)
    texts = [finished_text(builder.tokenizer, one, one.request.stop) for one in done]
    return [(text, one.tokens, one.finish_reason) for one, text in texts], [one.forwards for one in done]


@pytest.mark.parametrize(("name", "config"), SETTINGS, ids=["blocks", "branches, sampled", "causal"])
@pytest.mark.parametrize("sequences", [1, 4])
def test_the_same_text_in_fewer_forwards(
    builders: dict[str, EngineBuilder], name: str, config: DecodeConfig, sequences: int
) -> None:
    builder = builders[name]
    wanted, all_forwards = answers(builder, config, sequences)
    found, forwards = answers(builder, config, sequences, text_of=builder.text_of)
    assert found == wanted
    for request, fewer, before in zip(requests(builder), forwards, all_forwards, strict=True):
        assert fewer < before if request.stop else fewer == before


def test_branch_ranks_end_together(builders: dict[str, EngineBuilder]) -> None:
    builder, config = builders["embedded"], SETTINGS[1][1]
    alone = answers(builder, config, 4, text_of=builder.text_of)
    assert on_ranks(2, lambda comm: answers(builder, config, 4, comm, text_of=builder.text_of)) == [alone, alone]


def test_what_a_stopped_sequence_drafted_is_of_no_account(builders: dict[str, EngineBuilder]) -> None:
    """Its drafts may lie further on than the windows of the sequences that go on."""
    builder, config = builders["embedded"], replace(BLOCKS, block_size=4, drafts=8)
    items = list(Arithmetic(24, "held_out", 5).items())
    for pair in (items[i : i + 2] for i in range(0, 24, 2)):
        made = []
        for i, item in enumerate(pair):
            text = builder.tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
            ids = builder.tokenizer(text, add_special_tokens=False).input_ids
            made.append(Request(i, ids, 64, request_key(0, str(i)), stop=() if i else ("=",)))
        found = []
        for sequences in (1, 2):
            engine = Engine(builder.load(warn=False), config, Solo(), EngineConfig(sequences), text_of=builder.text_of)
            found.append({one.request.index: one.tokens for one in engine.generate(made)})
        assert found[0] == found[1]


def test_a_text_that_stops_before_a_prediction_that_is_no_number_is_no_error(
    builders: dict[str, EngineBuilder],
) -> None:
    """However many tokens a step brings: what follows the stop string is of no account."""
    builder = builders["causal"]
    model = copy.deepcopy(builder.load(warn=False))
    [equals] = builder.tokenizer(" =", add_special_tokens=False).input_ids[-1:]
    weight = model.model.embed_tokens.weight.detach().clone()
    weight[equals] = float("nan")
    model.model.embed_tokens.weight = torch.nn.Parameter(weight, requires_grad=False)
    made = [replace(one, stop=stops) for one in requests(builder)[:3] for stops in (("+",), ("=",), (" .",), ())]
    made = [replace(one, index=i) for i, one in enumerate(made)]
    found = []
    for drafts, branches, sequences in ((0, 0, 1), (2, 0, 12), (8, 0, 12), (4, 2, 12)):
        config = replace(SETTINGS[2][1], drafts=drafts, branches=branches)
        if not drafts:
            config = replace(config, draft_from="auto")
        engine = Engine(model, config, Solo(), EngineConfig(sequences), text_of=builder.text_of)
        done = sorted(engine.generate(made), key=lambda one: one.request.index)
        texts = [finished_text(builder.tokenizer, one, one.request.stop) for one in done]
        found.append([(text, one.finish_reason) for one, text in texts])
    assert {reason for _, reason in found[0]} >= {"stop", "error"}
    assert found == [found[0]] * 4


@given(
    text=st.text("ab", max_size=60),
    seen=st.integers(0, 60),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1),
)
def test_the_end_of_a_text_is_enough(text: str, seen: int, stops: list[str]) -> None:
    known = next((n for n in range(min(seen, len(text)), -1, -1) if not any(stop in text[:n] for stop in stops)), 0)
    tokens = [ord(c) for c in text]
    found = has_stop(lambda some: "".join(map(chr, some)), tokens, known, stops)
    assert found == any(stop in text for stop in stops)


def test_a_stop_string_of_characters_of_several_tokens_is_found() -> None:
    """One token at a time: a thumb is four tokens here, of a byte each."""
    text = ("so: " + 5 * "👍").encode()
    for stop in (n * "👍" for n in range(1, 6)):
        ends = (
            n for n in range(1, len(text) + 1)
            if has_stop(lambda some: bytes(some).decode(errors="replace"), list(text[:n]), n - 1, [stop])
        )  # fmt: skip
        assert next(ends) == len(b"so: ") + len(stop.encode())


@pytest.mark.parametrize("known", [3, 14, 15])
def test_a_stop_string_at_the_beginning_of_a_block_ends_it(small_model: Transformer, known: int) -> None:
    """Blocks count tokens of the prompt, too, and those are not searched."""
    config = DecodeConfig(context="blocks", block_size=16, max_new_tokens=64, drafts=0, max_active_blocks=1)
    request = Request(0, [5 + i % 7 for i in range(16 + known)], 64, key=7)

    def text_of(tokens: Sequence[int]) -> str:
        return "".join(chr(1000 + token) for token in tokens)

    [plain] = Engine(small_model, config, Solo(), EngineConfig(1)).generate([request])
    second = 16 - known  # number of the second block's first token
    stop = text_of(plain.tokens[: second + 2])[-3:]
    [found] = Engine(small_model, config, Solo(), EngineConfig(1), text_of=text_of).generate(
        [replace(request, stop=(stop,))]
    )
    assert found.tokens == plain.tokens[: len(found.tokens)]
    assert len(found.tokens) == second + 16 < len(plain.tokens)
