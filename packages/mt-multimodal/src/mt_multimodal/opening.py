"""Choice of the class that reads the samples of a file."""

from __future__ import annotations

import os
from pathlib import Path

from mt_multimodal.sources import FileImages, ImageSource, TarImages
from mt_multimodal.tables import TableImages


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
    if os.fspath(path).endswith(".tar"):
        return TarImages(path, indexes)
    if os.fspath(path).endswith(".parquet"):
        return TableImages(path, images)
    return FileImages(path, images)
