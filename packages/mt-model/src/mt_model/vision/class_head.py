"""Scores of classes, or their losses."""

from __future__ import annotations

import torch
from mt_fusions import IGNORE_INDEX, LOSS, LossOptions
from mt_kernels import Selector
from mt_tensor_parallel import linear_cross_entropy, parallel_linear
from torch import Tensor, nn

from mt_model.block.losses import Losses
from mt_model.block.shard_context import ShardContext


class ClassHead(nn.Module):
    """Scores `W v + b` of classes for a vector, or the sum of their cross entropies with labels.

    Parameters: `weight` [classes, size] and `bias` [classes], which every rank has whole, as their
    number need not divide.

    Args:
        size: Size of the vector.
        classes: Number of classes.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, size], the same on all tensor-parallel ranks -> [B, classes].
    """

    def __init__(self, size: int, classes: int, *, shard: ShardContext) -> None:
        super().__init__()
        self.gemm, self.kernel = shard.gemm, Selector(LOSS, shard.kernels.loss)
        like = {"dtype": shard.dtype, "device": torch.device("meta")}
        self.weight = nn.Parameter(torch.empty(classes, size, **like))
        self.bias = nn.Parameter(torch.empty(classes, **like))
        shard.mark_replicated(self, partial=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score the classes."""
        return parallel_linear(x, self.weight, self.bias, mode="column", gemm=self.gemm)

    def loss(self, x: Tensor, labels: Tensor) -> Losses:
        """Sum the cross entropies of the scores with labels.

        Returns:
            `classes`, the sum, and `tokens`, the number of labels that are not -100.

        Shape:
            x: [B, size]; labels: [B].
        """
        options = LossOptions(kernel=self.kernel.find(x).function)
        loss = linear_cross_entropy(
            x, self.weight, labels, bias=self.bias, options=options, gemm=self.gemm
        )
        return {"classes": loss, "tokens": (labels != IGNORE_INDEX).sum()}
