"""The embedding of tokens, positions and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from mt_tensor_parallel import VocabParallelEmbedding
from torch import Tensor

from mt_model.block.dropout import DropoutSite
from mt_model.block.initial import start_from
from mt_model.block.norm import stream_norm
from mt_model.block.replicated import replicated_table
from mt_model.block.shard_context import ShardContext
from mt_model.stack.batch import Batch

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig


class TokenEmbedding(VocabParallelEmbedding):
    """Embeddings of tokens, positions and types, added, normed and dropped.

    Parameters: `weight` [vocab_rows, hidden], split over "tp" in its first dim, whose collectives
    are those of `VocabParallelEmbedding`; `positions.weight` [max_sequence_length, hidden],
    `types.weight` [token_types, hidden] and `norm.*`, which every rank has whole. Modules that the
    model does not have are None.

    Args:
        config: Configuration of the model.
        shard: This rank's share of the model.
        only_tokens: Leave out positions, types and the norm.

    Shape:
        forward(tokens): [B, S] -> [B, S, hidden] (S / tp tokens under sequence parallelism), the
        embeddings of the tokens alone.
    """

    def __init__(
        self, config: ModelConfig, *, shard: ShardContext, only_tokens: bool = False
    ) -> None:
        super().__init__(
            config.vocab_rows,
            config.hidden_size,
            num_tokens=config.vocab_size,
            group=shard.group,
            sequence_parallel=shard.sequence_parallel,
            dtype=shard.dtype,
            device=torch.device("meta"),
        )
        start_from(self.weight, "embedding")
        self.shard = shard
        self.scale = torch.tensor(config.embedding_scale, dtype=shard.dtype).item()
        self.positions = self.types = self.norm = None
        size = config.hidden_size
        if config.positions == "learned" and not only_tokens:
            self.positions = replicated_table(config.max_sequence_length, size, shard)
        if config.token_types and not only_tokens:
            self.types = replicated_table(config.token_types, size, shard)
        if config.embedding_norm and not only_tokens:
            self.norm = stream_norm(config, shard)
        self.dropout = DropoutSite(config.dropout, seed=shard.seed, layer=-1, name="embedding")

    def forward(self, ids: Tensor) -> Tensor:
        """Look up tokens and scale their embeddings."""
        x = super().forward(ids)
        return x if self.scale == 1 else x * self.scale

    def embed(
        self,
        batch: Batch,
        positions: Tensor,
        hidden_index: Tensor | None,
        images: Callable[[Tensor, Batch], Tensor] | None = None,
    ) -> Tensor:
        """Embed this rank's tokens, or take embeddings from the batch, and add positions and types.

        Args:
            batch: Batch with `tokens` or `embeddings`, and `token_types`, 0 where missing.
            positions: Positions of the tokens.
            hidden_index: Counters of dropout (`ForwardContext`).
            images: Function that puts features of images in place of embeddings, or None.

        Shape:
            positions: [S / cp] or [B, S / cp]. Returns [B, S / cp, hidden] (S / cp / tp tokens
            under sequence parallelism).
        """
        given = batch.get("embeddings")
        if given is None:
            x = self(batch["tokens"])
            x = x if images is None else images(x, batch)
        else:
            x = self.shard.between(given.to(self.shard.dtype), dim=1)
        if self.positions is not None:
            x = x + self.positions(self.shard.between(positions, dim=-1))
        if (types := self._types(batch)) is not None:
            x = x + types
        x = x if self.norm is None else self.norm(x)
        return self.dropout(x, hidden_index)

    def _types(self, batch: Batch) -> Tensor | None:
        """Return the embeddings of the tokens' types; type 0 where the batch has none.

        Shape:
            [B, S / cp, hidden] or [hidden].
        """
        types = batch.get("token_types")
        if self.types is not None:
            if types is None:
                return self.types.weight[0]
            return self.types(self.shard.between(types, dim=1))
        if types is not None:
            raise ValueError(
                "the batch has token_types, but the model was built with token_types=0; leave them "
                "out, or build it with as many as there are"
            )
        return None
