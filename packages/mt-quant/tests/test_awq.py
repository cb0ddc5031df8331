"""AWQ, SmoothQuant and SVDQuant against their formulas and round-to-nearest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from mt_quant import (
    CalibrationError,
    QuantizationError,
    Statistics,
    WeightFormat,
    awq,
    output_error,
    rtn,
    smoothquant,
    svdquant,
)
from mt_quant.formats.grid import find_grid, round_to_grid
from mt_quant.methods.awq import awq_scale
from mt_quant.methods.smoothquant import smoothquant_scale
from torch import Tensor

FORMATS = ["int4-g16", "int4-g16-asym", "int4-channel", "int8", "int4-tensor", "mxfp4", "nvfp4"]


def example(seed: int = 0) -> tuple[Tensor, Tensor, Statistics]:
    """A weight, inputs with a few large features, and their statistics."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 64, generator=generator)
    x = torch.randn(400, 64, generator=generator)
    x[:, [3, 40]] *= torch.tensor([30.0, 12.0])
    statistics = Statistics(tokens=len(x), abs_max=x.abs().amax(0), hessian=x.T @ x / len(x))
    return weight, x, statistics


def measured(weight: Tensor, made: Tensor, x: Tensor) -> float:
    return float(((made - weight).double() @ x.double().T).square().sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMATS)
def test_awq_has_less_error_than_round_to_nearest(name: str, seed: int) -> None:
    weight, x, statistics = example(seed)
    format = WeightFormat.named(name)
    errors = [
        measured(weight, made.dequantize(), x)
        for made in (
            awq(weight, format, statistics),
            awq(weight, format, statistics, clip=False),
            rtn(weight, format),
        )
    ]
    assert errors[0] <= errors[1] * (1 + 1e-5)
    assert errors[1] < 0.95 * errors[2]


def test_the_exponent_is_the_one_that_a_plain_search_finds() -> None:
    weight, x, statistics = example()
    format = WeightFormat.named("int4-g16")
    rms = x.square().mean(0).sqrt()
    errors = {}
    for i in range(21):
        factor = rms ** (i / 20)
        scaled = weight * factor / (factor.max() * factor.min()).sqrt()
        rounded = round_to_grid(scaled, find_grid(scaled, format)) / scaled * weight
        errors[i] = measured(weight, rounded, x)
    exponent = min(errors, key=errors.__getitem__) / 20
    scale = awq_scale([weight], format, statistics.hessian)
    assert scale is not None
    assert 0 < exponent < 1
    ratio = (scale[3] / scale[40]).log() / (rms[3] / rms[40]).log()
    assert float(ratio) == pytest.approx(exponent, abs=1e-4)


def test_scales_of_layers_that_share_an_input_serve_their_sum() -> None:
    weight, _, statistics = example()
    other = torch.randn(64, 64, generator=torch.Generator().manual_seed(9)) * 3
    format = WeightFormat.named("int4-g16")
    together = awq_scale([weight, other], format, statistics.hessian)
    whole = awq_scale([torch.cat((weight, other))], format, statistics.hessian)
    assert together is not None
    assert whole is not None
    assert torch.equal(together, whole)


def test_even_inputs_and_no_input_need_no_scale() -> None:
    weight = example()[0]
    format = WeightFormat.named("int8")
    assert awq_scale([weight], format, torch.zeros(64, 64)) is None
    even = Statistics(tokens=4, hessian=torch.eye(64))
    assert awq(weight, format, even).input_scale is None
    assert awq(weight, format, even, scale=False).input_scale is None


def test_a_range_with_one_far_weight_is_clipped() -> None:
    weight, x, _ = example()
    x = torch.randn_like(x)
    weight = weight.clamp(-1, 1)
    weight[:, 5] = 1.5
    statistics = Statistics(tokens=len(x), hessian=x.T @ x / len(x))
    format = WeightFormat.named("int4-channel")
    clipped = awq(weight, format, statistics, scale=False)
    whole = rtn(weight, format)
    assert bool((clipped.weight.scale < whole.weight.scale).any())
    assert measured(weight, clipped.dequantize(), x) < measured(weight, whole.dequantize(), x)


