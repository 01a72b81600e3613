"""The embedded models' tokenizers: a token for each word of a model's small vocabulary, and for each byte."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from training.vocabularies import problem_words

EOS, MASK, USER, ASSISTANT, UNKNOWN = "<|endoftext|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|> {{ message.content }}<|endoftext|>"
    "{% else %}<|user|> {{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build(vocabulary: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """Return a unigram tokenizer in which every word of `vocabulary`, with its leading space, is one token.

    None stands for the vocabulary of the word problems. Words have high scores, and single bytes have such low ones
    that they are used only where no word fits. Any text survives encoding and decoding, because bytes cover what words
    do not. The only exception is U+2581, which stands for the space.
    """
    specials = [EOS, MASK, USER, ASSISTANT, UNKNOWN]
    words = [" " + w for w in (problem_words() if vocabulary is None else vocabulary)] + [" "]
    pieces = [(t, 0.0) for t in specials]
    pieces += [(f"<0x{b:02X}>", -20.0) for b in range(256)]
    pieces += [(w.replace(" ", "▁"), -1.0) for w in words]
    model = models.Unigram(pieces, unk_id=specials.index(UNKNOWN), byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("<", "isolated"),  # so that a text such as <0x41> is not taken for a byte
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def prompt_text(question: str) -> str:
    """Return a question as the chat template renders it, so that training needs no template engine."""
    return f"{USER} {question}{ASSISTANT}"
