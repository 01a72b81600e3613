"""Stop strings cut text and tokens together."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lopa_dist.decode.written import Written
from lopa_dist.engine.request import Generation, Request
from lopa_dist.jobs.run.answers import Pieces, finished_text, thought
from lopa_dist.models.tokenizer import anchor, text_of
from tests.models.test_tokenizer import llama_2


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [
        ([], "Tom has 3 apples . #### 3", "length"),
        (["####", "apples"], "Tom has 3 ", "stop"),
        (["3 apples", "apples"], "Tom has ", "stop"),  # complete at once: the longer one
        (["3 apples .", "apples"], "Tom has 3 ", "stop"),  # complete later
        (["has 3 a", "3", " 3"], "Tom has", "stop"),
        (["3"], "Tom has ", "stop"),
        (["Tom"], "", "stop"),
        (["pples ."], "Tom has 3 a", "stop"),
        (["nothing"], "Tom has 3 apples . #### 3", "length"),
    ],
)
def test_cut(embedded_tokenizer: PreTrainedTokenizerFast, stops: list[str], text: str, reason: str) -> None:
    tokens = embedded_tokenizer("Tom has 3 apples . #### 3", add_special_tokens=False).input_ids
    whole = Generation(Request(0, [1], 9, 0), tokens, "length", 5, 1.0, 0.1, 9)
    generation, found = finished_text(embedded_tokenizer, whole, stops)
    assert (found, generation.finish_reason) == (text, reason)
    kept = generation.tokens
    assert kept == tokens[: len(kept)]
    assert embedded_tokenizer.decode(kept).startswith(text)
    if text and reason == "stop":
        assert len(embedded_tokenizer.decode(kept[:-1])) < len(text)  # no token more than the text needs
    assert bool(kept) == bool(text)
    assert (generation.forwards, generation.seconds, generation.filled) == (5, 1.0, 9)


@pytest.mark.parametrize("stops", [[], ["  x", " return y"]])
def test_what_continues_a_prompt_keeps_the_space_that_it_begins_with(stops: list[str]) -> None:
    """Llama 2's decoder drops it: a function's body lost a space of its indentation, and no program could be run."""
    tokenizer = llama_2()
    prompt, text = "def f(x):\n", "    return x"
    whole = tokenizer(prompt + text).input_ids
    given = tokenizer(prompt).input_ids
    tokens = whole[len(given) :]
    for continues, expected in ((True, text), (False, text[1:])):
        request = Request(0, given, 99, 0, continues=continues)
        generation = Generation(request, tokens, "length", 5, 1.0, 0.1, 9)
        assert finished_text(tokenizer, generation, stops) == (generation, expected)
        written = [Written(1.0, 1, "filled")] * len(tokens)
        pieces = Pieces(tokenizer).steps(replace(generation, written=written))
        assert "".join(piece["token"] for piece in pieces) == expected
    cut, before = finished_text(tokenizer, replace(generation, request=replace(request, continues=True)), [" x"])
    assert (before, text_of(tokenizer, cut.tokens, anchor(tokenizer))) == ("    return", "    return")


@given(
    text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 6), max_size=20),
)  # fmt: skip
def test_the_cut_is_that_of_one_token_at_a_time(text: str, stops: list[str], steps: list[int]) -> None:
    """However many tokens come at once, and however stop strings overlap."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise())
    tokens = tokenizer(text, add_special_tokens=False).input_ids

    def cut(ends: Iterable[int]) -> str:
        for end in ends:  # as an engine stops: with the first step after which there is a stop string
            if any(stop in text[:end] for stop in stops) or end >= len(text):
                whole = Generation(Request(0, [1], 99, 0), tokens[:end], "length", 5, 1.0, 0.1, 9)
                return finished_text(tokenizer, whole, stops)[1]
        raise AssertionError

    assert cut([*accumulate(steps), len(text)]) == cut(range(len(text) + 1))


@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [
        ("👍\n\nQuestion: more", "\n\nQuestion:", "👍"),
        ("é👍👍 €x", "x", "é👍👍 €"),
        ("so: 漢字。Answer", "。", "so: 漢字"),
        ("👍", "👍", ""),
    ],
)
def test_no_token_of_a_character_of_several_is_lost(answer: str, stop: str, text: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise())
    tokens = tokenizer(answer, add_special_tokens=False).input_ids
    whole = Generation(Request(0, [1], 99, 0), tokens, "length", 5, 1.0, 0.1, 9)
    generation, found = finished_text(tokenizer, whole, [stop])
    assert found == text == tokenizer.decode(generation.tokens)
    assert len(generation.tokens) == len(text.encode())


def bytewise() -> Tokenizer:
    """A tokenizer with a token a byte."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("prompt", "text", "split"),
    [
        ("Tom", "<think> 3 apples . </think> #### 3", ("3 apples .", "#### 3")),
        ("Tom <think>", " 3 apples . </think> #### 3", ("3 apples .", "#### 3")),
        ("Tom <think> ", " 3 apples . 3", ("3 apples . 3", "")),
        ("Tom", "<think> 3 apples", ("3 apples", "")),
        ("Tom <think> </think>", " #### 3", (None, " #### 3")),
        ("Tom", " #### 3", (None, " #### 3")),
        ("Tom", "the mark <think> is not at its beginning", (None, "the mark <think> is not at its beginning")),
        ("Tom", "<think>3</think>\n \n    return 3\n", ("3", "    return 3\n")),  # code keeps its indentation
        ("Tom", "<think>3</think>\n\n", ("3", "")),
    ],
)
def test_reasoning(
    embedded_tokenizer: PreTrainedTokenizerFast, prompt: str, text: str, split: tuple[str | None, str]
) -> None:
    tokenizer = copy.deepcopy(embedded_tokenizer)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert thought(tokenizer, ids, text) == (None, text), "its template knows no reasoning"
    tokenizer.chat_template = "{{ messages }}</think>"
    assert thought(tokenizer, ids, text) == split
