"""The encoder of the neighbours of a text's chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from mt_parallel_state import hash_key
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.block.norm import stream_norm
from mt_model.block.shard_context import ShardContext
from mt_model.retro.cross_attention import NeighbourCrossAttention
from mt_model.rope.rotary import rotary_table
from mt_model.stack.layer import TransformerLayer
from mt_model.stack.retro_config import RetroConfig

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig


class NeighbourEncoder(nn.Module):
    """Bidirectional layers over each neighbour, which also attend to the neighbour's chunk.

    Parameters: `layers.*` as of `TransformerLayer`, with a `cross` between the branches, and
    `norm.*`. Nothing is dropped in it.

    Args:
        retro: How the model attends to neighbours.
        config: Configuration of the model.
        shard: This rank's share of the model, for layer `first`, with whole sequences.

    Shape:
        forward(x, lengths, chunks): [C, k * r, hidden] -> the same; lengths: [C * k]; chunks:
        [C, m, hidden]; their mask: [C, m] or None.
    """

    def __init__(self, retro: RetroConfig, config: ModelConfig, *, shard: ShardContext) -> None:
        super().__init__()
        self.retro, self.dtype, self.context = retro, shard.dtype, shard.context
        place = retro.places(config.num_layers)[0]
        layer = config.layers[place]
        entry, cross = retro.encoder_layer(layer, config.hidden_size), retro.cross(layer)
        self.layers = nn.ModuleList()
        for depth in range(retro.encoder_layers):
            own = replace(shard, seed=hash_key("neighbours", shard.seed, depth))
            attending = NeighbourCrossAttention(cross, config.hidden_size, layer=place, shard=own)
            made = TransformerLayer(entry, config, layer=place, shard=own, cross=attending)
            self.layers.append(made)
        self.norm = stream_norm(config, shard)
        self.rotary = entry.mixer.rotary if entry.mixer is not None else None

    def forward(
        self,
        x: Tensor,
        lengths: Tensor,
        chunks: Tensor,
        mask: Tensor | None,
        shared: ForwardContext,
    ) -> Tensor:
        """Encode embedded neighbours; padding is seen by no token."""
        size, places = self.retro.length, torch.arange(self.retro.length, device=x.device)
        tables = {}
        if self.rotary is not None:
            table = rotary_table(places, self.rotary, length=size, dtype=self.dtype)
            tables[self.rotary] = table
        own = ForwardContext(
            attend=self.context,  # also in generation, where neighbours are whole
            tables=tables,
            documents=(places < lengths[:, None]).long(),
            memory=chunks,
            memory_mask=mask,
            plain=shared.plain,
        )
        y = x.reshape(-1, size, x.shape[2])
        for layer in self.layers:
            y, _ = layer(y, own)
        return self.norm(y).view_as(x)
