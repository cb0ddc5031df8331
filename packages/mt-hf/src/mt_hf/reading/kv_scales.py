"""Scales of keys and values in a folder, beside the weights of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mt_model import GPT
from mt_quant import KVScheme, QuantizationError, kv_format_of, read_kv_scales

from mt_hf.family.error import ExchangeError
from mt_hf.family.link import Link
from mt_hf.reading.pretrained import Pretrained


def attention_names(links: Mapping[str, Sequence[Link]]) -> dict[int, str]:
    """Return the folder's names of attention modules, by layer index.

    Args:
        links: Links by tensor of the folder, or by parameter of the model.
    """
    names: dict[int, str] = {}
    for link in (link for each in links.values() for link in each):
        parts = link.target.split(".")
        if parts[0] == "layers" and parts[2:] == ["mixer", "out", "weight"]:
            names[int(parts[1])] = link.source.rsplit(".", 2)[0]
    return names


def read_kv_schemes(model: GPT, found: Pretrained) -> dict[int, KVScheme]:
    """Return the schemes of keys and values in a folder, by layer index.

    Raises:
        ExchangeError: Scales are missing, or do not fit the folder's scheme.
    """
    try:
        format = kv_format_of(found.given["quantization_config"])
    except QuantizationError as error:
        raise ExchangeError(f"{found.folder}: {error}") from error
    schemes: dict[int, KVScheme] = {}
    if format is None:
        return schemes
    names = attention_names(found.links)
    for index, mixer in model.generating().items():
        if not mixer.token_cache:
            continue
        inside = f"{names[index]}."  # ModelOpt stores them in the projections below it
        tensors = {
            name.rpartition(".")[2]: tensor.map()
            for name, tensor in found.kv_scales.items()
            if name.startswith(inside)
        }
        try:
            schemes[index] = read_kv_scales(tensors, format, mixer.token_heads)
        except QuantizationError as error:
            raise ExchangeError(f"{found.folder}: {names[index]}: {error}") from error
    return schemes


def written_kv_schemes(model: GPT, links: Mapping[str, Sequence[Link]]) -> dict[str, KVScheme]:
    """Return a model's schemes of keys and values, by the folder's names of attention modules.

    Raises:
        ExchangeError: Some layers have full keys and values, or a layer's scales can't be stored.
    """
    schemes: dict[str, KVScheme] = {}
    names = attention_names(links) if model.kv_schemes else {}
    for index, mixer in model.generating().items():
        if not model.kv_schemes or not mixer.token_cache:
            continue
        scheme = model.kv_schemes.get(index)
        if scheme is None:
            raise ExchangeError(
                f"layer {index} keeps its keys and values in full precision, and other layers do "
                "not; a folder has one format of all, so give all attention the same rule"
            )
        if scheme.format.group == "head" and "value" not in mixer.token_cache.values():
            raise ExchangeError(
                f"layer {index} has one latent for all heads, for which other software has one "
                f"scale; use {scheme.format.type}-tensor"
            )
        schemes[names[index]] = scheme
    return schemes
