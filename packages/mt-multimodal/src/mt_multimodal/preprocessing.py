"""Pixel values of images, according to the preprocessor_config.json of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from mt_data import DataError
from mt_files import Checks, build, read_bytes, read_json, shorten, to_plain
from numpy.typing import NDArray

from mt_multimodal.decoding import ImageLimits, decode_image, to_rgb

_FILE, _NEWER_FILE = "preprocessor_config.json", "processor_config.json"
_SQUARE = {"height": 224, "width": 224}
_CLIP = {
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": _SQUARE,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# What a file that names one of these processors of transformers means by the fields that it lacks.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": _CLIP,
    "SiglipImageProcessor": {"size": _SQUARE},
    "ViTImageProcessor": {"size": _SQUARE, "resample": 2},
}
_MAX_JSON = 1 << 22
_MAX_SIZE, _MAX_FILTER = 1 << 13, 5
_CHANNELS, _VALUES = 3, 256
_Size = int | Mapping[str, int] | None


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessing:
    """Preprocessing of a model's images to pixel values; fields have the names of the file.

    An image is converted to RGB. Then it is resized, cropped to its middle, multiplied and
    normalised, each if the file says so.

    Attributes:
        size: Size after resizing: `height` and `width`, or `shortest_edge`; a lone number is the
            shortest edge.
        crop_size: Size of the cropped middle: `height` and `width`; a lone number is both.
        resample: Number of pillow's filter for resizing.
        rescale_factor: Factor of the values 0 to 255.
        image_mean: Mean of each channel, subtracted after the factor.
        image_std: Divisor of each channel.
        do_convert_rgb: Ignored: all images are converted to RGB.
        do_resize: Whether images are resized.
        do_center_crop: Whether only their middle is kept.
        do_rescale: Whether values are multiplied.
        do_normalize: Whether mean and divisor are used.
        fields: Other fields.
    """

    keeps_other_keys: ClassVar[str] = "fields"
    size: _Size = None
    crop_size: _Size = None
    resample: int = 3
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = (0.5,)
    image_std: tuple[float, ...] = (0.5,)
    do_convert_rgb: bool = True
    do_resize: bool = True
    do_center_crop: bool = False
    do_rescale: bool = True
    do_normalize: bool = True
    fields: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.done()
        for name in ("size", "crop_size"):
            given = getattr(self, name)
            sizes = (
                given.values() if isinstance(given, Mapping) else [1 if given is None else given]
            )
            if not all(0 < size <= _MAX_SIZE for size in sizes):
                checks.add(name, f"{shorten(given)}: use 1 to {_MAX_SIZE}")
        if not 0 <= self.resample <= _MAX_FILTER:
            checks.add("resample", f"{self.resample}: use 0 to {_MAX_FILTER}")
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) not in (1, _CHANNELS):
                text = f"{shorten(getattr(self, name))}: give one value, or one for each of RGB"
                checks.add(name, text)
        if not all(self.image_std):
            checks.add("image_std", f"{shorten(self.image_std)}: values are divided by it")
        kind = self.fields.get("image_processor_type")
        if kind is not None and _kind_of(kind) not in _KINDS:
            text = f"image_processor_type {shorten(kind)} is none of {', '.join(_KINDS)}"
            checks.add("fields", f"{text}; give pixel values in place of images")
        for name, value in self.fields.items():
            if name.startswith("do_") and value:
                checks.add("fields", f"{name}: no such step is known; give pixel values")
        checks.done()

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of the pixel values; None if they depend on the image."""
        size = self._cropped if self.do_center_crop else self.size if self.do_resize else None
        if not isinstance(size, Mapping) or not {"height", "width"} <= size.keys():
            return None
        return size["height"], size["width"]

    @property
    def identity(self) -> str:
        """JSON of everything that decides the pixel values."""
        return json.dumps(to_plain(self), sort_keys=True)

    def pixels(self, image: Any, *, limits: ImageLimits | None = None) -> NDArray[np.float32]:
        """Return the pixel values of an image.

        Args:
            image: A path, or a pillow image.
            limits: Limits of the image's size.

        Shape:
            Returns [3, H, W].

        Raises:
            DataError: The file is no image, goes beyond the limits, or is smaller than the middle.
            FileError: The file can't be read.
            MissingExtraError: pillow is not installed.
        """
        limits = limits or ImageLimits()
        if isinstance(image, str | os.PathLike):
            content = read_bytes(Path(image), limit=limits.bytes)
            return self.pixels_of(content, str(image), limits)
        return self._values(self._sized(to_rgb(image), limits))

    def pixels_of(
        self, content: bytes, where: str, limits: ImageLimits | None = None
    ) -> NDArray[np.float32]:
        """Return the pixel values of an image, given the content of its file; see `pixels`."""
        limits = limits or ImageLimits()
        return self._values(self._sized(decode_image(content, where, limits), limits))

    def _sized(self, image: Any, limits: ImageLimits) -> Any:
        if self.do_resize:
            width, height = image.size
            image = image.resize(self._resized(width, height, limits), self.resample)
        return self._middle(image) if self.do_center_crop else image

    def _values(self, image: Any) -> NDArray[np.float32]:
        """Look up the pixel value of each byte: exact, and other threads can run meanwhile."""
        given = np.asarray(image)
        found = np.empty((_CHANNELS, *given.shape[:2]), np.float32)
        for channel, table in enumerate(self._tables):
            np.take(table, given[:, :, channel], out=found[channel], mode="clip")
        return found

    @cached_property
    def _tables(self) -> NDArray[np.float32]:
        """The pixel value of each byte in each channel, [3, 256]."""
        x = np.tile(np.arange(_VALUES, dtype=np.float64), (_CHANNELS, 1))
        if self.do_rescale:
            x = x * self.rescale_factor
        if self.do_normalize:
            mean, std = (np.array(each)[:, None] for each in (self.image_mean, self.image_std))
            x = (x - mean) / std
        return x.astype(np.float32)

    def _resized(self, width: int, height: int, limits: ImageLimits) -> tuple[int, int]:
        size = {"shortest_edge": self.size} if isinstance(self.size, int) else self.size or {}
        if "shortest_edge" in size:
            short = size["shortest_edge"]
            long = int(short * max(width, height) / min(width, height))
            if short * long > limits.pixels:
                raise DataError(f"an image of {width} x {height} becomes {short} x {long}")
            return (short, long) if width <= height else (long, short)
        if "height" not in size or "width" not in size:
            raise DataError(f"size {shorten(size)} has no height and width, or shortest_edge")
        return size["width"], size["height"]

    @property
    def _cropped(self) -> Mapping[str, int]:
        size = self.crop_size
        return {"height": size, "width": size} if isinstance(size, int) else size or {}

    def _middle(self, image: Any) -> Any:
        size = self._cropped
        width, height = size.get("width", 0), size.get("height", 0)
        if not (0 < width <= image.width and 0 < height <= image.height):
            raise DataError(
                f"crop_size {shorten(size)} does not fit an image of {image.width} x "
                f"{image.height} after resizing; give pixel values"
            )
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))


