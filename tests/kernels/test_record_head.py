"""The tiled record head says what a naive softmax over all logits says, in the same bits in any batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from lopa_dist.kernels import record_head as module
from lopa_dist.kernels.random import gumbel
from lopa_dist.kernels.record_head import filter_logits, record_head
from lopa_dist.kernels.sampling import Sampling

CONFIDENCES = ("probability", "margin", "neg_entropy")
RULES = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 7},
    {"temperature": 0.7, "top_k": 1000},
)
VOCABULARY_SIZE = 101


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(module, "VOCABULARY", 16)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(rows: int, vocabulary: int = VOCABULARY_SIZE, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden rows and a head on a coarse grid, so that logits are exact in fp32 and ties are common."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (rows, 8), generator=generator).float()
    weight = torch.randint(-3, 4, (vocabulary, 8), generator=generator) / 4
    return hidden, weight


def distribution(logits: list[float], sampling: Sampling, mask_id: int) -> list[float]:
    """Probabilities after temperature, mask, top-k and top-p, in Python floats."""
    scaled = [x / sampling.temperature if sampling.temperature else x for x in logits]
    scaled[mask_id] = -math.inf
    if sampling.temperature and sampling.top_k:
        least = sorted(scaled, reverse=True)[: sampling.top_k][-1]
        scaled = [x if x >= least else -math.inf for x in scaled]
    if sampling.temperature and sampling.top_p < 1:
        weights = [math.exp(x) for x in scaled]
        most = sampling.top_p * sum(weights)
        greater = [sum(w for y, w in zip(scaled, weights, strict=True) if y > x) for x in scaled]
        scaled = [x if mass <= most else -math.inf for x, mass in zip(scaled, greater, strict=True)]
    exponentials = [math.exp(x) for x in scaled]
    return [x / sum(exponentials) for x in exponentials]


def oracle(
    hidden: Tensor, weight: Tensor, mask_id: int, keys: Tensor, sampling: Sampling
) -> list[tuple[int, float, float]]:
    """One row at a time, whole distributions, fp64."""
    records = []
    for row, key in zip(hidden.double(), keys, strict=True):
        p = distribution((weight.double() @ row).tolist(), sampling, mask_id)
        preference = [math.log(x) if x else -math.inf for x in p]
        if sampling.temperature:
            noise = gumbel(key[None], torch.arange(len(p)))[0].tolist()
            preference = [x + n for x, n in zip(preference, noise, strict=True)]
        # an exact tie of logits is one up to rounding here: the lower id wins
        token = next(i for i, x in enumerate(preference) if x >= max(preference) - 1e-9)
        first, second = sorted(p, reverse=True)[:2]
        confidence = {
            "probability": p[token],
            "margin": first - second,
            "neg_entropy": sum(x * math.log(x) for x in p if x),
        }[sampling.confidence]
        records.append((token, p[token], confidence))
    return records


def read(records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert records.dtype == torch.int32
    token, probability, confidence = records.T.contiguous()
    return token, probability.view(torch.float32), confidence.view(torch.float32)


def agree(records: Tensor, wanted: list[tuple[int, float, float]]) -> None:
    token, probability, confidence = read(records)
    assert token.tolist() == [t for t, _, _ in wanted]
    assert probability.tolist() == pytest.approx([p for _, p, _ in wanted], rel=1e-5, abs=1e-7)
    assert confidence.tolist() == pytest.approx([c for _, _, c in wanted], rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("mask_id", [0, 50, VOCABULARY_SIZE - 1])
def test_against_the_oracle(confidence: str, rules: dict[str, Any], mask_id: int) -> None:
    hidden, weight = inputs(21)
    keys, sampling = torch.arange(21) + 7, Sampling(confidence, **rules)
    agree(record_head(hidden, weight, mask_id, keys, sampling), oracle(hidden, weight, mask_id, keys, sampling))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_second_choice_is_that_without_the_first(
    rules: dict[str, Any], tiles: bool, request: pytest.FixtureRequest
) -> None:
    if tiles:
        request.getfixturevalue("small_tiles")
    hidden, weight = inputs(21)
    keys, sampling = torch.arange(21) + 7, Sampling("probability", **rules)
    found = record_head(hidden, weight, 50, keys, sampling, second_choices=True)
    assert torch.equal(found[:, :3], record_head(hidden, weight, 50, keys, sampling))
    for row, record, key in zip(hidden.double(), found, keys, strict=True):
        p = distribution((weight.double() @ row).tolist(), sampling, 50)
        preference = [math.log(x) if x else -math.inf for x in p]
        if sampling.temperature:
            noise = gumbel(key[None], torch.arange(len(p)))[0].tolist()
            preference = [x + n for x, n in zip(preference, noise, strict=True)]
        preference[int(record[0])] = -math.inf
        token = next(i for i, x in enumerate(preference) if x >= max(preference) - 1e-9)
        if p[token]:  # filters may leave one token
            assert int(record[3]) == token
        assert float(record[4:].view(torch.float32)) == pytest.approx(p[token], rel=1e-5, abs=1e-7)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("mask_id", [0, 17, VOCABULARY_SIZE - 1])
def test_many_small_tiles_against_the_oracle(confidence: str, rules: dict[str, Any], mask_id: int) -> None:
    hidden, weight = inputs(21, seed=1)
    keys, sampling = torch.arange(21) * 1000, Sampling(confidence, **rules)
    agree(record_head(hidden, weight, mask_id, keys, sampling), oracle(hidden, weight, mask_id, keys, sampling))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("mask_id", [5, 16])
def test_a_last_tile_of_one_token(confidence: str, mask_id: int) -> None:
    hidden, weight = inputs(5, vocabulary=17)
    keys, sampling = torch.arange(5), Sampling(confidence)
    agree(record_head(hidden, weight, mask_id, keys, sampling), oracle(hidden, weight, mask_id, keys, sampling))


def test_real_valued_logits_of_great_size() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 32, generator=generator) * 4
    weight = torch.randn(300, 32, generator=generator)
    for confidence in CONFIDENCES:
        sampling = Sampling(confidence)
        token, probability, value = read(record_head(hidden, weight, 3, torch.zeros(40).long(), sampling))
        wanted = oracle(hidden, weight, 3, torch.zeros(40).long(), sampling)
        assert token.tolist() == [t for t, _, _ in wanted]
        assert probability.tolist() == pytest.approx([p for _, p, _ in wanted], rel=1e-4)
        assert value.tolist() == pytest.approx([c for _, _, c in wanted], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_on_a_tie_the_lower_id_is_taken_across_tiles(confidence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VOCABULARY", 4)
    weight = torch.zeros(12, 1)
    weight[[3, 6, 7, 11]] = 1.0
    token, probability, value = read(record_head(torch.ones(2, 1), weight, 3, torch.arange(2), Sampling(confidence)))
    assert token.tolist() == [6, 6]
    p, rest = math.e / (3 * math.e + 8), 1 / (3 * math.e + 8)
    entropy = 3 * p * math.log(p) + 8 * rest * math.log(rest)
    assert probability.tolist() == pytest.approx([p, p])
    wanted = {"probability": p, "margin": 0.0, "neg_entropy": entropy}[confidence]
    assert value.tolist() == pytest.approx([wanted] * 2, abs=1e-6)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_mask_is_never_predicted(rules: dict[str, Any]) -> None:
    hidden, weight = inputs(60)
    weight[33] = 50 * hidden.sign().sum(0)
    weight[34] = -weight[33]  # whatever the row, one of the two dwarfs all other logits
    for mask_id in (33, 34):
        token, probability, _ = read(record_head(hidden, weight, mask_id, torch.arange(60), Sampling(**rules)))
        assert mask_id not in token.tolist()
        assert probability.gt(0).all()
        assert probability.le(1).all()


def test_no_rows_give_no_records() -> None:
    """Nor need they have keys: a chunk of a prompt has none, even if its request is sampled."""
    hidden, weight = inputs(0)
    for keys, sampling in ((torch.zeros(0).long(), Sampling()), (None, Sampling(temperature=1.0, top_p=0.5))):
        assert record_head(hidden, weight, 3, keys, sampling).shape == (0, 3)
        assert record_head(hidden, weight, 3, keys, sampling, second_choices=True).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rules", [*RULES[:2], RULES[4], {"confidence": "margin"}], ids=str)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, rules: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(90, 192, generator=generator).to(dtype)
    weight = (torch.randn(500, 192, generator=generator) / 4).to(dtype)
    keys, sampling = torch.arange(90), Sampling(**rules)
    together = record_head(hidden, weight, 3, keys, sampling)
    order = torch.randperm(90, generator=generator)
    batches = [
        order,
        *order.split(5),
        *order[:33].split(33),
        *torch.arange(90).split(17),
        *order[:9].split(1),
    ]
    for batch in batches:
        assert torch.equal(record_head(hidden[batch], weight, 3, keys[batch], sampling), together[batch])


@pytest.mark.usefixtures("two_threads")
def test_bits_of_a_lone_row_of_a_great_vocabulary() -> None:
    """One row of more than 32,768 numbers is what torch would share out among threads."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 16, generator=generator), torch.randn(33_000, 16, generator=generator)
    keys, sampling = torch.arange(6), Sampling(temperature=0.8, top_p=0.9)
    together = record_head(hidden, weight, 3, keys, sampling)
    alone = [record_head(hidden[i : i + 1], weight, 3, keys[i : i + 1], sampling) for i in range(6)]
    assert torch.equal(torch.cat(alone), together)


