"""Pixel values of every kind of image agree with plain arithmetic of the preprocessor."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
from mt_data import DataError, DataFileError
from mt_files import SchemaError
from mt_multimodal import ImageLimits, ImagePreprocessing, decode_image, read_image_preprocessing
from mt_multimodal.containers import without_metadata
from mt_multimodal.decoding import to_rgb
from PIL import Image, PngImagePlugin

CLIP = {
    "size": {"shortest_edge": 20},
    "crop_size": {"height": 16, "width": 18},
    "do_center_crop": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "CLIPImageProcessor",
}


def saved(image, format, **how):
    file = io.BytesIO()
    image.save(file, format, **how)
    return file.getvalue()


def test_pixel_values_are_those_of_plain_arithmetic(tmp_path, made):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CLIP))
    found = read_image_preprocessing(tmp_path)
    assert found.output_size == (16, 18)
    assert found == read_image_preprocessing(tmp_path / "preprocessor_config.json")
    for size in ((31, 24), (20, 40), (33, 33)):
        image = made.picture(1, size=size)
        short = 20 / min(size)
        wide = tuple(20 if side == min(size) else int(side * short) for side in size)
        resized = np.asarray(image.resize(wide, 3)).astype(np.float64)
        top, left = (wide[1] - 16) // 2, (wide[0] - 18) // 2
        middle = resized[top : top + 16, left : left + 18] / 255
        expected = (middle - CLIP["image_mean"]) / CLIP["image_std"]
        image.save(tmp_path / "image.png")
        for given in (image, tmp_path / "image.png"):
            got = found.pixels(given)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected.transpose(2, 0, 1), rtol=0, atol=1e-6)


def test_images_of_every_mode_become_rgb(made):
    rgb = made.picture(3)
    for mode, format in (("L", "PNG"), ("P", "GIF"), ("1", "BMP")):
        image = rgb.convert(mode)
        found = decode_image(saved(image, format), "x")
        assert found.mode == "RGB"
        assert found.tobytes() == image.convert("RGB").tobytes()
    cmyk = decode_image(saved(rgb.convert("CMYK"), "JPEG", quality=100, subsampling=0), "x")
    difference = np.abs(np.asarray(cmyk).astype(int) - np.asarray(rgb).astype(int))
    assert difference.mean() < 10
    wide = np.arange(0, 1 << 16, 257, dtype=np.uint16).reshape(16, 16)
    deep = decode_image(saved(Image.fromarray(wide), "PNG"), "x")
    assert (np.asarray(deep)[..., 0] == wide >> 8).all()


@pytest.mark.parametrize(
    ("mode", "format", "how"),
    [
        ("RGBA", "PNG", {}),
        ("RGBA", "WEBP", {"lossless": True, "exact": True}),
        ("LA", "PNG", {}),
        ("P", "PNG", {"transparency": 3}),
        ("P", "PNG", {"transparency": bytes(range(256))}),
        ("P", "GIF", {"transparency": 3}),
        ("L", "PNG", {"transparency": 7}),
        ("RGB", "PNG", {"transparency": (1, 2, 3)}),
    ],
)
def test_transparent_pixels_lie_on_white(made, mode, format, how):
    image = made.picture(3, mode)
    if mode in ("L", "RGB"):
        image.putpixel((0, 0), how["transparency"])
    content = saved(image, format, **how)
    colours = np.asarray(Image.open(io.BytesIO(content)).convert("RGBA")).astype(float)
    share = colours[..., 3:] / 255
    assert share.min() < 1
    expected = share * colours[..., :3] + (1 - share) * 255
    for found in (decode_image(content, "x"), to_rgb(Image.open(io.BytesIO(content)))):
        assert np.abs(np.asarray(found) - expected).max() <= 1


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("metadata", ["exif", "xmp"])
@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_metadata_turns_an_image(made, turn, metadata, format):
    image, exif = made.picture(5), Image.Exif()
    exif[0x010F], exif[0x0112] = "a maker" * 20, turn
    if metadata == "xmp":
        exif = {0: f'<x tiff:Orientation="{turn}"/>'.encode()}
    how = {metadata: exif} if metadata == "exif" else {"xmp": exif[0]}
    if format == "PNG" and metadata == "xmp":
        how = {"pnginfo": PngImagePlugin.PngInfo()}
        how["pnginfo"].add_itxt("XML:com.adobe.xmp", exif[0].decode())
    how |= {"lossless": True} if format == "WEBP" else {}
    content = saved(image, format, **how)
    found = np.asarray(decode_image(content, "x"))
    given = np.asarray(Image.open(io.BytesIO(content)))
    # The standard's table: which side of the picture is the first row, and which the first column.
    wanted = {
        1: given,
        2: given[:, ::-1],
        3: given[::-1, ::-1],
        4: given[::-1],
        5: given.transpose(1, 0, 2),
        6: given[::-1].transpose(1, 0, 2),
        7: given[::-1, ::-1].transpose(1, 0, 2),
        8: given[:, ::-1].transpose(1, 0, 2),
    }[turn]
    assert (found == wanted).all()


def chunk(kind, content):
    """A part of a PNG."""
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def claiming(entries):
    """An EXIF table of 64 KB, in which each entry claims most of the table."""
    found = b"Exif\0\0II*\0" + struct.pack("<IH", 8, entries)
    for tag in range(1, entries + 1):
        found += struct.pack("<HHII", tag, 7, 64_000 - 12 * entries, 12 * entries + 12)
    return found.ljust(64_000, b"\0")


def test_metadata_never_reaches_a_decoder(made):
    """Tables that claim gigabytes, and thousands of comments, are removed from whole images."""
    image, exif = made.picture(1, size=(9, 9)), claiming(4000)
    png, jpeg = saved(image, "PNG"), saved(image, "JPEG")
    gif = saved(image.convert("P"), "GIF")
    palette = 13 + (6 << (gif[10] & 7))
    for content, plain in (
        (png[:33] + chunk(b"eXIf", exif[6:]) + png[33:], png),
        (png[:33] + chunk(b"tEXt", b"a\0b") * 1000 + png[33:], png),
        (jpeg[:2] + (b"\xff\xe1\xfa\x02" + exif) * 20 + jpeg[2:], jpeg),
        (jpeg[:2] + b"\xff\xfe\0\2" * 1000 + jpeg[2:], jpeg),
        (gif[:palette] + b"!\xfe" + b"\1a" * 1000 + b"\0" + gif[palette:], gif),
    ):
        kept, _ = without_metadata(content, "x", 1 << 20)
        assert kept == plain
        assert decode_image(content, "x").tobytes() == decode_image(plain, "x").tobytes()


def test_parts_that_would_take_a_decoder_long_are_refused(made):
    image = made.picture(1, size=(9, 9))
    png, jpeg = saved(image, "PNG"), saved(image, "JPEG", progressive=True)
    gif, bmp = saved(image.convert("P"), "GIF"), bytearray(saved(image, "BMP"))
    palette, scan = 13 + (6 << (gif[10] & 7)), b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00"
    bmp[30] = 1
    canvas = b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\2\0\0\0" + b"\xff" * 6
    for content, word in (
        (png[:33] + chunk(b"tEXt", b"") * 70_000 + png[33:], "chunks"),
        (jpeg[:2] + b"\xff\xfe\0\2" * 70_000 + jpeg[2:], "segments"),
        (jpeg[:-2] + scan * 40_000 + jpeg[-2:], "40010 scans"),
        (gif[:palette] + b"!\xfe\0" * 9 + b"!\xfe" + b"\1a" * 70_000, "blocks"),
        (gif[:palette] + b"x" * 100 + gif[palette:], "else than blocks"),
        (bytes(bmp), "run lengths"),
        (canvas, "16777216 x 16777216"),
    ):
        with pytest.raises(DataFileError, match=f"my.file: .*{word}"):
            decode_image(content, "my.file")


def bomb(width, height):
    """A PNG that says it is huge, of a few bytes."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def test_what_is_too_large_is_refused_before_it_is_decoded(made):
    for size in ((8000, 9000), (1 << 30, 1 << 30)):
        with pytest.raises(DataFileError, match="x: "):
            decode_image(bomb(*size), "x")
    with pytest.raises(DataFileError, match="20 x 14"):
        decode_image(made.png(1), "x", ImageLimits(pixels=279))
    with pytest.raises(DataFileError, match="bytes"):
        decode_image(made.png(1), "x", ImageLimits(bytes=10))


