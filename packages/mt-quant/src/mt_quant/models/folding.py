"""Folding of input scales into the module that produces the input."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal, cast

import torch
from mt_files import check_type
from torch import Tensor, nn

from mt_quant.calibration.statistics import Collector, Statistics, observed
from mt_quant.calibration.walk import call_of
from mt_quant.error import CalibrationError, QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.layers.shape import LinearShape, shape_of
from mt_quant.layers.shared_input import SharedInput
from mt_quant.methods.awq import awq_scale
from mt_quant.methods.output_error import hessian_of, needed
from mt_quant.methods.smoothquant import smoothquant_scale

_BYTES = 1 << 30  # limit of the statistics that one pass over the calibration data collects


@torch.no_grad()
def fold_scales(
    model: nn.Module,
    inputs: Iterable[SharedInput],
    calibration: Iterable[Any],
    *,
    by: Literal["awq", "smoothquant"] = "awq",
    format: WeightFormat | str = "int4",
    alpha: float = 0.5,
) -> nn.Module:
    """Scale input features for easier rounding, in place; then quantise with any method.

    The layers' weights are multiplied by a scale for each feature and the source is divided by it.
    The output changes only by rounding in the model's dtype, and no layer scales its input at run
    time. Calibration data runs repeatedly if its statistics take more than 1 GiB.

    Args:
        model: The model, changed in place.
        inputs: `SharedInput`s; a model of mt-model lists its own (`model.shared_inputs()`).
        calibration: Batches, each the arguments of the model's forward as a tensor, tuple, list or
            mapping.
        by: `awq` minimises the error of rounding the weights to a format; `smoothquant` balances
            the magnitudes of inputs and weights.
        format: Format of the weights, for `awq`; its groups must divide the inputs.
        alpha: Exponent for `smoothquant`; see the method.

    Returns:
        The model.

    Raises:
        QuantizationError: The description of an input does not fit its modules.
        CalibrationError: Data is missing or not finite, or never reaches a layer.
    """
    check_type("model", model, nn.Module)
    if by not in ("awq", "smoothquant"):
        raise QuantizationError(f"by must be 'awq' or 'smoothquant', got {by!r}")
    chosen = WeightFormat.named(format) if isinstance(format, str) else format
    listed, batches = list(inputs), list(calibration)
    if not batches:
        raise CalibrationError("there is no calibration data; pass at least one batch")
    names = {id(module): name for name, module in model.named_modules()}
    for shared in listed:
        _check(shared, names)
    statistic = "hessian" if by == "awq" else "abs_max"
    for part in _parts(listed, statistic):
        found = _collected(model, part, batches, (statistic, names))
        for shared, statistics in zip(part, found, strict=True):
            fold_scale(shared, _scale(shared, statistics, by=by, format=chosen, alpha=alpha))
    return model


@torch.no_grad()
def fold_scale(shared: SharedInput, scale: Tensor | None) -> None:
    """Multiply the layers' weights by a scale for each feature, and divide the source by it.

    Args:
        shared: The layers and their source.
        scale: Scale of each feature, equal for features that share an output; None for 1.

    Shape:
        scale: [in], over all ranks.

    Raises:
        QuantizationError: The scale does not fit. Nothing was changed.
    """
    if scale is None:
        return
    factor = scale.double()
    if not bool((factor.isfinite() & (factor > 0)).all()):
        raise QuantizationError("a scale must be finite and above 0")
    source = LinearShape.of(shared.source)
    for layer in shared.layers:
        shape = shape_of(layer, "a layer")
        if shape.whole_columns != len(factor):
            raise QuantizationError(
                f"the scale has {len(factor)} features and a layer {shape.whole_columns} inputs"
            )
    if source is None:
        _divide_norm(shared, factor)
    else:
        _divide_linear(shared, source, factor)
    for layer in shared.layers:
        shape = shape_of(layer, "a layer")
        columns = shape.own(factor.device)[1]
        weight = cast("nn.Parameter", layer.weight)
        own = factor if columns is None else factor[columns]
        _multiply(weight, own.expand(shape.rows, -1))


def _divide_norm(shared: SharedInput, factor: Tensor) -> None:
    weight, bias = (getattr(shared.source, name, None) for name in ("weight", "bias"))
    if not isinstance(weight, Tensor) or weight.shape != factor.shape:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else None
        raise QuantizationError(
            f"{type(shared.source).__name__} has a weight of shape {shape}, and the input "
            f"{len(factor)} features; a source is a norm with a weight for each, or a linear layer"
        )
    weight.copy_((weight.double() + shared.offset) / factor - shared.offset)
    if isinstance(bias, Tensor):
        bias.copy_(bias.double() / factor)


def _divide_linear(shared: SharedInput, source: LinearShape, factor: Tensor) -> None:
    rows = torch.arange(len(factor)) if shared.rows is None else shared.rows
    rows = rows.to(factor.device)
    if rows.shape != factor.shape or int(rows.max()) >= source.whole_rows or int(rows.min()) < 0:
        raise QuantizationError(
            f"rows must be {len(factor)} indices of {source.whole_rows} outputs of the source, one "
            f"for each feature, got {tuple(rows.shape)} up to {int(rows.max())}"
        )
    by_row = factor.new_ones(source.whole_rows)
    by_row[rows] = factor
    if not torch.equal(by_row[rows], factor):
        raise QuantizationError("features that share a source output must have the same scale")
    # Ranks that split the source's outputs scale the rows that they have.
    own = source.own(factor.device)[0]
    by_row = 1 / (by_row if own is None else by_row[own])
    weight = cast("nn.Parameter", shared.source.weight)
    _multiply(weight, by_row[:, None].expand(-1, source.columns))
    bias = shared.source.bias
    if isinstance(bias, Tensor):
        _multiply(bias, by_row)


def _multiply(param: Tensor, factor: Tensor) -> None:
    factor = factor.to(param.device)
    param.copy_(param.double() * factor.reshape(param.shape))


def _scale(
    shared: SharedInput, statistics: Statistics, *, by: str, format: WeightFormat, alpha: float
) -> Tensor | None:
    """Return the scale of one input, equal for features that share an output of the source."""
    weights = [
        shape_of(layer, "a layer").gathered(cast("nn.Parameter", layer.weight))
        for layer in shared.layers
    ]
    columns = weights[0].shape[1]
    if by == "smoothquant":
        scale = smoothquant_scale(weights, needed(statistics, "abs_max", (columns,)), alpha=alpha)
        return _alike(scale.log(), shared.rows).exp()
    hessian = hessian_of(statistics, columns)
    size = _alike(hessian.diagonal(), shared.rows)
    return awq_scale(weights, format, hessian, second_moment=size)


def _alike(values: Tensor, rows: Tensor | None) -> Tensor:
    """Replace the values of features that share an output by their mean."""
    if rows is None:
        return values
    _, group = rows.to(values.device).unique(return_inverse=True)
    sums = values.new_zeros(int(group.max()) + 1).index_add_(0, group, values)
    return (sums / group.bincount())[group]


def _parts(inputs: list[SharedInput], statistic: str) -> list[list[SharedInput]]:
    """Divide the inputs into passes whose statistics fit the limit."""
    parts: list[list[SharedInput]] = []
    held = _BYTES
    for shared in inputs:
        columns = shape_of(shared.layers[0], "a layer").whole_columns
        size = 4 * columns * (columns if statistic == "hessian" else 1)
        if not parts or held + size > _BYTES:
            parts.append([])
            held = 0
        parts[-1].append(shared)
        held += size
    return parts


def _collected(
    model: nn.Module,
    inputs: list[SharedInput],
    batches: list[Any],
    what: tuple[str, dict[int, str]],
) -> list[Statistics]:
    """Run the model, and return the statistics of each input."""
    statistic, names = what
    layers = [shared.layers[0] for shared in inputs]
    collectors = [Collector(names[id(x)], shape_of(x, "a layer"), {statistic}) for x in layers]
    training = model.training
    model.eval()
    with ExitStack() as stack:
        stack.callback(model.train, training)
        for layer, collector in zip(layers, collectors, strict=True):
            stack.enter_context(observed(layer, collector))
        with torch.no_grad():
            for batch in batches:
                call_of(model, batch)()
    return [collector.result() for collector in collectors]


def _check(shared: SharedInput, names: dict[int, str]) -> None:
    if not shared.layers:
        raise QuantizationError("a shared input names no layer that multiplies it")
    for module in (*shared.layers, shared.source):
        if id(module) not in names:
            raise QuantizationError(
                f"{type(module).__name__} of a shared input is no module of the model"
            )
    sizes = {shape_of(m, names[id(m)]).whole_columns for m in shared.layers}
    if len(sizes) > 1:
        raise QuantizationError(
            f"{', '.join(names[id(m)] for m in shared.layers)} can't share an input: they have "
            f"{sorted(sizes)} inputs"
        )
