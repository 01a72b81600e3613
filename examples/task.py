"""A task of your own: ``lopa-dist task=examples/task.py:Capitals``."""

from __future__ import annotations

from collections.abc import Iterator

from lopa_dist.tasks.task import Item, Score

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima"}


class Capitals:
    """Asks for the capitals of countries.

    ``options`` names the keys of ``task.*`` that it takes besides ``limit``, such as ``("input", "fewshot")``. The
    constructor has a parameter for each of them.
    """

    name = "capitals"
    options = ()

    def __init__(self, limit: int | None) -> None:
        self.limit = limit

    def items(self) -> Iterator[Item]:
        """Yield an `Item` for each request, with its own id; if a request cannot be used, the item has an `error`."""
        for country, capital in list(CAPITALS.items())[: self.limit]:
            question = f"What is the capital of {country}? Answer with its name alone."
            yield Item(country, messages=[{"role": "user", "content": question}], reference=capital)

    def score(self, item: Item, text: str) -> Score | None:
        """Return whether an answer is right, and what was read from it; None if no answer is right or wrong."""
        answer = text.strip().rstrip(".")
        return Score(answer == item.reference, answer, expected=item.reference)
