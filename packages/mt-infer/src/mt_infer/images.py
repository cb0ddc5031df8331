"""Images of a prompt: checked, and placed among its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from mt_model import ImageInputConfig, ModelConfig, expand_image_tokens
from torch import Tensor

from mt_infer.text import PromptError

_DIMS = 3  # channels, height, width
Pixels: TypeAlias = Any
"""Pixel values [C, H, W] as the model's preprocessor makes them: a tensor or an array; or, for it,
a path or an image of pillow."""
Preprocess: TypeAlias = Callable[[Any], Tensor]
Images: TypeAlias = Sequence[Pixels | Sequence[Pixels] | None] | Pixels | None
"""Images of each prompt, or of one alone; see `images_of_each`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Image:
    """An image among the tokens of a request.

    Attributes:
        start: Place of its first token.
        end: Place after its last token.
        digest: Hash of its pixels.
        pixels: Its pixel values.
    """

    start: int
    end: int
    digest: bytes
    pixels: Any


def images_of_each(images: Images, prompts: int) -> list[list[Pixels]]:
    """Return the images of each prompt.

    Args:
        images: A list with the images of each prompt, which may be None; None for no images. For
            one prompt its images alone serve too.
        prompts: Number of prompts.

    Raises:
        ValueError: There are lists for more or fewer prompts.
    """
    if images is None:
        return [[] for _ in range(prompts)]
    if _is_image(images):
        images = [images]
    if prompts == 1 and all(map(_is_image, images)):
        images = [images]
    if len(images) != prompts:
        raise ValueError(f"images has {len(images)} entries for {prompts} prompts; give one each")
    return [
        [] if each is None else [each] if _is_image(each) else list(cast("Sequence[Pixels]", each))
        for each in images
    ]


def place_images(
    tokens: Sequence[int],
    images: Sequence[Pixels],
    config: ModelConfig,
    preprocess: Preprocess | None = None,
) -> tuple[list[int], tuple[Image, ...]]:
    """Return a prompt's tokens with all tokens of each image, and the placed images.

    Args:
        tokens: The prompt, with one image token for each image, or with all of them.
        images: The images, in the order of their tokens.
        config: Config of the model.
        preprocess: Function that makes pixel values of a path or an image; None for neither.

    Raises:
        PromptError: The model takes no images, their number differs from the number of image
            tokens, or an image has another shape.
    """
    how = config.images
    if how is None:
        if images:
            raise PromptError(f"images: {len(images)} are given, and the model takes text alone")
        return list(tokens), ()
    count, each = sum(token == how.token_id for token in tokens), how.num_tokens
    if count not in (len(images), len(images) * each):
        raise PromptError(
            f"images: {len(images)} are given, and the prompt has {count} image tokens "
            f"({how.token_id}); give one image for each token, or for each {each} of them"
        )
    whole = list(tokens)
    if count == len(images):
        whole = expand_image_tokens(tokens, how)
    starts = [place for place, token in enumerate(whole) if token == how.token_id][::each]
    for start in starts:
        if set(whole[start : start + each]) != {how.token_id}:
            raise PromptError(
                f"images: token {start} of the prompt begins an image of {each} tokens, which do "
                "not follow one another; give one image token for each image"
            )
    placed = zip(starts, (_pixels(image, how, preprocess) for image in images), strict=True)
    return whole, tuple(
        Image(start=start, end=start + each, digest=_digest(pixels), pixels=pixels)
        for start, pixels in placed
    )


def _is_image(given: Any) -> bool:
    return isinstance(given, str | Path) or _is_picture(given) or getattr(given, "ndim", 0) == _DIMS


def _is_picture(given: Any) -> bool:
    return hasattr(given, "convert")  # an image of pillow, which is not imported here


def _pixels(image: Pixels, how: ImageInputConfig, preprocess: Preprocess | None) -> Tensor:
    if isinstance(image, str | Path) or _is_picture(image):
        if preprocess is None:
            raise PromptError("images: a model without a folder takes pixel values; give these")
        image = preprocess(image)
    x = torch.as_tensor(image)
    wanted = how.tower.num_channels, *how.tower.image_size
    if tuple(x.shape) != wanted or not x.is_floating_point():
        raise PromptError(
            f"images: one is {list(x.shape)} of {x.dtype}, and the model takes {list(wanted)} of "
            "floating point; give the pixel values that its preprocessor makes"
        )
    return x.detach()


def _digest(pixels: Tensor) -> bytes:
    wide = pixels.cpu().double().contiguous()
    return hashlib.sha256(wide.numpy().tobytes()).digest()
