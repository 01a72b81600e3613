"""Calculate the least time that a forward takes on a machine, and judge measured figures by bars.

    floor = max(bytes / bandwidth, sum of operations / their rate)

Bytes: the weights of all layers and of the head, and the biases and norms, each read once. A weight has two bytes, or
one in fp8; in fp8, each output of a layer's projections also has a scale of four bytes. Every layer also reads the K/V
of the prefix, once for all branches, and of the forward's own rows. Activations are left out; they are about 1 % for 64
rows. With fp8 weights, the engine still keeps the head in bf16, so it cannot reach that floor.

Operations: two for each weight of a layer in each row; two for each weight of the head in every second row; and four
for each number of a query and each column that its row sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lopa_dist.models.config import ModelConfig

BF16, FP8 = "bf16", "fp8"


@dataclass(frozen=True)
class Machine:
    """The measured rates of a GPU."""

    bandwidth: float  # bytes per second
    rate: float  # bf16 operations per second
    fp8_rate: float  # fp8 operations per second


@dataclass(frozen=True)
class Case:
    """A forward: branches of one sequence, each with `window` rows, which see `prefix` cached tokens."""

    prefix: int
    window: int
    branches: int

    @property
    def rows(self) -> int:
        """The number of packed rows."""
        return self.branches * self.window

    def __str__(self) -> str:
        return f"prefix {self.prefix}, {self.branches} x {self.window} rows"


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the numbers of outputs and inputs of a layer's projections, by the projections' names in `FusedLayer`."""
    d, q, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "qkv": (q + 2 * kv, d),
        "out": (d, q),
        "gate_up": (2 * config.intermediate_size, d),
        "down": (d, config.intermediate_size),
    }


def floor_s(config: ModelConfig, precision: str, case: Case, machine: Machine) -> float:
    """Return the least seconds that the forward `case` of a model takes on a machine."""
    fp8 = precision == FP8
    shapes = projections(config)
    weights = sum(n * k for n, k in shapes.values())  # in a layer
    scales = 4 * sum(n for n, _ in shapes.values()) if fp8 else 0
    others = 2 * (shapes["qkv"][0] * config.qkv_bias + 2 * config.hidden_size)  # bytes of a layer's biases and norms
    head = config.vocab_size * config.hidden_size
    kv = 2 * 2 * config.kv_heads * config.head_dim * (case.prefix + case.rows)  # bytes in a layer
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
    """A limit that a figure has to meet."""

    figure: str
    limit: float
    at_most: bool = True

    def met(self, value: float) -> bool:
        """Return whether the figure meets the bar with this value."""
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if self.at_most else '>='} {self.limit:g}"


def step_bar(precision: str, case: Case) -> Bar | None:
    """Return the bar for the ratio of a forward's time to its floor; None if the forward has no bar."""
    if precision == FP8:
        return Bar("x floor", 1.5)
    if case.branches == 1 and case.window <= 96:
        return Bar("x floor", 1.25)
    return Bar("x floor", 1.35) if (case.branches, case.window) == (8, 64) else None


def judged(figures: Mapping[str, float | None], *bars: Bar) -> dict[str, Any]:
    """Return figures, with "ok" for whether they meet their bars, and a text that tells what was measured.

    Figures that were not measured are None, and have no bar to meet.
    """
    measured = {name: value for name, value in figures.items() if value is not None}
    missed = [str(bar) for bar in bars if bar.figure in measured and not bar.met(measured[bar.figure])]
    words = [f"{name} {value:.3g}" for name, value in measured.items()]
    result: dict[str, Any] = {**figures, "ok": not missed}
    if words:
        result["measured"] = ", ".join(words)
    return result | ({"error": f"not {', not '.join(missed)}"} if missed else {})


def ratio(a: float | None, b: float | None) -> float | None:
    """Return ``a / b``; None if one of them was not measured, or `b` is 0."""
    return None if a is None or not b else a / b
