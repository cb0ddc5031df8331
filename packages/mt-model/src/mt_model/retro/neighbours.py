"""The neighbours of a batch on their way through a stage: encoded, attended to, handed on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from mt_parallel_state import (
    all_gather,
    gather_from_group,
    group_rank,
    group_size,
    scatter_to_group,
)
from torch import Tensor, nn

from mt_model.attend.cache import KVCache
from mt_model.attend.context import ForwardContext
from mt_model.attend.sequence import SequenceAttend
from mt_model.block.losses import Losses
from mt_model.block.residual import Stream, added
from mt_model.block.shard_context import ShardContext
from mt_model.retro.cross_attention import chunk_masks
from mt_model.retro.encoder import NeighbourEncoder
from mt_model.stack.batch import Batch, new_tokens
from mt_model.stack.layer import Step
from mt_model.stack.retro_config import RetroConfig

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig

LENGTHS, BEGUN = "neighbour_lengths", "begun_chunk"
"""Names of the tensors beside the layers of a cache."""


class TextStream(NamedTuple):
    """The stream of a text beside its neighbours, embedded or encoded, and their masks.

    The tokens attend to `memory`: the encoded neighbours and, if ranks share sequences, the
    neighbours of the chunk before each part of a row. A stage that neither encodes nor attends has
    unchanged neighbours, and no masks.

    Shape:
        text: [B, S, hidden]; neighbours: [B * L, k * r, hidden]; seen: [C, m, k * r]; own:
        [B * L, m] or None; memory: [C, k * r, hidden], or [B * L, k * r, hidden] with a cache.
    """

    text: Stream
    neighbours: Tensor
    seen: Tensor | None = None
    own: Tensor | None = None
    memory: Tensor | None = None


class Neighbours(nn.Module):
    """The part of a stage that encodes neighbours, or hands them on.

    Parameters: `encoder.*` as of `NeighbourEncoder`, on the stage with layer `first`.

    Args:
        retro: How the model attends to neighbours.
        config: Configuration of the model.
        layers: Indices of the stage's layers.
        shard: This rank's share of the model, for layer `first`.
        alone: Attention within a neighbour, which no ranks share.
    """

    def __init__(
        self,
        retro: RetroConfig,
        config: ModelConfig,
        *,
        layers: range,
        shard: ShardContext,
        alone: SequenceAttend,
    ) -> None:
        super().__init__()
        self.retro, self.place = retro, retro.places(config.num_layers)[0]
        self.group = shard.group if shard.sequence_parallel else None
        self.context, self.reads = shard.context, layers.stop > self.place
        self.encoder = None
        if self.place in layers:
            whole = replace(shard, sequence_parallel=False, context=alone)
            self.encoder = NeighbourEncoder(retro, config, shard=whole)

    def lengths(self, batch: Batch, *, training: bool) -> Tensor | None:
        """Check a batch's neighbours, and return their lengths; None where it has none.

        Raises:
            TypeError: Neighbours are no integers.
            ValueError: A shape does not fit, they are missing in training or behind others in a
                cache, or the cache can't keep them.
        """
        tokens, lengths = batch.get("neighbours"), batch.get("neighbour_lengths")
        chunks, cache = self._finished(batch), batch.get("cache")
        if tokens is None and lengths is None:
            if training:
                raise ValueError(
                    "a model with retro trains with batch['neighbours'] and "
                    "batch['neighbour_lengths']; where there are none, give lengths of 0"
                )
            return self._without(cache, chunks)
        _check_cache(batch)
        self._check_cut(batch)
        for name, x in (("neighbours", tokens), ("neighbour_lengths", lengths)):
            if not isinstance(x, Tensor) or x.dtype != torch.int64:
                raise TypeError(f"{name} must be a tensor of int64, and both are needed")
        shape = new_tokens(batch).shape[0], chunks, self.retro.neighbours, self.retro.length
        for name, x in (("neighbours", tokens), ("neighbour_lengths", lengths)):
            expected = shape[: 4 if name == "neighbours" else 3]
            if cast("Tensor", x).shape != expected:
                raise ValueError(
                    f"{name} must be {expected} for chunks of {self.retro.chunk} tokens, got "
                    f"{tuple(cast('Tensor', x).shape)}"
                )
        return lengths if chunks or cache is not None else None

    def _check_cut(self, batch: Batch) -> None:
        """Check that ranks that share sequences have whole chunks."""
        unit = 2 * self.retro.chunk if self.context.size > 1 else 1
        if new_tokens(batch).shape[1] % unit:
            raise ValueError(
                f"cp={self.context.size} ranks share sequences of whole chunks; use sequences of a "
                f"multiple of {unit * self.context.size} tokens"
            )

    def _finished(self, batch: Batch) -> int:
        """Return the number of chunks that a pass finishes."""
        cache, size = batch.get("cache"), self.retro.chunk
        held = cache.length if isinstance(cache, KVCache) else 0
        return (held + new_tokens(batch).shape[1]) // size - held // size

    def _without(self, cache: object, chunks: int) -> Tensor | None:
        """Return the lengths of a pass without neighbours: None, or of 0 chunks with kept ones."""
        kept = cache.beside.get(LENGTHS) if isinstance(cache, KVCache) else None
        if kept is None:
            return None
        if chunks:
            raise ValueError(
                f"the pass finishes {chunks} chunks behind others that have neighbours; give "
                "batch['neighbours'] and batch['neighbour_lengths'], with lengths of 0 for none"
            )
        return kept.new_zeros(len(kept), 0, self.retro.neighbours)

    def steps(self, layers: list[tuple[int, list[Step]]], *, is_last: bool) -> list[Step]:
        """Return the steps of a stage, given the index and the steps of each of its layers."""
        steps: list[Any] = [self._open]
        for index, own in layers:
            if index == self.place:
                steps.append(self._encode)
            steps += [partial(self._through, step, attends=index >= self.place) for step in own]
        return [*steps, partial(self._close, is_last=is_last)]

    def _open(self, x: Tensor, shared: ForwardContext) -> tuple[Any, Losses]:
        lengths = shared.neighbour_lengths
        if lengths is None:
            return x, {}
        rows, chunks, count = lengths.shape
        room, tp = count * self.retro.length, group_size(self.group)
        beside = chunks * room // tp
        text, neighbours = x.split((x.shape[1] - beside, beside), 1)
        text = text.clone()  # what a layer keeps of it would hold the neighbours' memory too
        if not self.reads:
            return TextStream(text, neighbours), {}
        neighbours = gather_from_group(neighbours, self.group, dim=1)
        neighbours = neighbours.reshape(rows * chunks, room, x.shape[2])
        seen, own = self._masks(lengths, shared, text.shape[1] * tp)
        stream = TextStream(text, neighbours, seen, own)
        return self._remembered(stream, lengths) if self.encoder is None else stream, {}

    def _masks(
        self, lengths: Tensor, shared: ForwardContext, length: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the masks of the tokens and of the chunks; see `chunk_masks`."""
        sizes = {"chunk": self.retro.chunk, "size": self.retro.length}
        documents, size = shared.documents, self.retro.chunk
        if shared.cache is not None:
            return chunk_masks(_with_kept(shared.cache, lengths), None, **sizes)
        if self.context.size == 1:
            if documents is not None:
                behind = size * (lengths.shape[1] + 1) - 1 - length
                documents = nn.functional.pad(documents, (0, behind))
            return chunk_masks(lengths, documents, **sizes)
        parts = lengths.unflatten(1, (2, -1))
        before = self._before(parts[:, :, -1])
        before = before.masked_fill(self._is_first(before), 0)
        joined = torch.cat((before[:, :, None], parts), 2).flatten(0, 1)
        if documents is None:
            return chunk_masks(joined, None, **sizes)
        padded = nn.functional.pad(documents, (size, size - 1))
        begins = [part * length // 2 for part in self._parts()]
        width = length // 2 + 2 * size - 1
        own = torch.stack([padded[:, begin : begin + width] for begin in begins], 1)
        seen, mask = chunk_masks(joined, own.flatten(0, 1), **sizes)
        assert mask is not None, "there are documents"  # noqa: S101
        return seen, mask.unflatten(0, (len(joined), -1))[:, 1:].flatten(0, 1)

    def _parts(self) -> tuple[int, int]:
        """Return the numbers of the two parts of a sequence that this rank has."""
        rank = group_rank(self.context.group)
        return rank, 2 * self.context.size - 1 - rank

    def _is_first(self, like: Tensor) -> Tensor:
        """Tell which of this rank's parts is the first of a sequence, to broadcast with [B, 2]."""
        first = torch.tensor([part == 0 for part in self._parts()], device=like.device)
        return first.view(1, 2, *(1,) * (like.dim() - 2))

    def _before(self, ends: Tensor) -> Tensor:
        """Return the ends of the parts in front of this rank's, from the ends of its own.

        All-gather over the context group; backward reduce-scatter. The first part gets another's.

        Shape:
            ends: [B, 2, ...]. Returns the same.
        """
        gathered, size = all_gather(ends, self.context.group, dim=1), self.context.size
        places = []
        for part in self._parts():
            before = max(part - 1, 0)
            places.append(2 * before if before < size else 2 * (2 * size - 1 - before) + 1)
        return gathered[:, places]

    def _remembered(self, x: TextStream, lengths: Tensor) -> TextStream:
        """Return the stream with what its tokens attend to."""
        if self.context.size == 1:
            return x._replace(memory=x.neighbours)
        parts = x.neighbours.unflatten(0, (lengths.shape[0], 2, -1))
        before = self._before(parts[:, :, -1])
        return x._replace(memory=torch.cat((before[:, :, None], parts), 2).flatten(0, 2))

    def _encode(self, x: Any, shared: ForwardContext) -> tuple[Any, Losses]:
        lengths, cache, size = shared.neighbour_lengths, shared.cache, self.retro.chunk
        if self.encoder is None or (lengths is None and cache is None):
            return x, {}
        text = added(x.text if isinstance(x, TextStream) else x)
        whole = gather_from_group(text, self.group, dim=1)
        if cache is not None:
            begun = cache.beside.get(BEGUN)
            whole = whole if begun is None else torch.cat((begun, whole), 1)
            cache.beside[BEGUN] = whole[:, whole.shape[1] // size * size :].clone()
        if lengths is None:
            return text, {}
        found = x.neighbours
        if lengths.shape[1]:
            chunks = whole[:, : lengths.shape[1] * size].reshape(-1, size, text.shape[2])
            with self._counting(shared):
                found = self.encoder(found, lengths.flatten(), chunks, x.own, shared)
        return self._remembered(x._replace(text=text, neighbours=found), lengths), {}

    def _counting(self, shared: ForwardContext) -> AbstractContextManager[None]:
        """Count what the encoder keeps for backward as the first attending layer's."""
        if shared.saved is None or not torch.is_grad_enabled():
            return nullcontext()
        others = chain(self.parameters(), shared.constants())
        return shared.saved.of_layer(self.place, others=others)

    def _through(
        self, step: Callable[..., Any], x: Any, shared: ForwardContext, *, attends: bool
    ) -> tuple[Any, Losses]:
        if not isinstance(x, TextStream):
            return step(x, shared)
        if attends:
            shared = replace(shared, memory=x.memory, memory_mask=x.seen)
        text, losses = step(x.text, shared)
        return x._replace(text=text), losses

    def _close(self, x: Any, shared: ForwardContext, *, is_last: bool) -> tuple[Any, Losses]:
        if not isinstance(x, TextStream):
            return x, {}
        text = added(x.text)
        if is_last:
            return text, {}
        beside = x.neighbours
        if self.reads:
            rows, chunks, count = cast("Tensor", shared.neighbour_lengths).shape
            beside = beside.reshape(rows, chunks * count * self.retro.length, text.shape[2])
            beside = scatter_to_group(beside, self.group, dim=1)
        return torch.cat((text, beside), 1), {}


def _with_kept(cache: KVCache, lengths: Tensor) -> Tensor:
    """Put the kept lengths of the last finished chunk in front, and keep those of the new chunk."""
    kept = cache.beside.get(LENGTHS)
    if kept is None:
        kept = lengths.new_zeros(lengths.shape[0], lengths.shape[2])
    lengths = torch.cat((kept[:, None], lengths), 1)
    cache.beside[LENGTHS] = lengths[:, -1].clone()
    return lengths


def _check_cache(batch: Batch) -> None:
    """Refuse neighbours beside pages, and chunks that rows of unequal length would cut apart."""
    cache = batch.get("cache")
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError("pages keep no neighbours; make a cache with new_cache() for each text")
    if cache is not None and (batch.get("mask") is not None or cache.mask is not None):
        raise ValueError(
            "neighbours don't go with a cache and a mask, as padding would move the chunks; give "
            "rows of equal length, or one at a time"
        )
