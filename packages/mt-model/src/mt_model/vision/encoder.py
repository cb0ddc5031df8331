"""An encoder of images: one pipeline stage of it, with patches and the head where they belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from mt_parallel_state import gather_from_group
from torch import Tensor

from mt_model.attend.context import ForwardContext
from mt_model.attend.padding import padding_as_document
from mt_model.block.losses import Losses
from mt_model.stack.batch import Batch
from mt_model.stack.config import StackConfig
from mt_model.stack.stack import Stack
from mt_model.vision.class_head import ClassHead
from mt_model.vision.patch_embedding import PatchEmbedding
from mt_model.vision.pooling import whole_linear

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from mt_model.vision.config import VisionConfig


class VisionEncoder(Stack["VisionConfig"]):
    """One pipeline stage of an encoder of images; with `layers=None` the whole model.

    It takes the arguments of `Stack`. Its parameters beside the layers are `embedding.*`
    (`PatchEmbedding`) on the first stage; on the last one `final_norm.*`, `pooling.*`,
    `classifier.weight` [classes, size] with `classifier.bias`, and `projection.weight`
    [projection_size, size], of which every tensor-parallel rank has all but the attention and the
    feed-forward of a pooling.

    Sequence parallelism splits the tokens of an image, with padding that no token sees where their
    number does not divide. The ranks of a context group can't share an image.

    Raises:
        TypeError: `config` is no VisionConfig.
        ValueError: As of `Stack`, or the layout has several ranks in a context group.
    """

    config: VisionConfig

    def forward(
        self,
        x: Tensor | None,
        batch: Batch | None = None,
        *,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> Tensor | Losses | tuple[Tensor, Losses]:
        """Run the model, or one stage of it.

        `model(images)` returns what the model makes of an image, and `model(images,
        labels=labels)` the losses. A stage of an `mt_pipeline` is called with `(x, batch)` instead:
        the activation of the stage before, and a mapping with the rest.

        Losses are sums over this rank's images, which the trainer divides once by the global count
        of labels: `classes`, the cross entropies; the losses of this stage's layers by their names;
        and `tokens`, the number of labels. They are fp32 (fp64 for an fp64 model), and equal on all
        ranks of a tensor-parallel group.

        Args:
            x: images; with a batch the activation of the stage before, None on the first.
            batch: `images` on the first stage; and `labels` and `sample_ids` as below.
            labels: the class of each image, int64; -100 does not count.
            sample_ids: unique per training sample; needed with dropout in training.

        Returns:
            The activation for the next stage, with the losses of the layers where they have
            some. On the last stage losses, or else the scores of the classes, the projection of
            the pooled features, or the features of each token: the last of these that it has.

        Shape:
            images: [B, num_channels, height, width]; labels, sample_ids: [B]; x: [B, S, hidden]
            (S / tp tokens under sequence parallelism); scores: [B, num_classes]; projection:
            [B, projection_size]; features: [B, max_sequence_length, hidden].

        Raises:
            TypeError: images are no floating-point tensor, labels or sample ids are no integers,
                or the batch is no mapping.
            ValueError: a shape does not fit, or what this stage needs is not given.
        """
        if batch is None:
            given = {"images": x, "labels": labels, "sample_ids": sample_ids}
            batch, x = {name: value for name, value in given.items() if value is not None}, None
        elif labels is not None or sample_ids is not None:
            raise ValueError("give labels and sample_ids in the batch, or images without a batch")
        x, shared = self.begin(x, batch)
        x, losses = self.run_layers(x, shared)
        return self.finish(x, losses, batch)

    def features(
        self,
        images: Tensor,
        *,
        layer: int | Sequence[int] | None = None,
        class_token: bool = True,
        sample_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the features of each token, of the last layer or of another, on every rank.

        Under sequence parallelism they are gathered over the tensor-parallel group, and backward
        keeps the rank's own part: their gradient has to be the same on all ranks, so a caller that
        goes on with a part of them takes it by `scatter_to_group`.

        Args:
            images: As for the model.
            layer: Index of a layer, whose output is returned without the final norm; negative
                indices count from the last. Later layers do not run. None: the last layer, normed.
                Features of several are joined along their width.
            class_token: With the class token, where the model has one.
            sample_ids: As for the model.

        Shape:
            images: [B, num_channels, height, width]. Returns [B, tokens, hidden].

        Raises:
            ValueError: This is one of several stages, or there is no such layer.
        """
        if not (self.has_embedding and self.has_head):
            raise ValueError(
                f"features() needs the whole model, and this stage holds layers "
                f"{self.layer_range.start} to {self.layer_range.stop - 1} of "
                f"{self.config.num_layers}. Build it with layers=range({self.config.num_layers})"
            )
        count = self.config.num_layers
        wanted = (layer,) if isinstance(layer, int) else layer or ()
        for each in wanted:
            if not -count <= each < count:
                raise ValueError(f"layer={each} is not between {-count} and {count - 1}")
        places = [each % count for each in wanted]
        x, shared = self.begin(None, {"images": images, "sample_ids": sample_ids})
        found: dict[int, Tensor] = {}
        for place, module in enumerate(islice(self.stage_layers(), max(places, default=count) + 1)):
            x, _ = module(x, shared)
            if place in places:
                found[place] = x
        if shared.saved is not None:
            shared.saved.finish()
        x = torch.cat([found[place] for place in places], -1) if places else self._normed(x)
        x = self._whole_tokens(x)
        return x if class_token or not self.config.class_token else x[:, 1:]

    def pool(self, features: Tensor) -> Tensor:
        """Make one vector of the features of an image; on the last stage.

        Args:
            features: What `features(images)` returns.

        Shape:
            features: [B, max_sequence_length, hidden]. Returns [B, pooled_size].

        Raises:
            ValueError: The model has no pooling, or this is not the last stage.
        """
        pooling = self.pooling if self.has_head else None
        if pooling is None:
            raise ValueError("the last stage of a model with a pooling pools; this is none")
        return pooling(features)

    def begin(self, x: Tensor | None, batch: Batch) -> tuple[Tensor, ForwardContext]:
        """Return the activation that enters this stage's layers, and what they share."""
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch must be a mapping with 'images', got {type(batch).__name__}")
        images = self._images(batch) if self.has_embedding else x
        if images is None:
            raise ValueError("x is None, and only the first stage starts from images")
        count, device = images.shape[0], images.device
        _check_ids(batch, count)
        length = self.config.max_sequence_length + self._padding
        sample_ids, index = self._dropout(batch, length, device)
        documents = None
        if self._padding:
            self._check_padded_dropout(sample_ids)
            real = torch.arange(length, device=device) < self.config.max_sequence_length
            documents = padding_as_document(real.repeat(count, 1), None)
        shared = ForwardContext(
            attend=self.shard.context,
            score_tables=self._score_weights(),
            documents=documents,
            sample_ids=sample_ids,
            hidden_index=index,
            saved=self._saved(device),
        )
        start: Tensor = self.embedding(images, index) if self.has_embedding else images
        return self.give_tables_gradients(start, shared), shared

    def finish(
        self, x: Tensor, losses: Losses, batch: Batch
    ) -> Tensor | Losses | tuple[Tensor, Losses]:
        """Return what the stage returns, from the output and the losses of its layers."""
        if not self.has_head:
            return (x, losses) if losses else x
        features, labels = self._whole_tokens(self._normed(x)), batch.get("labels")
        if labels is not None:
            if self.classifier is None:
                raise ValueError(
                    "there are labels, and the model has no classes; leave them out, or build it "
                    "with num_classes"
                )
            return {**self.classifier.loss(self.pool(features), labels), **losses}
        for head in (self.classifier, self.projection):
            if head is not None:
                return head(self.pool(features))
        return features

    def _check_padded_dropout(self, sample_ids: Tensor | None) -> None:
        """Refuse dropout by pairs of tokens, which are numbered by the length with padding."""
        if sample_ids is not None and any(m.drops for m in self.config.mixers.values()):
            raise ValueError(
                f"dropout of attention weights would change with the {self._padding} tokens of "
                f"padding that {self.config.max_sequence_length} tokens need for "
                f"tp={self.shard.tp} under sequence parallelism. Use "
                "sequence_parallel=False, or an attention dropout of 0"
            )

    @property
    def _padding(self) -> int:
        """Number of padding tokens of an image, so that ranks can share its tokens."""
        ranks = self.shard.tp if self.shard.sequence_parallel else 1
        return -self.config.max_sequence_length % ranks

    def _check_config(self, config: object) -> None:
        if not isinstance(config, StackConfig) or config.inputs != "images":
            raise TypeError(
                f"config must be a VisionConfig, as vit(...) or vision_preset(...) make it, got "
                f"{type(config).__name__}"
            )

    def _build_input(self) -> None:
        if self.shard.context.group is not None:
            raise ValueError(
                f"the ranks of a context group can't share an image, and there are "
                f"cp={self.shard.context.size}; use cp=1"
            )
        if self.has_embedding:
            self.embedding = PatchEmbedding(self.config, shard=self.shard, padding=self._padding)

    def _build_output(self) -> None:
        config, shard = self.config, self.shard
        self.pooling = self.classifier = self.projection = None
        if config.pooling is not None:
            self.pooling = config.pooling.build(config, layer=config.num_layers, shard=shard)
        size, classes, width = config.pooled_size, config.num_classes, config.projection_size
        if classes is not None:
            self.classifier = ClassHead(size, classes, shard=shard)
        if width is not None:
            self.projection = whole_linear(size, width, bias=False, shard=shard)

    def _whole_tokens(self, x: Tensor) -> Tensor:
        """The tokens of whole images, without padding."""
        if not self.shard.sequence_parallel:
            return x
        x = gather_from_group(x, self.shard.group, dim=1)
        return x[:, : self.config.max_sequence_length]

    def _images(self, batch: Batch) -> Tensor:
        images: Any = batch.get("images")
        if not isinstance(images, Tensor) or not images.is_floating_point():
            got = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"images must be a floating-point tensor [B, C, H, W], got {got}")
        expected = (self.config.num_channels, *self.config.image_size)
        if images.dim() != 4 or not images.shape[0] or images.shape[1:] != expected:
            raise ValueError(
                f"images must be [B, {', '.join(map(str, expected))}], got {tuple(images.shape)}; "
                "resize them"
            )
        return images.to(self.shard.dtype)


def _check_ids(batch: Batch, count: int) -> None:
    """Check labels and sample ids, one for each image."""
    for name in ("labels", "sample_ids"):
        x: Any = batch.get(name)
        if x is None:
            continue
        dtype = x.dtype if isinstance(x, Tensor) else None
        if dtype is None or dtype.is_floating_point or dtype == torch.bool:
            got = dtype or type(x).__name__
            raise TypeError(f"{name} must be a tensor of integers, such as int64, got {got}")
        if x.shape != (count,):
            raise ValueError(f"{name} must be [{count}], one for each image, got {tuple(x.shape)}")
