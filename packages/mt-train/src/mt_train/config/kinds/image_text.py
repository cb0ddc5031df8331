"""Conversations with images, with labels on the assistant's turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mt_files import Checks, FileError, RowField, SchemaError, UserError

from mt_train.config.kinds.chat import ChatData
from mt_train.config.kinds.section import Sources
from mt_train.config.limits import path_field

if TYPE_CHECKING:
    from mt_model import ModelConfig
    from mt_multimodal import ImagePreprocessing, ImageTextDataset

    from mt_train.config.run_config import RunConfig

_PREPROCESSOR, _NEWER = "preprocessor_config.json", "processor_config.json"


@dataclass(frozen=True, kw_only=True)
class ImageTextData(ChatData):
    """Conversations with images, for a model that takes images (LLaVA); needs `mt-train[images]`.

    A file of `train` is a tar of samples (WebDataset), whose members of one key are a `json` or
    `txt` beside images, or a file of conversations as for `chat`, whose records name their images
    as `image` or `images`; or a folder of these. In a message an image is `<image>`, or a part of
    the type `image`. Conversations without images may stand among them, or be a source of their
    own.

    Attributes:
        images: Folder of the images that records name; by default the folder of their file.
        preprocessor: The `preprocessor_config.json` (or `processor_config.json`) with the
            preprocessing of images; by default the one in the tokenizer's folder.
    """

    type_name: ClassVar[str] = "image-text"

    images: str | None = path_field("")
    preprocessor: str | None = path_field("")

    def check(self, checks: Checks) -> None:
        """Check that there are files, and that mt-multimodal is installed."""
        super().check(checks)
        if find_spec("mt_multimodal") is None:
            checks.add("kind", "image-text needs: pip install 'mt-train[images]'")

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row, which may have weights of labels too."""
        from mt_multimodal import image_text_fields

        return image_text_fields(packed=self.packing == "best-fit")

    def sizes(self, sequence_length: int) -> Mapping[str, int]:
        """Return the number of tokens, and the sizes of an image; a row may have any number."""
        height, width = self._preprocessing().output_size or (0, 0)
        sizes = {"images": 0, "channels": 3, "height": height, "width": width}
        return {"tokens": sequence_length, **sizes}

    def most_items(self, sources: Sources, rows: int) -> Mapping[str, int]:
        """Return the largest number of images in any `rows` rows of an epoch together.

        Raises:
            DataError: A sample is damaged, the template refuses it, or there is no template.
        """
        import numpy as np

        images = [self.dataset(path, sources).images_of_rows for path in sources.train]
        most = np.sort(np.concatenate(images))[::-1]
        return {"images": int(np.resize(most, rows).sum())}

    def files(self) -> Mapping[str, bytes]:
        """Return the chat template, its tokens, and the preprocessing of images."""
        from mt_files import read_json

        fields = read_json(self._preprocessor(), limit=1 << 22)
        fields = fields.get("image_processor", fields)
        return {**super().files(), _PREPROCESSOR: (json.dumps(fields, indent=2) + "\n").encode()}

    def misfits(self, config: RunConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """Yield the problem if the model takes no images, or images of another size."""
        yield from super().misfits(config, model)
        if model.images is None:
            text = "image-text, but the model takes no images (model.images); use chat, or a model "
            yield "data.kind", text + "such as LLaVA by model.from"
            return
        try:
            found = self._preprocessing()
        except (FileError, SchemaError, UserError) as error:
            yield "data.preprocessor", str(error)
            return
        tower = model.images.tower
        if tower.num_channels != 3:
            yield "model.images", f"its encoder takes {tower.num_channels} channels; images have 3"
        if found.output_size != tuple(tower.image_size):
            size = "several sizes" if found.output_size is None else f"{list(found.output_size)}"
            text = f"{self._preprocessor()} makes pixel values of {size}, and the model takes "
            yield "data.preprocessor", f"{text}{list(tower.image_size)}; make both the same"

    def dataset(self, path: Path, sources: Sources) -> ImageTextDataset:
        """Read a tar or a file of conversations.

        Raises:
            DataError: A sample is damaged, the template refuses it, or there is no template.
        """
        from mt_data import DataError
        from mt_multimodal import ImageForm, ImageTextDataset, image_sources
        from mt_tokenizer import ChatTemplate

        how, source = sources.model.images, self._template()
        assert how is not None, "checked"  # noqa: S101
        if source[0] is None:
            raise DataError("conversations with images need a chat template; name data.template")
        form = ImageForm(
            preprocessing=self._preprocessing(),
            token_id=how.token_id,
            num_tokens=how.num_tokens,
        )
        with ChatTemplate(source[0], sources.tokenizer, tokens=source[1]) as template:
            return ImageTextDataset(
                image_sources(path, images=self.images),
                template,
                form,
                sequence_length=sources.sequence_length,
                packing=self.packing,
                too_long=self.too_long,
                seed=sources.seed,
            )

    def _preprocessor(self) -> Path:
        if self.preprocessor is not None:
            return Path(self.preprocessor)
        assert self.tokenizer is not None, "this kind needs one"  # noqa: S101
        folder = Path(self.tokenizer).parent
        is_newer = not (folder / _PREPROCESSOR).exists() and (folder / _NEWER).exists()
        return folder / (_NEWER if is_newer else _PREPROCESSOR)

    def _preprocessing(self) -> ImagePreprocessing:
        from mt_files import MissingFileError
        from mt_multimodal import read_image_preprocessing

        found = read_image_preprocessing(self._preprocessor())
        if found is None:
            text = "says how images become pixel values, and is missing; name data.preprocessor"
            raise MissingFileError(self._preprocessor(), text)
        return found
