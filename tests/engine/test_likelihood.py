"""Likelihoods against plain forwards, one text at a time, with every mask written out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.likelihood import Given, Likelihood, Scorer
from lopa_dist.kernels.dispatch import by_torch
from lopa_dist.models.transformer import Transformer
from tests.engine.test_causal import attend_causally, causal

CONTEXTS = ["d2f", "d2f_causal", "lopa_released", "blocks", "vanilla"]


@pytest.fixture(autouse=True, params=["C", "torch"])
def _form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with both forms of attention: in C, on CPUs with a compiler, and torch's."""
    with by_torch(frozenset() if request.param == "C" else frozenset({"rope"})):
        yield


def config(context: str) -> DecodeConfig:
    return causal() if context == "causal" else DecodeConfig(context=context, block_size=4)


def given(seed: int, prompt: int, answer: int) -> Given:
    rng = random.Random(seed)
    return Given([rng.randrange(46) for _ in range(prompt)], [rng.randrange(46) for _ in range(answer)], seed)


def distributions(model: Transformer, context: str, one: Given, part: range, masked: set[int]) -> dict[int, Tensor]:
    """Log probabilities of all tokens at the masked positions of a part of the answer, by a dense forward.

    Every row is at its place in the text. What comes after the part is left out; before it the answer is in clear.
    """
    size, prompt, shift = 4, len(one.prompt), int(model.config.shift)
    text = [*one.prompt, *one.answer][: part.stop]
    tokens = [model.config.mask_id if position in masked else token for position, token in enumerate(text)]

    def block_end(row: int) -> int:
        if context == "blocks":
            return (row // size + 1) * size
        return prompt if row < prompt else prompt + ((row - prompt) // size + 1) * size

    def sees(row: int, column: int) -> bool:
        if context in ("vanilla", "lopa_released"):
            return True
        if context == "d2f":  # the row before the answer predicts its first token, and sees its masks
            return column < prompt or row >= prompt - shift
        return column < block_end(row)

    visible = torch.tensor([[sees(row, column) for column in range(len(text))] for row in range(len(text))])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("rhd,chd->hrc", q, k) * q.shape[2] ** -0.5
        return torch.einsum("hrc,chd->rhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)

    with torch.no_grad():
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), attend) @ model.head_weight.T
    logits[:, model.config.mask_id] = -torch.inf
    rows = logits.log_softmax(1)
    return {position: rows[position - shift] for position in masked}


def parts(context: str, one: Given) -> list[range]:
    prompt, end = len(one.prompt), len(one.prompt) + len(one.answer)
    if context in ("d2f", "vanilla", "lopa_released"):
        return [range(prompt, end)]
    origin = 0 if context == "blocks" else prompt
    edges = [prompt, *(edge for edge in range(origin, end, 4) if edge > prompt), end]
    return [range(a, b) for a, b in pairwise(edges)]


def bound(model: Transformer, context: str, one: Given) -> float:
    """The bound by enumeration: the mean over l of the mean over the masks of l tokens."""
    text, total = [*one.prompt, *one.answer], 0.0
    for part in parts(context, one):
        for count in range(1, len(part) + 1):
            masks = [set(mask) for mask in combinations(part, count)]
            for mask in masks:
                found = distributions(model, context, one, part, mask)
                logprob = sum(float(found[position][text[position]]) for position in mask)
                total += len(part) / count * logprob / len(masks) / len(part)
    return total


def filled_greedily(model: Transformer, context: str, one: Given) -> list[int]:
    """The answer that filling one token of a part at a time gives, parts after others that are as given."""
    answer = []
    for part in parts(context, one):
        text, masked = [*one.prompt, *one.answer], set(part)
        while masked:
            shown = Given(text[: len(one.prompt)], text[len(one.prompt) :], 0)
            found = distributions(model, context, shown, part, masked)
            best = max(masked, key=lambda position: float(found[position].max()))
            text[best] = int(found[best].argmax())
            masked.remove(best)
        answer += text[part.start : part.stop]
    return answer


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_bound_by_enumeration(small_model: Transformer, context: str) -> None:
    """All masks where there are few; drawn ones within three standard errors."""
    asked = [given(1, 5, 3), given(2, 5, 5), given(3, 8, 6), given(4, 1, 1)]
    wanted = [bound(small_model, context, one) for one in asked]
    found = Scorer(small_model, config(context), samples=63).score(asked)
    for one, exact in zip(found, wanted, strict=True):
        assert one.loglikelihood == pytest.approx(exact, abs=1e-4)
        assert one.error == 0
    found = Scorer(small_model, config(context), samples=12).score(asked)
    for one, exact in zip(found, wanted, strict=True):
        assert abs(one.loglikelihood - exact) <= max(3 * one.error, 1e-4)
    drawn = [max(map(len, parts(context, one))) > 3 for one in asked]
    assert [one.error > 0 for one in found] == drawn


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_mean_of_many_draws_is_the_bound(small_model: Transformer, context: str) -> None:
    one = given(2, 5, 4)
    draws = [Given(one.prompt, one.answer, key) for key in range(300)]
    found = [each.loglikelihood for each in Scorer(small_model, config(context), samples=3).score(draws)]
    error = float(np.std(found, ddof=1)) / math.sqrt(len(found))
    assert abs(float(np.mean(found)) - bound(small_model, context, one)) < 3 * error + 1e-4


def test_causal_is_the_sum_of_log_probabilities(small_model: Transformer) -> None:
    asked = [given(1, 5, 3), given(2, 1, 30), Given(given(1, 5, 3).prompt, [7, 8], 0), given(3, 40, 1)]
    for one, found in zip(asked, Scorer(small_model, causal(), rows=20).score(asked), strict=True):
        text = torch.tensor([*one.prompt, *one.answer])
        with torch.no_grad():
            logits = small_model(text, torch.arange(len(text)), attend_causally) @ small_model.head_weight.T
        logits[:, small_model.config.mask_id] = -torch.inf
        rows, answer = logits.log_softmax(1)[len(one.prompt) - 1 : -1], torch.tensor(one.answer)
        assert found.loglikelihood == pytest.approx(
            float(rows.gather(1, answer[:, None]).sum()), abs=1e-5 * len(answer)
        )
        assert found.error == 0
        assert found.greedy == bool((rows.argmax(1) == answer).all())


@pytest.mark.parametrize("context", [*CONTEXTS, "causal"])
def test_greedy_answers_are_recognised(small_model: Transformer, context: str) -> None:
    """What filling the most probable token gives, and the same with another token at each place."""
    one = given(5, 6, 7)
    answer = []
    if context == "causal":
        for _ in range(7):
            text = torch.tensor([*one.prompt, *answer])
            with torch.no_grad():
                logits = small_model(text, torch.arange(len(text)), attend_causally)[-1] @ small_model.head_weight.T
            logits[small_model.config.mask_id] = -torch.inf
            answer.append(int(logits.argmax()))
    else:
        answer = list(one.answer)
        for _ in parts(context, one):  # a part is filled after those that are as given
            answer = filled_greedily(small_model, context, Given(one.prompt, answer, 0))
    others = [[*answer[:i], (answer[i] + 1) % 46, *answer[i + 1 :]] for i in range(7)]
    found = Scorer(small_model, config(context), samples=1).score([Given(one.prompt, a, 0) for a in (answer, *others)])
    assert [one.greedy for one in found] == [True, *[False] * 7]


@pytest.mark.parametrize("context", [*CONTEXTS, "causal"])
def test_an_answer_s_likelihood_does_not_depend_on_what_is_beside_it(small_model: Transformer, context: str) -> None:
    asked = [given(seed, 1 + seed % 4 * 3, 1 + seed % 7) for seed in range(8)]
    asked += [Given(asked[1].prompt, [3, 4, 5, 6, 7, 8], 9)]

    def scored(asked: list[Given], rows: int) -> list[Likelihood]:
        return Scorer(small_model, config(context), samples=9, rows=rows).score(asked)

    together = scored(asked, 4096)
    for other in (scored(asked, 25), scored(asked[::-1], 200)[::-1], [scored([one], 64)[0] for one in asked]):
        for one, wanted in zip(other, together, strict=True):
            assert one.greedy == wanted.greedy
            assert one[:2] == pytest.approx(wanted[:2], rel=1e-4, abs=1e-4)
