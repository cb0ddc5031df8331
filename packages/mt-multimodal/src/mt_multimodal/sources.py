"""Samples of texts with images: tars, and records with paths of images."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import mt_files
from mt_data import DataFileError, parse_conversation, read_lines
from mt_files import find_object, listed, object_url, parse_json, shorten

from mt_multimodal.decoding import ImageLimits
from mt_multimodal.tar_index import TarIndex

IMAGE_KINDS = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
_MOST_TEXT = 1 << 24
_TALKS = frozenset({"messages", "completion", "conversations"})


@dataclass(frozen=True, kw_only=True)
class ImageSample:
    """A conversation with its images.

    Attributes:
        where: Place of the sample, for messages.
        messages: The messages.
        tools: JSON schemas of functions, if the record has some.
        images: Numbers of the sample's images in their source, in order. Images that are named in
            parts of the messages replace them.
    """

    where: str
    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    images: tuple[int, ...] = ()


class ImageSource(ABC):
    """Samples of one file, and its images by number.

    Attributes:
        path: The file, or its URL.
        fingerprint: Digest of the samples read so far; for a tar, of the images' content too.
    """

    path: str = ""
    fingerprint: str = ""

    @abstractmethod
    def samples(self) -> Iterator[ImageSample]:
        """Yield the samples in order.

        Raises:
            DataFileError: A sample is damaged.
        """

    @abstractmethod
    def named(self, name: str, sample: ImageSample) -> int:
        """Return the number of the image that a part of a sample's messages names.

        Raises:
            DataFileError: There is no such image.
        """

    @abstractmethod
    def where(self, image: int) -> str:
        """Return the place of an image, for messages."""

    @abstractmethod
    def read(self, image: int, limits: ImageLimits) -> bytes:
        """Return the content of an image.

        Raises:
            DataFileError: The image can't be read, is larger than the limit, or has changed.
        """


class TarImages(ImageSource):
    """Samples of a tar: a member `json` or `txt`, and images in the order of their members.

    `json` is a record like a line of a file of conversations; it may name the images of the sample
    as `image` or `images`. `txt` is the assistant's text about the sample's images; a `json`
    without a conversation beside it, such as img2dataset writes, is left out.

    Args:
        path: The tar.
        folder: Folder of its index.
    """

    def __init__(self, path: str | os.PathLike[str], folder: Path | None = None) -> None:
        self.path, self.tar = os.fspath(path), TarIndex(path, folder)
        self.fingerprint = self.tar.fingerprint

    def samples(self) -> Iterator[ImageSample]:
        """Yield the samples in order."""
        for number in range(self.tar.num_samples):
            members = self.tar.sample(number)
            images = tuple(
                member for kind, member in members.items() if kind.rpartition(".")[2] in IMAGE_KINDS
            )
            if members.keys().isdisjoint(("json", "txt")):
                where = f"{self.tar.path}: {self.tar.key(number)}"
                text = f"has {listed(members)}, and neither json nor txt; add what is said of it"
                raise DataFileError(where, text)
            record = self._text(members["json"]) if "json" in members else b""
            if "txt" not in members or (record and _is_conversation(record)):
                yield self._of_json(self.tar.where(members["json"]), record, images)
            else:
                text = self._text(members["txt"])
                yield _captioned(self.tar.where(members["txt"]), text, images)

    def _text(self, member: int) -> bytes:
        if (size := self.tar.size(member)) > _MOST_TEXT:
            text = f"has {size} bytes; at most {_MOST_TEXT} are read"
            raise DataFileError(self.tar.where(member), text)
        return self.tar.read(member)

    def _of_json(self, where: str, content: bytes, images: tuple[int, ...]) -> ImageSample:
        named = _named_images(where, content)
        sample = sample_of(where, content, images)
        lasts = {PurePosixPath(self.tar.name(each)).name for each in images}
        known = all(PurePosixPath(each).name in lasts for each in named)
        if named and (known or len(named) != len(images)):
            found = tuple(self.named(each, sample) for each in named)
            return sample_of(where, content, found)
        return sample

    def named(self, name: str, sample: ImageSample) -> int:
        """Return the sample's image with the last part of a name, or the member with the name."""
        last = PurePosixPath(name).name
        own = (each for each in sample.images if PurePosixPath(self.tar.name(each)).name == last)
        found = next(own, self.tar.find(name))
        if found is None:
            raise DataFileError(sample.where, f"names {shorten(name)}, which is not in the tar")
        return found

    def where(self, image: int) -> str:
        """Return the name of a member."""
        return self.tar.where(image)

    def read(self, image: int, limits: ImageLimits) -> bytes:
        """Return the content of a member."""
        size = self.tar.size(image)
        if size > limits.bytes:
            text = f"has {size} bytes; at most {limits.bytes} are decoded"
            raise DataFileError(self.where(image), text)
        return self.tar.read(image)


