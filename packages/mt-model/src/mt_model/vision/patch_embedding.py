"""The patches of images as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mt_model.block.dropout import DropoutSite
from mt_model.block.initial import start_from
from mt_model.block.norm import stream_norm
from mt_model.block.replicated import replicated_table
from mt_model.block.shard_context import ShardContext
from mt_model.vision.pooling import whole_linear

if TYPE_CHECKING:
    from mt_model.vision.config import VisionConfig


def cut_patches(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut images into patches, row by row; incomplete patches at the lower and right edge are lost.

    Args:
        images: Images of any size with at least one patch.
        size: Height and width of a patch.

    Shape:
        images: [B, C, H, W]. Returns [B, rows * columns, C * height * width].

    Example:
        >>> cut_patches(torch.arange(6.0).view(1, 1, 2, 3), (1, 2)).tolist()
        [[[0.0, 1.0], [3.0, 4.0]]]
    """
    patches = images.unfold(2, size[0], size[0]).unfold(3, size[1], size[1])
    return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class PatchEmbedding(nn.Module):
    """A linear layer over the pixels of each patch, the class token, positions, and a norm.

    The linear layer is a convolution whose stride is its kernel. Parameters: `patches.weight`
    [hidden, C * height * width], `patches.bias`, `class_token` [hidden], `positions.weight`
    [tokens, hidden] and `norm.*`, which every rank has whole; what the model does not have is
    None. Under sequence parallelism a rank goes on with its own tokens, and gradients are partial.

    Args:
        config: Configuration of the encoder.
        shard: This rank's share of the model.
        padding: Zeros after the last token, so that ranks can share the tokens.

    Shape:
        forward(images): [B, C, H, W] -> [B, tokens + padding, hidden], of which sequence
        parallelism leaves 1 / tp.
    """

    def __init__(self, config: VisionConfig, *, shard: ShardContext, padding: int) -> None:
        super().__init__()
        self.size, self.padding, self.shard = config.patch_size, padding, shard
        hidden, partial = config.hidden_size, shard.sequence_parallel
        self.patches = whole_linear(
            config.patch_elements, hidden, bias=config.patch_bias, shard=shard
        )
        self.class_token = None
        if config.class_token:
            empty = torch.empty(hidden, dtype=shard.dtype, device="meta")
            self.class_token = nn.Parameter(empty)
            start_from(self.class_token, "embedding")
        shard.mark_replicated(self, partial=partial)
        self.positions = replicated_table(config.max_sequence_length, hidden, shard)
        self.norm = stream_norm(config, shard) if config.embedding_norm else None
        self.dropout = DropoutSite(config.dropout, seed=shard.seed, layer=-1, name="embedding")

    def forward(self, images: Tensor, hidden_index: Tensor | None) -> Tensor:
        """Embed the patches."""
        x = self.patches(cut_patches(images, self.size))
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], 1, -1), x), dim=1)
        x = nn.functional.pad(x + self.positions.weight, (0, 0, 0, self.padding))
        x = self.shard.between(x, dim=1)
        x = x if self.norm is None else self.norm(x)
        return self.dropout(x, hidden_index)
