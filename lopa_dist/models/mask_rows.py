"""A LoRA adapter that acts only on rows that draft, beside the base model's products.

So a causal model drafts with an adapter, and writes the text of the base model: I-DLM's adapter for Qwen3 works like
this (arXiv 2604.11035), and so does the one that comes with Nemotron-Labs-Diffusion (2607.05722). A projection computes
all rows with the base weights. Then the adapter's output is added to the rows that draft; no other row is touched, so
each keeps its bits by construction. On a GPU the adapter's two narrow products are also computed for all rows, because
in a CUDA graph shapes must not depend on the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lopa_dist.kernels.product import product

Pair = tuple[Tensor, Tensor]
"""A ``[r, in]`` and B ``[out, r]``, the scale included."""


class MaskRows:
    """Which rows of the running forward draft; all adapted projections of a model share it.

    These rows are the masks and, where masks draft in blocks, the copies before them.
    """

    def __init__(self) -> None:
        self.rows = torch.empty(0, 1, dtype=torch.bool)  # [R, 1]
        self.numbers: Tensor | None = None  # numbers of these rows; only on a CPU, where shapes may depend on tokens
        self.resting = False  # whether adapters add nothing, because others are being trained

    def begin(self, rows: Tensor) -> None:
        """Set the rows of a forward that draft, ``[R]`` bool."""
        self.rows = rows[:, None]
        self.numbers = rows.nonzero()[:, 0] if rows.device.type == "cpu" else None

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Make adapters add nothing within the context."""
        self.resting = True
        try:
            yield
        finally:
            self.resting = False

    @contextmanager
    def only(self, rows: Tensor | slice) -> Iterator[None]:
        """Restrict adapters to some of the forward's rows within the context."""
        all_rows = self.rows[:, 0]
        self.begin(all_rows[rows])
        try:
            yield
        finally:
            self.begin(all_rows)


class MaskRowAdapter:
    """An adapter's part for one product: for each of its projections, the number of outputs, and a pair or None."""

    def __init__(self, masks: MaskRows, parts: Sequence[tuple[int, Pair | None]]) -> None:
        self.masks, self.parts = masks, tuple(parts)
        self.hook: RemovableHandle | None = None  # by which the projection calls the adapter

    def attach(self, projection: nn.Module) -> None:
        """Make a projection add this adapter, instead of one that it had, before any other hook sees the output."""
        if (other := adapter_of(projection)) is not None and other.hook is not None:
            other.hook.remove()
        projection.adapter = self  # type: ignore[assignment]
        self.hook = projection.register_forward_hook(self._hook, prepend=True)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y, the base projection's output ``[R, N]`` for x ``[R, K]``, with the adapter's output added."""
        if self.masks.resting:
            return y
        if (numbers := self.masks.numbers) is not None:
            if len(numbers):
                drafting, begin = x.index_select(0, numbers), 0
                for size, pair in self.parts:
                    if pair is not None:
                        added = product(product(drafting, pair[0].t()), pair[1].t())
                        y.narrow(1, begin, size).index_add_(0, numbers, added)
                    begin += size
            return y
        for base, (_, pair) in zip(y.split([size for size, _ in self.parts], -1), self.parts, strict=True):
            if pair is not None:  # in place, because the largest layer's numbers decide how many rows fit
                added = F.linear(F.linear(x, pair[0]), pair[1]).add_(base)
                torch.where(self.masks.rows, added, base, out=base)
        return y

    def _hook(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.add(inputs[0], output)


def adapter_of(projection: nn.Module) -> MaskRowAdapter | None:
    """Return the adapter of a projection, or None."""
    return getattr(projection, "adapter", None)


def attach_joined(joint: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Attach the adapters of `parts` to the projection that computes them side by side."""
    adapters = [adapter_of(part) for part in parts]
    masks = next((adapter.masks for adapter in adapters if adapter is not None), None)
    if masks is not None:
        sizes = [len(part.weight) for part in parts]  # type: ignore[arg-type]
        pairs = [None if adapter is None else adapter.parts[0][1] for adapter in adapters]
        MaskRowAdapter(masks, list(zip(sizes, pairs, strict=True))).attach(joint)
