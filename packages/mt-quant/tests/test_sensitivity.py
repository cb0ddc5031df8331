"""Plans of formats against every plan there is, and against one format for all."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from mt_quant import (
    QuantizationConfig,
    QuantizationError,
    QuantizedLinear,
    Rule,
    WeightFormat,
    choose_formats,
    measure_costs,
    quantize,
)
from mt_quant.models.sensitivity import weight_bits
from torch import Tensor, nn

SMALL, MIDDLE, LARGE = "int4-g64", "int4-g16", "int8"


def uneven_model() -> nn.Sequential:
    """Layers of three sizes; errors of the smallest matter most."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 16)
    )
    with torch.no_grad():
        model[4].weight *= torch.linspace(0, 3, 64).exp()
        model[2].weight *= 0.1
    return model


def inputs() -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def measure_of(model: nn.Module):
    x = inputs()
    with torch.no_grad():
        expected = model(x)
    return lambda other: float((other(x).detach() - expected).square().mean())


def mean_bits(model: nn.Module) -> float:
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    stored = sum(8 * layer.quantized_weight.nbytes for layer in layers)
    return stored / sum(layer.weight.numel() for layer in layers)


def test_costs_are_measured_one_layer_at_a_time_and_the_model_is_left_as_it_was() -> None:
    model = uneven_model()
    measure, layers = measure_of(model), list(model)
    costs = measure_costs(model, [SMALL, LARGE], measure)
    assert list(model) == layers
    assert measure(model) == 0
    for name, of_layer in costs.items():
        for format, cost in of_layer.items():
            one = uneven_model()
            rule = Rule(name=name, weight=format)
            made = quantize(one, QuantizationConfig(rules=(rule,)))
            # codes and scales are multiplied in another order than dequantised weights
            assert measure(made) == pytest.approx(cost, rel=1e-4)
    assert costs["4"][WeightFormat.named(SMALL)] > costs["4"][WeightFormat.named(LARGE)] > 0


@pytest.mark.parametrize("bits", [4.25, 4.6, 5.0, 6.0, 7.5, 9.0])
def test_the_plan_is_the_best_of_all_within_the_budget(bits: float) -> None:
    model = uneven_model()
    costs = measure_costs(model, [SMALL, MIDDLE, LARGE], measure_of(model))
    sizes = weight_bits(model, costs)
    total = sum(model[int(name)].weight.numel() for name in costs)
    plans = [
        sum(costs[name][format] for name, format in zip(costs, formats, strict=True))
        for formats in product(*costs.values())
        if sum(sizes[n][f] for n, f in zip(costs, formats, strict=True)) <= bits * total
    ]
    plan = choose_formats(model, costs, bits=bits)
    assert plan.cost == pytest.approx(min(plans), rel=1e-12)
    made = quantize(model, plan.config())
    assert mean_bits(made) == pytest.approx(plan.bits)
    assert plan.bits <= bits


def test_the_plan_beats_one_format_of_the_same_size() -> None:
    measure = measure_of(uneven_model())
    uniform = quantize(uneven_model(), QuantizationConfig(rules=(Rule(weight=MIDDLE),)))
    costs = measure_costs(uneven_model(), [SMALL, MIDDLE, LARGE], measure)
    plan = choose_formats(uneven_model(), costs, bits=mean_bits(uniform))
    chosen = quantize(uneven_model(), plan.config())
    assert mean_bits(chosen) <= mean_bits(uniform)
    assert measure(chosen) < 0.8 * measure(uniform)


def test_a_budget_of_many_layers_of_odd_sizes_is_kept() -> None:
    sizes = [(2 * i + 64, 64 * (i % 3 + 1)) for i in range(40)]
    model = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in sizes)
    generator = torch.Generator().manual_seed(0)
    formats = [WeightFormat.named(name) for name in (SMALL, MIDDLE, LARGE)]
    costs = {
        str(i): dict(
            zip(
                formats,
                torch.rand(3, generator=generator).sort(descending=True)[0].tolist(),
                strict=True,
            )
        )
        for i in range(len(sizes))
    }
    plans = [choose_formats(model, costs, bits=bits) for bits in (4.3, 5.0, 6.0, 7.0, 9.0)]
    for plan, bits in zip(plans, (4.3, 5.0, 6.0, 7.0, 9.0), strict=True):
        assert bits - 0.3 < plan.bits <= bits or set(plan.formats.values()) == {formats[2]}
    assert [plan.cost for plan in plans] == sorted((p.cost for p in plans), reverse=True)


def test_formats_that_do_not_fit_are_left_out_for_a_layer() -> None:
    model = nn.Sequential(nn.Linear(24, 64), nn.Linear(64, 8))
    costs = measure_costs(model, [SMALL, LARGE], lambda _: 0.0)
    assert [str(f) for f in costs["0"]] == ["int8-channel"]
    assert len(costs["1"]) == 2
    with pytest.raises(QuantizationError, match=r"no format of int4-g64 fits 0 with 24 inputs"):
        measure_costs(model, [SMALL], lambda _: 0.0)


def test_bad_targets_names_and_measures_are_refused() -> None:
    model = uneven_model()
    with pytest.raises(QuantizationError, match="no linear layer '7'"):
        measure_costs(model, [LARGE], lambda _: 0.0, layers=["7"])
    with pytest.raises(QuantizationError, match="no linear layer to choose"):
        measure_costs(nn.Tanh(), [LARGE], lambda _: 0.0)
    with pytest.raises(QuantizationError, match="the model itself is nan"):
        measure_costs(model, [LARGE], lambda _: float("nan"))
    costs = measure_costs(model, [SMALL], lambda _: 0.0)
    with pytest.raises(QuantizationError, match=r"the smallest formats have 4\.250"):
        choose_formats(model, costs, bits=4.2)
    with pytest.raises(QuantizationError, match="can't be met"):
        choose_formats(model, costs, bits=float("nan"))
    with pytest.raises(QuantizationError, match="at least one layer"):
        choose_formats(model, {}, bits=4.2)
    with pytest.raises(QuantizationError, match="must be finite"):
        choose_formats(model, {"0": {WeightFormat.named(SMALL): float("inf")}}, bits=5)
