"""What a forward takes at least on a machine, and the bars that measured figures are held to: arithmetic alone.

    floor = max(bytes / bandwidth, sum of operations / their rate)

Bytes: the weights of all layers and of the head once, two bytes a number, in fp8 one, and four for the scale of every
output of a layer's projections; and in every layer K/V of the prefix, read once for all branches, and of the forward's
own rows. Activations are left out: some 1 % for 64 rows. The engine keeps the head in bf16 with fp8, too, so it cannot
reach that floor.
Operations: two for every weight and row, of the head for every other row only, and four for every query number and
column that it sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lopa_dist.models.config import ModelConfig

BF16, FP8 = "bf16", "fp8"


@dataclass(frozen=True)
class Machine:
    """What this GPU was measured to do, a second."""

    bandwidth: float  # bytes
    rate: float  # bf16 operations
    fp8_rate: float


@dataclass(frozen=True)
class Case:
    """A forward: branches of one sequence, of `window` rows each, that see `prefix` cached tokens."""

    prefix: int
    window: int
    branches: int

    @property
    def rows(self) -> int:
        """Packed rows."""
        return self.branches * self.window

    def __str__(self) -> str:
        return f"prefix {self.prefix}, {self.branches} x {self.window} rows"


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products, by their names in `FusedLayer`."""
    d, q, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "qkv": (q + 2 * kv, d),
        "out": (d, q),
        "gate_up": (2 * config.intermediate_size, d),
        "down": (d, config.intermediate_size),
    }


def floor_s(config: ModelConfig, precision: str, case: Case, machine: Machine) -> float:
    """The least seconds of a forward."""
    fp8 = precision == FP8
    shapes = projections(config)
    weights = sum(n * k for n, k in shapes.values())  # of a layer
    scales = 4 * sum(n for n, _ in shapes.values()) if fp8 else 0
    others = 2 * (shapes["qkv"][0] * config.qkv_bias + 2 * config.hidden_size)  # biases and norms of a layer
    head = config.vocab_size * config.hidden_size
    kv = 2 * 2 * config.kv_heads * config.head_dim * (case.prefix + case.rows)  # of a layer
    size = 1 if fp8 else 2  # bytes of a weight
    moved = config.layers * (size * weights + scales + others + kv) + size * head + 2 * config.hidden_size
    products = 2.0 * case.rows * config.layers * weights
    columns = case.rows * (case.prefix + case.window)
    attention = 4.0 * config.layers * config.heads * config.head_dim * columns
    predictions = 2.0 * -(-case.rows // 2) * head
    rate = machine.fp8_rate if fp8 else machine.rate
    return max(moved / machine.bandwidth, products / rate + (attention + predictions) / machine.rate)


@dataclass(frozen=True)
class Bar:
    """What a figure has to reach."""

    figure: str
    limit: float
    at_most: bool = True

    def met(self, value: float) -> bool:
        """Whether the figure does."""
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if self.at_most else '>='} {self.limit:g}"


def step_bar(precision: str, case: Case) -> Bar | None:
    """The bar of a forward's time over its floor."""
    if precision == FP8:
        return Bar("x floor", 1.5)
    if case.branches == 1 and case.window <= 96:
        return Bar("x floor", 1.25)
    return Bar("x floor", 1.35) if (case.branches, case.window) == (8, 64) else None


def judged(figures: Mapping[str, float | None], *bars: Bar) -> dict[str, Any]:
    """Return figures, null where not measured, with whether they meet their bars, and all of it in words."""
    measured = {name: value for name, value in figures.items() if value is not None}
    missed = [str(bar) for bar in bars if bar.figure in measured and not bar.met(measured[bar.figure])]
    words = [f"{name} {value:.3g}" for name, value in measured.items()]
    result: dict[str, Any] = {**figures, "ok": not missed}
    if words:
        result["measured"] = ", ".join(words)
    return result | ({"error": f"not {', not '.join(missed)}"} if missed else {})


def ratio(a: float | None, b: float | None) -> float | None:
    """``a / b``, where both were measured."""
    return None if a is None or not b else a / b
