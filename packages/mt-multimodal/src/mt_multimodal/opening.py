"""Choice of the class that reads the samples of a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mt_multimodal.sources import FileImages, ImageSource, TarImages
from mt_multimodal.tables import TableImages

_TAR = re.compile(r"\.(tar|tgz|tar\.\w+)$")  # a compressed one is refused by name


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
