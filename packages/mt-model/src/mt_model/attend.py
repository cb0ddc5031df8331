"""What one forward pass shares, and who attends to whom in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from mt_context_parallel import AttentionDropout, AttentionMask, context_parallel_attention
from torch import Tensor

from mt_model.cache import KVCache
from mt_model.placement import Context
from mt_model.reference_attention import reference_attention


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


@dataclass(frozen=True, kw_only=True)
class SequenceAttend:
    """Causal attention within sequences, which the ranks of a context group may share.

    Plain causal attention of whole sequences is torch's; all else is computed by tiles
    (`mt_context_parallel`), whose collectives run where there is a group.

    Attributes:
        context: The ranks that share the sequences.
    """

    context: Context

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has a part of the sequences."""
        return self.context.group is None

    def __call__(
        self, layer: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, shared: Pass
    ) -> Tensor:
        """Attend; see `Attend`."""
        dropout, length = layer.weight_dropout(shared), query.shape[1] * self.context.size
        window = layer.window if layer.window is not None and layer.window < length else None
        special = (dropout, window, shared.documents, layer.sinks, layer.softcap)
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
        return context_parallel_attention(
            query,
            key,
            value,
            group=self.context.attention_group(layer.index),
            algorithm=self.context.algorithms[layer.index],
            mask=AttentionMask(window=window, documents=shared.documents),
            sinks=layer.sinks,
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
        if layer.sinks is not None or layer.softcap is not None:
            out = reference_attention(
                query,
                key,
                value,
                allowed=allowed,
                scale=layer.scale,
                softcap=layer.softcap,
                sinks=layer.sinks,
            )
            return out.transpose(1, 2)
        with steady_kernels(query):
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                scale=layer.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return out.transpose(1, 2)


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
        tables: rotary tables of this rank's tokens by (head_dim, theta).
        documents: ids of the packed documents of whole sequences, which do not see each other.
        sample_ids: for the dropout of attention weights; None without dropout.
        hidden_index: global index of each element of the hidden states; None without dropout.

    Shape:
        tables: [2, S, D] or [2, B, S, D]; documents: [B, S]; sample_ids: [B].
    """

    attend: Attend
    tables: Mapping[tuple[int, float], Tensor] = field(default_factory=dict)
    documents: Tensor | None = None
    sample_ids: Tensor | None = None
    hidden_index: Tensor | None = None

    def mask(self, window: int | None, length: int) -> Tensor | None:
        """Which keys each query of whole sequences sees; None where that is all before it.

        Shape:
            Returns [length, length], or [B, length, length] with documents.
        """
        window = window if window is not None and window < length else None
        if window is None and self.documents is None:
            return None
        places = torch.arange(length)
        allowed = _seen(places, places, window)
        if self.documents is None:
            return allowed
        return allowed & (self.documents[:, :, None] == self.documents[:, None, :])
