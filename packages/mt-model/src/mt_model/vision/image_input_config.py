"""The config of a language model's images: an encoder, and a projection to the model's width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mt_files import Checks

from mt_model.block.sizes import indivisible
from mt_model.kernels.words import Activation
from mt_model.vision.config import VisionConfig


@dataclass(frozen=True, kw_only=True)
class ImageInputConfig:
    """Images in a text, as LLaVA has them (Liu et al., 2023).

    An image stands in a text as `num_tokens` tokens of one id, whose embeddings are replaced by
    `W2 act(W1 x)` of the features x of an encoder's layer.

    Attributes:
        tower: Encoder of images; its pooling and heads are not used.
        token_id: Id of the tokens that stand for an image.
        feature_layers: Layers whose output is taken, without the final norm; negative indices count
            from the last. Several outputs are joined along their width.
        drop_first: Leave out the first token's features: the class token's, if the encoder has one.
        activation: Activation between the two linear layers.
        bias: Biases of both linear layers.
    """

    tower: VisionConfig
    token_id: int
    feature_layers: tuple[int, ...] = (-2,)
    drop_first: bool = True
    activation: Activation = "gelu"
    bias: bool = True

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "token_id")
        checks.done()
        count = self.tower.num_layers
        if not self.feature_layers:
            checks.add("feature_layers", "an empty list; name a layer, such as -2")
        for layer in self.feature_layers:
            if not -count <= layer < count:
                checks.add("feature_layers", f"{layer} is not between {-count} and {count - 1}")
        for name in ("num_classes", "projection_size"):
            if getattr(self.tower, name) is not None:
                text = f"has {name}={getattr(self.tower, name)}, which is not used; use None"
                checks.add("tower", text)
        if not self.num_tokens:
            checks.add("drop_first", "leaves nothing of an image that has one token; use False")
        checks.done()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that stand for an image."""
        return self.tower.max_sequence_length - self.drop_first

    @property
    def feature_size(self) -> int:
        """Width of the features before the projection."""
        return len(self.feature_layers) * self.tower.hidden_size

    def num_parameters(self, hidden_size: int) -> int:
        """Count the parameters of the encoder and of the projection to a width."""
        projector = hidden_size * (self.feature_size + hidden_size + 2 * self.bias)
        return self.tower.num_parameters + projector

    def flops_per_image(
        self, hidden_size: int, *, trains_tower: bool = True, trains_projector: bool = True
    ) -> int:
        """Count the operations of forward and backward for an image.

        The encoder's layers after the last one whose output is taken, and its pooling, never run
        and are not counted. Backward is twice forward, and none where there is nothing to train.

        Args:
            hidden_size: Width of the language model.
            trains_tower: Whether any parameter of the encoder is trained.
            trains_projector: Whether any parameter of the projection is trained.
        """
        last = max(layer % self.tower.num_layers for layer in self.feature_layers)
        tower = replace(self.tower, layers=self.tower.layers[: last + 1], pooling=None)
        projector = 6 * hidden_size * (self.feature_size + hidden_size) * self.num_tokens
        return tower.flops_per_image // (1 if trains_tower else 3) + projector // (
            1 if trains_tower or trains_projector else 3
        )

    def check_split(self, hidden_size: int, tp: int) -> None:
        """Check that `tp` ranks can share the encoder and the projection.

        Raises:
            ValueError: A size does not divide; the message names it.
        """
        try:
            self.tower.check_split(tp)
        except ValueError as error:
            raise ValueError(f"{error} (images.tower)") from None
        if hidden_size % tp:
            raise ValueError(indivisible("hidden_size", hidden_size, tp) + " (images)")


def expand_image_tokens(
    tokens: Sequence[int], images: ImageInputConfig, *, num_images: int | None = None
) -> list[int]:
    """Make of each image token in a text as many as the features of an image need.

    Args:
        tokens: With one image token for each image.
        images: How the model takes images.
        num_images: Number of images, to be checked; None for any number.

    Raises:
        ValueError: There are not as many image tokens as images.

    Example:
        >>> from mt_model import ImageInputConfig, vit
        >>> tower = vit(image_size=4, patch_size=2, hidden_size=8, num_layers=2, num_heads=2)
        >>> expand_image_tokens([1, 9, 2], ImageInputConfig(tower=tower, token_id=9))
        [1, 9, 9, 9, 9, 2]
    """
    count = sum(token == images.token_id for token in tokens)
    if num_images is not None and count != num_images:
        raise ValueError(
            f"the tokens have {count} image tokens ({images.token_id}), and there are {num_images} "
            "images; put one where each image is"
        )
    return [
        token
        for each in tokens
        for token in [each] * (images.num_tokens if each == images.token_id else 1)
    ]
