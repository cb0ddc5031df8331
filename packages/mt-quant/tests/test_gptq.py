"""GPTQ against the least-squares problem that it solves, one column at a time."""

from __future__ import annotations

import sys

import pytest
import torch
from mt_quant import (
    CalibrationError,
    QuantizationError,
    Statistics,
    WeightFormat,
    gptq,
    output_error,
    rtn,
)
from mt_quant.formats.grid import find_grid, round_to_grid
from mt_quant.formats.weight import encode
from torch import Tensor

FORMATS = ["int4-g16", "int4-g16-asym", "int4-channel", "int8", "int4-tensor", "int8-tensor-asym"]
FLOATS = ["fp8", "mxfp4", "nvfp4"]


def related_inputs(columns: int, *, tokens: int = 300, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ mixing
    x[:, columns // 3] *= 10
    return x


def statistics_of(x: Tensor) -> Statistics:
    return Statistics(tokens=len(x), hessian=x.T @ x / len(x))


def random_weight(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def solved_column_by_column(
    weight: Tensor, format: WeightFormat, hessian: Tensor, *, damping: float, order: list[int]
) -> Tensor:
    """Round a column, then solve the normal equations for all remaining columns, from scratch."""
    hessian = hessian.double() + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    grid, original = find_grid(weight, format), weight.double()
    current, made = original.clone(), torch.zeros_like(weight)
    for place, j in enumerate(order):
        made[:, j : j + 1] = round_to_grid(current[:, j : j + 1], grid, start=j)
        done, left = order[: place + 1], order[place + 1 :]
        moved = made[:, done].double() - original[:, done]
        products = hessian[left][:, done] @ moved.T
        current[:, left] = (
            original[:, left] - torch.linalg.solve(hessian[left][:, left], products).T
        )
    return made


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", FORMATS + FLOATS)
def test_each_column_is_rounded_at_the_least_squares_solution(
    name: str, act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["mt_quant.methods.gptq"], "_BLOCK", 5)
    weight, x = random_weight(12, 32), related_inputs(32)
    format, statistics = WeightFormat.named(name), statistics_of(x)
    hessian = x.T @ x / len(x)
    order = list(range(32))
    if act_order:
        order = torch.argsort(hessian.diagonal(), descending=True).tolist()
    expected = solved_column_by_column(weight, format, hessian, damping=0.01, order=order)
    options = {"act_order": act_order, "static_groups": True}
    made = gptq(weight, format, statistics, **options).weight
    error, nearest = (
        ((values - weight) @ x.T).square().sum(1)
        for values in (expected, rtn(weight, format).dequantize())
    )
    expected = torch.where((error > nearest)[:, None], rtn(weight, format).dequantize(), expected)
    assert torch.equal(made.codes(), encode(expected, made.grid).codes())


@pytest.mark.parametrize("static_groups", [False, True])
@pytest.mark.parametrize("name", FORMATS + FLOATS)
@pytest.mark.parametrize("seed", range(4))
def test_no_output_is_worse_than_round_to_nearest(
    name: str, seed: int, static_groups: bool
) -> None:
    weight, x = random_weight(40, 64, seed), related_inputs(64, tokens=40, seed=seed)
    format = WeightFormat.named(name)
    made = gptq(weight, format, statistics_of(x), static_groups=static_groups).dequantize()
    errors = [
        ((values - weight) @ x.T).double().square().sum(1)
        for values in (made, rtn(weight, format).dequantize())
    ]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())
    assert float(errors[0].sum()) < 0.9 * float(errors[1].sum())


def test_groups_found_on_the_way_start_from_the_changed_weight() -> None:
    weight, x = random_weight(16, 64), related_inputs(64)
    format, statistics = WeightFormat.named("int4-g16"), statistics_of(x)
    fresh = gptq(weight, format, statistics).weight
    static = gptq(weight, format, statistics, static_groups=True).weight
    assert torch.equal(static.scale, rtn(weight, format).weight.scale)
    assert torch.equal(fresh.scale[:, 0], static.scale[:, 0])
    assert not torch.equal(fresh.scale[:, 1:], static.scale[:, 1:])


def test_the_block_does_not_change_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_block(block: int) -> Tensor:
        monkeypatch.setattr(sys.modules["mt_quant.methods.gptq"], "_BLOCK", block)
        return gptq(weight, format, statistics).weight.data

    weight, x = random_weight(16, 96), related_inputs(96)
    format, statistics = WeightFormat.named("int4-g16"), statistics_of(x)
    first, *others = (with_block(block) for block in (128, 16, 40, 1))
    assert all(torch.equal(first, other) for other in others)


def test_columns_without_input_are_rounded_to_nearest() -> None:
    weight, x = random_weight(8, 32), related_inputs(32)
    x[:, [0, 9, 31]] = 0
    format = WeightFormat.named("int8")
    made = gptq(weight, format, statistics_of(x), damping=0.0).weight
    nearest = rtn(weight, format).weight
    assert torch.equal(made.codes()[:, [0, 9, 31]], nearest.codes()[:, [0, 9, 31]])


def test_no_input_at_all_is_round_to_nearest() -> None:
    weight, format = random_weight(8, 32), WeightFormat.named("int4-g16")
    made = gptq(weight, format, Statistics(tokens=5, hessian=torch.zeros(32, 32))).weight
    assert torch.equal(made.data, rtn(weight, format).weight.data)


def test_fp32_factors_give_the_same_quality() -> None:
    weight, x = random_weight(16, 64), related_inputs(64)
    format, statistics = WeightFormat.named("int4-g16"), statistics_of(x)
    errors = [
        output_error(weight, gptq(weight, format, statistics, double=double), statistics)
        for double in (True, False)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_a_singular_matrix_is_refused_with_the_way_out() -> None:
    weight, x = random_weight(8, 32), related_inputs(32, tokens=4)
    format, statistics = WeightFormat.named("int8"), statistics_of(x)
    with pytest.raises(
        CalibrationError, match=r"no Cholesky factor .* raise `damping` \(try 0\.01"
    ):
        gptq(weight, format, statistics, damping=0.0)
    gptq(weight, format, statistics, damping=0.01)


@pytest.mark.parametrize(
    ("statistics", "match"),
    [
        (None, "there is none"),
        (Statistics(tokens=3), "reads `hessian`"),
        (Statistics(tokens=0, hessian=torch.eye(32)), "no token"),
        (Statistics(tokens=3, hessian=torch.eye(31)), r"shape \(31, 31\)"),
        (Statistics(tokens=3, hessian=torch.full((32, 32), float("nan"))), "not finite"),
    ],
)
def test_what_it_cannot_calibrate_with_is_named(statistics: Statistics | None, match: str) -> None:
    with pytest.raises(CalibrationError, match=match):
        gptq(random_weight(8, 32), WeightFormat.named("int8"), statistics)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"damping": -0.1}, "damping must be 0 or more"),
        ({"damping": float("nan")}, "damping must be 0 or more"),
        ({"act_order": True}, "set static_groups too"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], match: str) -> None:
    statistics = statistics_of(related_inputs(32))
    with pytest.raises(QuantizationError, match=match):
        gptq(random_weight(8, 32), WeightFormat.named("int4-g16"), statistics, **options)
