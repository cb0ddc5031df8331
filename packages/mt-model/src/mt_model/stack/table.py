"""A model's configuration as a table for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mt_model.block.entry import EntryConfig
    from mt_model.stack.config import StackConfig
    from mt_model.stack.layer_config import LayerConfig

_HEADINGS = ("layers", "parameters", "FLOPs/token", "norms", "mixer", "feed-forward")
_NUMBERS = (1, 2)  # columns that are aligned to the right


def table(config: StackConfig) -> str:
    """Describe a model: a row for each run of equal layers, with its parameters and FLOPs.

    FLOPs count forward and backward for one token of a full sequence, and a row's FLOPs all of its
    layers; the row of MTP modules includes their heads. Entries show the fields that differ from
    their defaults.
    """
    hidden, length = config.hidden_size, config.max_sequence_length
    rows: list[tuple[str, ...]] = [_HEADINGS]
    first = in_layers = flops_in_layers = 0
    for layer, count in config.runs:
        parameters = count * config.layer_parameters(layer)
        flops = count * sum(entry.flops_per_token(hidden, length) for entry in layer.entries)
        in_layers, flops_in_layers = in_layers + parameters, flops_in_layers + flops
        rows.append(_row(span_name(first, count), parameters, flops, layer))
        first += count
    for names, parameters, flops, layer in config.rows_behind():
        in_layers, flops_in_layers = in_layers + parameters, flops_in_layers + flops
        rows.append(_row(names, parameters, flops, layer))
    rest = config.num_parameters - in_layers
    in_head = config.flops_per_token(length) - flops_in_layers
    rows.append(("others", f"{rest:,}", _short(in_head), *config.outside()))
    total = config.flops_per_token(length)
    rows.append(("total", f"{config.num_parameters:,}", _short(total), "", "", ""))
    return "\n".join([*_lines(rows), "", _summary(config)])


def span_name(first: int, count: int) -> str:
    """Name a span of indices, as `3` or `0-11`."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _row(names: str, parameters: int, flops: int, layer: LayerConfig) -> tuple[str, ...]:
    entries = [_entry(entry) for entry in (layer.mixer, layer.feed_forward)]
    return names, f"{parameters:,}", _short(flops), _norms(layer), *entries


def _lines(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in _NUMBERS else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _norms(layer: LayerConfig) -> str:
    words = [layer.norms, *(name for name in ("parallel", "shared_norm") if getattr(layer, name))]
    if layer.residual_scale != 1:
        words.append(f"scale={layer.residual_scale:g}")
    return " ".join(words)


def _entry(entry: EntryConfig | None) -> str:
    """Return an entry's kind and changed fields, as `attention(num_heads=8, head_dim=64)`."""
    if entry is None:
        return "-"
    kind = type(entry).__name__.removesuffix("Config").lower()
    return f"{kind}({', '.join(_changes(entry))})"


def _changes(value: Any) -> Iterable[str]:
    for item in dataclasses.fields(value):
        found = getattr(value, item.name)
        if item.default is dataclasses.MISSING or found != item.default:
            yield f"{item.name}={_value(found)}"


def _value(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = ", ".join(_changes(value))
        return f"({changes})" if changes else "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _summary(config: StackConfig) -> str:
    """Return the fields of the model outside of the rows."""
    shown = {"layers", "vocab_size", "hidden_size", "tied", "head_bias", "token_types"}
    shown |= {"head_transform", "embedding_norm", "final_norm", "num_channels", "patch_size"}
    shown |= {"class_token", "num_classes", "projection_size", "images", "pooled_head", "retro"}
    shown |= {name for name in ("mtp",) if getattr(config, name, None) is None}
    fields = [item for item in dataclasses.fields(config) if item.name not in shown]
    return ", ".join(f"{item.name}={_value(getattr(config, item.name))}" for item in fields)


def _short(number: float) -> str:
    """Write a large number with three digits, such as 12.3 G."""
    for unit in ("", " K", " M", " G", " T", " P"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.0f} E"
