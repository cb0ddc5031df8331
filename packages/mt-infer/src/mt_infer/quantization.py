"""A trained model in low precision, as a folder of Hugging Face."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from mt_ckpt import RunFolder, inspect_checkpoint
from mt_data import Tokenizer
from mt_files import read_text
from mt_hf import ExchangeError, Pretrained, save_pretrained
from mt_model import DTYPES, GPT, calibrate_kv_cache, kv_formats
from mt_quant import (
    CalibrationError,
    Decision,
    KVFormat,
    LayoutWriter,
    Progress,
    QuantizationConfig,
    QuantizationError,
    QuantizedLinear,
    quantize,
    stored_layer,
)
from torch import Tensor, nn

from mt_infer.folding import fold_input_scales
from mt_infer.loading import Run, RunError, check_ema

_LENGTH = 2048
_MAX_TEXT = 1 << 28


@dataclass(kw_only=True)
class Calibration:
    """A text as batches of one sequence each; read when the first is asked for.

    Attributes:
        path: Of the text.
        tokenizer: The model's.
        samples: Number of sequences at most.
        length: Of a sequence, in tokens.
        is_read: Whether a sequence was asked for.
    """

    path: Path
    tokenizer: Tokenizer
    samples: int
    length: int
    is_read: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls, path: Path | None, run: Run, samples: int, length: int | None
    ) -> Calibration | None:
        """Return the sequences for a model; None where there is no text.

        Raises:
            RunError: They are longer than the model's context, or it has an encoder.
        """
        if path is None:
            return None
        limit = run.config.max_sequence_length
        if length is not None and length > limit:
            raise RunError(f"--length {length}: the model's context is {limit} tokens; use less")
        if run.config.encoder_layers:
            raise RunError(
                "--calibration: a model with an encoder is not run on one text; use a recipe that "
                "needs none, such as int8 or fp8"
            )
        chosen = min(_LENGTH, limit) if length is None else length
        return cls(path=path, tokenizer=run.tokenizer, samples=samples, length=chosen)

    def __iter__(self) -> Iterator[Tensor]:
        self.is_read = True
        tokens = torch.tensor(self.tokenizer.encode(read_text(self.path, limit=_MAX_TEXT)))
        if not len(tokens):
            raise CalibrationError(f"{self.path} is empty; give a text like those the model is for")
        length = min(self.length, len(tokens))
        whole = len(tokens) // length
        for index in range(min(self.samples, whole)):
            start = index * whole // min(self.samples, whole) * length
            yield tokens[None, start : start + length].long()


@dataclass(frozen=True, kw_only=True)
class Share:
    """The layers that one rule decided.

    Attributes:
        rule: As the rule prints, with the format of weight and input.
        layers: Their number.
        weights: Their weights.
        before: Bytes of the weights before.
        after: Bytes of codes, scales and zero points, or of the weights where they stay.
    """

    rule: str
    layers: int
    weights: int
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What was made; prints as a table.

    Attributes:
        shares: By rule; the last is of everything that is no linear layer.
        before: Bytes of the model's tensors before.
        after: Bytes of the safetensors files.
        folder: Where they are.
        kv_cache: Formats of the keys and values of layers, by index.
    """

    shares: tuple[Share, ...]
    before: int
    after: int
    folder: Path
    kv_cache: Mapping[int, KVFormat] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("rule", "layers", "weights", "bits before", "bits after")]
        rows += [_row(share) for share in self.shares]
        weights = sum(share.weights for share in self.shares)
        layers = sum(share.layers for share in self.shares)
        total = Share(
            rule="all", layers=layers, weights=weights, before=self.before, after=self.after
        )
        rows.append(_row(total))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        kept = Counter(str(format) for format in self.kv_cache.values())
        lines += [f"layers with keys and values in {format}: {n}" for format, n in kept.items()]
        return "\n".join([*lines, f"{self.before} -> {self.after} bytes in {self.folder}"])


def _row(share: Share) -> tuple[str, str, str, str, str]:
    bits = [f"{8 * size / max(share.weights, 1):.2f}" for size in (share.before, share.after)]
    return share.rule, str(share.layers), str(share.weights), bits[0], bits[1]


def check_source(run: Run, *, ema: bool) -> None:
    """Find every mistake that shows before weights are read.

    Raises:
        RunError: The folder is in low precision already, or has no average of the weights.
    """
    if ema:
        check_ema(run)
    if isinstance(run.source, Pretrained) and run.source.given.get("quantization_config"):
        raise RunError(
            f"{run.folder} is in low precision already; pass the folder that it was made from"
        )


def stored_dtype(run: Run) -> str:
    """Return the dtype in which a model is kept: of a run its widest weights', at most fp32."""
    if isinstance(run.source, Pretrained):
        found = run.source.dtype
    else:
        arrays = inspect_checkpoint(run.source).arrays
        prefix = f"{RunFolder.WEIGHTS}/"
        kept = [getattr(torch, spec.dtype) for n, spec in arrays.items() if n.startswith(prefix)]
        found = max(kept, key=lambda dtype: dtype.itemsize)
    names = (name for name, dtype in DTYPES.items() if dtype == found and name != "fp64")
    return next(names, "fp32")


