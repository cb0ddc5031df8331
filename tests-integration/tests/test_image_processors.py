"""Images become the pixel values that transformers' processors of CLIP and SigLIP make."""

import io
import json

import numpy as np
import pytest
from mt_multimodal import read_image_preprocessing
from PIL import Image, ImageOps
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

PROCESSORS = {
    "clip": CLIPImageProcessorPil(),
    "clip of rectangles": CLIPImageProcessorPil(
        size={"shortest_edge": 20}, crop_size={"height": 16, "width": 18}
    ),
    "clip without a crop": CLIPImageProcessorPil(
        size={"height": 9, "width": 14}, do_center_crop=False, resample=2
    ),
    "siglip": SiglipImageProcessorPil(size={"height": 12, "width": 17}),
}
FORMATS = {
    "RGB": "JPEG",
    "L": "PNG",
    "LA": "PNG",
    "P": "GIF",
    "RGBA": "PNG",
    "CMYK": "JPEG",
    "1": "BMP",
}
DRAWN = 50


def drawn(draw):
    """The file of an image of any size, mode and orientation; smooth, as noise hides little."""
    width, height = (int(each) for each in draw.integers(3, 90, 2))
    coarse = draw.integers(0, 256, (4, 4, 4), dtype=np.uint8)
    image = Image.fromarray(coarse, "RGBA").resize((width, height), 3)
    mode = draw.choice(list(FORMATS))
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = int(draw.integers(1, 9))
    how = {"exif": exif} if FORMATS[mode] in ("JPEG", "PNG") else {}
    image.convert(mode).save(file, FORMATS[mode], **how)
    return file.getvalue()


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixel_values_are_those_of_transformers(tmp_path, name):
    processor, draw = PROCESSORS[name], np.random.default_rng(len(name))
    processor.save_pretrained(tmp_path)
    ours = read_image_preprocessing(tmp_path)
    step = 1 / 255 / np.array(processor.image_std).reshape(3, 1, 1)
    for number in range(DRAWN):
        content = drawn(draw)
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        theirs = processor(images=[image], return_tensors="np")
        found = ours.pixels_of(content, f"image {number}")
        assert found.shape == theirs["pixel_values"][0].shape[:1] + ours.output_size
        assert (np.abs(found - theirs["pixel_values"][0]) <= step * 1.001).all(), number


@pytest.mark.parametrize("size", [{}, {"size": 20}])
@pytest.mark.parametrize(
    "kind", [CLIPImageProcessorPil, SiglipImageProcessorPil, ViTImageProcessorPil]
)
def test_fields_that_a_file_lacks_are_those_of_its_processor(tmp_path, kind, size):
    name = kind.__name__.removesuffix("Pil")
    crop = {"crop_size": 16} if "CLIP" in name and size else {}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"image_processor_type": name, **size, **crop}))
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (30, 50, 3), np.uint8))
    theirs = kind.from_pretrained(tmp_path)(images=[image], return_tensors="np")["pixel_values"][0]
    found = read_image_preprocessing(tmp_path).pixels(image)
    assert found.shape == theirs.shape
    assert np.abs(found - theirs).max() <= 1.001 / 255 / min(kind().image_std)
