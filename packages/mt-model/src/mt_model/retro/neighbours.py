"""The neighbours of a batch on their way through a stage: encoded, attended to, handed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.block.losses import Losses
from mt_model.block.residual import Stream, added
from mt_model.block.shard_context import ShardContext
from mt_model.retro.cross_attention import chunk_masks
from mt_model.retro.encoder import NeighbourEncoder
from mt_model.stack.batch import Batch
from mt_model.stack.layer import Step
from mt_model.stack.retro_config import RetroConfig

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig


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
            ValueError: A shape does not fit, they are missing in training, or there is a cache.
        """
        tokens, lengths = batch.get("neighbours"), batch.get("neighbour_lengths")
        if tokens is None and lengths is None:
            if training:
                raise ValueError(
                    "a model with retro trains with batch['neighbours'] and "
                    "batch['neighbour_lengths']; where there are none, give lengths of 0"
                )
            return None
        if batch.get("cache") is not None:
            raise ValueError(
                "passes with a cache don't take neighbours; score whole sequences without one"
            )
        for name, x in (("neighbours", tokens), ("neighbour_lengths", lengths)):
            if not isinstance(x, Tensor) or x.dtype != torch.int64:
                raise TypeError(f"{name} must be a tensor of int64, and both are needed")
        given = batch.get("tokens")
        text = cast("Tensor", batch.get("embeddings") if given is None else given)
        rows, chunks = text.shape[0], text.shape[1] // self.retro.chunk
        shape = rows, chunks, self.retro.neighbours, self.retro.length
        for name, x in (("neighbours", tokens), ("neighbour_lengths", lengths)):
            expected = shape[: 4 if name == "neighbours" else 3]
            if cast("Tensor", x).shape != expected:
                raise ValueError(
                    f"{name} must be {expected} for chunks of {self.retro.chunk} tokens, got "
                    f"{tuple(cast('Tensor', x).shape)}"
                )
        return lengths if chunks else None

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
            lengths,
            shared.documents,
            chunk=self.retro.chunk,
            length=text.shape[1],
            size=self.retro.length,
        )
        neighbours = neighbours.reshape(rows * chunks, -1, x.shape[2])
        return TextStream(text, neighbours, seen, own), {}

    def _encode(self, x: Any, shared: ForwardContext) -> tuple[Any, Losses]:
        lengths = shared.neighbour_lengths
        if lengths is None or self.encoder is None:
            return x, {}
        text, (size, count) = added(x.text), (self.retro.chunk, lengths.shape[1])
        chunks = text[:, : count * size].reshape(-1, size, text.shape[2])
        found = self.encoder(x.neighbours, lengths.flatten(), chunks, x.own, shared)
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
        beside = x.neighbours.reshape(text.shape[0], -1, text.shape[2])
        return torch.cat((text, beside), 1), {}
