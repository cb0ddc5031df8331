"""Images become the pixel values that transformers' processors make."""

import json
from dataclasses import replace

import numpy as np
import pytest
from mt_files import SchemaError
from mt_hf import ExchangeError, ImagePreprocessing, read_image_preprocessing
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

PROCESSORS = [
    CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 18}),
    CLIPImageProcessorPil(size={"shortest_edge": 9}, do_center_crop=False, resample=2),
    SiglipImageProcessorPil(size={"height": 12, "width": 17}),
    ViTImageProcessorPil(size={"height": 8, "width": 8}, do_normalize=False),
]


def picture(mode: str, width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


@pytest.mark.parametrize("index", range(len(PROCESSORS)))
def test_pixel_values_are_those_of_transformers(tmp_path, index):
    processor = PROCESSORS[index]
    processor.save_pretrained(tmp_path)
    ours = read_image_preprocessing(tmp_path)
    for mode, width, height in (("RGB", 31, 24), ("L", 20, 40), ("RGBA", 13, 13)):
        image = picture(mode, width, height)
        (expected,) = processor(images=[image.convert("RGB")], return_tensors="np")["pixel_values"]
        image.save(tmp_path / "image.png")
        for given in (image, tmp_path / "image.png", str(tmp_path / "image.png")):
            np.testing.assert_allclose(ours.pixels(given).numpy(), expected, rtol=0, atol=1e-6)


def test_the_fields_of_a_processors_file_serve_too(tmp_path):
    given = PROCESSORS[0].to_dict()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": given}))
    found = read_image_preprocessing(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 20, "crop_size": 16}))
    assert found.size == {"shortest_edge": 20}
    older = read_image_preprocessing(tmp_path)
    assert older.pixels(picture("RGB", 30, 30)).shape == (3, 20, 20)
    assert read_image_preprocessing(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"image_processor_type": "PixtralImageProcessor"}, "Pixtral"),
        ({"do_pad": True}, "do_pad"),
        ({"resample": "bicubic"}, "resample"),
        ({"resample": 9}, "resample"),
        ({"size": {"shortest_edge": 10**6}}, "size"),
        ({"crop_size": -1}, "crop_size"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
    ],
)
def test_steps_that_are_not_known_are_refused(tmp_path, fields, word):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(SchemaError, match=word):
        read_image_preprocessing(tmp_path)


def test_what_is_no_image_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 4}, "crop_size": 9, "do_center_crop": True})
    )
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\nand more")
    ours = read_image_preprocessing(tmp_path)
    with pytest.raises(ExchangeError, match="pillow"):
        ours.pixels(tmp_path / "image.png")
    with pytest.raises(ExchangeError, match="shortest_edge"):
        ours.pixels(picture("RGB", 5, 5))
    wide = ImagePreprocessing(size=8000, image_mean=(0.5, 0.5))
    with pytest.raises(ExchangeError, match="becomes"):
        wide.pixels(picture("RGB", 5, 9000))
    with pytest.raises(ExchangeError, match="image_mean"):
        replace(wide, size=4).pixels(picture("RGB", 5, 5))
