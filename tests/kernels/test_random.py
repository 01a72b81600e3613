"""Counter-based noise: the right distribution, a function of key and counter alone, the same for ever."""

from __future__ import annotations

import math

import pytest
import torch

from lopa_dist.kernels.random import gumbel, mix

MODULUS = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def splitmix(x: int) -> int:
    """The published finaliser, in Python's integers."""
    x %= MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31)


def unsplitmix(x: int) -> int:
    """Its inverse."""
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, MODULUS) % MODULUS
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, MODULUS) % MODULUS
    return x ^ (x >> 30) ^ (x >> 60)


def signed(x: int) -> int:
    return x - MODULUS if x >= MODULUS // 2 else x


def counter_of(bits: int, key: int) -> int:
    """The counter at which `key` draws these 64 bits."""
    return signed((unsplitmix(bits) - splitmix(key)) * pow(GOLDEN, -1, MODULUS) % MODULUS)


def test_mix_is_splitmix64() -> None:
    values = [0, 1, 2, -1, -2, 12345678901234567, -(2**63), 2**63 - 1]
    assert [x % MODULUS for x in mix(torch.tensor(values)).tolist()] == [splitmix(x) for x in values]
    # the first outputs of the generator seeded with 0, as published
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    state = torch.tensor([signed(GOLDEN * n % MODULUS) for n in (1, 2, 3)])
    assert [x % MODULUS for x in mix(state).tolist()] == published


def test_values_are_pinned() -> None:
    noise = gumbel(torch.tensor([1, -5]), torch.tensor([0, 1, 151_665]))
    assert noise.dtype == torch.float32
    assert noise.flatten().tolist() == pytest.approx(
        [0.3073301, 1.2447330, 0.3960460, 1.5175599, 0.3805172, 1.3042743], abs=1e-5
    )


def test_gumbel_of_the_hash() -> None:
    keys, counters = [0, 3, -9, 1 << 60], [1, 2, 70_000]
    for key, row in zip(keys, gumbel(torch.tensor(keys), torch.tensor(counters)).tolist(), strict=True):
        for counter, value in zip(counters, row, strict=True):
            uniform = ((splitmix(splitmix(key) + counter * GOLDEN) >> 40) + 0.5) / 2**24
            assert value == pytest.approx(-math.log(-math.log(uniform)), abs=1e-4)


@pytest.mark.parametrize("top", [0, 1, 2**23 - 1, 2**23, 2**24 - 3, 2**24 - 2, 2**24 - 1])
def test_noise_is_finite_for_every_hash(top: int) -> None:
    counters = torch.tensor([counter_of((top << 40) + low, key=77) for low in (0, (1 << 40) - 1)])
    noise = gumbel(torch.tensor([77]), counters)
    assert noise.isfinite().all()
    uniform = (top + 0.5) / 2**24
    assert noise[0].tolist() == pytest.approx([-math.log(-math.log(uniform))] * 2, abs=1.2)  # the last steps are coarse


def test_noise_is_finite_at_a_real_token() -> None:
    assert gumbel(torch.tensor([26]), torch.tensor([98_052])).isfinite().all()


def test_moments_and_quantiles() -> None:
    noise = gumbel(torch.arange(1024), torch.arange(1024)).double()
    assert noise.shape == (1024, 1024)
    assert noise.mean().item() == pytest.approx(0.577216, abs=0.006)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for x in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0):
        p = math.exp(-math.exp(-x))
        assert (noise < x).double().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p)) / 1024)


def test_neighbours_are_not_correlated() -> None:
    noise = gumbel(torch.arange(512) - 100, torch.arange(2048)).double()
    noise = (noise - noise.mean()) / noise.std()
    pairs = [(noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[1:, :-1], noise[:-1, 1:])]
    for a, b in pairs:
        assert abs((a * b).mean().item()) < 5 / math.sqrt(a.numel())
    rows, columns = noise.mean(1) * math.sqrt(2048), noise.mean(0) * math.sqrt(512)
    assert rows.abs().max() < 5
    assert columns.abs().max() < 5
    assert rows.var().item() == pytest.approx(1, abs=0.35)
    assert columns.var().item() == pytest.approx(1, abs=0.2)


def test_a_value_follows_from_its_key_and_counter_alone() -> None:
    keys, counters = torch.arange(40) * 7919, torch.arange(300)
    whole = gumbel(keys, counters)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(keys[order], counters[100:117]), whole[order, 100:117])
    assert torch.equal(gumbel(keys[5:6], counters[299:]), whole[5:6, 299:])
    assert len(set(whole.flatten().tolist())) > 0.99 * whole.numel()