def chi_square(tokens: Tensor, p: list[float]) -> float:
    seen = torch.bincount(tokens.long(), minlength=len(p)).tolist()
    assert all(n == 0 for n, x in zip(seen, p, strict=True) if x == 0)
    return sum((n - len(tokens) * x) ** 2 / (len(tokens) * x) for n, x in zip(seen, p, strict=True) if x)


@pytest.mark.parametrize("rules", RULES[1:5], ids=str)
@pytest.mark.parametrize("tile", [4, 8192])
def test_samples_follow_the_distribution(rules: dict[str, Any], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 2048)
    monkeypatch.setattr(module, "VOCABULARY", tile)
    logits = torch.tensor([0.3, 2.0, -1.0, 9.0, 1.5, 0.0, 0.7, -2.0, 1.1, 0.2, 1.9, -0.5])
    sampling, mask_id, count = Sampling(**rules), 3, 16384
    tokens, _, _ = read(record_head(torch.ones(count, 1), logits[:, None], mask_id, torch.arange(count), sampling))
    p = distribution(logits.tolist(), sampling, mask_id)
    assert chi_square(tokens, p) < 29.6  # 10 degrees of freedom at most: once in a thousand
    halves = tokens.view(2, -1)
    assert not torch.equal(halves[0], halves[1])


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.5}], ids=str)
def test_without_a_temperature_filters_make_no_token_surer(filters: dict[str, Any]) -> None:
    """A threshold compares the probability: of one token that is left it would be 1."""
    hidden, weight = inputs(21)
    assert torch.equal(
        record_head(hidden, weight, 50, None, Sampling(**filters)), record_head(hidden, weight, 50, None, Sampling())
    )


