"""The tokenizer keeps words whole and loses nothing of any other text."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lopa_dist.tasks import word_problems
from training import tokenizer
from training.vocabularies import problem_words

WORDS = tokenizer.build()
SPECIALS = (tokenizer.EOS, tokenizer.MASK, tokenizer.USER, tokenizer.ASSISTANT, tokenizer.UNKNOWN)

characters = st.characters(exclude_categories=["Cs"], exclude_characters="▁")
pieces = st.one_of(st.sampled_from([*problem_words(), *SPECIALS, " ", "  ", "\n"]), st.text(characters))


def decode(words: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return words.decode(ids, skip_special_tokens=False)


@given(text=st.text(characters))
@example(text="")
@example(text=" ")
@example(text="  two  spaces\t\r\n ")
@example(text="漢字 🎉 e\u0301 \x00 \ufffd \u00a0x")
@settings(max_examples=300, deadline=None)
def test_any_text_survives(text: str) -> None:
    ids = WORDS.encode(text, add_special_tokens=False)
    assert decode(WORDS, ids) == text
    assert WORDS.unk_token_id not in ids


@given(parts=st.lists(pieces, max_size=8), gap=st.sampled_from(["", " "]))
@settings(max_examples=200, deadline=None)
def test_any_mixture_of_words_specials_and_text_survives(parts: list[str], gap: str) -> None:
    text = gap.join(parts)
    assert decode(WORDS, WORDS.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("text", ["<0x41>", "the byte <0xFF> of <0x0A>", "<0xE2><0x96>"])
def test_text_that_is_written_like_a_byte_survives(text: str) -> None:
    assert decode(WORDS, WORDS.encode(text)) == text


def test_every_word_is_one_token() -> None:
    vocabulary = problem_words()
    ids = [WORDS.encode(" " + word, add_special_tokens=False) for word in vocabulary]
    assert [len(i) for i in ids] == [1] * len(vocabulary)
    assert len({i[0] for i in ids}) == len(vocabulary)
    assert WORDS.encode("".join(" " + w for w in vocabulary)) == [i[0] for i in ids]


def test_problems_are_words_only() -> None:
    for problem in islice(word_problems.problems("held_out", 1), 100):
        for text in (problem.question, problem.answer):
            assert len(WORDS.encode(" " + text)) == len(text.split(" "))


def test_specials_are_one_token_each_wherever_they_stand() -> None:
    for special in SPECIALS:
        (number,) = WORDS.encode(special, add_special_tokens=False)
        assert WORDS.encode(f" has{special}x{special}").count(number) == 2
    assert (WORDS.eos_token, WORDS.pad_token, WORDS.mask_token) == (tokenizer.EOS, tokenizer.EOS, tokenizer.MASK)
    assert WORDS.encode("has", add_special_tokens=True) == WORDS.encode("has", add_special_tokens=False)


def test_specials_can_be_left_out() -> None:
    ids = WORDS.encode("<|user|> Alice has<|assistant|> 7<|endoftext|><|endoftext|>")
    assert WORDS.decode(ids, skip_special_tokens=True) == " Alice has 7"


def test_the_vocabulary_is_small() -> None:
    assert len(WORDS) <= 512
    assert max(WORDS.get_vocab().values()) == len(WORDS) - 1


def test_the_chat_template_renders_prompt_text() -> None:
    for problem in islice(word_problems.problems("train", 0), 20):
        messages = [{"role": "user", "content": problem.question}]
        text = WORDS.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == tokenizer.prompt_text(problem.question)
        messages.append({"role": "assistant", "content": problem.answer})
        whole = WORDS.apply_chat_template(messages, tokenize=False)
        assert whole == f"{text} {problem.answer}{tokenizer.EOS}"
