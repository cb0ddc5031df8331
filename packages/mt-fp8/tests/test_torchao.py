"""The same bits as torchao, where its quantisers run on a CPU."""

import importlib
import logging
import warnings

import pytest
import torch
from drawing import hard
from mt_fp8 import Scaling, quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def torchao(module):
    pytest.importorskip("torchao", exc_type=ImportError)
    return importlib.import_module(f"torchao.{module}")


@pytest.fixture(autouse=True, scope="module")
def quiet_import():
    """It has invalid escapes, which Python warns of where it is compiled, and logs about torch."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao", exc_type=ImportError)
        torchao("prototype.mx_formats.nvfp4_tensor")
    yield
    logging.disable(logging.NOTSET)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("mode", ["floor", "rceil"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_formats(mode, name, dtype):
    mx = torchao("prototype.mx_formats.mx_tensor")
    elements = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": torch.float4_e2m1fn_x2}[name]
    rounding = "floor" if mode == "floor" else "up"
    scaling = Scaling(format=name, block=(1, 32), scale="e8m0", exponent=rounding)
    x = hard(64, 256, seed=1, dtype=dtype)
    scales, data = mx.to_mx(x, elements, 32, mx.ScaleCalculationMode(mode))
    q = quantize(x, scaling)
    # What is all zeros, or tiny, has a scale of no matter there: codes decide.
    large = x.float().abs().unflatten(-1, (-1, 32)).amax(-1) > 1e-25
    assert torch.equal(q.steps()[large], scales.view(q.steps().shape).float()[large])
    wide = large.repeat_interleave(32 // scaling.elements.per_byte, -1)
    assert same(q.data[wide], data.view(q.data.shape)[wide] if name != "e2m1" else data[wide])


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", ["tensor", "row"])
def test_float8_of_tensors_and_rows(power, dtype, block):
    utils = torchao("float8.float8_utils")
    name = "e4m3" if dtype == E4M3 else "e5m2"
    x = hard(32, 80, seed=2)
    x[1:3] = x[3:5]  # zero and tiny rows have an amax of 1e-12 there
    granularity = {"tensor": "TENSORWISE", "row": "AXISWISE"}[block]
    factor = utils.tensor_to_scale(
        x, dtype, axiswise_dim=-1, round_scales_to_power_of_2=power,
        scaling_granularity=utils.ScalingGranularity[granularity],
    )  # fmt: skip
    q = quantize(x, Scaling(format=name, block=block, scale="pow2" if power else "fp32"))
    assert same(q.data, utils.to_fp8_saturated(x * factor, dtype))
    assert torch.equal(q.scales, torch.ones_like(factor) / factor)


def test_nvfp4_but_for_the_rounding_of_its_products():
    fp4 = torchao("prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    q = quantize(x, Scaling(format="e2m1", block=(1, 16), scale="nvfp4"))
    scales, data = fp4.nvfp4_quantize(x, 16, fp4.per_tensor_amax_to_scale(x.abs().max()))
    different = scales.view(q.scales.shape).view(torch.uint8) != q.scales.view(torch.uint8)
    assert different.float().mean() < 1e-3
    assert (data.view(q.data.shape) != q.data).float().mean() < 1e-3
