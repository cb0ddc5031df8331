"""The neighbours of a batch on their way through a stage: encoded, attended to, handed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mt_model.attend.cache import KVCache
from mt_model.attend.context import ForwardContext
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

    Shape:
        text: [B, S, hidden]; neighbours: [B * L, k * r, hidden]; seen: [B * L, m, k * r]; own:
        [B * L, m] or None.
    """

    text: Stream
    neighbours: Tensor
    seen: Tensor
    own: Tensor | None


class Neighbours(nn.Module):
    """The part of a stage that encodes neighbours, or hands them on.

    Parameters: `encoder.*` as of `NeighbourEncoder`, on the stage with layer `first`.

    Args:
        retro: How the model attends to neighbours.
        config: Configuration of the model.
        layers: Indices of the stage's layers.
        shard: This rank's share of the model, for layer `first`.

    Raises:
        ValueError: The layout splits sequences.
    """

    def __init__(
        self, retro: RetroConfig, config: ModelConfig, *, layers: range, shard: ShardContext
    ) -> None:
        super().__init__()
        if shard.sequence_parallel or shard.context.size > 1:
            raise ValueError(
                "a model with retro needs whole sequences on each rank; use cp=1 and "
                "sequence_parallel=False"
            )
        self.retro, self.place = retro, retro.places(config.num_layers)[0]
        self.encoder = None
        if self.place in layers:
            self.encoder = NeighbourEncoder(retro, config, shard=shard)

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
        beside = chunks * count * self.retro.length
        text, neighbours = x.split((x.shape[1] - beside, beside), 1)
        seen, own = chunk_masks(
            lengths if shared.cache is None else _with_kept(shared.cache, lengths),
            shared.documents,
            chunk=self.retro.chunk,
            length=text.shape[1],
            size=self.retro.length,
        )
        neighbours = neighbours.reshape(rows * chunks, count * self.retro.length, x.shape[2])
        return TextStream(text, neighbours, seen, own), {}

    def _encode(self, x: Any, shared: ForwardContext) -> tuple[Any, Losses]:
        lengths, cache, size = shared.neighbour_lengths, shared.cache, self.retro.chunk
        if self.encoder is None or (lengths is None and cache is None):
            return x, {}
        text = whole = added(x.text if isinstance(x, TextStream) else x)
        if cache is not None:
            begun = cache.beside.get(BEGUN)
            whole = text if begun is None else torch.cat((begun, text), 1)
            cache.beside[BEGUN] = whole[:, whole.shape[1] // size * size :].clone()
        if lengths is None:
            return text, {}
        found = x.neighbours
        if lengths.shape[1]:
            chunks = whole[:, : lengths.shape[1] * size].reshape(-1, size, text.shape[2])
            found = self.encoder(found, lengths.flatten(), chunks, x.own, shared)
        return x._replace(text=text, neighbours=found), {}

    def _through(
        self, step: Callable[..., Any], x: Any, shared: ForwardContext, *, attends: bool
    ) -> tuple[Any, Losses]:
        if not isinstance(x, TextStream):
            return step(x, shared)
        if attends:
            shared = replace(shared, memory=x.neighbours, memory_mask=x.seen)
        text, losses = step(x.text, shared)
        return x._replace(text=text), losses

    def _close(self, x: Any, shared: ForwardContext, *, is_last: bool) -> tuple[Any, Losses]:
        if not isinstance(x, TextStream):
            return x, {}
        text = added(x.text)
        if is_last:
            return text, {}
        rows, chunks, count = cast("Tensor", shared.neighbour_lengths).shape
        beside = x.neighbours.reshape(rows, chunks * count * self.retro.length, text.shape[2])
        return torch.cat((text, beside), 1), {}


def _with_kept(cache: KVCache, lengths: Tensor) -> Tensor:
    """Put the kept lengths of the last finished chunk in front, and keep those of the new one."""
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
