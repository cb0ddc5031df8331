"""Images in a text: their features in place of the embeddings of image tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from mt_context_parallel import shard as shard_sequence
from mt_context_parallel import unshard
from mt_kernels import Choice
from mt_parallel_state import ParallelState, copy_to_group, hash_key
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_model.attend.sequence import SequenceAttend
from mt_model.block.shard_context import ShardContext
from mt_model.kernels.activation import PlainActivation
from mt_model.recompute.plan import RecomputePlan
from mt_model.stack.batch import Batch
from mt_model.vision.encoder import VisionEncoder
from mt_model.vision.image_input_config import ImageInputConfig


class ImageTower(VisionEncoder):
    """An encoder of whole images on every rank of a context group, of which each uses a part."""

    def _sequences(self, state: ParallelState, **arguments: Any) -> SequenceAttend:
        return super()._sequences(state, **arguments, shared=False)

    def _dropout(
        self, batch: Batch, length: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        if batch.get("sample_ids") is None:  # the language model asks for them where it trains
            return None, None
        return super()._dropout(batch, length, device)


class Projector(nn.Module):
    """Two linear layers with an activation between them.

    Parameters: `up.weight` [hidden, features] and `up.bias`, split over "tp" in their first dim,
    and `down.weight` [hidden, hidden], split in its second, with `down.bias`, which every rank has
    whole. `ColumnParallelLinear` and `RowParallelLinear` state the collectives.

    Args:
        config: How the model takes images.
        hidden_size: Width of the language model.
        shard: This rank's share of the model.

    Shape:
        forward(x): [N, T, features] -> [N, T, hidden].
    """

    def __init__(self, config: ImageInputConfig, hidden_size: int, *, shard: ShardContext) -> None:
        super().__init__()
        linear = replace(shard, sequence_parallel=False).linear_arguments()
        self.activation = PlainActivation(config.activation, shard.kernels.activations)
        sizes = config.feature_size, hidden_size
        self.up = ColumnParallelLinear(*sizes, bias=config.bias, **linear)
        self.down = RowParallelLinear(hidden_size, hidden_size, bias=config.bias, **linear)

    def forward(self, x: Tensor) -> Tensor:
        """Project the features of each token."""
        return self.down(self.activation(*self.activation.project(self.up, x)))

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield what computes the activation, if it has several kernels."""
        yield from self.activation.choices(self.up, like)


