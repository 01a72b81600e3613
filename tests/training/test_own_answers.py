"""The model's own answers: written greedily, and kept if they are right."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lopa_dist.models.transformer import Transformer
from lopa_dist.tasks import word_problems as wp
from training import own_answers, tokenizer
from training.attention import dense
from training.noise import Examples
from training.own_answers import OwnAnswers, greedy
from training.train import Shape, model_config


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return tokenizer.build()


@torch.no_grad()
def naive(model: Transformer, prompt: list[int], most: int) -> list[int]:
    """Greedy decoding that computes everything anew for every token."""
    answer: list[int] = []
    while len(answer) < most:
        tokens = torch.tensor(prompt + answer)
        place = torch.arange(len(tokens))
        last = model(tokens, place, dense(model.config, (place > place[:, None])[None]))[-1]
        following = int((last @ model.head_weight.T).argmax())
        if following == model.config.eos_ids[0]:
            break
        answer.append(following)
    return answer


def test_greedy_is_one_token_at_a_time(words: PreTrainedTokenizerFast) -> None:
    """Prompts of different lengths in one batch, answers that end early among them."""
    torch.manual_seed(3)
    config = model_config(Shape(16, 2, 4, 2, 32), words, "lopa_causal")
    model = Transformer(config)
    with torch.no_grad():  # many answers end, and not at once
        model.head_weight[config.eos_ids[0]] *= 3
        model.head_weight[:40] *= 3
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 400, (n,), generator=draw).tolist() for n in (1, 3, 9, 4, 17, 2, 6, 5)]
    wanted = [naive(model, prompt, 12) for prompt in prompts]
    assert greedy(model, prompts, 12) == wanted
    assert len({len(answer) for answer in wanted}) > 2


def test_right_answers_are_kept(words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four answers, one is right, one has a wrong number, one no number, and one a sentence too many."""
    source = Examples(words, "train", 0)
    own = OwnAnswers(source, Transformer(model_config(Shape(16, 1, 2, 2, 16), words, "lopa_causal")), 0)
    stream = wp.problems("train", 5)
    problems = [next(stream) for _ in range(4)]
    own.problems = iter(problems)
    texts = [p.answer for p in problems]
    texts[1] = texts[1].rsplit(" ", 1)[0] + " 99"
    texts[2] = texts[2].rsplit(" ", 2)[0]
    texts[3] = " ".join(texts[3].split()[:6]) + " " + texts[3]
    monkeypatch.setattr(own_answers, "greedy", lambda *_: [source.encode(text) for text in texts])
    assert own.draw(1.0) not in own.kept  # before it has written, examples are drawn
    assert own.write(4) == 0.25
    assert own.kept == [source.example(problems[0].question, problems[0].answer, drill=False)]
    own.kept *= own_answers.KEPT
    drawn = [own.draw(1.0) for _ in range(60)]
    assert 15 < sum(example in own.kept for example in drawn) < 45
