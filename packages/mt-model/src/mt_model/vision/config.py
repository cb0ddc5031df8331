"""An encoder of images as frozen values: patches, layers, and heads over the features."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mt_files import Checks, FieldError

from mt_model.block.sizes import MAX_LENGTH, MAX_WIDTH, indivisible
from mt_model.stack.config import StackConfig
from mt_model.vision.pooling_config import PoolingConfig

if TYPE_CHECKING:
    from mt_parallel_state import ParallelState
    from torch import nn

MAX_PIXELS, MAX_CHANNELS = 1 << 16, 1 << 12


@dataclass(frozen=True, kw_only=True)
class VisionConfig(StackConfig):
    """An encoder of images, as a Vision Transformer (Dosovitskiy et al., 2021).

    An image is cut into patches, and each becomes a token. The model returns the last of these that
    it has: the features of each token, the last layer's output; a projection of the pooled
    features; or their scores of classes.

    Attributes:
        image_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch. Pixels past the last whole patch, at the lower and
            right edge, are ignored.
        num_channels: Number of channels of a pixel.
        patch_bias: Bias of the linear layer over a patch's pixels.
        class_token: Learned token in front of the patches.
        embedding_norm: Norm in front of the first layer (CLIP).
        pooling: Pooling of the features into one vector; None for none.
        num_classes: Number of classes, scored from the vector; None for none.
        projection_size: Width of a projection of the vector, without a bias (CLIP); None for none.
        max_sequence_length: Number of tokens of an image, which follows from the sizes.
    """

    type_name: ClassVar[str] = "vision"
    inputs: ClassVar[Literal["tokens", "images"]] = "images"
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_channels: int = 3
    patch_bias: bool = True
    class_token: bool = True
    embedding_norm: bool = False
    pooling: PoolingConfig | None = None
    num_classes: int | None = None
    projection_size: int | None = None
    max_sequence_length: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in ("image_size", "patch_size"):
            sizes = getattr(self, name)
            if name not in checks.errors and not all(0 < size <= MAX_PIXELS for size in sizes):
                checks.add(name, f"{sizes}; use sizes of 1 to {MAX_PIXELS}")
        checks.done()
        if not all(self.grid):
            text = f"{self.patch_size} is larger than image_size={self.image_size}"
            raise FieldError({"patch_size": f"{text}; use a smaller one"}, "VisionConfig")
        count = self.num_patches + self.class_token
        if count > MAX_LENGTH:
            text = f"{self.image_size} has {count} tokens, more than {MAX_LENGTH}"
            raise FieldError({"image_size": f"{text}; use larger patches"}, "VisionConfig")
        object.__setattr__(self, "max_sequence_length", count)
        super().__post_init__()

    def _check_own(self, checks: Checks) -> None:
        checks.at_least(1, "num_channels", "num_classes", "projection_size")
        checks.at_most(MAX_CHANNELS, "num_channels")
        checks.at_most(MAX_WIDTH, "num_classes", "projection_size")
        checks.done()
        rotating = [i for i, mixer in self.mixers.items() if mixer.rotary is not None]
        if rotating:
            text = f"layer {rotating[0]} has a rope, and images have learned positions"
            checks.add("layers", f"{text}; leave it out")
        heated = [i for i, mixer in self.mixers.items() if mixer.query_temperature is not None]
        if heated:
            text = f"layer {heated[0]} has a temperature, and images have no length to grow"
            checks.add("layers", f"{text}; leave it out")
        if self.pooling is not None and self.pooling.needs_class_token and not self.class_token:
            text = "takes the class token, and class_token is False"
            checks.add("pooling", f"{text}; use class_token=True or another pooling")
        for name in ("num_classes", "projection_size"):
            if getattr(self, name) is not None and self.pooling is None:
                checks.add(name, f"{getattr(self, name)} without a pooling; give one")
        if self.num_classes is not None and self.projection_size is not None:
            checks.add("projection_size", "does not go with num_classes; leave one of them out")

    def build(self, state: ParallelState | None = None, **arguments: Any) -> nn.Module:
        """Build a `VisionEncoder`."""
        from mt_model.vision.encoder import VisionEncoder

        return VisionEncoder(self, state, **arguments)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches in a column and in a row of an image."""
        return (self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1])

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return prod(self.grid)

    @property
    def patch_elements(self) -> int:
        """Number of elements of a patch."""
        return self.num_channels * prod(self.patch_size)

    @property
    def pooled_size(self) -> int:
        """Width of the vector that the pooling makes."""
        return self.hidden_size if self.pooling is None else self.pooling.size(self.hidden_size)

    @property
    def own_losses(self) -> dict[str, float]:
        """Weight of the loss `classes`, where there are classes."""
        return {} if self.num_classes is None else {"classes": 1.0}

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, from the sizes."""
        hidden, pooled = self.hidden_size, self.pooled_size
        total = super().num_parameters + hidden * (self.patch_elements + self.patch_bias)
        total += hidden * (self.class_token + self.max_sequence_length)
        if self.embedding_norm:
            total += self.norm.num_parameters(hidden)
        if self.pooling is not None:
            total += self.pooling.num_parameters(self)
        return total + (self.num_classes or 0) * (pooled + 1) + (self.projection_size or 0) * pooled

    @property
    def flops_per_image(self) -> int:
        """Operations of forward and backward for an image, as `flops_per_token` counts them."""
        length, pooled = self.max_sequence_length, self.pooled_size
        total = length * super().flops_per_token(length)
        total += 6 * self.hidden_size * self.patch_elements * self.num_patches
        if self.pooling is not None:
            total += self.pooling.flops(self)
        return total + 6 * pooled * ((self.num_classes or 0) + (self.projection_size or 0))

    def flops_per_token(self, sequence_length: int) -> int:
        """Count `flops_per_image` for each of its tokens.

        Args:
            sequence_length: tokens of an image; there is one number of them only.
        """
        if sequence_length != self.max_sequence_length:
            text = f"images have {self.max_sequence_length} tokens"
            raise ValueError(f"sequence_length={sequence_length}, but {text}; give that number")
        return self.flops_per_image // self.max_sequence_length

    def check_split(self, tp: int) -> None:
        """Check that `tp` ranks can share the layers and the pooling."""
        super().check_split(tp)
        for name, size in () if self.pooling is None else self.pooling.split_sizes(tp):
            if size % tp:
                raise ValueError(indivisible(name, size, tp) + " (pooling)")

    def outside(self) -> tuple[str, str, str]:
        """Describe the norms, the embeddings and the heads."""
        norms = [name for name in ("embedding_norm", "final_norm") if getattr(self, name)]
        height, width = self.patch_size
        first = ["class token"] if self.class_token else []
        first.append(f"patches {height} x {width} x {self.num_channels}")
        first.append(f"positions [{self.max_sequence_length}]")
        last = [] if self.pooling is None else [f"{self.pooling.type_name} pooling"]
        if self.num_classes is not None:
            last.append(f"classes [{self.num_classes}]")
        if self.projection_size is not None:
            last.append(f"projection [{self.projection_size}]")
        return ", ".join(norms) or "-", ", ".join(first), ", ".join(last) or "-"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with the `type`, by which `StackConfig.from_dict` knows them."""
        return {"type": self.type_name, **super().to_dict()}
