"""Images from bytes: decoded within limits, upright, and in RGB."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from mt_data import DataFileError
from mt_files import Checks, require

from mt_multimodal.containers import exif_orientation, without_metadata, xmp_orientation

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_REASON = 200


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """Limits of an image's size, checked before memory is taken.

    Only the first frame of an animation is decoded.

    Attributes:
        pixels: Largest number of pixels, before resizing and after it.
        bytes: Largest number of bytes of the file.
    """

    pixels: int = 1 << 26
    bytes: int = 1 << 26

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "pixels", "bytes")
        checks.done()


def decode_image(content: bytes, where: str, limits: ImageLimits | None = None) -> Any:
    """Return a pillow image in RGB, turned upright according to its EXIF or XMP.

    Transparent pixels lie on white, palettes are looked up, and 16 bits of grey become 8. Metadata
    is removed before pillow sees the file.

    Args:
        content: The file: PNG, JPEG, WEBP, BMP or GIF.
        where: Place of the file, for messages.
        limits: Limits of the image's size.

    Raises:
        DataFileError: The file is no image, is cut short, or goes beyond a limit.
        MissingExtraError: pillow is not installed.
    """
    library = require("PIL.Image", "decoding an image")
    limits = limits or ImageLimits()
    if len(content) > limits.bytes:
        raise DataFileError(where, f"has {len(content)} bytes; at most {limits.bytes} are decoded")
    content, turn = without_metadata(content, where, limits.pixels)
    try:
        image = library.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height <= limits.pixels:
            image.load()
            if image.format == "WEBP":
                turn = exif_orientation(image.info.get("exif", b""))
                turn = xmp_orientation(image.info.get("xmp", b"")) if turn == 1 else turn
            steps = library.Transpose
            return _in_rgb(image if turn == 1 else image.transpose(_turn(steps)[turn - 2]))
    except library.UnidentifiedImageError:
        raise DataFileError(where, f"is no image; use one of {', '.join(FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 - a decoder may raise anything
        reason = f"{type(error).__name__}: {error}"[:_REASON]
        text = f"is no image that pillow reads ({reason}); use a whole PNG or JPEG"
        raise DataFileError(where, text) from None
    raise DataFileError(
        where, f"has {width} x {height} pixels; at most {limits.pixels} are decoded"
    )


def to_rgb(image: Any) -> Any:
    """Return a pillow image in RGB, on white, turned upright according to its EXIF."""
    return _in_rgb(require("PIL.ImageOps", "decoding an image").exif_transpose(image))


def _turn(step: Any) -> tuple[Any, ...]:
    """Return the transpositions that undo the orientations from 2 on."""
    return (
        step.FLIP_LEFT_RIGHT,
        step.ROTATE_180,
        step.FLIP_TOP_BOTTOM,
        step.TRANSPOSE,
        step.ROTATE_270,
        step.TRANSVERSE,
        step.ROTATE_90,
    )


def _in_rgb(image: Any) -> Any:
    library = require("PIL.Image", "decoding an image")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        # 16 bits; pillow would clip values above 255.
        image = library.fromarray(np.minimum(values >> 8, 255).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        ground = library.new("RGBA", image.size, "white")
        image = library.alpha_composite(ground, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")
