"""Images for language models: indexed tar files, preprocessing, rows of texts with images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_multimodal.decoding import ImageLimits as ImageLimits
    from mt_multimodal.decoding import decode_image as decode_image
    from mt_multimodal.messages import image_parts as image_parts
    from mt_multimodal.messages import with_parts as with_parts
    from mt_multimodal.opening import image_sources as image_sources
    from mt_multimodal.opening import open_images as open_images
    from mt_multimodal.preprocessing import ImagePreprocessing as ImagePreprocessing
    from mt_multimodal.preprocessing import read_image_preprocessing as read_image_preprocessing
    from mt_multimodal.rows import ImageForm as ImageForm
    from mt_multimodal.rows import ImageTextDataset as ImageTextDataset
    from mt_multimodal.rows import image_text_fields as image_text_fields
    from mt_multimodal.sources import ImageSample as ImageSample
    from mt_multimodal.tar_index import TarIndex as TarIndex
else:
    # Resolved at first use, so that an import stays light.
    __getattr__ = resolve_later(__name__)
