"""Small engines of the first run on a GPU: as toys on a CPU, they find faults that were there and are put back."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import first_engines
from benchmarks.first_engines import BLOCKS, against_the_cpu, engines
from benchmarks.first_facts import perform
from benchmarks.gpu_shapes import CPU
from lopa_dist.engine import runner, static_runner
from lopa_dist.engine.request import Request
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import Tiles
from lopa_dist.models import experts, fused
from lopa_dist.models.quantize import QuantizedLinear

Patch = pytest.MonkeyPatch


def parts_without_a_room(patched: Patch) -> None:
    """The first fault of the review: each segment of a causal model was split into as many parts as a stack."""
    patched.setattr(static_runner, "replace", lambda split, room: split)


def products_of_linears_alone(patched: Patch) -> None:
    """Hole C of the review: a reproducible product took no weights of eight bits."""
    right = fused.FusedTransformer.project

    def project(self: Any, linear: Any, x: Any, rows: Any) -> Any:
        assert not (self.real_rows_only and isinstance(linear, QuantizedLinear))
        return right(self, linear, x, rows)

    patched.setattr(fused.FusedTransformer, "project", project)


def bounds_that_are_not_kept(patched: Patch) -> None:
    """Rows of a chain see the tokens after them."""
    right = static_runner.tile

    def cut(segments: Segments, *given: Any) -> Tiles:
        tiles = right(segments, *given)
        return static_runner.replace(tiles, seen=tiles.seen + 1)  # type: ignore[type-var]

    patched.setattr(static_runner, "tile", cut)


def places_in_scratch(patched: Patch) -> None:
    """K/V of a chain go where those of masks do."""
    patched.setattr(static_runner.StaticRunner, "kv_slots", lambda *_: None, raising=False)


def heads_without_norms(patched: Patch) -> None:
    """The pass between projection and attention leaves them out, over fixed buffers."""
    right = static_runner.Body.run

    def run(self: Any, running: Any) -> None:
        with patched.context() as inside:
            plain = fused.rope_and_store
            inside.setattr(fused, "rope_and_store", lambda *given: plain(*given[:7], None, *given[8:]))
            right(self, running)

    patched.setattr(static_runner.Body, "run", run)


def experts_of_others(patched: Patch) -> None:
    """Groups of rows meet their neighbours' weights, over fixed buffers."""
    right = static_runner.Body.run

    def run(self: Any, running: Any) -> None:
        with patched.context() as inside:
            product = experts.expert_linear
            inside.setattr(experts, "expert_linear", lambda x, weight, *given: product(x, weight.roll(1, 0), *given))
            right(self, running)

    patched.setattr(static_runner.Body, "run", run)


def keys_of_no_rows(patched: Patch) -> None:
    """A chunk of a prompt predicts nothing, and has no keys: the kernels that filter logits asked for them."""
    right = runner.record_head

    def head(hidden: Any, weight: Any, mask_id: Any, keys: Any, sampling: Any, *given: Any) -> Any:
        assert keys is not None or not sampling.filtered
        return right(hidden, weight, mask_id, keys, sampling, *given)

    patched.setattr(runner, "record_head", head)


FAULTS: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "1": (parts_without_a_room, "causal, auto, a prompt of 1500", "exceed the plan's"),
    "C": (products_of_linears_alone, "masked, reproducible, int8", "AssertionError"),
    "C, causal": (products_of_linears_alone, "causal, reproducible, int8", "AssertionError"),
    "bounds": (bounds_that_are_not_kept, "causal, 4 drafts, a prompt of 300", ""),
    "places": (places_in_scratch, "causal, auto by itself", ""),
    "norms": (heads_without_norms, "causal, norms of heads", ""),
    "sigmoids": (experts_of_others, "router of sigmoids", ""),
    "softmax": (experts_of_others, "router of softmax", ""),
    "keys": (keys_of_no_rows, "causal, top-p after chunks of a prompt", "AssertionError"),
    "keys, masked": (keys_of_no_rows, "masked, top-p after chunks of a prompt", "AssertionError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_put_back_is_found(fault: str, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    put_back, name, why = FAULTS[fault]
    put_back(monkeypatch)
    perform(lambda device: ((fact, found) for fact, found in engines(device) if fact == name), CPU)
    begun, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert (begun["begun"], found["fact"], found["ok"]) == (name, name, False), found
    assert why in found.get("error", "")


@pytest.mark.parametrize("router", ["router of sigmoids", "router of softmax"])
@torch.inference_mode()
def test_the_bound_in_bf16_is_between_right_mixtures_and_wrong_ones(router: str, monkeypatch: Patch) -> None:
    """On a GPU alone it is a fact; a CPU's roundings are about as large."""
    compare = partial(against_the_cpu, CPU, {}, router, BLOCKS, dtype=torch.bfloat16)
    asked: list[list[Request]] = []
    monkeypatch.setattr(
        first_engines, "against_the_cpu", lambda *given, **named: asked.append(given[4]) or {"ok": True}
    )
    [found] = [fact for name, fact in engines(torch.device("cuda:0")) if name == f"{router}, bf16"]
    assert found()["ok"]
    [requests] = asked
    assert compare(requests)["ok"]
    experts_of_others(monkeypatch)
    assert not compare(requests)["ok"]
