"""Which beginnings a job's prompts have in common: instructions, examples, a document."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np

LEAST = 16  # tokens: computing fewer a second time takes hardly longer
REMEMBERED = 1 << 20  # tokens of the latest prompts with which a prompt is compared
MOST_CUTS = 256  # beginnings that are known to be shared; the pool keeps fewer of them
TOKEN = array("i").itemsize
ABOVE = b"\xff" * TOKEN  # greater than any token's bytes


class Beginnings:
    """Chooses after how many tokens to cut a prompt, so that the tokens before the cut are computed once for many.

    The K/V of a causal model's tokens depend only on the tokens before them, so a cut changes no text. A prompt is
    compared with the latest ones before it. It shares the longest beginning that was cut off before, or a longer one
    that it has in common with earlier prompts, if that pays. The longer one must be computed anew from its first token,
    and is expected to serve as many further prompts as have had it so far.
    """

    def __init__(self) -> None:
        self.seen: list[bytes] = []  # the latest prompts, sorted: those most like a new one are its neighbours
        self.order: deque[bytes] = deque()  # the same, oldest first
        self.bytes = 0  # of all of them
        self.cuts: dict[bytes, None] = {}  # beginnings that were cut off, the latest one last

    def cut(self, tokens: Sequence[int], known: int = 0, copies: int = 1) -> int:
        """Return how many first tokens to share with other prompts; 0: the whole prompt, only with its copies.

        Args:
            tokens: the prompt.
            known: how many of its first tokens other prompts are known to begin with.
            copies: how many requests have this prompt. What follows a cut is computed for each of them.
        """
        prompt = array("i", tokens).tobytes()
        longest, having = self.longest(prompt)
        best = max((len(one) for one in self.cuts if prompt.startswith(one) and len(one) < len(prompt)), default=0)
        best = max(best, known * TOKEN)
        if longest - best >= LEAST * TOKEN and having * (longest - best) > best:
            best = longest
        self.remember(prompt)
        if not best or (copies > 1 and copies * (len(prompt) - best) >= len(prompt)):
            return 0
        beginning = prompt[:best]
        self.cuts.pop(beginning, None)
        self.cuts[beginning] = None
        if len(self.cuts) > MOST_CUTS:
            del self.cuts[next(iter(self.cuts))]
        return best // TOKEN

    def longest(self, prompt: bytes) -> tuple[int, int]:
        """Return the length in bytes of the longest beginning that an earlier prompt has, too, and how many have it.

        At least the prompt's last token is left out, because its row predicts the answer's first token.
        """
        at = bisect_left(self.seen, prompt)
        most = max((common(prompt, other) for other in self.seen[max(0, at - 1) : at + 1]), default=0)
        most = min(most, len(prompt) - TOKEN)
        if most < LEAST * TOKEN:
            return 0, 0
        beginning = prompt[:most]
        return most, bisect_left(self.seen, beginning + ABOVE) - bisect_left(self.seen, beginning)

    def remember(self, prompt: bytes) -> None:
        """Add a prompt to those seen, and forget the oldest ones if there are too many."""
        insort(self.seen, prompt)
        self.order.append(prompt)
        self.bytes += len(prompt)
        while self.bytes > REMEMBERED * TOKEN and len(self.order) > 1:
            old = self.order.popleft()
            del self.seen[bisect_left(self.seen, old)]
            self.bytes -= len(old)


def common(a: bytes, b: bytes) -> int:
    """Return how many bytes of whole tokens two prompts have in common at their beginnings."""
    length = min(len(a), len(b))
    differs = np.frombuffer(a, np.int32, length // TOKEN) != np.frombuffer(b, np.int32, length // TOKEN)
    first = int(differs.argmax()) if length else 0
    return first * TOKEN if length and differs[first] else length