def read_image_preprocessing(path: str | os.PathLike[str]) -> ImagePreprocessing | None:
    """Return the image preprocessing of a model; None if no file describes it.

    Args:
        path: A folder of Hugging Face transformers, any folder without these files, or the file.

    Raises:
        FileError: A file can't be read.
        SchemaError: A field has another type, or names an unknown step.
    """
    path = Path(path)
    files = [path] if path.is_file() else [path / _FILE, path / _NEWER_FILE]
    for each in files:
        if not each.exists():
            continue
        # A snapshot in the hub's cache has links into the folder of its model.
        real = each.parent.resolve()
        within = real.parents[1] if real.parent.name == "snapshots" else real
        given = read_json(each, limit=_MAX_JSON, within=within)
        if isinstance(given, dict) and (each.name == _NEWER_FILE or "image_processor" in given):
            given = given.get("image_processor")
        if isinstance(given, dict):
            given = {field: value for field, value in given.items() if value is not None}
            return build(ImagePreprocessing, _completed(given), f"{each}")
    return None


def _kind_of(name: object) -> str:
    """Return the name of a processor without the suffix of its implementation."""
    return str(name).removesuffix("Fast").removesuffix("Pil")


def _completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a file with the defaults of the processor that it names."""
    kind, size = _kind_of(given.get("image_processor_type")), given.get("size")
    found = {**_KINDS.get(kind, {}), **given}
    if kind.startswith("ViT") and isinstance(size, int):
        found["size"] = {"height": size, "width": size}  # of others it is the shortest edge
    return found