class ImageInput(nn.Module):
    """An encoder of images and the projection of its features to a language model's width.

    Parameters: `tower.*` as of `VisionEncoder` and `projector.*` as of `Projector`, split over
    "tp". Ranks that share a sequence each encode all of its images, and tell each other where
    image tokens are: one all-gather over "cp". The encoder's layers after the last one whose
    output is taken are frozen. Under sequence parallelism the features' gradient is summed over
    "tp".

    Args:
        config: How the model takes images.
        hidden_size: Width of the language model.
        state: This rank's place.
        shard: This rank's share of the model.
        plan: Recomputation of the language model's layers; rules for all layers hold for the
            encoder's too.

    Shape:
        forward(x, batch): [B, S / cp, hidden] (S / cp / tp tokens under sequence parallelism) ->
        the same.
    """

    def __init__(
        self,
        config: ImageInputConfig,
        hidden_size: int,
        *,
        state: ParallelState,
        shard: ShardContext,
        plan: RecomputePlan,
    ) -> None:
        super().__init__()
        self.config, self.hidden_size, self.shard = config, hidden_size, shard
        self.tower = ImageTower(
            config.tower,
            state,
            layers=range(config.tower.num_layers),
            sequence_parallel=shard.sequence_parallel,
            kernels=shard.kernels,
            recompute=plan.of_all_layers,
            seed=hash_key("images", shard.seed),
            gemm=shard.gemm,
            dtype=shard.dtype,
            device="meta",
        )
        self.projector = Projector(config, hidden_size, shard=shard)
        self._freeze_unused()

    def _freeze_unused(self) -> None:
        """Freeze the encoder's layers after the last used one, its final norm and its pooling.

        They never run, and a trainer waits for the gradient of each trainable parameter.
        """
        count = self.config.tower.num_layers
        last = max(layer % count for layer in self.config.feature_layers)
        layers = islice(self.tower.stage_layers(), last + 1, None)
        for module in (*layers, self.tower.final_norm, self.tower.pooling):
            if module is not None:
                module.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Put the features of `batch["pixel_values"]` in place of embeddings, in order.

        Args:
            x: Embeddings of the tokens.
            batch: Batch of the stage; without images nothing changes.

        Raises:
            ValueError: There are not as many image tokens as features.
        """
        images = batch.get("pixel_values")
        if images is None:
            return x
        own, place = batch["tokens"] == self.config.token_id, self._places(batch["tokens"])
        order = place.flatten().cumsum(0)  # the number of each image token, from 1 on
        self._check_count(order[-1], len(images))
        features = self._features(images, self._sample_ids(batch, order, len(images)))
        if self.shard.sequence_parallel:
            features = copy_to_group(features, self.shard.group)
        order = shard_sequence(order.view_as(place), self.shard.context.group)
        own, order = self.shard.between(own, dim=1), self.shard.between(order, dim=1)
        # A feature for every token, so that no shape depends on values.
        found = features.flatten(0, 1).index_select(0, (order.flatten() - 1).clamp(min=0))
        return torch.where(own[..., None], found.view_as(x), x)

    def num_images(self, tokens: Tensor) -> int:
        """Count the images of rows, of which ranks that share them have parts.

        Args:
            tokens: This rank's tokens of the rows, [B, S / cp].
        """
        return int(self._places(tokens).sum()) // self.config.num_tokens

    def features(self, images: Tensor, sample_ids: Tensor | None = None) -> Tensor:
        """Return the features that stand for images, on every rank of the tensor-parallel group.

        Args:
            images: Images of the encoder's size.
            sample_ids: Unique per image; needed with dropout in training.

        Shape:
            images: [N, C, H, W]; sample_ids: [N]. Returns [N, num_tokens, hidden].
        """
        needed = images.requires_grad or _is_trained(self.tower)
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            x = self.tower.features(images, layer=self.config.feature_layers, sample_ids=sample_ids)
        return self.projector(x[:, 1:] if self.config.drop_first else x)

    @property
    def flops_per_image(self) -> int:
        """Operations of training on an image; a frozen part counts only its forward."""
        return self.config.flops_per_image(
            self.hidden_size,
            trains_tower=_is_trained(self.tower),
            trains_projector=_is_trained(self.projector),
        )

    def _places(self, tokens: Tensor) -> Tensor:
        """Return 1 where an image token is in whole rows, and 0 elsewhere."""
        place = (tokens == self.config.token_id).long()
        context = self.shard.context.group
        return place if context is None else unshard(place, context)

    def _features(self, images: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Return the features of any number of images.

        Without images, the features come from an empty image, and no token uses them: then the
        parameters have zero gradients, for which ranks with images wait.
        """
        if not len(images):
            images = images.new_zeros(1, *images.shape[1:])
            sample_ids = None if sample_ids is None else sample_ids.new_zeros(1)
        return self.features(images, sample_ids)

    def _check_count(self, tokens: Tensor, images: int) -> None:
        each = self.config.num_tokens
        if tokens != images * each:
            raise ValueError(
                f"the batch has {int(tokens)} image tokens ({self.config.token_id}), and "
                f"pixel_values has {images} images of {each}, which is {images * each}; give as "
                "many tokens for each image, as expand_image_tokens does"
            )

    def _sample_ids(self, batch: Batch, order: Tensor, count: int) -> Tensor | None:
        """Return ids of the images, from the id of their row and their place in the row."""
        ids = batch.get("sample_ids")
        if ids is None:
            return None
        numbers = torch.arange(count, device=order.device) * self.config.num_tokens + 1
        first, length = torch.searchsorted(order, numbers), len(order) // len(ids)
        return ids[first // length] * length + first % length


def _is_trained(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters())
