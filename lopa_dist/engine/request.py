"""What goes into the engine and what comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lopa_dist.decode.written import Written
from lopa_dist.engine.work import Work
from lopa_dist.kernels.sampling import Sampling

WRITTEN = ("stop", "length")  # finish reasons of answers that the model has written in full, or up to their limit


@dataclass(frozen=True, slots=True)
class Given:
    """An answer to be scored; `key` seeds its masks."""

    prompt: Sequence[int]
    answer: Sequence[int]
    key: int
    top: int | None = None  # also return each token's log probability, and this many of the most probable tokens there

    @classmethod
    def seeded(cls, prompt: Sequence[int], answer: Sequence[int], seed: int) -> Given:
        """Return an answer whose masks depend on nothing but the answer, its prompt and `seed`."""
        return cls(prompt, answer, request_key(seed, f"{list(prompt)} {list(answer)}"))


class TokenLikelihood(NamedTuple):
    """How likely a token is, given the tokens before it, in nats, at temperature 1 and without `top_p` or `top_k`."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the most probable tokens and their log probabilities, the most probable one first


class Likelihood(NamedTuple):
    """How likely an answer is, in nats."""

    loglikelihood: float  # of a masked model, a lower bound
    error: float  # standard error of the bound, at most; 0 where no masks were sampled
    greedy: bool  # whether filling one token at a time, the most probable first, gives this answer
    forwards: int  # passes through the model, one for each mask
    tokens: list[TokenLikelihood] | None = None  # of a causal model's answer with `Given.top`


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `key` seeds its random numbers, whatever it is batched with."""

    index: int
    prompt: Sequence[int]
    max_new_tokens: int
    key: int
    sampling: Sampling | None = None  # None: as the decode config says
    prefix: int = 0  # tokens of the prompt that many requests begin with: few-shot examples, a system prompt
    token_steps: bool = False  # whether to tell how each token was written
    stop: tuple[str, ...] = ()  # the answer ends at the first of these strings; the caller cuts the text there
    suffix: Sequence[int] = ()  # tokens after the answer, which then has `max_new_tokens` masks, or ends earlier
    continues: bool = False  # whether the answer continues the prompt's text; otherwise it is a message of its own
    # texts to score, instead of generating one: the likelihood of each is the sum over its parts
    scored: tuple[tuple[Given, ...], ...] = ()

    @property
    def given_tokens(self) -> int:
        """Return how many tokens the model is given: those of the prompt and of the suffix."""
        return len(self.prompt) + len(self.suffix)

    @property
    def all_tokens(self) -> int:
        """Return how many tokens there are at most, given ones and the answer's: as many need K/V space."""
        return self.given_tokens + self.max_new_tokens


@dataclass(frozen=True)
class Generation:
    """A finished request. Seconds run from admission."""

    request: Request
    tokens: list[int]  # up to the first EOS, which is left out
    finish_reason: str  # "stop", "length", "scored", or "error": its predictions were not numbers, and it has no tokens
    forwards: int  # passes through the model, prefill included
    seconds: float
    first_step_seconds: float
    filled: int  # all tokens in the appended blocks, filler included, as LoPA's released program counts
    work: Work = field(default_factory=Work)
    written: list[Written] | None = None  # how each token was written, if the request asked
    likelihoods: list[Likelihood] | None = None  # of the texts that the request has scored
    tries: int = 1  # how many answers were tried, this one being the last; forwards and seconds are of all of them
    failed_tokens: int = 0  # tokens of the answers before it, which did not have the format that was asked for
    invalid: str = ""  # why this answer does not have that format


def request_key(seed: int, custom_id: str) -> int:
    """Return a 63-bit key of `seed` and the request's `custom_id`: the same in every run, process and batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{custom_id}".encode()).digest()[:8], "little") >> 1
