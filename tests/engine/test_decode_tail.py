"""What a GPU is given to do after a step's forward: choice of tokens, verification, and the state's updates.

Each operation there takes the GPU some microseconds, whatever its size, and the next forward waits for them all.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.runner import Prepared
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.test_loop import random_requests

NOTHING = {  # views, and what asks for memory only
    "view", "transpose", "t", "expand", "select", "slice", "unsqueeze", "squeeze", "permute", "_unsafe_view", "detach",
    "alias", "split", "split_with_sizes", "unbind", "as_strided", "_reshape_alias", "empty_like", "new_empty", "empty",
    "empty_strided", "_local_scalar_dense", "lift_fresh", "new_empty_strided",
}  # fmt: skip


class Tail(TorchDispatchMode):
    """Counts operations from a forward's end to the step's, those of which others consist."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()
        self.counts: list[int] = []  # of each step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = func.__name__.split(".")[0]
        if name not in NOTHING:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def end(self, engine: Engine) -> None:
        self.__exit__(None, None, None)
        self.counts.append(len(self.names))
        self.names.clear()


@pytest.mark.parametrize("sequences", [1, 16])
@pytest.mark.parametrize(
    ("knobs", "most"),
    [
        ({}, 148),
        ({"branches": 7, "verify": "confidence", "drafts": 0}, 112),
        ({"context": "causal", "branches": 0, "drafts": "auto"}, 54),
        ({"context": "causal", "branches": 0, "drafts": 8}, 54),
    ],
    ids=str,
)
def test_a_step_has_few_operations_after_its_forward(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], most: int, sequences: int
) -> None:
    """They were 171, 117 and 76; another version of torch may take one or two more."""
    tail, forward = Tail(), StaticRunner.forward

    def noted(runner: StaticRunner, prepared: Prepared) -> Tensor:
        records = forward(runner, prepared)
        tail.__enter__()
        return records

    monkeypatch.setattr(StaticRunner, "forward", noted)
    config = DecodeConfig(block_size=16, max_new_tokens=96, **knobs)
    requests = [replace(one, max_new_tokens=96) for one in random_requests(1, sequences, 96)]
    options = EngineConfig(sequences, attention="meta", graphs="always")
    engine = Engine(small_model, config, Solo(), options, on_step=tail.end)
    assert len(list(engine.generate(requests))) == sequences
    assert len(tail.counts) > 6
    assert 0 < median(tail.counts[3:-2]) <= most
