"""How the record head chooses a token, and how the model's confidence in it is measured."""

from __future__ import annotations

from dataclasses import dataclass

COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """The rules by which a token is chosen and the model's confidence in it is measured."""

    confidence: str = "neg_entropy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def divisor(self) -> float:
        """Return what logits are divided by, with temperature > 0.

        Below `COLDEST` they would overflow; at it, sampling is greedy in all but name.
        """
        return max(self.temperature, COLDEST)

    @property
    def filtered(self) -> bool:
        """Return whether tokens are drawn from part of the distribution, which needs a whole row of logits at once.

        Greedy decoding takes the best token, and the model's confidence in it must not depend on what filters exclude.
        """
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)