def test_of_an_animation_the_first_frame_is_decoded(made):
    frames = [made.picture(seed).convert("P") for seed in range(50)]
    content = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0)
    found = decode_image(content, "x")
    assert found.tobytes() == frames[0].convert("RGB").tobytes()


def test_cut_and_damaged_images_are_refused_by_name(made):
    draw, image = np.random.default_rng(0), made.picture(2, size=(60, 60))
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        whole = saved(image, format)
        with pytest.raises(DataFileError, match=r"my\.file"):
            decode_image(whole[: len(whole) // 2], "my.file")
        for _ in range(40):
            damaged = bytearray(whole)
            for place in draw.integers(0, len(whole), 4):
                damaged[place] = draw.integers(256)
            try:
                assert decode_image(bytes(damaged), "my.file").mode == "RGB"
            except DataFileError as error:
                assert "my.file" in str(error)  # noqa: PT017 - some damage is another image


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
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
    ],
)
def test_steps_that_are_not_known_are_refused(tmp_path, fields, word):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(SchemaError, match=word):
        read_image_preprocessing(tmp_path)


def test_sizes_that_do_not_fit_an_image_are_refused(made):
    with pytest.raises(DataError, match="crop_size"):
        ImagePreprocessing(size=4, crop_size=9, do_center_crop=True).pixels(made.picture(1))
    with pytest.raises(DataError, match="shortest_edge"):
        ImagePreprocessing(size={"height": 4}).pixels(made.picture(1))
    with pytest.raises(DataError, match="becomes"):
        ImagePreprocessing(size=8000).pixels(made.picture(1, size=(9000, 5)))