def quantize_model(
    model: GPT,
    run: Run,
    config: QuantizationConfig,
    out: Path,
    *,
    layout: str = "compressed-tensors",
    calibration: Calibration | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Quantized:
    """Round the linear layers of a run's model, and write it with its tokenizer.

    Static scales of keys and values are made of what the rounded model keeps of the calibration.

    Args:
        model: Whole, on this process; changed in place. Scales and what stays in full precision
            have its dtype.
        run: Where it is from.
        config: Which layers, and how.
        out: The folder that is made; does not exist, or is empty.
        layout: Of the folder, as `mt_hf.save_pretrained` takes it.
        calibration: What rules that see activations are given.
        progress: Called after each layer.

    Raises:
        QuantizationError: The rules don't fit the model, or a weight is not finite.
        CalibrationError: Data is needed and missing, empty, or gives values that are not finite.
        ExchangeError: The model is of no family of Hugging Face, or the folder has no place for
            what a rule makes. Nothing is left at `out`.
    """
    model.unfuse_experts()  # rules name each of them, and folders have them so
    decisions = config.decide(model)
    formats = kv_formats(model, decisions)
    _check_formats(model, decisions, formats, layout)
    if calibration is None and any(format.is_static for format in formats.values()):
        raise CalibrationError(
            "static scales of keys and values are made of those that the model keeps of a text; "
            "name one with --calibration"
        )
    sizes = _sizes(model, decisions)
    before = sum(param.nbytes for param in model.parameters())

    def finished(done: Progress) -> None:
        _check_layer(done.name, model.get_submodule(done.name))
        if progress is not None:
            progress(done)

    rounded = fold_input_scales(model, config, calibration)
    quantize(model, rounded, calibration, progress=finished)
    model.kv_schemes = calibrate_kv_cache(model, calibration or (), formats)
    like, beside = _beside(run)
    save_pretrained(model, out, like=like, beside=beside, layout=layout)
    after = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    shares = _shares(model, config, decisions, sizes)
    return Quantized(shares=shares, before=before, after=after, folder=out, kv_cache=formats)


def _check_formats(
    model: GPT,
    decisions: Mapping[str, Decision],
    kv_cache: Mapping[int, KVFormat],
    layout: str,
) -> None:
    """Refuse formats that the folder has no place for, before any layer is rounded."""
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
            "format of all; give all attention the same rule"
        )
    try:
        LayoutWriter.of(layout).describe(layers, next(iter(kv_cache.values()), None))
    except QuantizationError as error:
        raise ExchangeError(str(error)) from error


def _check_layer(name: str, layer: nn.Module) -> None:
    """Refuse a finished layer that the folder has no place for, before the others are rounded."""
    try:
        stored_layer(cast("QuantizedLinear", layer))
    except QuantizationError as error:
        raise ExchangeError(f"{name}: {error}") from error


def _beside(run: Run) -> tuple[Path | None, dict[str, bytes]]:
    """The folder whose other files are carried over, or what stands beside weights without one."""
    if isinstance(run.source, Pretrained):
        return run.folder, {}
    origin = RunFolder(run.folder).hugging_face
    if origin.is_dir():
        return origin, {}
    content = run.tokenizer.to_bytes()
    if not content.lstrip().startswith(b"{"):
        return None, {"tokenizer.model": content}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": run.tokenizer.eod_token}
    settings = json.dumps(told, indent=2) + "\n"
    return None, {"tokenizer.json": content, "tokenizer_config.json": settings.encode()}


def _sizes(model: nn.Module, decisions: Mapping[str, Decision]) -> dict[str, tuple[int, int]]:
    """Elements and bytes of the weights of linear layers."""
    found: dict[str, tuple[int, int]] = {}
    for name in decisions:
        weight = getattr(model.get_submodule(name), "weight", None)
        if isinstance(weight, Tensor):
            found[name] = weight.numel(), weight.nbytes
    return found


def _shares(
    model: nn.Module,
    config: QuantizationConfig,
    decisions: Mapping[str, Decision],
    sizes: Mapping[str, tuple[int, int]],
) -> tuple[Share, ...]:
    names: dict[str, list[str]] = {}
    for name in sizes:
        names.setdefault(_rule(config, decisions[name]), []).append(name)
    shares = []
    for rule, layers in names.items():
        made = [model.get_submodule(name) for name in layers]
        after = [
            layer.quantized_weight.nbytes if isinstance(layer, QuantizedLinear) else sizes[name][1]
            for name, layer in zip(layers, made, strict=True)
        ]
        weights, before = (sum(sizes[name][i] for name in layers) for i in (0, 1))
        shares.append(
            Share(rule=rule, layers=len(layers), weights=weights, before=before, after=sum(after))
        )
    inside = tuple(f"{name}." for name in sizes)
    others = [p for n, p in model.named_parameters() if not n.startswith(inside)]
    # Biases belong to their layers, which are in low precision; few, and stored as they were.
    biases = [model.get_submodule(name).bias for name in sizes]
    others += [bias for bias in biases if isinstance(bias, Tensor)]
    size = sum(param.nbytes for param in others)
    count = sum(param.numel() for param in others)
    last = Share(rule="no linear layer's weight", layers=0, weights=count, before=size, after=size)
    return (*shares, last)


def _rule(config: QuantizationConfig, decision: Decision) -> str:
    if decision.rule is None:
        return "no rule"
    rule = f"{decision.rule}: {config.rules[decision.rule]}"
    if decision.weight is None:
        return f"{rule}, as it is"
    inputs = "" if decision.input is None else f", input {decision.input}"
    return f"{rule}, {decision.method}, weight {decision.weight}{inputs}"
