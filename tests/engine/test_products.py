"""Products are measured as they run, and whatever is then chosen gives the same text."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from lopa_dist.engine import products
from lopa_dist.engine.buckets import average, bucket, ladder
from lopa_dist.engine.products import ProductTimes, choices, enough, measure_products
from lopa_dist.engine.runners import merged
from lopa_dist.kernels.products import PRODUCTS
from lopa_dist.models.fused import FusedTransformer, projections
from lopa_dist.models.quantize import quantize
from lopa_dist.models.transformer import Transformer
from tests.engine.test_loop import BASE, random_requests, texts
from tests.engine.test_static_runner import static_texts


def test_every_bucket_and_shape_until_the_time_is_up(small_model: Transformer) -> None:
    shapes = list(projections(small_model.config).values())
    found = measure_products(merged(small_model), most_rows=100, budget_s=60)
    assert [(one.rows, one.outputs, one.inputs) for one in found] == [(n, *s) for n in (32, 64, 96) for s in shapes]
    for one in found:
        assert {"library", "vgemm"} <= set(one.us) <= set(PRODUCTS)
        assert min(one.us.values()) == one.us[one.fastest] > 0
    assert [one.rows for one in measure_products(merged(small_model), most_rows=100, budget_s=0)] == [32] * len(shapes)


def test_a_quantised_model_has_nothing_to_choose(small_model: Transformer) -> None:
    model = copy.deepcopy(small_model)
    quantize(model, "int8")
    assert measure_products(FusedTransformer(model), most_rows=64, budget_s=60) == []


def test_a_run_goes_over_the_layers_with_the_buckets_average(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, seen = merged(small_model), set()

    def spy(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        seen.add((len(x), int(rows), weight.data_ptr(), None if bias is None else bias.data_ptr()))
        return x @ weight.T

    monkeypatch.setitem(PRODUCTS, "vgemm", spy)
    measure_products(network, most_rows=64, budget_s=60)
    linears = [one for layer in network.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert seen == {
        (size, size - 16, one.weight.data_ptr(), None if one.bias is None else one.bias.data_ptr())
        for size in (32, 64)
        for one in linears
    }


def test_what_a_device_cannot_run_is_left_out(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):
        """As Triton's, which is no RuntimeError."""

    def fail(*_: object) -> Tensor:
        raise OutOfResources

    monkeypatch.setitem(PRODUCTS, "vgemm", fail)
    assert all("vgemm" not in one.us for one in measure_products(merged(small_model), most_rows=32, budget_s=60))
    monkeypatch.setitem(PRODUCTS, "library", fail)
    with pytest.raises(OutOfResources):
        measure_products(merged(small_model), most_rows=32, budget_s=60)


@pytest.mark.parametrize("seed", range(3))
def test_the_text_stays_whatever_is_chosen(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)

    def clock(run: Callable[[], None], device: torch.device, repeats: int) -> float:
        run()
        return rng.random()

    monkeypatch.setattr(products, "median_ms", clock)
    times = measure_products(merged(small_model), most_rows=512, budget_s=60)
    kept = json.loads(json.dumps([asdict(one) for one in times]))
    chosen = choices(ProductTimes(**one) for one in kept)
    assert "vgemm" in chosen.values()
    assert len(chosen) < len(times)
    for (rows, outputs, inputs), way in chosen.items():
        [one] = [t for t in times if (t.rows, t.outputs, t.inputs) == (rows, outputs, inputs)]
        assert way == one.fastest != "library"
    requests = random_requests(seed, 6, BASE.max_new_tokens)
    called = []
    monkeypatch.setitem(PRODUCTS, "vgemm", lambda *of, plain=PRODUCTS["vgemm"]: (called.append(1), plain(*of))[1])
    assert static_texts(small_model, BASE, requests, products=chosen) == texts(small_model, BASE, requests)
    count = len(called)
    assert count > 0
    static_texts(small_model, BASE, requests)
    assert len(called) == count, "another engine of the same model has choices of its own"


def test_rows_of_a_bucket_on_average() -> None:
    by_size: dict[int, list[int]] = {size: [] for size in ladder()}
    for rows in range(1, max(by_size) + 1):
        by_size[bucket(rows)].append(rows)
    for size, rows in by_size.items():
        assert abs(average(size) - sum(rows) / len(rows)) <= 0.5


def test_weights_that_no_cache_holds() -> None:
    assert enough(100, 50) == 8
    assert enough(1000, 50) == 2, "one would stay in it from run to run"
