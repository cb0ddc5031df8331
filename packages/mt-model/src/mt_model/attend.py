"""What one forward pass shares, and who attends to whom in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args

import torch
from mt_context_parallel import (
    Algorithm,
    AttentionDropout,
    AttentionMask,
    HierarchicalGroups,
    ReferenceKernel,
    context_parallel_attention,
    positions,
)
from mt_files import divisors
from mt_parallel_state import ParallelState, group_rank, outside_graph
from torch import Tensor

from mt_model.attention_kernels import attention
from mt_model.cache import KVCache
from mt_model.choice import AttentionKernel
from mt_model.chunks import chunk_documents
from mt_model.distance import spread
from mt_model.padding import positions_of
from mt_model.rope import Rotary
from mt_model.rotary import RotaryTable
from mt_model.saved_activations import SavedActivations
from mt_model.scores import Scores
from mt_model.seen import seen
from mt_model.temperature_config import TemperatureConfig


class AttendingLayer(Protocol):
    """What attention needs to know of the layer that asks for it.

    Attributes:
        index: Of the layer in the whole model.
        window: Tokens that a query sees, or None.
        chunk: Tokens of the chunks that don't see each other, or None.
        scale: Of the scores, or None.
        softcap: Of the scores, or None.
        causal: Whether a query sees the tokens up to its own only.
        algorithm: How attention gets at the keys of the other ranks of a context group.
    """

    index: int
    window: int | None
    chunk: int | None
    scale: float | None
    softcap: float | None
    causal: bool
    algorithm: Algorithm

    def sink_logits(self, query: Tensor) -> Tensor | None:
        """Return a logit per query head of this rank that has no value, or None."""
        ...

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
    """Attention within sequences, which the ranks of a context group may share.

    Plain attention of whole sequences is torch's; all else is computed by tiles
    (`mt_context_parallel`), whose collectives run where there is a group. To make one is
    collective over the group.

    Args:
        state: This rank's place.
        algorithm: How attention gets at the others' keys; a list has one for each layer.
        inner_size: Ranks that swap tokens for heads, for the hierarchical algorithm.
        layers: Of the whole model.
        kernel: Computes attention; where ranks share sequences by tiles, fused or plain ones.
        shared: Ranks of a context group share sequences; False: each has whole ones of its own.

    Attributes:
        group: The ranks that share a sequence, or None.
        size: How many they are.
        algorithms: How attention gets at the others' keys, in each of the model's layers.
        kernel: The one that computes attention, or `auto`.

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
        kernel: AttentionKernel = "auto",
        shared: bool = True,
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
        self.group, self.size, self.algorithms = None, 1, each
        if shared:
            self.group, self.size = state.group("cp"), state.size("cp")
        self.kernel: AttentionKernel = kernel
        if self.group is not None and kernel not in ("auto", "tiles", "reference"):
            raise ValueError(
                f"kernels.attention: kernel {kernel!r} does not serve: it needs whole sequences, "
                f"and cp={self.size} ranks share them; use auto, tiles or reference, or cp=1"
            )
        self._levels: HierarchicalGroups | None = None
        if self.group is not None and "hierarchical" in each:
            if not inner_size or self.size % inner_size:
                raise ValueError(
                    f"context_inner_size={inner_size} does not divide cp={self.size}, which the "
                    f"hierarchical algorithm needs; use one of {divisors(self.size)}"
                )
            inner, outer = state.level_groups("cp", (inner_size, self.size // inner_size))
            self._levels = HierarchicalGroups(inner=inner, outer=outer)

    def algorithm_of(self, layer: int) -> Algorithm:
        """Of a layer of the model; modules behind the last layer do as it."""
        return self.algorithms[min(layer, len(self.algorithms) - 1)]

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
        length = query.shape[1] * self.size
        scores = Scores(
            scale=query.shape[-1] ** -0.5 if layer.scale is None else layer.scale,
            causal=layer.causal,
            window=layer.window if layer.window is not None and layer.window < length else None,
            documents=shared.documents_of(layer.chunk, like=query, length=length),
            softcap=layer.softcap,
            bias=layer.bias_by_distance(shared, length),
            sinks=layer.sink_logits(query),
            dropout=layer.weight_dropout(shared),
        )
        if self.is_whole:
            return attention(query, key, value, scores, kernel=self.kernel)
        algorithm = layer.algorithm
        return outside_graph(context_parallel_attention)(
            query,
            key,
            value,
            group=self._levels if algorithm == "hierarchical" else self.group,
            algorithm=algorithm,
            mask=AttentionMask(
                causal=scores.causal, window=scores.window, documents=scores.documents
            ),
            sinks=scores.sinks,
            bias=scores.bias,
            dropout=scores.dropout,
            scale=scores.scale,
            softcap=scores.softcap,
            kernels=(ReferenceKernel(),) if self.kernel == "reference" else None,
        )


@dataclass(frozen=True, kw_only=True)
class CachedAttend:
    """Causal attention to what a cache holds, after the new keys and values are put there.

    All of the cache's places are looked at, or as many as the layer's window has, and those not yet
    filled masked, so that no shape depends on how many are.

    Attributes:
        cache: Of this stage.
        places: Of the new tokens in it, [S].
    """

    cache: KVCache
    places: Tensor

    @property
    def is_whole(self) -> bool:
        """Never: the keys are of other tokens too."""
        return False

    def __call__(
        self, layer: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, shared: Pass
    ) -> Tensor:
        """Attend; see `Attend`."""
        self.put(layer.index, {"key": key, "value": value})
        block = self.block(layer.window, layer.chunk)
        bias = layer.bias_by_distance(shared, self.cache.max_length)
        scores = Scores(
            scale=query.shape[-1] ** -0.5 if layer.scale is None else layer.scale,
            allowed=self.allowed(layer.window, layer.chunk, block=block),
            softcap=layer.softcap,
            bias=None if bias is None else spread(bias, *self.positions(block)),
            sinks=layer.sink_logits(query),
        )
        key = self.cache.read(layer.index, "key", key.dtype, block)
        value = self.cache.read(layer.index, "value", value.dtype, block)
        return attention(query, key, value, scores)

    def put(self, layer: int, new: Mapping[str, Tensor]) -> None:
        """Keep what a layer has made of the new tokens.

        Args:
            layer: Its global index.
            new: By name, as the mixer's `token_cache` has them.

        Shape:
            new: [B, S, heads, D].
        """
        for name, x in new.items():
            self.cache.write(layer, name, x, self.places)

    def block(self, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Places of all that the new tokens may see, in order; None for all of the cache.

        There are as many wherever the new tokens are. Where padding stands between tokens they are
        farther apart than their positions say, and no window tells how many places they see.

        Shape:
            Returns [places].
        """
        near = window if chunk is None else chunk
        size = 0 if near is None else near + self.places.shape[0] - 1
        if near is None or self.cache.mask is not None or size >= self.cache.max_length:
            return None
        start = (self.places[0] - near + 1).clamp(min=0)
        return start + torch.arange(size, device=self.places.device)

    def positions(self, block: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Positions of the new tokens and of places: [S] and [T], or [B, ...] with padding.

        Args:
            block: The places; None for all.
        """
        mask, device = self.cache.mask, self.places.device
        if block is not None:
            return self.places, block
        if mask is None:
            return self.places, torch.arange(self.cache.max_length, device=device)
        positions = positions_of(mask)
        return positions.index_select(1, self.places), positions

    def allowed(
        self, window: int | None, chunk: int | None = None, *, block: Tensor | None = None
    ) -> Tensor:
        """Which places of the cache each new token sees: [S, T], or [B, 1, S, T] with padding.

        Padding sees itself, since a softmax over nothing is not a number.

        Args:
            window: Of the layer.
            chunk: Of the layer.
            block: The places; None for all.
        """
        near, mask = seen(*self.positions(block), window, chunk=chunk), self.cache.mask
        if mask is None:
            return near
        places = torch.arange(self.cache.max_length, device=mask.device)
        return ((near & mask[:, None]) | (self.places[:, None] == places))[:, None]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What the layers of one forward pass share.

    Attributes:
        attend: who attends to whom, and by what means.
        tables: rotary tables of this rank's tokens, by the mixers' `rotary`.
        score_tables: weights of the tables of biases that layers share, by name.
        temperatures: what queries of this rank's tokens are multiplied with, by the mixers'
            `query_temperature`.
        documents: ids of the packed documents of whole sequences, which do not see each other.
        sample_ids: for the dropout of attention weights; None without dropout.
        hidden_index: global index of each element of the hidden states; None without dropout.
        cache: of what this stage's layers keep in generation.
        memory: what layers with cross-attention attend to.
        memory_mask: which of it counts, for all tokens of a row or for each of this rank's; None
            for all.
        saved: takes care of what layers keep for backward; None leaves it to autograd.
        plain: layers run as they are, and not through what `Stack.wrap_layers` put around them.

    Shape:
        documents: [B, S]; sample_ids: [B]; memory: [B, M, size]; memory_mask: [B, M], or
        [B, S, M] of this rank's tokens; temperatures: [S] or [B, S].
    """

    attend: Attend
    tables: Mapping[Rotary, RotaryTable] = field(default_factory=dict)
    score_tables: Mapping[str, Tensor] = field(default_factory=dict)
    temperatures: Mapping[TemperatureConfig, Tensor] = field(default_factory=dict)
    documents: Tensor | None = None
    sample_ids: Tensor | None = None
    hidden_index: Tensor | None = None
    cache: KVCache | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    saved: SavedActivations | None = None
    plain: bool = False

    def tensors(self) -> list[Tensor]:
        """Return what may need a gradient: the tables, and the memory where there is one."""
        return [*self.score_tables.values(), *([] if self.memory is None else [self.memory])]

    def constants(self) -> list[Tensor]:
        """Return what layers read that none of them makes."""
        tables = (table.values for table in self.tables.values())
        once = (self.documents, self.hidden_index, self.memory, self.memory_mask)
        found = [*self.score_tables.values(), *tables, *self.temperatures.values()]
        return found + [x for x in once if x is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Pass:
        """Return the same with others in place of `tensors`."""
        tables = dict(zip(self.score_tables, tensors, strict=False))
        memory = None if self.memory is None else tensors[-1]
        return replace(self, score_tables=tables, memory=memory)

    def documents_of(self, chunk: int | None, *, like: Tensor, length: int) -> Tensor | None:
        """Return the ids of documents, of which chunks of so many tokens are ones of their own.

        Args:
            chunk: None leaves the documents whole.
            like: Has the rows and the device.
            length: Of the whole sequences.

        Shape:
            Returns [B, S].
        """
        if chunk is None or chunk >= length:
            return self.documents
        return chunk_documents(self.documents, chunk, like=like, length=length)

    def kept(self, layer: int) -> Mapping[str, Tensor] | None:
        """What a layer with a state keeps in generation; zeros before the first token.

        Raises:
            ValueError: There is padding elsewhere than in front of the first tokens, which a state
                can't leave out.
        """
        if self.cache is None:
            return None
        held, tokens = self.cache.layers[layer], self.documents
        if tokens is not None and not (tokens if self.cache.length else tokens[:, -1]).all():
            raise ValueError(
                f"layer {layer} keeps a state of the tokens, and the mask has padding behind some "
                "of them; put all padding in front, and give no more of it later"
            )
        if self.cache.length == 0:
            for tensor in held.values():
                tensor.zero_()
        return held

    @property
    def is_cached(self) -> bool:
        """Whether this is a pass of generation."""
        return isinstance(self.attend, CachedAttend)
