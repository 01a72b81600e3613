"""What a step takes at least on a machine, what it is measured against, and until when: arithmetic, no GPU needed.

    floor = max(bytes / bandwidth, sum of operations / their rate)

Bytes: the weights of all layers and of the head once (fp8: a byte a number of the layers' projections and four for
every output's scale; the head stays bf16, as the engine keeps it, but in `halved`), and in every layer K/V of the
prefix, read once for all branches, and of the step's own rows. Activations are left out: some 1 % for 64 rows.
Operations: two for every weight and row, of the head for masked rows only, and four for every query number and column
that it sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lopa_dist.models.config import ModelConfig

DREAM = ModelConfig(
    family="Dream", vocab_size=152064, hidden_size=3584, layers=28, heads=28, kv_heads=4, head_dim=128,
    intermediate_size=18944, rms_eps=1e-6, rope_theta=1e6, qkv_bias=True, tied=False, shift=True, mask_id=151666,
    eos_ids=(151643,), pad_id=151643, max_positions=131072,
)  # fmt: skip
LLADA = ModelConfig(
    family="llada", vocab_size=126464, hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    intermediate_size=12288, rms_eps=1e-5, rope_theta=5e5, qkv_bias=False, tied=False, shift=False, mask_id=126336,
    eos_ids=(126081,), pad_id=126081, max_positions=4096,
)  # fmt: skip
MODELS = {"Dream-7B": DREAM, "LLaDA-8B": LLADA}
BF16, FP8 = "bf16", "fp8"

Figures = Mapping[str, "float | None"]


@dataclass(frozen=True)
class Machine:
    """What this GPU was measured to do, a second."""

    bandwidth: float  # bytes
    rate: float  # bf16 operations
    fp8_rate: float


@dataclass(frozen=True)
class Case:
    """A step: branches of one sequence, of `window` rows each, that see `prefix` cached tokens."""

    prefix: int
    window: int
    branches: int  # on this GPU

    @property
    def rows(self) -> int:
        """Packed rows."""
        return self.branches * self.window

    @property
    def masked(self) -> int:
        """Of them, rows that the head sees: every other one."""
        return -(-self.rows // 2)


@dataclass(frozen=True)
class Work:
    """What a step must move and compute."""

    bytes: float
    linears: float  # operations of the layers' projections
    others: float  # of attention and head

    @property
    def flops(self) -> float:
        """All operations."""
        return self.linears + self.others

    def floor(self, machine: Machine, precision: str) -> float:
        """Seconds."""
        rate = machine.fp8_rate if precision == FP8 else machine.rate
        return max(self.bytes / machine.bandwidth, self.linears / rate + self.others / machine.rate)


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products, by their names in `FusedLayer`."""
    d, q, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "qkv": (q + 2 * kv, d),
        "out": (d, q),
        "gate_up": (2 * config.intermediate_size, d),
        "down": (d, config.intermediate_size),
    }


def work(config: ModelConfig, precision: str, case: Case) -> Work:
    """A step's bytes and operations."""
    shapes = projections(config)
    weights = sum(n * k for n, k in shapes.values())  # of a layer
    scales = 4 * sum(n for n, _ in shapes.values())
    layer = weights + scales if precision == FP8 else 2 * weights
    layer += 2 * (shapes["qkv"][0] * config.qkv_bias + 2 * config.hidden_size)
    head = config.vocab_size * config.hidden_size
    kv = 2 * 2 * config.kv_heads * config.head_dim * (case.prefix + case.rows)  # of a layer
    columns = case.rows * (case.prefix + case.window)
    return Work(
        bytes=config.layers * (layer + kv) + 2 * (head + config.hidden_size),
        linears=2.0 * case.rows * config.layers * weights,
        others=2.0 * case.masked * head + 4.0 * config.layers * config.heads * config.head_dim * columns,
    )


def halved(config: ModelConfig, case: Case) -> Work:
    """As `work` in fp8, with the head in eight bits, too: half the bytes of all weights."""
    whole = work(config, FP8, case)
    return replace(whole, bytes=whole.bytes - config.vocab_size * config.hidden_size)


@dataclass(frozen=True)
class Bar:
    """What a figure has to reach."""

    figure: str
    limit: float
    at_most: bool = True

    def met(self, figures: Figures) -> bool | None:
        """Whether it does; null where it was not measured."""
        value = figures.get(self.figure)
        if value is None:
            return None
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if self.at_most else '>='} {self.limit:g}"


def step_bar(precision: str, case: Case) -> Bar | None:
    """The bar of a step's time over its floor; in fp8 that of `halved`, the lower one."""
    if precision == FP8:
        return Bar("x halved floor", 1.5)
    if case.branches == 1 and case.window <= 96:
        return Bar("x floor", 1.25)
    return Bar("x floor", 1.35) if (case.branches, case.window) == (8, 64) else None


class Deadline:
    """Says when nothing more is to be begun."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.end = clock, clock() + 60 * minutes

    def over(self) -> bool:
        """Whether the time is up."""
        return self.clock() >= self.end


def ratio(a: float | None, b: float | None) -> float | None:
    """``a / b``, where both were measured."""
    return None if a is None or not b else a / b
