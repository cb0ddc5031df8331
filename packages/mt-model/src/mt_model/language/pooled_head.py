"""Scores of classes for whole sequences, or their losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mt_fusions import IGNORE_INDEX
from mt_parallel_state import reduce_from_group
from torch import Tensor, nn

from mt_model.block.losses import Losses
from mt_model.block.shard_context import ShardContext
from mt_model.language.pooled_head_config import PooledHeadConfig
from mt_model.stack.batch import Batch
from mt_model.vision.class_head import ClassHead
from mt_model.vision.pooling import whole_linear

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig


class PooledHead(nn.Module):
    """A layer `tanh(W x + b)` over the first token's features, then scores of the classes.

    Parameters: `dense.weight` [hidden, hidden], `dense.bias`, `classifier.weight`
    [classes, hidden] and `classifier.bias`, which every rank has whole. Under sequence parallelism
    the first token's features are summed over the tensor-parallel group (backward identity). In a
    context group the rank with the first token counts the loss.

    Args:
        config: Configuration of the head.
        model: Configuration of the whole model.
        shard: This rank's share of the model.
    """

    def __init__(
        self, config: PooledHeadConfig, model: ModelConfig, *, shard: ShardContext
    ) -> None:
        super().__init__()
        self.shard, size = shard, model.hidden_size
        self.dense = whole_linear(size, size, bias=True, shard=shard)
        self.classifier = ClassHead(size, config.num_classes, shard=shard)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Score the classes.

        Args:
            x: The last layer's output, normed.
            batch: Batch with a `mask` where there is padding.

        Shape:
            x: [B, S / cp, hidden] (S / cp / tp tokens under sequence parallelism). Returns
            [B, classes], meaningless on ranks of a context group without the first token.
        """
        return self.classifier(self._pooled(x, self._firsts(x, batch)))

    def loss(self, x: Tensor, batch: Batch) -> Losses:
        """Sum the cross entropies of the scores with the labels of the sequences.

        Args:
            x: The last layer's output, as in `forward`.
            batch: Batch with `sequence_labels`, where -100 does not count, and a `mask` where there
                is padding.

        Returns:
            `nsp`, the sum, and `sequences`, the number of labels, over the sequences whose first
            token this rank holds.

        Raises:
            ValueError: Several documents share a row.
        """
        firsts, labels = self._firsts(x, batch), batch.get("sequence_labels")
        here = firsts.any(1)
        if labels is None:
            labels = torch.full_like(here, IGNORE_INDEX, dtype=torch.int64)
        elif batch.get("documents") is not None:
            raise ValueError(
                "sequence_labels are of whole rows, and documents packs several texts into one; "
                "leave one of them out"
            )
        found = self.classifier.loss(self._pooled(x, firsts), labels.where(here, IGNORE_INDEX))
        return {"nsp": found["classes"], "sequences": found["tokens"]}

    def _firsts(self, x: Tensor, batch: Batch) -> Tensor:
        """Tell which of this rank's tokens are the first of their sequences: [B, S / cp]."""
        context, mask = self.shard.context, batch.get("mask")
        length = x.shape[1] * (self.shard.tp if self.shard.sequence_parallel else 1)
        places = context.positions(length * context.size, x.device)
        first = places.new_zeros(x.shape[0]) if mask is None else mask.long().argmax(1)
        return places == first[:, None]

    def _pooled(self, x: Tensor, firsts: Tensor) -> Tensor:
        own = self.shard.between(firsts, dim=1)
        at = own.long().argmax(1)[:, None, None].expand(-1, 1, x.shape[2])
        x = x.gather(1, at)[:, 0] * own.any(1, keepdim=True)
        if self.shard.sequence_parallel:
            x = reduce_from_group(x, self.shard.group)
        return torch.tanh(self.dense(x))
