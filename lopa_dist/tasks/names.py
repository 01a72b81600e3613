"""How requests are called that have no name of their own, and the several answers to one request."""

from __future__ import annotations


def line_name(number: int) -> str:
    """Return the name of a request that its line does not name; lines are counted from 1."""
    return f"line-{number}"


def sample_name(name: str, sample: int) -> str:
    """Return the name of one of several answers to the request `name`; they are counted from 0."""
    return f"{name}#{sample}"


def without_sample(name: str, sample: int) -> str:
    """Return the name of the request that an answer is one of several to."""
    return name.removesuffix(sample_name("", sample))
