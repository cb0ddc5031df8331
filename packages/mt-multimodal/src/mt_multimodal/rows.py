"""Rows of conversations with images, with labels on the assistant's turns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from mt_data import (
    ChatReader,
    Conversation,
    DataError,
    DataFileError,
    GatheredRow,
    RenderedRows,
    RowPacking,
    TooLong,
    chat_fields,
)
from mt_files import Checks, RowField
from mt_tokenizer import ChatTemplate, Rendered
from numpy.typing import NDArray

from mt_multimodal.decoding import ImageLimits
from mt_multimodal.expansion import expanded, fitted
from mt_multimodal.messages import with_parts
from mt_multimodal.opening import image_sources
from mt_multimodal.preprocessing import ImagePreprocessing
from mt_multimodal.sources import ImageSample, ImageSource

Source: TypeAlias = str | os.PathLike[str] | ImageSource


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """The form of images in a row: their tokens and their pixel values.

    Attributes:
        preprocessing: Preprocessing of images to pixel values, all of one size.
        token_id: Id of the image token.
        num_tokens: Number of image tokens for each image.
        limits: Limits of an image's size.
        threads: Number of threads that decode images.
    """

    preprocessing: ImagePreprocessing
    token_id: int
    num_tokens: int
    limits: ImageLimits = field(default_factory=ImageLimits)
    threads: int = 2

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "token_id")
        checks.at_least(1, "num_tokens", "threads")
        if not checks.errors and self.preprocessing.output_size is None:
            text = "makes pixel values of different sizes; give a height and a width"
            checks.add("preprocessing", text)
        checks.done()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the pixel values."""
        size = self.preprocessing.output_size
        assert size is not None, "it is checked"  # noqa: S101
        return size


def image_text_fields(*, packed: bool, weighted: bool = False) -> tuple[RowField, ...]:
    """Return the arrays of a row of conversations with images.

    Only the first stage of a pipeline reads pixel values. Each of the ranks that share a row has
    all images of the row.

    Args:
        packed: Whether a row has several conversations, which attention keeps apart.
        weighted: Whether labels have weights other than 1.
    """
    pixels = RowField(
        name="pixel_values",
        dtype="float32",
        dims=("images", "channels", "height", "width"),
        cut="whole",
        stages=("first",),
        joined=True,
    )
    return (*chat_fields(packed=packed, weighted=weighted), pixels)


