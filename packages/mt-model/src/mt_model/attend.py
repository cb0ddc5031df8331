"""What one forward pass shares, and who attends to whom in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import torch
import torch.nn.functional as F
from mt_context_parallel import (
    Algorithm,
    AttentionDropout,
    AttentionMask,
    HierarchicalGroups,
    context_parallel_attention,
    positions,
)
from mt_files import divisors
from mt_parallel_state import ParallelState, group_rank
from torch import Tensor

from mt_model.cache import KVCache
from mt_model.distance import spread
from mt_model.reference_attention import reference_attention
from mt_model.rope import Rotary
from mt_model.rotary import RotaryTable

BIAS_MAX_LENGTH = 1024  # of sequences whose biased scores are made at once; longer ones by tiles


class AttendingLayer(Protocol):
    """What attention needs to know of the layer that asks for it.

    Attributes:
        index: Of the layer in the whole model.
        window: Tokens that a query sees, or None.
        scale: Of the scores, or None.
        softcap: Of the scores, or None.
        sinks: A logit per query head of this rank, or None.
    """

    index: int
    window: int | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None

    def weight_dropout(self, shared: Pass) -> AttentionDropout | None:
        """Make the dropout of attention weights in a pass."""
        ...

    def bias_by_distance(self, shared: Pass, length: int) -> Tensor | None:
        """Return what is added to scores, for distances below a length, or None.

        Shape:
            Returns [heads of this rank, 2 * length - 1].
        """
        ...


class Attend(Protocol):
    """Attention of one pass, as every layer asks for it."""

    @property
    def is_whole(self) -> bool:
        """Whether queries and keys are the same tokens, whole sequences of them on this rank."""
        ...

    def __call__(
        self, layer: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, shared: Pass
    ) -> Tensor:
        """Attend, with the layer's window, scale, cap, sinks and dropout.

        Shape:
            query: [B, S, N, D]; key, value: [B, S, G, D]; rotated. Returns [B, S, N, D].
        """
        ...


class SequenceAttend:
    """Causal attention within sequences, which the ranks of a context group may share.

    Plain causal attention of whole sequences is torch's; all else is computed by tiles
    (`mt_context_parallel`), whose collectives run where there is a group. To make one is
    collective over the group.

    Args:
        state: This rank's place.
        algorithm: How attention gets at the others' keys; a list has one for each layer.
        inner_size: Ranks that swap tokens for heads, for the hierarchical algorithm.
        layers: Of the whole model.

    Attributes:
        group: The ranks that share a sequence, or None.
        size: How many they are.
        algorithms: How attention gets at the others' keys, in each of the model's layers.

    Raises:
        ValueError: An unknown algorithm, or an inner size that does not divide cp.
    """

    def __init__(
        self,
        state: ParallelState,
        algorithm: Algorithm | Sequence[Algorithm],
        inner_size: int | None,
        *,
        layers: int,
    ) -> None:
        each = (algorithm,) * layers if isinstance(algorithm, str) else tuple(algorithm)
        if len(each) != layers:
            raise ValueError(
                f"context_algorithm has {len(each)} algorithms, but the model has {layers} "
                "layers. Give one for each, or one for all"
            )
        for name in each:
            if name not in get_args(Algorithm):
                raise ValueError(
                    f"context_algorithm must be one of {get_args(Algorithm)}, got {name!r}"
                )
        self.group, self.size, self.algorithms = state.group("cp"), state.size("cp"), each
        self._levels: HierarchicalGroups | None = None
        if self.group is not None and "hierarchical" in each:
            if not inner_size or self.size % inner_size:
                raise ValueError(
                    f"context_inner_size={inner_size} does not divide cp={self.size}, which the "
                    f"hierarchical algorithm needs; use one of {divisors(self.size)}"
                )
            inner, outer = state.level_groups("cp", (inner_size, self.size // inner_size))
            self._levels = HierarchicalGroups(inner=inner, outer=outer)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions of this rank's tokens in sequences of `length`. Returns [length / size]."""
        return positions(length, ranks=self.size, rank=group_rank(self.group), device=device)

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has a part of the sequences."""
        return self.group is None

    def __call__(
        self, layer: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, shared: Pass
    ) -> Tensor:
        """Attend; see `Attend`."""
        dropout, length = layer.weight_dropout(shared), query.shape[1] * self.size
        window = layer.window if layer.window is not None and layer.window < length else None
        bias = layer.bias_by_distance(shared, length)
        rare = (dropout, layer.sinks, layer.softcap)
        special = (*rare, window, shared.documents, bias)
        if self.is_whole and all(item is None for item in special):
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                is_causal=query.shape[1] > 1,
                scale=layer.scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
            return out.transpose(1, 2)
        small = self.is_whole and length <= BIAS_MAX_LENGTH
        if bias is not None and small and all(item is None for item in rare):
            allowed = shared.mask(window, length, query.device)
            places = torch.arange(length, device=query.device)
            allowed = _seen(places, places, None) if allowed is None else allowed
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=_masked(spread(bias, places, places), allowed, query.dtype),
                scale=layer.scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
            return out.transpose(1, 2)
        algorithm = self.algorithms[layer.index]
        return context_parallel_attention(
            query,
            key,
            value,
            group=self._levels if algorithm == "hierarchical" else self.group,
            algorithm=algorithm,
            mask=AttentionMask(window=window, documents=shared.documents),
            sinks=layer.sinks,
            bias=bias,
            dropout=dropout,
            scale=layer.scale,
            softcap=layer.softcap,
        )


@dataclass(frozen=True, kw_only=True)
class CachedAttend:
    """Causal attention to what a cache holds, after the new keys and values are put there.

    All of the cache's places are looked at and those not yet filled masked, so that no shape
    depends on how many are.

    Attributes:
        cache: Of this stage.
        positions: Of the new tokens, [S].
    """

    cache: KVCache
    positions: Tensor

    @property
    def is_whole(self) -> bool:
        """Never: the keys are of other tokens too."""
        return False

    def __call__(
        self, layer: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, shared: Pass
    ) -> Tensor:
        """Attend; see `Attend`."""
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        held = self.cache.layers[layer.index]
        held["key"].index_copy_(2, self.positions, key)
        held["value"].index_copy_(2, self.positions, value)
        key, value = held["key"], held["value"]
        places = torch.arange(key.shape[2], device=key.device)
        allowed = _seen(self.positions, places, layer.window)
        bias = layer.bias_by_distance(shared, key.shape[2])
        if bias is not None:
            bias = spread(bias, self.positions, places).to(query.dtype)
        if layer.sinks is not None or layer.softcap is not None:
            out = reference_attention(
                query,
                key,
                value,
                allowed=allowed,
                scale=layer.scale,
                softcap=layer.softcap,
                sinks=layer.sinks,
                bias=bias,
            )
            return out.transpose(1, 2)
        with steady_kernels(query):
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed if bias is None else _masked(bias, allowed, query.dtype),
                scale=layer.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return out.transpose(1, 2)


def _masked(bias: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias where a query sees a key, and minus infinity elsewhere. [..., H, S, T]."""
    allowed = allowed[:, None] if allowed.dim() == 3 else allowed
    return bias.to(dtype).masked_fill(~allowed, float("-inf"))


