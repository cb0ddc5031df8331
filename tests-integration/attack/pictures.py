"""Tars, images and conversations with images, drawn by the hundred: read whole, or named in short.

What is read outside of the case's own folder, or written there, is bad too.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import struct
import sys
import sysconfig
import tarfile
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from conversations import _spoilt
from drawn import named
from world import Row, World, demand

NUMBER = 300  # tars or images of a case
TALKS = 60
MOST_MEMORY = 1 << 29
MOST_SECONDS = 1.0
NAMES = (
    "1.json",
    "1.png",
    "../../x.txt",
    "/etc/passwd",
    "a/../b.jpg",
    "é.txt",
    "x" * 200,
    ".a",
    "",
)
SIZES = (0, 1, 511, 512, 513, 2**31, 2**33, 2**60, 2**63, 10**6)
TYPES = (b"0", b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"L", b"K", b"S", b"M", b"x", b"g")
RECORDS = (
    b"path=../../x.txt",
    b"path=",
    b"size=-1",
    b"size=99999999999999999999",
    b"size=0",
    b"GNU.sparse.major=1",
    b"path=a\0b",
    b"mtime=1",
)
LIBRARIES = tuple({*sysconfig.get_paths().values(), sys.prefix, "/usr", "/proc"})
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PIXELS, BYTES = 1 << 20, 1 << 22


@contextmanager
def _inside(folder: Path, memory: int = MOST_MEMORY) -> Iterator[None]:
    """Demand that no file outside of a folder is opened, and that memory is bounded."""
    opened: list[tuple[str, int]] = []
    is_on = [True]

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if is_on[0] and event == "open" and isinstance(values[0], str | bytes):
            opened.append((os.fsdecode(values[0]), values[2] or 0))

    sys.addaudithook(hook)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("ignore")
    yield
    is_on[0] = False
    for path, flags in opened:
        is_relative = not path.startswith("/") and ".." not in Path(path).parts
        is_written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        # What is imported late; the packages themselves may lie anywhere.
        is_library = not is_written and (path.startswith(LIBRARIES) or "/mt_" in path)
        is_own = path == os.devnull or Path(path).is_relative_to(folder)
        if "__pycache__" in path:
            continue
        demand(is_relative or is_library or is_own, f"opened {path}")


def drawn_tars(world: World, rng: random.Random, scratch: Path) -> None:
    """Index tars with forged headers: refused, or each member has the bytes of its place."""
    from mt_multimodal import TarIndex

    path = scratch / "some.tar"

    def read() -> None:
        index, whole = TarIndex(path), path.read_bytes()
        names = [index.name(number) for number in range(len(index))]
        demand(len(set(names)) == len(names), "a name is there twice")
        for number, name in enumerate(names):
            content = index.read(number)
            demand(len(content) == index.size(number), f"{name} has another size")
            demand(content in whole, f"{name} has bytes of its own")
        for number in range(index.num_samples):
            index.key(number)
        demand(TarIndex(path).fingerprint == index.fingerprint, "the kept index is another")

    with _inside(scratch):
        for _ in range(NUMBER):
            path.write_bytes(_tar(rng))
            began = time.process_time()
            named("some.tar", read)
            demand(time.process_time() - began < MOST_SECONDS, "it takes too long")
        demand({each.name for each in scratch.iterdir()} <= {"some.tar", "some.tar.index"}, "files")


def _tar(rng: random.Random) -> bytes:
    blocks = [_member(rng, number) for number in range(rng.randrange(1, 8))]
    if rng.random() < 0.1:
        blocks.append(rng.choice(blocks))  # a name twice
    content = bytearray(b"".join(blocks) + bytes(1024) * rng.randrange(2))
    how = rng.random()
    if how < 0.15:
        del content[rng.randrange(len(content)) :]
    elif how < 0.3:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how < 0.35:
        at = rng.randrange(len(content))
        content[at:at] = rng.randbytes(rng.randrange(1, 600))
    return bytes(content)


def _member(rng: random.Random, number: int) -> bytes:
    """Return a member: of any kind, with a size that may lie, behind extensions."""
    content = rng.randbytes(rng.choice((0, 1, 100, 512, 1300)))
    member = tarfile.TarInfo(rng.choice(NAMES) if rng.random() < 0.4 else f"{number}.txt")
    member.size, member.linkname = len(content), rng.choice(("", "../x", "/etc/passwd"))
    form = rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    header = bytearray(member.tobuf(form))
    head = header[-512:]
    if rng.random() < 0.15:
        head[156:157] = rng.choice(TYPES)
    if rng.random() < 0.1:
        size = rng.choice(SIZES)
        digits = b"%011o\0" % size
        far = b"\x80" + size.to_bytes(11, "big")
        head[124:136] = digits if len(digits) == 12 and rng.random() < 0.7 else far
    if rng.random() < 0.1:
        at = rng.randrange(512)
        head[at] = rng.randrange(256)
    if rng.random() < 0.95:
        sums = sum(head) - sum(head[148:156]) + 8 * ord(" ")
        head[148:156] = b"%06o\0 " % sums
    header[-512:] = head
    before = _extension(rng) if rng.random() < 0.15 else b""
    return before + bytes(header) + content + bytes(-len(content) % 512)


def _extension(rng: random.Random) -> bytes:
    kind = rng.choice((b"x", b"x", b"g", b"L", b"K"))
    records = [rng.choice(RECORDS) for _ in range(rng.randrange(3))]
    lines = b"".join(b"%d %s\n" % (len(each) + 4, each) for each in records)
    content = lines if kind in (b"x", b"g") else b"a" * rng.choice((0, 200, 5000, 70_000))
    if rng.random() < 0.2:
        content = rng.randbytes(rng.randrange(300))
    member = tarfile.TarInfo("././@LongLink")
    member.size, member.type = len(content), kind
    return member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def drawn_images(world: World, rng: random.Random, scratch: Path) -> None:
    """Decode damaged, forged and endless images: named, or RGB within the limits; soon."""
    from mt_multimodal import ImageLimits, decode_image

    limits = ImageLimits(pixels=PIXELS, bytes=BYTES)
    said = f"picture of {scratch.name}"

    def read(content: bytes) -> None:
        image = decode_image(content, said, limits)
        demand(image.mode == "RGB" and 0 < image.width * image.height <= PIXELS, f"{image}")

    decode_image(_image(random.Random(0)), "x")  # what is imported is not measured
    with _inside(scratch, MOST_MEMORY):
        for number in range(NUMBER):
            content = _spoilt_image(_image(rng), rng)
            began = time.process_time()
            named(said, lambda content=content: read(content))
            took = time.process_time() - began
            demand(took < MOST_SECONDS, f"image {number} of {len(content)} bytes takes {took} s")


def _image(rng: random.Random) -> bytes:
    """Return an image of some format, mode, size and orientation."""
    from PIL import Image

    mode, form = rng.choice(("RGB", "L", "LA", "P", "RGBA", "CMYK", "1")), rng.choice(FORMATS)
    if form == "JPEG":
        mode = rng.choice(("RGB", "L", "CMYK"))
    elif form == "WEBP":
        mode = rng.choice(("RGB", "RGBA"))
    elif form == "GIF":
        mode = rng.choice(("P", "L"))
    elif mode in ("CMYK", "LA") or (form == "BMP" and mode == "RGBA"):
        mode = "RGB"
    image = Image.effect_noise((rng.randint(1, 60), rng.randint(1, 60)), 60).convert(mode)
    file, how = io.BytesIO(), {}
    if rng.random() < 0.4 and form in ("PNG", "JPEG", "WEBP"):
        how["exif"] = Image.Exif()
        how["exif"][0x0112] = rng.choice((*range(10), 2**16 - 1))
    if form == "GIF" and rng.random() < 0.5:
        how |= {"save_all": True, "append_images": [image] * rng.randrange(9), "loop": 0}
    if form == "JPEG":
        how["progressive"] = rng.random() < 0.5
    image.save(file, form, **how)
    return file.getvalue()


def _spoilt_image(content: bytes, rng: random.Random) -> bytes:
    """Return a file that is cut, flipped, forged, or made of endless parts."""
    how, at = rng.randrange(9), rng.randrange(len(content))
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if how == 2:
        return content[:at] + rng.randbytes(rng.randrange(1, 40)) + content[at:]
    if how == 3:
        at = rng.randrange(min(60, len(content)))  # the header
        return content[:at] + rng.randbytes(rng.choice((1, 2, 4))) + content[at + 4 :]
    if how == 4 and rng.random() < 0.3:
        count = rng.choice((1000, 70_000))
        return rng.choice((_png_of_parts, _gif_of_parts, _jpeg_of_parts))(rng, count)
    if how == 5:
        return rng.choice((_large_png, _large_webp, _runs))(rng)
    if how == 6:
        return _table_of_exif(rng, content)
    return content


def _chunk(kind: bytes, content: bytes) -> bytes:
    sums = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + sums


@cache
def _zeros(count: int) -> bytes:
    return zlib.compress(bytes(count))


@cache
def _saved(form: str, side: int = 8, **how: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((side, side), 60).convert("P" if form == "GIF" else "RGB").save(
        file, form, **how
    )
    return file.getvalue()


def _png_of_parts(rng: random.Random, count: int) -> bytes:
    image, kind = _saved("PNG"), rng.choice((b"tEXt", b"teSt", b"IDAT", b"fcTL", b"zTXt", b"PLTE"))
    text = rng.choice((b"", b"a\0b", b"a\0\0" + _zeros(10**6)))
    return image[:33] + _chunk(kind, text)[:BYTES] * min(count, BYTES // 20) + image[33:]


def _gif_of_parts(rng: random.Random, count: int) -> bytes:
    image = _saved("GIF")
    place = 13 + (6 << (image[10] & 7)) * bool(image[10] & 0x80)
    block = rng.choice(
        (b"!\xfe\1a\0", b"!\xfe\0", b"!\xf9\4\0\0\0\0\0", b"\xffx" + b"y" * 254, b";")
    )
    frames = image[place:-1]
    return rng.choice(
        (
            image[:place] + block * count + image[place:],
            image[:place] + b"!\xfe" + b"\1a" * count + b"\0" + image[place:],
            image[:place] + frames * min(count, 30_000),
        )
    )


def _jpeg_of_parts(rng: random.Random, count: int) -> bytes:
    image = _saved("JPEG", side=rng.choice((8, 400)), progressive=True)
    part = rng.choice(
        (b"\xff\xfe\0\2", b"\xff\xe1\0\x08Exif\0\0", b"\xff\xff", b"\xff\0", b"\xff\xd0")
    )
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00"
    return rng.choice(
        (image[:2] + part * count + image[2:], image[:-2] + scan * (count // 10) + image[-2:])
    )


def _large_png(rng: random.Random) -> bytes:
    side = rng.choice((1025, 30_000, 2**31 - 1))
    head = struct.pack(">IIBBBBB", side, side, 8, rng.choice((0, 2, 6)), 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", _zeros(10**7)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _large_webp(rng: random.Random) -> bytes:
    image, side = _saved("WEBP", lossless=True), rng.choice((1025, 9000, 2**24))
    size = (side - 1).to_bytes(3, "little")
    frame = bytes(6) + (7).to_bytes(3, "little") * 2 + bytes([10, 0, 0, 0]) + image[12:]
    body = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + size * 2
    body += b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    body += b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def _runs(rng: random.Random) -> bytes:
    side = rng.choice((8, 1000))
    runs = b"\1\1" * side * side
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(runs), 0, 0, 256, 0)
    start = struct.pack("<IHHI", 1078 + len(runs), 0, 0, 1078)
    return b"BM" + start + head + bytes(1024) + runs


def _table_of_exif(rng: random.Random, content: bytes) -> bytes:
    """Return an image with a table each of whose entries claims most of it."""
    entries, whole = rng.choice((1, 1000, 5000)), rng.choice((64_900, 10**6))
    size = max(whole - 12 * entries - 20, 0)
    table = b"II*\0\x08\0\0\0" + struct.pack("<H", entries)
    table += b"".join(
        struct.pack("<HHII", tag, 7, size, 12 * entries + 12) for tag in range(1, entries + 1)
    )
    table = (b"Exif\0\0" + table).ljust(whole, b"\0")
    if rng.random() < 0.5:
        image = _saved("PNG")
        return image[:33] + _chunk(b"eXIf", table[6:]) + image[33:]
    image, pieces = _saved("JPEG"), range(0, len(table), 65_000)
    parts = (table[at : at + 65_000].removeprefix(b"Exif\0\0") for at in pieces)
    segments = (
        b"\xff\xe1" + struct.pack(">H", len(part) + 8) + b"Exif\0\0" + part for part in parts
    )
    return image[:2] + b"".join(segments) + image[2:]


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|eod|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<image>"]
PLACES = ("in.png", "no.png", "../out.png", "/etc/passwd", "link.png", "pipe", "folder", "s3://a/b")
ODD_IMAGES = (None, 7, [], {}, [7], "", "\0", "x" * 9000, {"bytes": "!"}, ["in.png", None])


def drawn_talks(world: World, rng: random.Random, scratch: Path) -> None:
    """Make rows of drawn conversations with images: named, or with as many images as tokens."""
    from mt_multimodal import ImageForm, ImagePreprocessing, ImageTextDataset
    from mt_tokenizer import ChatTemplate, train_tokenizer

    tokenizer = train_tokenizer(["a cat. x"], 300, SPECIAL)
    size = ImagePreprocessing(size={"height": 4, "width": 4})
    token = tokenizer.special_tokens["<image>"]
    form = ImageForm(preprocessing=size, token_id=token, num_tokens=3)
    folder, png = scratch / "in", _saved("PNG")
    (folder / "folder").mkdir(parents=True)
    (folder / "in.png").write_bytes(png)
    (scratch / "out.png").write_bytes(png)
    (folder / "link.png").symlink_to(scratch / "out.png")
    os.mkfifo(folder / "pipe")

    def read(path: Path) -> None:
        data = ImageTextDataset(path, template, form, sequence_length=600, too_long="drop")
        for number in range(len(data)):
            row = data.row(number)
            images = row["pixel_values"]
            demand((row["tokens"] == token).sum() == 3 * len(images), "other image tokens")
            demand(not (row["labels"] == token).any(), "an image token is learnt")

    with ChatTemplate(TEMPLATE, tokenizer) as template, _inside(folder, 4 * MOST_MEMORY):
        for number in range(TALKS):
            path = folder / (f"{number}.tar" if rng.random() < 0.5 else f"{number}.jsonl")
            records = [_talk(rng) for _ in range(rng.randrange(1, 4))]
            if path.suffix == ".tar":
                path.write_bytes(_tar_of(records, png, rng))
            else:
                path.write_bytes(b"\n".join(map(_line, records)))
            named("in" if path.suffix == ".jsonl" else path.name, lambda path=path: read(path))


def _talk(rng: random.Random) -> Any:
    shown = rng.choice((0, 1, 1, 2))
    asked = "<image>\n" * shown + "a cat"
    form = rng.randrange(3)
    if form == 0:
        record: dict[str, Any] = {"prompt": asked, "completion": "x"}
    elif form == 1:
        turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": "x"}]
        record = {"conversations": turns}
    else:
        parts: list[Any] = [{"type": "text", "text": "a"}]
        parts += [{"type": "image", "image": rng.choice(PLACES)} for _ in range(shown)]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
        record = {"messages": turns}
    names = ["in.png"] * shown
    if rng.random() < 0.3:
        names = [rng.choice(PLACES) for _ in range(rng.randrange(3))]
    if form < 2:
        record["images"] = names
    if rng.random() < 0.2:
        record[rng.choice(("image", "images"))] = rng.choice(ODD_IMAGES)
    return _spoilt(record, rng) if rng.random() < 0.4 else record


def _line(record: Any) -> bytes:
    return json.dumps(record).encode().replace(b"\n", b" ")


def _tar_of(records: list[Any], png: bytes, rng: random.Random) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, record in enumerate(records):
            members = [(f"{number}.json", _line(record))]
            members += [(f"{number}.{n}.png", png) for n in range(rng.choice((0, 1, 1, 2)))]
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


ROWS = [
    Row(name="tars drawn, 300 a case", attack=drawn_tars, cases=120, sample=1),
    Row(name="images drawn, 300 a case", attack=drawn_images, cases=120, sample=1),
    Row(name="conversations with images, 60 files a case", attack=drawn_talks, cases=100, sample=1),
]
