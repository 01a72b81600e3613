"""The rules by which the record head chooses a token and says how sure the model is of it."""

from __future__ import annotations

from dataclasses import dataclass

COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen and how sure the model is of it."""

    confidence: str = "neg_entropy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def divisor(self) -> float:
        """Of the logits, with temperature > 0: below it they would overflow, and it is greedy in all but name."""
        return max(self.temperature, COLDEST)

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a part of the distribution, for which a whole row is needed at once.

        Greedy decoding takes the best token, and how sure the model is of it must not depend on what is left out.
        """
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)