def test_a_sample_follows_from_its_key_alone() -> None:
    hidden, weight = inputs(1)
    sampling = Sampling(temperature=2.0)
    records = record_head(hidden.expand(64, -1), weight, 3, torch.arange(64) % 8, sampling)
    assert torch.equal(records, records[:8].repeat(8, 1))
    assert len(set(records[:8, 0].tolist())) > 1


class Sizes(TorchDispatchMode):
    """Keeps the shapes of all tensors that operations give out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.shapes += [tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


@pytest.mark.parametrize("rules", [{}, *({"confidence": c} for c in CONFIDENCES), *RULES[1:5]], ids=str)
def test_logits_of_all_rows_never_exist(rules: dict[str, Any]) -> None:
    hidden, weight = inputs(200, vocabulary=300)
    with Sizes() as sizes:
        record_head(hidden, weight, 3, torch.arange(200), Sampling(**rules))
    assert (64, 300) in sizes.shapes  # a tile of logits is seen, so more would be
    assert max(math.prod(shape) for shape in sizes.shapes) < 100 * 300


@pytest.mark.usefixtures("small_tiles")
def test_no_tile_is_larger_than_asked_for() -> None:
    hidden, weight = inputs(30, vocabulary=300)
    with Sizes() as sizes:
        record_head(hidden, weight, 3, torch.arange(30), Sampling(temperature=1.0))
    tiles = {shape for shape in sizes.shapes if len(shape) == 2 and shape[1] > hidden.shape[1]}
    sums = -(-300 // 16)  # of so many tiles
    assert {shape[1] for shape in tiles} == {16, 300 % 16, sums}
    assert max(shape[0] for shape in tiles if shape[1] != sums) <= module.ROW_TILE


def kept(logits: list[float], top_p: float = 1.0, top_k: int = 0) -> list[int]:
    filtered = filter_logits(torch.tensor([logits]), top_p, top_k)[0]
    return (filtered > torch.finfo(torch.float32).min).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("k", "wanted"),
    [(1, [1]), (2, [0, 1, 3, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])],
)
def test_top_k_keeps_ties_at_the_kth(k: int, wanted: list[int]) -> None:
    assert kept([2.0, 3.0, 1.0, 2.0, 2.0], top_k=k) == wanted


def test_top_p_keeps_ties() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 2.0], top_p=0.6) == [1, 2, 3, 4]


@pytest.mark.parametrize(("p", "wanted"), [(1e-9, [1]), (0.45, [1]), (0.6, [1, 2]), (0.79, [1, 2]), (0.81, [0, 1, 2])])
def test_top_p_drops_what_follows_enough_mass(p: float, wanted: list[int]) -> None:
    assert kept([math.log(0.2), math.log(0.5), math.log(0.3)], top_p=p) == wanted


def test_top_p_counts_what_top_k_left() -> None:
    assert kept([math.log(x) for x in (0.4, 0.3, 0.2, 0.1)], top_p=0.35, top_k=3) == [0]
    assert kept([math.log(x) for x in (0.4, 0.3, 0.2, 0.1)], top_p=0.95, top_k=3) == [0, 1, 2]


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 20), (0.95, 5), (0.3, 0), (1.0, 7), (0.99, 1)])
def test_filters_leave_what_those_of_transformers_do(top_p: float, top_k: int) -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(1)) * 2
    wanted = TopKLogitsWarper(top_k)(None, logits) if top_k else logits  # type: ignore[arg-type]
    wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted  # type: ignore[arg-type]
    kept = filter_logits(logits, top_p, top_k) > torch.finfo(torch.float32).min
    assert torch.equal(kept, wanted.isfinite())
    assert torch.equal(filter_logits(logits, top_p, top_k)[kept], logits[kept])
