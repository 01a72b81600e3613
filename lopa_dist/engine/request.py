"""What goes into the engine and what comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from lopa_dist.decode.written import Written
from lopa_dist.engine.work import Work
from lopa_dist.kernels.sampling import Sampling


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


@dataclass(frozen=True)
class Generation:
    """A finished request. Seconds run from admission."""

    request: Request
    tokens: list[int]  # up to the first EOS, which is left out
    finish_reason: str  # "stop", "length", or "error": its predictions were not numbers, so it has no tokens
    forwards: int  # passes through the model, prefill included
    seconds: float
    first_step_seconds: float
    filled: int  # all tokens in the appended blocks, filler included: what the reference counts
    work: Work = field(default_factory=Work)
    written: list[Written] | None = None  # how each token was written, if the request asked

    @property
    def drafts(self) -> int:
        """Drafts that its forwards verified (verify=agreement)."""
        return sum(drafts * count for drafts, count in self.work.proposed.items())

    @property
    def accepted(self) -> int:
        """Of these, the drafts that were accepted."""
        return sum(drafts * count for drafts, count in self.work.accepted.items())


def request_key(seed: int, custom_id: str) -> int:
    """63-bit key of (seed, request): the same in every run, process and batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{custom_id}".encode()).digest()[:8], "little") >> 1