@pytest.mark.parametrize(
    "options", [{"step": 0.0}, {"step": 1.5}, {"step": float("nan")}, {"least_clip": 1.0}]
)
def test_bad_options_of_awq_are_refused(options: dict[str, float]) -> None:
    weight, _, statistics = example()
    with pytest.raises(QuantizationError, match=next(iter(options))):
        awq(weight, WeightFormat.named("int8"), statistics, **options)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_smoothquant_scales_by_the_formula(alpha: float) -> None:
    weight, x, statistics = example()
    factor = smoothquant_scale([weight], statistics.abs_max, alpha=alpha)
    expected = x.abs().amax(0) ** alpha / weight.abs().amax(0) ** (1 - alpha)
    torch.testing.assert_close(factor, expected)
    made = smoothquant(weight, WeightFormat.named("int8"), statistics, alpha=alpha)
    assert made.input_scale is not None
    torch.testing.assert_close(made.input_scale, 1 / expected)
    half = made.weight.scale.float() / 2 * made.input_scale
    assert bool(((made.dequantize() - weight).abs() <= half * 1.001).all())


def test_smoothquant_makes_int8_inputs_and_weights_together_better() -> None:
    weight, x, statistics = example()
    format = WeightFormat.named("int8")

    def both_rounded(made: Tensor, scale: Tensor) -> float:
        inputs = x * scale
        step = inputs.abs().amax() / 127
        y = (inputs / step).round() * step @ (made / scale).T
        return float((y - x @ weight.T).square().sum())

    smooth = smoothquant(weight, format, statistics)
    assert smooth.input_scale is not None
    plain = both_rounded(rtn(weight, format).dequantize(), torch.ones(64))
    assert both_rounded(smooth.dequantize(), smooth.input_scale) < 0.3 * plain


def test_features_that_are_always_zero_are_not_scaled() -> None:
    weight, x, _ = example()
    weight[:, 1], x[:, 2] = 0, 0
    factor = smoothquant_scale([weight], x.abs().amax(0))
    assert factor[1] == factor[2] == 1
    assert bool(factor.isfinite().all())


def test_svdquant_is_exact_for_a_weight_of_its_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 4, generator=generator) @ torch.randn(4, 64, generator=generator)
    made = svdquant(weight, WeightFormat.named("int4-g16"), example()[2], rank=4)
    torch.testing.assert_close(made.dequantize(), weight, rtol=1e-4, atol=1e-4)


def test_svdquant_has_less_error_the_higher_its_rank() -> None:
    weight, _, statistics = example()
    format = WeightFormat.named("int4-g16")
    errors = [
        output_error(weight, svdquant(weight, format, statistics, rank=rank), statistics)
        for rank in (2, 8, 24)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_the_remainder_makes_up_for_a_product_in_bf16() -> None:
    weight, _, statistics = example()
    made = svdquant(weight.bfloat16(), WeightFormat.named("int8"), statistics, rank=8)
    assert made.low_rank is not None
    assert made.low_rank[0].dtype == torch.bfloat16
    assert output_error(weight.bfloat16().float(), made, statistics) < 1e-4


def test_more_rounds_of_svdquant_are_never_worse() -> None:
    weight = example()[0]
    format, ones = WeightFormat.named("int4-channel"), Statistics(tokens=1, abs_max=torch.ones(64))
    errors = [
        float(
            (
                svdquant(weight, format, ones, rank=4, alpha=0.0, rounds=n).dequantize() - weight
            ).norm()
        )
        for n in (1, 10)
    ]
    assert errors[1] <= errors[0] * (1 + 1e-5)


@pytest.mark.parametrize("rank", [0, 25])
def test_a_rank_that_the_weight_does_not_have_is_refused(rank: int) -> None:
    weight, _, statistics = example()
    with pytest.raises(QuantizationError, match="rank must be 1 to 24"):
        svdquant(weight, WeightFormat.named("int8"), statistics, rank=rank)


@pytest.mark.parametrize("method", [smoothquant, partial(svdquant, rank=2)])
def test_bad_statistics_and_alpha_are_refused(method: Callable[..., object]) -> None:
    weight, _, statistics = example()
    with pytest.raises(CalibrationError, match="abs_max"):
        method(weight, WeightFormat.named("int8"), Statistics(tokens=2))
    with pytest.raises(QuantizationError, match="alpha must be between 0 and 1"):
        method(weight, WeightFormat.named("int8"), statistics, alpha=1.1)
