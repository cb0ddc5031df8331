"""Moments in 8 bits from mt-optim agree with mt-fp8's definition."""

from __future__ import annotations

import pytest
import torch
from mt_fp8 import Scaling, quantize
from mt_optim import OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

BLOCKS, SIZE = 40, 256


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_in_fp8_have_the_codes_and_scales_of_mt_fp8(key) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-40, 10, (BLOCKS, 1), generator=generator)
    value = torch.randn(BLOCKS, SIZE, generator=generator) * 2.0**exponents
    value[0] = 0
    value = value.square() if key == "exp_avg_sq" else value
    model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(BLOCKS, SIZE))})
    config = OptimizerConfig(name="adamw", lr=1e-3, moments_dtype="fp8")
    optimizer = build_optimizer(model, config, ParallelState(ParallelLayout(), device="cpu"))
    optimizer.set_moment("weight", key, value)
    state = optimizer.state[model["weight"]]

    expected = quantize(value, Scaling(block=(1, SIZE), scale="pow2"))
    codes = expected.data.view(torch.uint8)
    if key == "exp_avg_sq":  # no square becomes zero, but zero
        codes = torch.where((value > 0) & (codes == 0), 1, codes)
        assert (codes != expected.data.view(torch.uint8)).any()
    assert torch.equal(state[key].view(torch.uint8), codes)
    assert torch.equal(state[f"{key}_scale"][1:], expected.scales[1:, 0])
    read = codes.view(torch.float8_e4m3fn).float() * expected.scales
    assert torch.equal(optimizer.moment("weight", key), read)
