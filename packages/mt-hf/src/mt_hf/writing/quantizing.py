"""Quantise a model as folders can store it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from mt_model import GPT, calibrate_kv_cache, kv_formats
from mt_quant import (
    CalibrationError,
    Decision,
    KVFormat,
    LayoutWriter,
    ModelSizes,
    Progress,
    QuantizationConfig,
    QuantizationError,
    QuantizedLinear,
    fold_input_scales,
    quantize,
    stored_layer,
)

from mt_hf.family.error import ExchangeError


def quantize_for_folder(
    model: GPT,
    config: QuantizationConfig,
    calibration: Iterable[Any] | None = None,
    *,
    layout: str = "compressed-tensors",
    progress: Callable[[Progress], None] | None = None,
) -> ModelSizes:
    """Quantise a model so that a folder can store it.

    Scales of inputs (AWQ, SmoothQuant) are folded into the modules that produce the inputs. Static
    scales of keys and values come from the quantised model's cache on the calibration data. Write
    the model with `save_pretrained(model, folder, layout=layout)` afterwards.

    Args:
        model: The whole model, on this process; changed in place.
        config: The rules.
        calibration: Batches of tokens, which can be iterated more than once; needed by rules that
            read activations.
        layout: The folder's layout, as for `save_pretrained`.
        progress: Called after each layer.

    Returns:
        The sizes before; `report(model)` compares them with those after.

    Raises:
        QuantizationError: The rules don't fit the model, or a weight is not finite.
        CalibrationError: Data is needed and missing, empty, or leads to values that aren't finite.
        ExchangeError: The layout can't store the result of a rule.
    """
    model.unfuse_experts()  # rules name each expert, and folders store them one by one
    decisions = config.decide(model)
    formats = kv_formats(model, decisions)
    _check_formats(model, decisions, formats, layout)
    if calibration is None and any(format.is_static for format in formats.values()):
        raise CalibrationError(
            "static scales of keys and values are made from those that the model keeps of a text; "
            "name one with --calibration"
        )
    sizes = ModelSizes(model, config)

    def finished(done: Progress) -> None:
        # Checked layer by layer, so that a long calibration doesn't end in a refusal.
        _check_layer(done.name, model)
        if progress is not None:
            progress(done)

    remaining = fold_input_scales(model, model.shared_inputs(), config, calibration)
    quantize(model, remaining, calibration, progress=finished)
    model.kv_schemes = calibrate_kv_cache(model, calibration or (), formats)
    return sizes


def _check_formats(
    model: GPT, decisions: Mapping[str, Decision], kv_cache: Mapping[int, KVFormat], layout: str
) -> None:
    """Refuse formats that the layout lacks, before any layer is quantised."""
    layers = {n: (d.weight, d.input) for n, d in decisions.items() if d.weight is not None}
    keeping = {i: mixer for i, mixer in model.generating().items() if mixer.token_cache}
    kept = {str(kv_cache.get(index, "full")) for index in keeping}
    for index, format in kv_cache.items():
        if format.group == "head" and "value" not in keeping[index].token_cache.values():
            raise ExchangeError(
                f"layer {index} keeps one latent for all heads, for which a folder has one scale; "
                f"use {format.type}-tensor"
            )
    if kv_cache and len(kept) > 1:
        raise ExchangeError(
            f"keys and values would be kept in {' and '.join(sorted(kept))}, and a folder has one "
            "format for all of them; give all attention the same rule"
        )
    try:
        LayoutWriter.of(layout).describe(layers, next(iter(kv_cache.values()), None))
    except QuantizationError as error:
        raise ExchangeError(str(error)) from error


def _check_layer(name: str, model: GPT) -> None:
    try:
        stored_layer(cast("QuantizedLinear", model.get_submodule(name)))
    except QuantizationError as error:
        raise ExchangeError(f"{name}: {error}") from error
