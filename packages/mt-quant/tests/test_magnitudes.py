"""Ranges from histograms against the values themselves."""

from __future__ import annotations

import pytest
import torch
from mt_quant import (
    CalibrationError,
    KVCalibrator,
    Magnitudes,
    QuantizationError,
    find_range,
)
from mt_quant.calibration.magnitudes import RANGES
from torch import Tensor


def seen(*batches: Tensor, rows: int = 1) -> Magnitudes:
    magnitudes = Magnitudes(rows)
    for batch in batches:
        magnitudes.update(batch)
    return magnitudes


def normal(count: int = 20000, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_max_is_exact_in_any_order_of_batches() -> None:
    x = normal()
    expected = x.abs().max()
    for batches in (x.chunk(7), reversed(x.chunk(7)), x.sort().values.split(100)):
        assert find_range(seen(*batches))[0] == expected


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0, 99.9, 100.0])
def test_percentile_is_that_of_the_values_to_a_bin(percentile: float) -> None:
    x = normal()
    magnitudes = seen(*x.split(777))
    exact = float(x.abs().double().quantile(percentile / 100, interpolation="higher"))
    found = float(find_range(magnitudes, "percentile", percentile=percentile)[0])
    assert abs(found - exact) <= 2 * float(magnitudes.width[0])
    assert int(magnitudes.counts.sum()) == len(x)


@pytest.mark.parametrize("levels", [7, 127])
def test_mse_is_the_range_with_the_least_error_of_the_values(levels: int) -> None:
    x = torch.cat((normal(), torch.tensor([9.0, -12.0])))

    def error(range: float) -> float:
        step = range / levels
        return float(((x / step).round().clamp(-levels, levels) * step - x).square().sum())

    found = float(find_range(seen(*x.split(999)), "mse", levels=levels)[0])
    best = min(error(12 * i / 400) for i in range(1, 401))
    assert error(found) <= 1.02 * best
    assert levels == 127 or found < 6


def test_entropy_cuts_a_long_tail_and_keeps_an_even_range() -> None:
    tail = torch.cat((normal(200000), torch.full((3,), 100.0)))
    assert float(find_range(seen(tail), "entropy")[0]) < 50
    even = torch.rand(200000, generator=torch.Generator().manual_seed(0))
    assert float(find_range(seen(even), "entropy")[0]) > 0.9


@pytest.mark.parametrize("by", RANGES)
def test_batches_that_grow_by_magnitudes_lose_nothing(by: str) -> None:
    parts = [normal(500, seed=i) * 10.0 ** (3 * i - 20) for i in range(12)]
    magnitudes = seen(*parts)
    assert int(magnitudes.counts.sum()) == 6000
    assert 0 < float(find_range(magnitudes, by)[0]) <= float(parts[-1].abs().max())


@pytest.mark.parametrize("by", RANGES)
@pytest.mark.parametrize("value", [3.0, -0.001, 1e-40, 3e38])
def test_the_range_of_a_constant_is_the_constant(by: str, value: float) -> None:
    found = float(find_range(seen(torch.full((50,), value)), by)[0])
    assert found == pytest.approx(abs(value), rel=1e-3)


@pytest.mark.parametrize("by", RANGES)
def test_zeros_have_range_zero_and_each_row_its_own(by: str) -> None:
    x = torch.stack((torch.zeros(300), normal(300), 1000 * normal(300)))
    found = find_range(seen(*x.split(50, dim=1), rows=3), by)
    alone = [find_range(seen(*row.split(50)), by)[0] for row in x]
    assert found[0] == 0
    assert torch.equal(found, torch.stack(alone))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_and_not_counted(bad: float) -> None:
    magnitudes = seen(torch.ones(4))
    with pytest.raises(CalibrationError, match="not finite"):
        magnitudes.update(torch.tensor([1.0, bad]))
    assert magnitudes.tokens == 4


def test_no_values_are_refused() -> None:
    for magnitudes in (Magnitudes(), seen(torch.empty(0))):
        with pytest.raises(CalibrationError, match="no value was seen"):
            find_range(magnitudes)


def test_bad_arguments_are_named() -> None:
    magnitudes = seen(torch.ones(4))
    with pytest.raises(QuantizationError, match="entropy"):
        find_range(magnitudes, "entropi")
    with pytest.raises(QuantizationError, match="percentile must be"):
        find_range(magnitudes, "percentile", percentile=0.0)
    with pytest.raises(QuantizationError, match="levels must be"):
        find_range(magnitudes, "mse", levels=0)
    with pytest.raises(QuantizationError, match=r"expected \[3, n\]"):
        seen(torch.ones(2, 5), rows=3)


def test_each_head_of_each_layer_has_scales_of_its_keys_and_values() -> None:
    generator = torch.Generator().manual_seed(0)
    calibrator, batches = KVCalibrator(), []
    for _ in range(3):
        key, value = torch.randn(2, 2, 5, 4, 8, generator=generator)
        key[:, :, 2] *= 50
        batches.append((key, value))
        calibrator.update("a", key, value)
        calibrator.update("b", 2 * key, value[..., :3])
    scales = calibrator.scales(limit=127)
    keys = torch.cat([key for key, _ in batches]).abs().amax((0, 1, 3))
    values = torch.cat([value for _, value in batches]).abs().amax((0, 1, 3))
    torch.testing.assert_close(scales["a"].key, keys / 127)
    torch.testing.assert_close(scales["a"].value, values / 127)
    torch.testing.assert_close(scales["b"].key, 2 * keys / 127)
    whole = calibrator.scales(limit=448, each="layer")["a"]
    torch.testing.assert_close(whole.key, (keys.max() / 448).expand(4))


def test_a_head_without_keys_has_scale_one_and_bad_ones_name_the_layer() -> None:
    calibrator = KVCalibrator()
    with pytest.raises(CalibrationError, match="no keys"):
        calibrator.scales()
    calibrator.update("a", torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert calibrator.scales()["a"].key.tolist() == [1, 1, 1]
    with pytest.raises(QuantizationError, match="a: value has shape"):
        calibrator.update("a", torch.ones(1, 2, 3, 4), torch.ones(1, 2, 2, 4))
    with pytest.raises(QuantizationError, match=r"a: values have shape \(2, 8\)"):
        calibrator.update("a", torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4))
    with pytest.raises(CalibrationError, match=r"b: .*not finite"):
        calibrator.update("b", torch.full((1, 2, 2, 4), float("nan")), torch.ones(1, 2, 2, 4))
    with pytest.raises(QuantizationError, match="limit"):
        calibrator.scales(limit=0)
