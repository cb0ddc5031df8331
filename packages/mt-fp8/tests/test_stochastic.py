"""Rounding at random is right in the mean, takes one of the two neighbours, and has no state."""

from fractions import Fraction

import pytest
import torch
from drawing import LAYOUTS, hard, laid_out, same_bits
from exact import magnitudes, step
from mt_fp8 import Scaling, quantize
from mt_kernels import random_bits

FORMATS = ("e4m3", "e5m2", "e2m1")


def rounded(x, name, seed):
    scaling = Scaling(format=name, stochastic=True)
    return quantize(x, scaling, factor=torch.ones(()), seed=seed).dequantize()


@pytest.mark.parametrize("name", FORMATS)
def test_the_mean_over_seeds_is_the_number(name):
    top = float(magnitudes(name)[-1])
    x = torch.linspace(-top, top, 61)
    x = torch.cat((x, torch.linspace(-1, 1, 40) * 0.9, torch.tensor([0.3, 5.3, 0.01])))
    count = 3000
    total = torch.zeros(x.numel(), dtype=torch.float64)
    for seed in range(count // 100):
        many = x.expand(100, -1)
        total += rounded(many, name, seed).double().sum(0)
    for mean, item in zip((total / count).tolist(), x.tolist(), strict=True):
        width = float(step(name, Fraction(item)))
        # A share p of steps has a deviation of at most half a step: five of the mean's.
        assert abs(mean - item) <= 5 * width / 2 / count**0.5, item


@pytest.mark.parametrize("name", FORMATS)
def test_only_neighbours_are_taken_and_values_of_the_format_stay(name):
    values = [float(v) for v in magnitudes(name)]
    x = torch.tensor([*values, *(-v for v in values)])
    assert torch.equal(rounded(x, name, 4), x)
    top = values[-1]
    drawn = torch.randn(3000, generator=torch.Generator().manual_seed(1)).clamp(-top, top)
    for item, found in zip(drawn.tolist(), rounded(drawn, name, 5).tolist(), strict=True):
        below = max(v for v in values if v <= abs(item))
        above = min(v for v in values if v >= abs(item))
        assert abs(found) in (below, above)
        assert found * item >= 0


def test_bits_depend_on_seed_and_place_alone():
    scaling = Scaling(block=(1, 16), format="e2m1", scale="nvfp4", stochastic=True)
    x = hard(7, 48, seed=2)
    plain = quantize(x, scaling, seed=11)
    state = torch.get_rng_state()
    for layout in LAYOUTS[:-1]:
        assert same_bits(quantize(laid_out(x, layout), scaling, seed=11), plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(quantize(x, scaling, seed=torch.tensor(11)), plain)
    assert not same_bits(quantize(x, scaling, seed=12), plain)


def test_nvfp4_at_random_is_right_in_the_mean():
    scaling = Scaling(block=(1, 16), format="e2m1", scale="nvfp4", stochastic=True)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    q = quantize(x, scaling, seed=0)
    count = 600
    total = sum(quantize(x, scaling, seed=i).dequantize(torch.float64) for i in range(count))
    spread = q.steps().repeat_interleave(16, 1)  # half of the widest step
    clipped = (x.abs() - 6 * q.steps().repeat_interleave(16, 1)).clamp_min(0)
    assert ((total / count - x).abs() <= 5 * spread / count**0.5 + clipped + 1e-6).all()


def test_random_bits_are_those_of_a_counter():
    # Those of `random_uniform(3, torch.arange(3))` of mt-parallel-state, times 2^24.
    assert random_bits(3, torch.arange(3)).tolist() == [13008442, 7238834, 9999032]


def test_wrong_seeds_are_named():
    scaling = Scaling(stochastic=True)
    with pytest.raises(ValueError, match="seed must be from 0"):
        quantize(torch.ones(2), scaling, seed=-1)
    with pytest.raises(TypeError, match="seed must be int64"):
        quantize(torch.ones(2), scaling, seed=torch.ones(2))
    with pytest.raises(TypeError, match="seed must be an int"):
        quantize(torch.ones(2), scaling, seed="a")