def _seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """True where a query sees a key, by their places. [queries, keys]."""
    distance = queries[:, None] - keys
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def steady_kernels(query: Tensor) -> AbstractContextManager[Any]:
    """Leave out the kernels of torch's attention that cost more for a size they have not seen.

    cuDNN makes a plan for every size, which takes tens of milliseconds, and prompts and caches
    have many.
    """
    if query.device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What the layers of one forward pass share.

    Attributes:
        attend: who attends to whom, and by what means.
        tables: rotary tables of this rank's tokens, by the mixers' `rotary`.
        score_tables: weights of the tables of biases that layers share, by name.
        documents: ids of the packed documents of whole sequences, which do not see each other.
        sample_ids: for the dropout of attention weights; None without dropout.
        hidden_index: global index of each element of the hidden states; None without dropout.
        cache: of what this stage's layers keep in generation.

    Shape:
        documents: [B, S]; sample_ids: [B].
    """

    attend: Attend
    tables: Mapping[Rotary, RotaryTable] = field(default_factory=dict)
    score_tables: Mapping[str, Tensor] = field(default_factory=dict)
    documents: Tensor | None = None
    sample_ids: Tensor | None = None
    hidden_index: Tensor | None = None
    cache: KVCache | None = None

    def kept(self, layer: int) -> Mapping[str, Tensor] | None:
        """What a layer keeps in generation; zeros before the first token of a sequence."""
        if self.cache is None:
            return None
        held = self.cache.layers[layer]
        if self.cache.length == 0:
            for tensor in held.values():
                tensor.zero_()
        return held

    def mask(
        self, window: int | None, length: int, device: torch.device | None = None
    ) -> Tensor | None:
        """Which keys each query of whole sequences sees; None where that is all before it.

        Shape:
            Returns [length, length], or [B, length, length] with documents.
        """
        window = window if window is not None and window < length else None
        if window is None and self.documents is None:
            return None
        places = torch.arange(length, device=device)
        allowed = _seen(places, places, window)
        if self.documents is None:
            return allowed
        return allowed & (self.documents[:, :, None] == self.documents[:, None, :])
