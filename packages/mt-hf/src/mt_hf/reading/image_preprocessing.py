"""Pixel values of images, as a folder's preprocessor_config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from mt_files import Checks, build, open_file, read_json, shorten
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import MAX_JSON, root_of

_FILE, _NEWER_FILE = "preprocessor_config.json", "processor_config.json"
_KINDS = ("CLIPImageProcessor", "SiglipImageProcessor", "ViTImageProcessor", "LlavaImageProcessor")
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_MAX_SIZE, _MAX_PIXELS, _MAX_FILTER = 1 << 13, 1 << 26, 5
_BYTES = ("L", "RGB", "RGBA")  # modes of a byte for each channel
_Size = int | Mapping[str, int] | None


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessing:
    """How a model's images become pixel values; the fields are those of the file.

    An image is made RGB, resized, cut to its middle, multiplied, and normalised, each if the file
    says so.

    Attributes:
        size: Size after resizing: `height` and `width`, or `shortest_edge`, which a lone number
            means too.
        crop_size: Size of the middle that is kept; a lone number for height and width.
        resample: Filter of resizing, as pillow counts them.
        rescale_factor: Factor of the values 0 to 255.
        image_mean: Mean of each channel, subtracted after the factor.
        image_std: Divisor of each channel.
        do_convert_rgb: Whether other images than RGB are converted.
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
        if not all(self.image_std):
            checks.add("image_std", f"{shorten(self.image_std)}: values are divided by it")
        kind = str(self.fields.get("image_processor_type", _KINDS[0]))
        if kind.removesuffix("Fast") not in _KINDS:
            text = f"image_processor_type {shorten(kind)} is none of {', '.join(_KINDS)}"
            checks.add("fields", f"{text}; give pixel values in place of images")
        for name, value in self.fields.items():
            if name.startswith("do_") and value:
                checks.add("fields", f"{name}: no such step is known; give pixel values")
        checks.done()

    def pixels(self, image: Any) -> Tensor:
        """Return the pixel values of an image.

        Args:
            image: A path, or an image of pillow.

        Shape:
            Returns [C, H, W], fp32.

        Raises:
            ExchangeError: The file is no image, or the middle is larger than the image.
            FileError: The file can't be read.
            ModuleNotFoundError: pillow is not installed.
        """
        if isinstance(image, str | Path):
            image = _opened(Path(image))
        if self.do_convert_rgb or image.mode not in _BYTES:
            image = image.convert("RGB")
        if self.do_resize:
            image = image.resize(self._resized(*image.size), self.resample)
        if self.do_center_crop:
            image = self._middle(image)
        x = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).double()
        x = x.view(image.height, image.width, -1)
        if self.do_rescale:
            x = x * self.rescale_factor
        if self.do_normalize:
            if not {len(self.image_mean), len(self.image_std)} <= {1, x.shape[2]}:
                raise ExchangeError(
                    f"image_mean and image_std have {len(self.image_mean)} and "
                    f"{len(self.image_std)} values for {x.shape[2]} channels; give one each"
                )
            x = (x - x.new_tensor(self.image_mean)) / x.new_tensor(self.image_std)
        return x.permute(2, 0, 1).float().contiguous()

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        size = {"shortest_edge": self.size} if isinstance(self.size, int) else self.size or {}
        if "shortest_edge" in size:
            short = size["shortest_edge"]
            long = int(short * max(width, height) / min(width, height))
            if short * long > _MAX_PIXELS:
                raise ExchangeError(f"an image of {width} x {height} becomes {short} x {long}")
            return (short, long) if width <= height else (long, short)
        if "height" not in size or "width" not in size:
            raise ExchangeError(f"size {shorten(size)} has no height and width, or shortest_edge")
        return size["width"], size["height"]

    def _middle(self, image: Any) -> Any:
        size = self.crop_size
        size = {"height": size, "width": size} if isinstance(size, int) else size or {}
        width, height = size.get("width", 0), size.get("height", 0)
        if not (0 < width <= image.width and 0 < height <= image.height):
            raise ExchangeError(
                f"crop_size {shorten(size)} does not fit an image of {image.width} x "
                f"{image.height} after resizing; give pixel values"
            )
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))


def read_image_preprocessing(folder: str | Path) -> ImagePreprocessing | None:
    """Return how the model of a folder of Hugging Face takes images; None if no file says it.

    Args:
        folder: A folder of Hugging Face transformers, or any path without these files.

    Raises:
        FileError: A file can't be read.
        SchemaError: A field has another type, or names a step that is not known.
    """
    for name in (_FILE, _NEWER_FILE):
        path = Path(folder) / name
        if not path.exists():
            continue
        given = read_json(path, limit=MAX_JSON, within=root_of(path.parent))
        if isinstance(given, dict) and name == _NEWER_FILE:
            given = given.get("image_processor")
        if isinstance(given, dict):
            given = {field: value for field, value in given.items() if value is not None}
            return build(ImagePreprocessing, given, f"{path}")
    return None


def _opened(path: Path) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise ExchangeError(f"{path}: images need: pip install 'mt-hf[images]'") from error
    with open_file(path) as file:
        try:
            image = Image.open(file, formats=_FORMATS)
            is_large = image.width * image.height > _MAX_PIXELS
            if not is_large:
                image.load()
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise ExchangeError(
                f"{path}: is no image that pillow reads ({error}); use PNG or JPEG"
            ) from error
    if is_large:
        raise ExchangeError(f"{path}: {image.width} x {image.height} pixels are too many")
    return image
