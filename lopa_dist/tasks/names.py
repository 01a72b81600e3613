"""Names of requests that have no name of their own, and of the answers if a request gets several."""

from __future__ import annotations


def line_name(number: int) -> str:
    """Return the name of a request that its line does not name; lines are counted from 1."""
    return f"line-{number}"


def sample_name(name: str, sample: int) -> str:
    """Return the name of one of several answers to the request `name`; they are counted from 0."""
    return f"{name}#{sample}"


def without_sample(name: str, sample: int) -> str:
    """Return the name of the request to which answer number `sample`, called `name`, belongs."""
    return name.removesuffix(sample_name("", sample))
