"""An empty cache, in full or in low precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mt_model.attend.cache import SCALE
from mt_model.block.entry import MixerConfig
from mt_model.block.shard_context import ShardContext

if TYPE_CHECKING:
    from mt_quant import KVFormat, KVScheme


def chosen_schemes(
    wanted: KVFormat | str, mixers: Mapping[int, MixerConfig], known: Mapping[int, KVScheme]
) -> dict[int, KVScheme]:
    """Return how layers keep their keys and values in a format.

    Args:
        wanted: The format or its name.
        mixers: Mixers of a stage, by the layer's index.
        known: Schemes of the model; a format of the same kind takes over their static scales.

    Raises:
        QuantizationError: There is no such format.
        CalibrationError: The format has static scales, and a layer has none.
    """
    from mt_quant import KVFormat, KVScheme

    format = wanted if isinstance(wanted, KVFormat) else KVFormat.named(wanted)
    schemes: dict[int, KVScheme] = {}
    for index, mixer in mixers.items():
        if mixer.token_cache:
            scheme = known.get(index)
            is_known = format.is_static and scheme is not None and scheme.format == format
            schemes[index] = scheme if scheme and is_known else KVScheme(format=format)
    return schemes


def check_keeps(mixers: Iterable[MixerConfig], format: object) -> None:
    """Refuse a format of keys and values for a model that keeps none.

    Raises:
        QuantizationError: No mixer of the model keeps any.
    """
    if any(mixer.token_cache for mixer in mixers):
        return
    from mt_quant import QuantizationError

    raise QuantizationError(
        f"no layer of this model keeps keys and values, which the format {format} is for; the "
        "states of recurrent layers stay as they are. Leave the format out"
    )


def empty_layers(
    mixers: Mapping[int, MixerConfig],
    schemes: Mapping[int, KVScheme],
    *,
    rows: int,
    length: int,
    shard: ShardContext,
    states: int | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Make the tensors that the layers of a stage keep of tokens.

    Args:
        mixers: Mixers that keep something, by the layer's index.
        schemes: Schemes of the layers whose keys and values are kept in low precision.
        rows: Number of rows, or blocks.
        length: Number of tokens of each.
        shard: This rank's share of the model.
        states: Number of recurrent states where rows are blocks; None where each row has one.

    Raises:
        QuantizationError: A layer has another number of heads than scales.
    """
    layers: dict[int, dict[str, Tensor]] = {}
    wide = torch.promote_types(shard.dtype, torch.float32)
    for index, mixer in mixers.items():
        scheme = schemes.get(index)
        shapes, blocks = dict(mixer.cache_shapes(states or rows, length, shard.tp)), set[str]()
        if states is not None:
            pages, blocks = mixer.page_shapes(rows, length, shard.tp), set(mixer.token_cache)
            shapes |= {name: pages[name] for name in blocks}
        dtypes = dict.fromkeys(shapes, shard.dtype) | dict.fromkeys(mixer.wide_cache, wide)
        if scheme is not None:
            dtypes |= dict.fromkeys(mixer.token_cache, scheme.format.dtype)
        layers[index] = {
            name: _zeros(shape, dtypes[name], shard.device, by_token=name in blocks)
            for name, shape in shapes.items()
        }
        if scheme is not None:
            layers[index] |= dict(_scales(layers[index], index, mixer, scheme, shard))
    return layers


def _zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, by_token: bool
) -> Tensor:
    """Make an empty tensor; `by_token` puts dim 2, of tokens, before dim 1, of heads, in memory."""
    if not by_token:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    rows, heads, length, width = shape
    return torch.zeros(rows, length, heads, width, dtype=dtype, device=device).transpose(1, 2)


def _scales(
    codes: Mapping[str, Tensor],
    layer: int,
    mixer: MixerConfig,
    scheme: KVScheme,
    shard: ShardContext,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales of codes: static ones of this rank's heads, or room for one a token."""
    for name, kind in mixer.token_cache.items():
        if scheme.scales is not None:
            whole = scheme.scales.key if kind == "key" else scheme.scales.value
            own = own_heads(whole, layer, mixer, shard)
            yield name + SCALE, own.to(shard.device)[:, None, None]
        elif name in codes:  # cross-attention brings its own
            like = codes[name][..., :1]  # with the codes' order in memory
            yield name + SCALE, torch.zeros_like(like, dtype=torch.float32)


def own_heads(whole: Tensor, layer: int, mixer: MixerConfig, shard: ShardContext) -> Tensor:
    """Cut the values of this rank's heads from the values of all heads of the model.

    Shape:
        whole: [token_heads].

    Raises:
        QuantizationError: There is not one value for each head.
    """
    count = mixer.token_heads
    if whole.shape != (count,):
        from mt_quant import QuantizationError

        raise QuantizationError(
            f"layer {layer} has {count} heads of keys and values, and scales of the shape "
            f"{list(whole.shape)}; give one for each"
        )
    first = shard.tp_index * count // shard.tp
    return whole.narrow(0, first, max(1, count // shard.tp))