class ImageTextDataset(RenderedRows):
    """Rows of whole conversations with images, with labels on the assistant's turns.

    Conversations are rendered once and kept in memory, 8 bytes a token; images are read with their
    row, and decoded in threads. Each image is `form.num_tokens` tokens in a row, none of which is a
    label. Rows are packed by this length. A conversation may have several images, or none. Images
    at the end of a conversation are left out.

    Args:
        source: A tar (see `TarIndex`), a file of conversations (JSON lines, JSON, parquet, Arrow)
            beside the images that it names, a folder of such files, a source from `open_images`, or
            several of them.
        template: Chat template with the tokenizer; it writes the image token for each image.
        form: Form of the images in a row.
        sequence_length: Number of tokens of a row.
        packing: Packing of conversations into rows.
        too_long: Treatment of conversations longer than a row: an error that names the place,
            dropping, or cutting without dividing an image.
        seed: Seed of the order.

    Attributes:
        report: Numbers of conversations and tokens, both kept and left out.
        num_images: Number of images in the conversations.

    Raises:
        DataError: A sample is damaged or refused, or there is nothing to learn.

    Shape:
        - `row(i)`: the arrays of `ChatDataset`, and `pixel_values` [images of the row, 3, H, W],
          float32, in the order of the image tokens. They are decoded at their first use, the
          images of a batch together.
    """

    def __init__(
        self,
        source: Source | Sequence[Source],
        template: ChatTemplate,
        form: ImageForm,
        *,
        sequence_length: int,
        packing: RowPacking = "best-fit",
        too_long: TooLong = "refuse",
        seed: int = 0,
    ) -> None:
        tokenizer = template.tokenizer
        if tokenizer is None:
            raise DataError("the chat template has no tokenizer; give it one")
        given = [source] if isinstance(source, str | os.PathLike | ImageSource) else list(source)
        self._sources: list[ImageSource] = []
        for each in given:
            self._sources += [each] if isinstance(each, ImageSource) else image_sources(each)
        self.form = form
        reader = ChatReader(tokenizer, template, size=sequence_length, too_long=too_long)
        self.report = reader.report
        self._owners: list[tuple[int, ...]] = []  # numbers of each conversation's images
        self._image_source: list[int] = []
        self._image_number: list[int] = []
        super().__init__(
            self._rendered(reader, template, too_long),
            sequence_length=sequence_length,
            packing=packing,
            seed=seed,
            identity={
                "rows": "image-text",
                "tokenizer": tokenizer.sha256,
                "template": [template.source, template.tokens],
                "too_long": too_long,
                "image": [form.token_id, form.num_tokens, form.preprocessing.identity],
            },
        )
        self._identity["data"] = [each.fingerprint for each in self._sources]

    @property
    def num_images(self) -> int:
        """Number of images in an epoch."""
        return len(self._image_number)

    @property
    def images_of_rows(self) -> NDArray[np.int64]:
        """Number of images of each row of the first epoch."""
        return np.array([len(self._images_of(row)) for row in range(len(self))], np.int64)

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return image_text_fields(packed=self.packing == "documents", weighted=self.is_weighted)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of tokens in a row, and the sizes of an image."""
        height, width = self.form.size
        return {
            "tokens": self.sequence_length,
            "images": 0,
            "channels": 3,
            "height": height,
            "width": width,
        }

    def describe(self) -> str:
        """Return a sentence on the rows."""
        tokens = self.num_images * self.form.num_tokens
        share = tokens / max(1, self.report.tokens)
        text = f"{len(self)} rows of {self.report.conversations} conversations with "
        return f"{text}{self.num_images} images, whose tokens are {share:.0%} of all"

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` in the endless stream of epochs."""
        arrays = {name: x for name, x in super().row(index).items() if name != "pixel_values"}
        return GatheredRow(self, arrays, ("pixel_values",), self._images_of(index))

    def gather(self, rows: Sequence[GatheredRow]) -> None:
        """Decode the images of rows, in threads."""
        pixels = self.pixel_values([image for row in rows for image in row.content])
        for row in rows:
            count = len(row.content)
            row.keep(pixel_values=pixels[:count])
            pixels = pixels[count:]

    def pixel_values(self, numbers: Sequence[int]) -> NDArray[np.float32]:
        """Return the pixel values of numbered images, decoded in threads, [n, 3, H, W].

        Raises:
            DataError: An image can't be read or decoded.
        """
        height, width = self.form.size
        found = np.empty((len(numbers), 3, height, width), np.float32)

        def decode(place: int) -> None:
            number = numbers[place]
            source = self._sources[self._image_source[number]]
            image = self._image_number[number]
            content, where = source.read(image, self.form.limits), source.where(image)
            try:
                found[place] = self.form.preprocessing.pixels_of(content, where, self.form.limits)
            except DataFileError:
                raise
            except DataError as error:
                raise DataFileError(where, str(error)) from None

        places = range(len(numbers))
        if self.form.threads > 1 and len(numbers) > 1:
            list(self._pool.map(decode, places))
        else:
            for place in places:
                decode(place)
        return found

    def _images_of(self, index: int) -> list[int]:
        return [each for talk in self.items(index) for each in self._owners[talk]]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.form.threads, thread_name_prefix="images")

    def _rendered(
        self, reader: ChatReader, template: ChatTemplate, too_long: TooLong
    ) -> Iterator[Rendered]:
        """Render all conversations, and note the images of the kept ones."""
        for which, source in enumerate(self._sources):
            for sample in source.samples():
                found, images = self._one(reader, template, source, sample)
                size = self.sequence_length if too_long == "cut" else None
                whole = len(found.ids)
                found = fitted(found, self.form.token_id, self.form.num_tokens, size)
                reader.report.cut += size is not None and whole - 1 > size
                kept = reader.fitting(sample.where, found)
                if kept is None:
                    continue
                count = kept.ids.count(self.form.token_id) // self.form.num_tokens
                first = len(self._image_number)
                self._owners.append(tuple(range(first, first + count)))
                self._image_source += [which] * count
                self._image_number += images[:count]
                yield kept
        if not reader.report.conversations:
            names = ", ".join(source.path for source in self._sources)
            text = f"{names}: has nothing to learn; {reader.report.too_long} conversations are too "
            text += f"long, and {reader.report.unlabelled} have no answer to learn"
            raise DataError(text)

    def _one(
        self,
        reader: ChatReader,
        template: ChatTemplate,
        source: ImageSource,
        sample: ImageSample,
    ) -> tuple[Rendered, list[int]]:
        """Return the expanded tokens of a sample, and its images in their order."""
        try:
            messages, named = with_parts(sample.messages)
        except DataError as error:
            raise DataFileError(sample.where, str(error)) from None
        images = list(sample.images)
        if any(name is not None for name in named):
            if not all(name is not None for name in named):
                text = "names some of its images in parts of messages, and some not"
                raise DataFileError(sample.where, text)
            images = [source.named(str(name), sample) for name in named]
        if len(named) != len(images):
            raise DataFileError(
                sample.where,
                f"has {len(images)} images, and its messages have {len(named)} places for them; "
                "put <image>, or a part of the type image, where each image is",
            )
        talk = Conversation(where=sample.where, messages=messages, tools=sample.tools)
        found = reader.rendered(talk)
        count = found.ids.count(self.form.token_id)
        if count != len(images):
            raise DataFileError(
                sample.where,
                f"the chat template writes {count} image tokens ({self.form.token_id}) for "
                f"{len(images)} images; use a template that writes one for each image",
            )
        return expanded(found, self.form.token_id, self.form.num_tokens), images
