"""Conversations with images, in the form that the chat templates of multimodal models read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mt_data import DataError
from mt_files import shorten

_PLACEHOLDER = re.compile(r"\n?<image>\n?")
_IMAGE_KINDS = ("image", "image_url")
_REFERENCES = ("image", "path", "url", "image_url")


def image_parts(text: str) -> str | list[dict[str, str]]:
    r"""Split a text into parts at each `<image>`; return a text without `<image>` as it is.

    The line feed beside `<image>` in LLaVA's files is left out, since a template writes its own.

    Example:
        >>> image_parts("<image>\nWhat is it?")
        [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]
    """
    pieces, found = _PLACEHOLDER.split(text), list[dict[str, str]]()
    if len(pieces) == 1:
        return text
    for number, piece in enumerate(pieces):
        if number:
            found.append({"type": "image"})
        if piece:
            found.append({"type": "text", "text": piece})
    return found


def with_parts(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[str | None]]:
    """Return messages as a template reads them, and the images that they name.

    A text with `<image>` becomes parts. A part of the type `image` or `image_url` may name its
    image, as `image`, `path`, `url` or `image_url`.

    Args:
        messages: Mappings with `role` and `content`: a text, or a list of parts.

    Returns:
        The messages, and for each image in order the path in its part, or None.

    Raises:
        DataError: A part is not a mapping, or has another type.
    """
    found, images = [], []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            content = image_parts(content)
        if isinstance(content, list):
            content, named = _parts(content, number)
            images += named
        found.append({**message, "content": content})
    return found, images


def _parts(content: Sequence[Any], number: int) -> tuple[list[dict[str, Any]], list[str | None]]:
    parts, named = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_KINDS:
            parts.append({"type": "image"})
            named.append(_reference(part, number))
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            text = f"message {number} has a part {shorten(part)}; use text and image"
            raise DataError(text)
    return parts, named


def _reference(part: Mapping[str, Any], number: int) -> str | None:
    given = next((part[name] for name in _REFERENCES if part.get(name) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is not None and not isinstance(given, str):
        raise DataError(f"message {number} names the image {shorten(given)}; give a path")
    return given
