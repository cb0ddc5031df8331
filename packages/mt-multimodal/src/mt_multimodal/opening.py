"""Choice of the class that reads the samples of a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mt_multimodal.sources import FileImages, ImageSource, TarImages
from mt_multimodal.tables import TableImages

_TAR = re.compile(r"\.(tar|tgz|tar\.\w+)$")  # a compressed one is refused by name
_IN_FOLDERS = re.compile(r"\.(tar|parquet|jsonl)(\.(gz|bz2|xz|zst))?$")


def image_sources(
    path: str | os.PathLike[str], *, images: str | os.PathLike[str] | None = None
) -> list[ImageSource]:
    """Open a file of samples, or all tars, parquet files and JSON lines of a folder by their names.

    Args:
        path: The file, or its URL; or a folder, with the folders in it.
        images: Folder of the images that records name; by default the folder of each file.

    Raises:
        DataFileError: A tar is damaged.
        FileError: A file can't be read.
    """
    inside = sorted(Path(path).rglob("*")) if os.path.isdir(path) else []
    files = [each for each in inside if _IN_FOLDERS.search(each.name)]
    return [open_images(each, images=images) for each in files or [path]]


def open_images(
    path: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    indexes: Path | None = None,
) -> ImageSource:
    """Open a file of samples with the class for its ending.

    Args:
        path: A tar; or JSON lines, JSON, parquet or Arrow. A path or a URL.
        images: Folder of the images that records name.
        indexes: Folder of the indexes of tars.

    Raises:
        DataFileError: The tar is damaged.
        FileError: The file can't be read.
    """
    if _TAR.search(os.fspath(path)):
        return TarImages(path, indexes)
    if os.fspath(path).endswith(".parquet"):
        return TableImages(path, images)
    return FileImages(path, images)