class FileImages(ImageSource):
    """Samples of JSON lines, JSON, parquet or Arrow, whose images are files.

    A record names its images as `image` or `images`, or in the parts of its messages.

    Args:
        path: The file.
        folder: Folder of the images, or its URL in an object store; by default the file's folder.
            A name must not lead out of it.
    """

    def __init__(
        self, path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.path = os.fspath(path)
        own = self.path.rpartition("/")[0] or "."
        self._folder = own if folder is None else os.fspath(folder)
        self._names: list[str] = []

    def samples(self) -> Iterator[ImageSample]:
        """Yield the samples in order."""
        digest = hashlib.sha256()
        for where, line in read_lines(self.path):
            digest.update(line + b"\n")
            first = len(self._names)
            self._names += [self._inside(where, name) for name in _named_images(where, line)]
            yield sample_of(where, line, tuple(range(first, len(self._names))))
        self.fingerprint = digest.hexdigest()

    def named(self, name: str, sample: ImageSample) -> int:
        """Return the number of a file."""
        self._names.append(self._inside(sample.where, name))
        return len(self._names) - 1

    def _inside(self, where: str, name: str) -> str:
        """Return the name of a file in the folder of images, which an absolute one must be in."""
        path = PurePosixPath(name)
        if path.is_absolute() and not object_url(self._folder):
            folder = os.path.abspath(self._folder)
            path = path.relative_to(folder) if path.is_relative_to(folder) else path
        if path.is_absolute() or ".." in path.parts or "://" in name or name.startswith("data:"):
            text = f"names the image {shorten(name)}, which is no file in the folder of images, "
            raise DataFileError(where, f"{text}{self._folder}; put it there, or name its folder")
        return str(path)

    def where(self, image: int) -> str:
        """Return the path of a file."""
        return f"{self._folder.rstrip('/')}/{self._names[image]}"

    def read(self, image: int, limits: ImageLimits) -> bytes:
        """Return the content of a file."""
        path = self.where(image)
        try:
            if object_url(path):
                return find_object(path).content(limit=limits.bytes)
            return mt_files.read_bytes(path, limit=limits.bytes, within=self._folder)
        except mt_files.FileError as error:
            raise DataFileError(path, error.problem) from None


def _captioned(where: str, content: bytes, images: tuple[int, ...]) -> ImageSample:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise DataFileError(where, "is not UTF-8") from None
    shown = [{"type": "image"} for _ in images]
    messages = [
        {"role": "user", "content": shown or ""},
        {"role": "assistant", "content": text.strip()},
    ]
    return ImageSample(where=where, messages=messages, images=images)


def sample_of(where: str, line: bytes, images: tuple[int, ...]) -> ImageSample:
    """Return the sample of a record.

    Args:
        where: Place of the record, for messages.
        line: The record as JSON.
        images: Numbers of its images.

    Raises:
        DataFileError: The record is no conversation.
    """
    talk = parse_conversation(where, line)
    messages = talk.messages or [
        {"role": "user", "content": talk.prompt},
        {"role": "assistant", "content": talk.completion},
    ]
    return ImageSample(where=where, messages=messages, tools=talk.tools, images=images)


def _is_conversation(content: bytes) -> bool:
    """Return whether a text is a conversation, or damaged; else it describes an image."""
    try:
        record = parse_json(content, name="json")
    except mt_files.FileError:
        return True
    return not isinstance(record, dict) or not _TALKS.isdisjoint(record)


def _named_images(where: str, line: bytes) -> list[str]:
    """Return the names under `image` or `images` of a record."""
    try:
        record = parse_json(line, name=where)
    except mt_files.FileError as error:
        raise DataFileError(where, error.problem) from None
    given = record.get("images", record.get("image")) if isinstance(record, dict) else None
    given = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        shown = shorten(json.dumps(given))
        raise DataFileError(where, f"names the images {shown}; give a path, or a list of paths")
    return given
