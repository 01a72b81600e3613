"""What a finished request results in: its text, cut at its stop strings, and its line of `results.jsonl`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from lopa_dist.engine.request import Generation, Given, Likelihood
from lopa_dist.jobs.run.judging import Verdict
from lopa_dist.models.tokenizer import anchor, begins_with_space, text_of
from lopa_dist.tasks.task import Item


def finished_text(
    tokenizer: PreTrainedTokenizerFast, generation: Generation, stops: Sequence[str]
) -> tuple[Generation, str]:
    """Return the generation as if it had ended at its first stop string, and the text before that string.

    The first stop string is the one whose last character comes first; of several that end at the same place, the
    longest. So the result does not depend on how much was generated before the engine looked for stop strings.

    The generation keeps the fewest tokens whose text reaches the cut, so that tokens after it are not counted; forwards
    and seconds stay what they were.
    """
    continues = generation.request.continues and begins_with_space(tokenizer, generation.tokens)
    after = anchor(tokenizer) if continues else []

    def text_to(count: int) -> str:
        return text_of(tokenizer, generation.tokens[:count], after)

    text = text_to(len(generation.tokens))
    found = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    if not found:
        return generation, text
    text = text[: min(found)[1]]
    count = bisect_left(range(len(generation.tokens)), len(text), key=lambda n: len(text_to(n)))
    # the text of an incomplete character is as long as the character, but not the same
    while not text_to(count).startswith(text) and count < len(generation.tokens):
        count += 1
    while count and text_to(count - 1).startswith(text):
        count -= 1
    tokens, written = generation.tokens[:count], generation.written and generation.written[:count]
    return replace(generation, tokens=tokens, finish_reason="stop", written=written), text


def thought(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], text: str) -> tuple[str | None, str]:
    """Return the reasoning that a text begins with, and the answer after it.

    The reasoning is None if the chat template does not have the marks of reasoning, or if the model gave its answer at
    once. If a text ended before its answer began, the answer is empty. An answer keeps the indentation of its first
    line, which code needs.
    """
    if ANSWER not in str(tokenizer.chat_template or ""):
        return None, text
    reasoning, mark, answer = text.partition(ANSWER)
    begun = text.lstrip().startswith(THINK) or str(tokenizer.decode(prompt[-8:])).rstrip().endswith(THINK)
    if not mark and not begun:
        return None, text
    first = len(answer) - len(answer.lstrip())
    line = answer.rfind("\n", 0, first) + 1  # where the first line that is not blank begins; 0: beside the mark
    return reasoning.replace(THINK, "", 1).strip(), answer[line or first :]


def answer_of(
    tokenizer: PreTrainedTokenizerFast, generation: Generation, stops: Sequence[str]
) -> tuple[Generation, str | None, str]:
    """Return the generation as if it had ended at its first stop string, its reasoning (`thought`), and its answer."""
    generation, text = finished_text(tokenizer, generation, stops)
    return generation, *thought(tokenizer, generation.request.prompt, text)


class Pieces:
    """The texts of an answer's tokens.

    The first token reads as at the beginning of a text, the others read as after another token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.text_of = lru_cache(None)(self.decoded)

    def decoded(self, token: int) -> str:
        """Return the text of a token; a part of a character is U+FFFD."""
        first, both = (str(self.tokenizer.decode([token] * count)) for count in (1, 2))
        return both[len(first) :]

    def steps(self, generation: Generation) -> list[dict[str, Any]]:
        """Return each token of an answer with its log probability, in nats, its step, and how it was written."""
        assert generation.written is not None
        texts = [self.text_of(token) for token in generation.tokens]
        if texts and not generation.request.continues:  # it begins the text
            texts[0] = str(self.tokenizer.decode(generation.tokens[:1]))
        return [
            {"token": text, "logprob": round(step.logprob, 6), "step": step.step, "way": step.way}
            for text, step in zip(texts, generation.written, strict=True)
        ]


def generation_line(verdict: Verdict, token_ids: bool, pieces: Pieces) -> dict[str, Any]:
    """Return the result line of a finished request; `journal.merge` adds its place in the input."""
    answer, score = verdict.answer, verdict.score
    item, generation, request = answer.item, answer.generation, answer.generation.request
    count = len(generation.tokens)
    line: dict[str, Any] = {
        "custom_id": item.custom_id,
        "text": answer.text,
        "finish_reason": generation.finish_reason,
        "usage": {
            "prompt_tokens": request.given_tokens,
            "completion_tokens": count,
            "forwards": generation.forwards,
        },
        "tpf": round(count / generation.forwards, 4),
        "latency_s": round(generation.seconds, 6),
    }
    if item.response_format is not None:
        line["usage"] |= {"tries": generation.tries, "failed_tokens": generation.failed_tokens}
    if generation.invalid:
        line |= {"finish_reason": "invalid", "error": invalid(generation, item)}
    if token_ids:
        line["token_ids"] = generation.tokens
    if generation.written is not None:
        line["token_steps"] = pieces.steps(generation)
    if generation.likelihoods is not None:
        pairs = zip(generation.likelihoods, request.scored, strict=True)
        line["likelihoods"] = [likelihood_of(*pair) for pair in pairs]
    if score is not None:
        line |= score.fields()
    if answer.reasoning is not None:
        line["reasoning"] = answer.reasoning
    if verdict.failure:
        line |= {"correct": None, "unjudged": verdict.failure}
    return line


def invalid(generation: Generation, item: Item) -> str:
    """Return why an answer does not have the format that was asked for, and what to do."""
    assert item.response_format is not None
    tries, most = generation.tries, item.response_format.tries
    remedy = "the same job with a higher task.tries retries only these; or describe the format better in the prompt"
    if generation.finish_reason == "length":
        remedy = "it was cut at its limit of tokens: raise that (decode.max_new_tokens, or the line's max_tokens)"
    elif tries < most:
        remedy = "set a temperature: without one, another try gives the same text"
    return f"the text is {generation.invalid} after {tries} {'try' if tries == 1 else 'tries'}; {remedy}"


def likelihood_of(likelihood: Likelihood, parts: Sequence[Given]) -> dict[str, Any]:
    """Return a text's likelihood, for a line of results."""
    line: dict[str, Any] = {"loglikelihood": likelihood.loglikelihood, "greedy": likelihood.greedy}
    line |= {"error": likelihood.error} if likelihood.error else {}
    return line | {"tokens": sum(len(part.answer) for part in parts)}


THINK, ANSWER = "<think>", "</think>"  # around reasoning, in the templates of Qwen3 and its kin
NOT_NUMBERS = (
    "the model's predictions are not numbers. Many models overflow in fp16: use model.dtype=bf16 or fp32, or shorten "
    "or leave out this prompt. In fp32, the checkpoint's weights may not be numbers. In bf16 on a GPU a kernel may be "
    "at fault: lopa-dist doctor tries each, and engine.kernels=torch does without"
)


def error_line(item: Item, message: str) -> dict[str, Any]:
    """Return the result line of a request that could not run, or not to its end."""
    return {"custom_id": item.custom_id, "text": "", "finish_reason": "error", "error": message}
