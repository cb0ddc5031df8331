"""Multi-token prediction: modules after the last layer, and their tokens and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mt_context_parallel import shard as shard_sequence
from mt_context_parallel import unshard
from mt_fusions import IGNORE_INDEX
from mt_parallel_state import Group, all_to_all, gather_from_group
from mt_tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.block.losses import Losses
from mt_model.block.norm import stream_norm
from mt_model.block.shard_context import ShardContext
from mt_model.stack.batch import Batch
from mt_model.stack.layer import TransformerLayer

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig


class MTPModule(nn.Module):
    """A layer over each token's hidden state joined with the embedding of a later token.

    `norm(layer(W [hidden_norm(h); embedding_norm(e)]))` (DeepSeek-V3, section 2.2), where h is the
    output of the final norm or of the module before, and e the embedding of the token k further on.
    Parameters: `hidden_norm.*`, `embedding_norm.*`, `projection.weight` [hidden, 2 * hidden], split
    over "tp" in its first dim, `layer.*` and `norm.*`, where the model has a final norm.

    Args:
        config: Configuration of the model.
        layer: Index of its layer, counted on from the model's layers.
        shard: This rank's share of the model and of the layer.

    Shape:
        forward(h, e): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same, and
        the layer's losses: scalars, sums over these tokens.
    """

    def __init__(self, config: ModelConfig, *, layer: int, shard: ShardContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.shard = shard
        self.hidden_norm = stream_norm(config, shard)
        self.embedding_norm = stream_norm(config, shard)
        self.projection = ColumnParallelLinear(
            2 * size, size, bias=False, **shard.linear_arguments()
        )
        self.layer = TransformerLayer(config.all_layers[layer], config, layer=layer, shard=shard)
        self.norm = stream_norm(config, shard) if config.final_norm else None

    def forward(self, h: Tensor, e: Tensor, shared: ForwardContext) -> tuple[Tensor, Losses]:
        """Return the head's input, and the losses of the layer."""
        x = self.projection(torch.cat((self.hidden_norm(h), self.embedding_norm(e)), dim=-1))
        if self.shard.sequence_parallel:
            x = all_to_all(x, self.shard.group, split_dim=1, concat_dim=2)
        else:
            x = gather_from_group(x, self.shard.group, dim=-1)
        x, losses = self.layer(x, shared)
        return x if self.norm is None else self.norm(x), losses


class Ahead:
    """Tokens and labels that follow the tokens of a batch, in the same document.

    Ranks that share sequences gather both once, since another rank has the tokens that follow.

    Args:
        batch: Batch with tokens and labels.
        documents: Document ids of whole sequences; None where each row is one document.
        group: Ranks that share sequences.

    Raises:
        ValueError: The batch has embeddings, and no tokens.
    """

    def __init__(self, batch: Batch, documents: Tensor | None, group: Group) -> None:
        if batch.get("tokens") is None:
            raise ValueError(
                "modules that predict further tokens look up the embeddings of tokens, and the "
                "batch has embeddings alone. Give batch['tokens'] too, or build the model with "
                "mtp=None"
            )
        self.group, self.documents = group, documents
        self.tokens, self.labels = (unshard(batch[name], group) for name in ("tokens", "labels"))
        weights = batch.get("label_weights")
        self.weights = None if weights is None else unshard(weights, group)

    def at(self, depth: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tokens `depth` places after this rank's, their labels and the labels' weights.

        Past the end of the document or the sequence they are 0, -100 and 0.

        Shape:
            [B, S / cp] each.
        """
        both = (self.tokens, 0), (self.labels, IGNORE_INDEX)
        tokens, labels = (self._own(x, depth, end) for x, end in both)
        weights = None if self.weights is None else self._own(self.weights, depth, 0)
        return tokens, labels, weights

    def _own(self, x: Tensor, depth: int, end: int) -> Tensor:
        return shard_sequence(self._moved(x, depth, end), self.group)

    def _moved(self, x: Tensor, depth: int, end: int) -> Tensor:
        left = max(x.shape[1] - depth, 0)
        moved = torch.full_like(x, end)
        moved[:, :left] = x[:, depth:]
        if self.documents is not None:
            same = self.documents[:, :left] == self.documents[:, depth:]
            moved[:, :left].masked_fill_(~same, end)
        return moved
